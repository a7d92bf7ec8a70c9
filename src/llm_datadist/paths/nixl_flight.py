"""One transfer over NIXL from its begin until nothing of it moves any more, which may be after its call has failed."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Final

from llm_datadist.paths.base import ConnectionLostError, PathError
from llm_datadist.paths.nixl_requests import lost
from llm_datadist.utils.deadline import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from llm_datadist.paths.nixl import NixlPath
    from llm_datadist.paths.nixl_remote import Look

GRACE_S: Final = 0.15
"""How long a transfer that has failed is waited for, before it is left to itself."""
_leaving: Final = threading.Lock()


class Flight:
    """One transfer, and all that it holds until NIXL has ended each of its requests."""

    __slots__ = ("_deadline", "_left", "_live", "_open", "_path", "_remote", "_requests", "bases", "look", "undo")

    def __init__(self, path: NixlPath, look: Look, deadline: Deadline) -> None:
        self._path = path
        self._requests = path.agent.requests
        self._remote = path.remote
        self.look: Look = look
        self._deadline = deadline
        self._live: dict[int, bool] = {}
        """Requests that may run, and whether they are used again."""
        self._open = 1
        self._left = False
        self.undo: contextlib.ExitStack | None = None
        self.bases: Sequence[int] = ()
        """Of local tensors that are read or written."""

    def __enter__(self) -> Flight:  # noqa: PYI034 - there is no Self in Python 3.10
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is not None and not self.settle() and isinstance(error, PathError):
                error.quiescent = False
            if isinstance(error, ConnectionLostError):
                self._remote.lost()
        finally:
            self.end()

    def post(self, handle: int, *, reuse: bool = False) -> bool:
        """Begin a request; whether it has ended already.

        Raises:
            ConnectionLostError: the peer's agent cannot be reached (any more).
        """
        self._live[handle] = reuse
        try:
            done = self._requests.post(handle)
        except ConnectionLostError:
            self._over(handle)
            raise
        if done:
            self._over(handle)
        return done

    def wait(self, handle: int) -> None:
        """Wait for the end of a request that was posted."""
        try:
            self._requests.wait(handle, self._deadline, self._path.stopped)
        except ConnectionLostError:
            self._over(handle)
            raise
        self._over(handle)

    def run(self, handle: int, *, reuse: bool = False) -> None:
        """Both; see ``Run``."""
        live, requests = self._live, self._requests
        live[handle] = reuse
        try:  # ``post``, but for small transfers each call counts
            done = int(requests.start(handle, "")) == requests.done
        except Exception as error:
            self._over(handle)
            raise lost(error) from error
        if not done:
            self.wait(handle)
            return
        del live[handle]
        if not reuse:
            requests.free(handle)

    def _over(self, handle: int) -> None:
        if not self._live.pop(handle):
            self._requests.free(handle)

    def settle(self) -> bool:
        """After a failure: wait a moment for requests that still run, then leave them; whether all have ended."""
        grace = Deadline.after(GRACE_S)
        for handle in list(self._live):
            if self._requests.ends_by(handle, grace):
                self._over(handle)
            else:
                self._leave(handle)
        return not self._left

    def more_time(self, seconds: float) -> None:
        """After a failure: look at the peer once more."""
        self._deadline = Deadline.after(seconds)

    def _leave(self, handle: int) -> None:
        """Nobody waits for this request any more: what it touches is held until it has ended."""
        with _leaving:
            self._open += 1
            first, self._left = not self._left, True
        if first:
            self._remote.abandon()
            if self.bases:  # else nothing but the peer's table is read, into memory of the agent
                self.at_end(self._path.context.linger())
                self._path.hold(self)
        reuse = self._live.pop(handle)

        def ended() -> None:
            if not reuse:
                self._requests.free(handle)
            self.end()

        self._requests.leave(handle, ended)

    def end(self) -> None:
        """The call, or one of the requests that were left, has ended."""
        if self._left:
            with _leaving:
                self._open -= 1
                if self._open:
                    return
        if self.undo is not None:
            self.undo.close()
        self._remote.leave(self.look, was_left=self._left)

    def at_end(self, call: Callable[[], object]) -> None:
        """Call this when all has ended."""
        if self.undo is None:
            self.undo = contextlib.ExitStack()
        self.undo.callback(call)
