"""Messages between linked engines: what peers have sent and nobody has read yet, and how one is delivered."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING, Final

from llm_datadist.engine.errors import RELINK_HINT, failure, invalid
from llm_datadist.engine.requests import Notification
from llm_datadist.engine.service import refuse
from llm_datadist.net.channel import ChannelClosedError, ReplyTimeoutError
from llm_datadist.status import LLMException, LLMStatusCode, code_2_status
from llm_datadist.utils import log
from llm_datadist.wire import messages

if TYPE_CHECKING:
    from llm_datadist.engine.link import PeerLink
    from llm_datadist.engine.transfers import Request
    from llm_datadist.utils.deadline import Deadline

MAX_MESSAGES: Final = 4096
MAX_BYTES: Final = 16 << 20
"""Of all messages that wait to be read."""


class Mailbox:
    """The messages of all peers, in the order of arrival; bounded. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # with an RLock: a signal handler may look, too
        self._messages: list[Notification] = []
        self._bytes = 0
        self._signal: int | None = None
        """An eventfd that is readable while there are messages, once somebody has asked for it."""
        self._closed = False

    def put(self, cluster_id: int, message: bytes) -> messages.Body:
        """Keep a message of a peer; the answer to it. Does not block."""
        with self._changed:
            if self._closed:
                return refuse(LLMStatusCode.LLM_FAILED, "it has been finalized")
            if len(self._messages) >= MAX_MESSAGES or self._bytes + len(message) > MAX_BYTES:
                waiting = f"{len(self._messages)} notifications of {self._bytes} bytes wait to be read there"
                limits = f"the limits are {MAX_MESSAGES} and {MAX_BYTES}"
                return refuse(LLMStatusCode.LLM_LINK_BUSY, f"{waiting}; {limits}")
            self._messages.append(Notification(cluster_id, message))
            self._bytes += len(message)
            if self._signal is not None and len(self._messages) == 1:
                os.eventfd_write(self._signal, 1)
            self._changed.notify_all()
        return messages.Ok()

    def take(self, timeout_s: float) -> list[Notification]:
        """All that are there; waits for the first one. Empty if none has come in time.

        Raises:
            LLMException: LLM_FAILED: it is closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._messages or self._closed, timeout_s)
            self._check("get_notifies")
            taken, self._messages, self._bytes = self._messages, [], 0
            if taken and self._signal is not None:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._signal)
            return taken

    def fileno(self) -> int:
        """A descriptor that is readable while there are messages.

        Raises:
            OSError: no descriptor is left.
            LLMException: LLM_FAILED: it is closed.
        """
        with self._changed:
            self._check("notify_fileno")
            if self._signal is None:
                self._signal = os.eventfd(int(bool(self._messages)), os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            return self._signal

    def _check(self, operation: str) -> None:
        if self._closed:
            raise failure(LLMStatusCode.LLM_FAILED, operation, "it has been finalized", phase="check")

    def close(self) -> None:
        """Take no more, and let those who wait know."""
        with self._changed:
            self._closed = True
            if self._messages:
                log.warn("finalized with %d notifications that nobody has read", len(self._messages))
            if self._signal is not None:
                os.eventfd_write(self._signal, 1)  # who polls it learns of the end
                os.close(self._signal)
            self._signal, self._messages = None, []
            self._changed.notify_all()


def check_size(operation: str, message: bytes) -> None:
    """Raise LLM_PARAM_INVALID for a message that is too long."""
    if len(message) > messages.MAX_NOTIFICATION:
        context = f"the notification has {len(message)} bytes, but at most {messages.MAX_NOTIFICATION} are supported"
        raise invalid(operation, context, hint="send what is long as blocks of a cache, and a notification with them")


def deliver(link: PeerLink, message: bytes, operation: str, deadline: Deadline) -> None:
    """Send a message to a peer; its library has it when this returns.

    Raises:
        LLMException: LLM_LINK_BUSY: its queue is full; LLM_NOT_YET_LINK: the link has ended; LLM_TIMEOUT, where the
            message may still arrive.
    """
    _deliver(link, message, operation, deadline, "transfer", "")


def confirm(link: PeerLink, message: bytes, request: Request, deadline: Deadline) -> None:
    """Send the message of a transfer that has succeeded.

    Raises:
        LLMException: as for ``deliver``, with the phase "confirm".
    """
    try:
        _deliver(link, message, request.operation, deadline, "confirm", "the bytes are in place, but ")
    except LLMException as error:
        if request.dst_blocks is not None:
            error.finished_blocks = tuple(sorted({int(block) for block in request.dst_blocks}))
        raise


def _deliver(link: PeerLink, message: bytes, operation: str, deadline: Deadline, phase: str, before: str) -> None:
    code, retryable = LLMStatusCode.LLM_NOT_YET_LINK, True
    hint: str | None = RELINK_HINT
    cause: Exception | None = None
    try:
        reply = link.request(messages.Notify(message=message), deadline)
    except ReplyTimeoutError as error:
        code, cause = LLMStatusCode.LLM_TIMEOUT, error
        why, hint = (
            "did not confirm the notification in time",
            "it may still arrive: send it again if twice is harmless",
        )
    except ChannelClosedError as error:
        why, cause = f"did not get the notification, or could not confirm it: {error}", error
    else:
        if isinstance(reply, messages.Ok):
            return
        code = code_2_status(reply.code) if isinstance(reply, messages.Refuse) else LLMStatusCode.LLM_FAILED
        reason = reply.reason if isinstance(reply, messages.Refuse) else f"it answered with {type(reply).__name__}"
        why, retryable = f"has refused the notification: {reason}", code is LLMStatusCode.LLM_LINK_BUSY
        hint = "send it again when the peer has called get_notifies" if retryable else None
    context = f"{before}cluster {link.cluster_id} {why}"
    raise failure(
        code, operation, context, peer=link.cluster_id, phase=phase, retryable=retryable, hint=hint
    ) from cause
