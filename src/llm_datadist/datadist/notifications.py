"""Short messages between linked processes."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING

from llm_datadist.status import raise_if_false
from llm_datadist.utils import utils

if TYPE_CHECKING:
    from llm_datadist.engine import Engine
    from llm_datadist.engine.requests import Notification


class Notifications(abc.ABC):
    """Send messages of the application to linked processes, and get theirs.

    A process keeps up to 4096 messages, or 16 MiB, that it has not got yet; then senders get LLM_LINK_BUSY. Messages of
    peers whose link has ended stay; ``finalize`` drops those that are left, with a warning.
    """

    @abc.abstractmethod
    def _running(self) -> Engine:
        """The engine, once initialised."""

    def send_notify(self, cluster_id: int, message: bytes, timeout_ms: int = 1000) -> None:
        """Send a message to a linked process. When this returns, it is there, for :meth:`get_notifies`.

        Messages of one thread arrive in the order in which they were sent. To send one with a finished transfer, use
        the argument ``notify`` of the transfer.

        Args:
            cluster_id: the peer.
            message: at most 64 KiB.
            timeout_ms: milliseconds, at least 1.

        Raises:
            TypeError: wrong type of an argument.
            ValueError: a number does not fit its integer type.
            RuntimeError: not initialised.
            LLMException: LLM_PARAM_INVALID: the message is too long, or no time is left; LLM_NOT_YET_LINK: no link to
                the peer; LLM_LINK_BUSY: the peer has too many messages that it has not got, try again; LLM_TIMEOUT: the
                peer has not confirmed, the message may still arrive.
        """
        engine = self._running()
        utils.check_uint64("cluster_id", cluster_id)
        utils.check_isinstance("message", message, bytes, allow_none=False)
        utils.check_uint32("timeout_ms", timeout_ms)
        raise_if_false(timeout_ms > 0, "timeout_ms must be at least 1, but is {}", timeout_ms)
        engine.send_notify(int(cluster_id), message, int(timeout_ms))

    def get_notifies(self, timeout_ms: int = 0) -> list[Notification]:
        """Take all messages that have arrived, in the order of arrival; each is given once.

        Args:
            timeout_ms: how long to wait for the first one, in milliseconds, unsigned 32 bits; 0 only looks.

        Returns:
            Messages with their senders; empty if none has come in time.

        Raises:
            TypeError: the timeout is not an int.
            ValueError: the timeout does not fit.
            RuntimeError: not initialised.
            LLMException: LLM_FAILED: finalized while it waited.
        """
        engine = self._running()
        utils.check_uint32("timeout_ms", timeout_ms)
        return engine.get_notifies(int(timeout_ms))

    def notify_fileno(self) -> int:
        """A descriptor that is readable while there are messages to get, for select, poll and epoll; always the same.

        Do not read or close it. ``finalize`` closes it: stop to watch it before.

        Raises:
            OSError: no descriptor is left.
            RuntimeError: not initialised.
        """
        return self._running().notify_fileno()
