"""Requests of NIXL from their begin to their end, also of those for which nobody waits any more.

NIXL reports a request that it is told to give up as released at once, although its bytes may still be under way. So
none is given up: who has no time to wait leaves it here, with all that it touches, until NIXL says that it has ended.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from llm_datadist.memory.devices import HOST_ONLY
from llm_datadist.paths.base import ConnectionLostError, PathTimeoutError, PeerGoneError
from llm_datadist.utils import log

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm_datadist.memory.devices import Devices
    from llm_datadist.paths.nixl_agent import Agent
    from llm_datadist.utils.deadline import Deadline

_SPIN_S: Final = 0.0002
"""As long a thread looks without a pause: to sleep takes longer than a small transfer."""
_NAP_S: Final = 0.00005
_LOOKS: Final = 16
"""Between two looks at the clock."""
_REAP_S: Final = 0.002


class Requests:
    """Those of one agent. Thread-safe."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.start: Any = agent.native.postXferReq
        """``post`` without a word on what goes wrong."""
        self._look: Any = agent.native.getXferStatus
        self._release: Any = agent.native.releaseXferReq
        self._create: Any = agent.native.createXferReq
        self._choose: Any = agent.native.makeXferReq
        self._backends = [agent.backend]
        bindings = agent.bindings
        self.done: int = int(bindings.NIXL_SUCCESS)
        self._busy = int(bindings.NIXL_IN_PROG)
        self._operations = {False: bindings.NIXL_READ, True: bindings.NIXL_WRITE}
        self._list, self._kind, self._device_kind = bindings.nixlXferDList, bindings.DRAM_SEG, bindings.VRAM_SEG
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._left: dict[int, Callable[[], object]] = {}
        """Requests for which nobody waits, and what is done at their end."""
        self._ending = 0
        """Of those that were left: those that have ended, while that is being done."""
        self._reaping = False

    def make(self, here: Any, there: Any, remote: str, *, writing: bool, devices: Devices = HOST_ONLY) -> int:
        """A request for these descriptors (address, length, device), as arrays or lists of tuples.

        ``devices`` tells in which memory they are.

        Raises:
            PathError: NIXL does not take it.
        """
        kinds = [self._kind if device is None else self._device_kind for device in devices]
        local, far = self._list(kinds[0], here), self._list(kinds[1], there)
        try:
            handle: int = self._create(self._operations[writing], local, far, remote, "", [self._agent.backend])
        except Exception as error:
            message = f"NIXL does not take the transfer: {error}"
            raise ConnectionLostError(message) from error
        return handle

    def prepare(self, remote: str | None, rows: Any) -> int:
        """A list of descriptors for requests that choose among them: blocks of this side, or of a peer's.

        Each row stands for many of them: address of the first, length, device, distance and count.

        Raises:
            ConnectionLostError: NIXL does not take it.
        """
        whose = self._agent.bindings.NIXL_INIT_AGENT if remote is None else remote
        try:
            blocks: int = self._agent.native.prepXferDlist(whose, self._kind, rows, [self._agent.backend])
        except Exception as error:
            message = f"NIXL does not take the memory: {error}"
            raise ConnectionLostError(message) from error
        return blocks

    def choose(self, here: int, ours: list[int], there: int, theirs: list[int], *, writing: bool) -> int:
        """A request for some of two prepared lists, one to one.

        Raises:
            ConnectionLostError: NIXL does not take it.
        """
        try:
            handle: int = self._choose(self._operations[writing], here, ours, there, theirs, "", self._backends)
        except Exception as error:
            message = f"NIXL does not take the transfer: {error}"
            raise ConnectionLostError(message) from error
        return handle

    def discard(self, blocks: int) -> None:
        """Give a prepared list back."""
        with contextlib.suppress(Exception):  # the agent has been finalized
            self._agent.native.releasedDlistH(blocks)

    def free(self, handle: int) -> None:
        """Give a request back that has ended, or was not begun."""
        try:
            self._release(handle)
        except Exception as error:  # noqa: BLE001 - it is NIXL's, and does no harm to what the request has moved
            log.error("NIXL does not take a request back that has ended: %s", error)

    def post(self, handle: int) -> bool:
        """Begin a request; whether it has ended already.

        Raises:
            ConnectionLostError: the peer's agent cannot be reached (any more).
        """
        try:
            return int(self.start(handle, "")) == self.done
        except Exception as error:
            raise lost(error) from error

    def ended(self, handle: int) -> bool:
        """Whether a request has ended.

        Raises:
            ConnectionLostError: it has, but not well.
        """
        try:
            status = int(self._look(handle))
        except Exception as error:
            raise lost(error) from error
        if status == self._busy:
            return False
        if status != self.done:
            raise lost(status)
        return True

    def wait(self, handle: int, deadline: Deadline, stopped: Callable[[], bool]) -> None:
        """Wait for the end of a request that was begun.

        Raises:
            ConnectionLostError: it has ended, but not well.
            PathTimeoutError, PeerGoneError: there is no time, or ``stopped()``; it may still run.
        """
        begun = time.monotonic()
        spinning = True
        while True:
            for _ in range(_LOOKS if spinning else 1):
                if self.ended(handle):
                    return
            if deadline.expired():
                message = "the deadline passed"
                raise PathTimeoutError(message)
            if stopped():
                message = "the link was closed"
                raise PeerGoneError(message)
            spinning = spinning and time.monotonic() - begun < _SPIN_S
            if not spinning:
                time.sleep(_NAP_S)

    def ends_by(self, handle: int, deadline: Deadline) -> bool:
        """Whether a request ends, however it does, by the deadline."""
        while True:
            try:
                if self.ended(handle):
                    return True
            except ConnectionLostError:
                return True
            if deadline.expired():
                return False
            time.sleep(_NAP_S)

    def leave(self, handle: int, then: Callable[[], object]) -> None:
        """Nobody waits for this request any more: call ``then`` at its end."""
        with self._lock:
            self._left[handle] = then
        self.look_after()

    def look_after(self) -> None:
        """Have a thread wait for those that were left, if there are any; again, if there was none to be had before."""
        with self._lock:
            if self._reaping or not self._left:
                return
            self._reaping = True
        try:
            threading.Thread(target=self._reap, name="datadist-nixl", daemon=True).start()
        except RuntimeError as error:
            with self._lock:
                self._reaping = False
            log.error("no thread waits for the end of a late transfer over NIXL, which holds its memory: %s", error)

    def _reap(self) -> None:
        while True:
            with self._lock:
                handles = list(self._left)
                if not handles:
                    self._reaping = False
                    return
            for handle in handles:
                self._try_to_reap(handle)
            time.sleep(_REAP_S)

    def _try_to_reap(self, handle: int) -> None:
        try:
            if not self.ended(handle):
                return
        except ConnectionLostError:
            pass
        with self._lock:
            then = self._left.pop(handle)  # before its number is free for another one
            self._ending += 1
        try:
            then()
        except Exception as error:  # noqa: BLE001 - the others are waited for in any case
            log.error("what a late transfer over NIXL held was not given back: %s", error)
        with self._lock:
            self._ending -= 1
            self._changed.notify_all()

    def settle(self, deadline: Deadline) -> bool:
        """Wait for the requests that were left; whether all have ended, and what they held is free."""
        self.look_after()
        with self._lock:
            return self._changed.wait_for(lambda: not (self._left or self._ending), deadline.remaining())

    def close(self) -> None:
        """Let go of the agent, of which no request is left: it ends when nothing refers to it."""
        self.start = self._look = self._release = self._create = self._choose = _finalized


def _finalized(*_: object) -> Any:
    message = "this engine has been finalized"
    raise RuntimeError(message)


def lost(cause: object) -> ConnectionLostError:
    """What is raised for an error of NIXL."""
    return ConnectionLostError(f"the peer's NIXL agent cannot be reached (any more): {cause}")
