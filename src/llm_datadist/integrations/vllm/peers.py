"""Links to the workers of other engines, made when they are first needed."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

from llm_datadist import LLMClusterInfo, LLMException, LLMStatusCode
from llm_datadist.integrations.vllm import messages

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm_datadist import LLMDataDist
    from llm_datadist.integrations.vllm.messages import Message
    from llm_datadist.integrations.vllm.params import Worker

_LINKED: Final = (LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_ALREADY_LINK)
_BACK_OFF_S: Final = 1.0
"""How long a worker that could not be reached is not tried again."""


class UnreachableError(Exception):
    """A worker of another engine cannot be linked; the text says why."""


class Peers:
    """Links of one worker. Thread-safe; calls may block for the link timeout."""

    def __init__(self, dist: LLMDataDist, link_timeout_ms: int) -> None:
        self._dist = dist
        self._timeout_ms = link_timeout_ms
        self._lock = threading.Lock()
        self._peers: dict[int, _Peer] = {}
        self.before_link: Callable[[int, float], bool] = lambda *_: True
        """Called before a cluster is linked that is not: has what was begun over a former link end within so many
        seconds, and says whether it has."""

    def link(self, worker: Worker) -> int:
        """Make sure that there is a link; the cluster id.

        Raises:
            UnreachableError: there is none.
        """
        cluster_id = worker.cluster_id
        with self._lock:
            peer = self._peers.setdefault(cluster_id, _Peer())
        with peer.lock:
            if peer.linked:
                return cluster_id
            if time.monotonic() < peer.not_before:
                raise UnreachableError(peer.why)
            self._try(worker, peer)
        return cluster_id

    def _try(self, worker: Worker, peer: _Peer) -> None:
        if not self.is_linked(worker.cluster_id) and not self.before_link(worker.cluster_id, self._timeout_ms / 1000):
            raise UnreachableError("a push over a former link to it has not ended yet")
        info = LLMClusterInfo()
        info.remote_cluster_id = worker.cluster_id
        info.append_local_ip_info(worker.host, 0)
        info.append_remote_ip_info(worker.host, worker.port)
        _, (status,) = self._dist.link_clusters([info], self._timeout_ms)
        if status in _LINKED:
            peer.linked = True
            return
        error = self._dist.last_link_error(worker.cluster_id)
        peer.why = str(error or status)
        peer.not_before = time.monotonic() + _BACK_OFF_S
        raise UnreachableError(peer.why)

    def is_linked(self, cluster_id: int) -> bool:
        """Whether the link to a worker that was linked still stands."""
        try:
            self._dist.explain_link(cluster_id)
        except LLMException:
            return False
        return True

    def forget_ended(self, cluster_id: int) -> None:
        """Have a link that has ended made again when it is next needed."""
        if not self.is_linked(cluster_id):
            self.lost(cluster_id)

    def may_write(self, cluster_id: int) -> bool:
        """Whether a worker may still write to memory of this one; it may be so for a while after its link has ended."""
        return self._dist.is_reached_by(cluster_id)

    def condemn(self, cluster_id: int, seconds: float, why: str) -> None:
        """Do not link to a worker for some time: what it would do with a new link is not wanted any more."""
        with self._lock:
            peer = self._peers.setdefault(cluster_id, _Peer())
            peer.linked, peer.why, peer.not_before = False, why, time.monotonic() + seconds

    def lost(self, cluster_id: int) -> None:
        """A call has found that there is no link any more."""
        with self._lock:
            peer = self._peers.get(cluster_id)
            if peer is not None and peer.not_before <= time.monotonic():
                del self._peers[cluster_id]

    def send(self, cluster_id: int, message: Message) -> None:
        """Send a message to a linked worker.

        Raises:
            LLMException: it has not arrived, or may not have.
        """
        self._dist.send_notify(cluster_id, messages.encode(message), self._timeout_ms)


class _Peer:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.linked = False
        self.not_before = 0.0
        self.why = ""
