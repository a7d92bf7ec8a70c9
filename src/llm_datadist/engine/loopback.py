"""Loopback mode for tests: every cluster id that is linked leads to this very engine, without a socket.

Turned on by ``llm_datadist.testing.loopback``; engines that are initialised while it is on stay in this mode.
"""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING

from llm_datadist.engine.errors import LinkError, failure, invalid
from llm_datadist.engine.link import LinkReport, LinkState, PeerLink
from llm_datadist.engine.link_failures import LinkFailures
from llm_datadist.engine.network import Links
from llm_datadist.engine.requests import MemStatus
from llm_datadist.engine.service import Holds
from llm_datadist.memory.devices import HOST_ONLY
from llm_datadist.paths.base import NoDevicePathError
from llm_datadist.paths.inprocess import InProcessPath
from llm_datadist.paths.ladder import Attempt
from llm_datadist.status import LLMStatusCode
from llm_datadist.wire import messages

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from llm_datadist.engine.core import Core
    from llm_datadist.engine.requests import PeerAddress
    from llm_datadist.memory.devices import Devices
    from llm_datadist.net.address import Address
    from llm_datadist.paths.base import Path
    from llm_datadist.status import LLMException
    from llm_datadist.utils.deadline import Deadline

_depth = 0


def enabled() -> bool:
    """Whether engines that start now are in loopback mode."""
    return _depth > 0


def enter() -> None:
    """Turn it on; calls nest."""
    global _depth  # noqa: PLW0603 - a switch for the whole process, by design
    _depth += 1


def leave() -> None:
    """Undo one ``enter``."""
    global _depth  # noqa: PLW0603
    _depth -= 1


class LoopbackLink(PeerLink):
    """A link from an engine to itself."""

    def __init__(self, cluster_id: int, core: Core) -> None:
        super().__init__(core.offer.digest)
        self.cluster_id = cluster_id
        self._core = core
        self._path = InProcessPath(core.regions)
        self._holds = Holds()

    def begin(self, ticket: object) -> None:
        """It is always up."""

    def end(self, ticket: object) -> None:
        """Nobody waits for its transfers."""

    def path(self, deadline: Deadline, beyond: Path | None = None, devices: Devices = HOST_ONLY) -> Path:
        """See ``PeerLink.path``."""
        del deadline, beyond
        if devices.any:
            message = f"the caches are in {devices}, and loopback mode copies host memory only"
            raise NoDevicePathError(message, "use two instances or processes, or caches in host memory")
        return self._path

    def uses(self, path: Path) -> bool:
        """See ``PeerLink.uses``."""
        return path is self._path

    def demote(self, path: Path, reason: str, hint: str | None) -> None:
        """There is only one path."""

    def ends(self, deadline: Deadline) -> bool:
        """It does not end by itself."""
        del deadline
        return False

    def request(self, body: messages.Body, deadline: Deadline) -> messages.Body:  # noqa: PLR0911 - one a message
        """See ``PeerLink.request``."""
        del deadline
        service = self._core.service
        if isinstance(body, messages.Fetch):
            return service.fetch()
        if isinstance(body, messages.Lookup):
            return service.lookup(self._holds, body)
        if isinstance(body, messages.Finish):
            return service.finish(self._holds, body)
        if isinstance(body, messages.Resolve):
            return service.resolve(body)
        if isinstance(body, messages.Notify):
            return self._core.mailbox.put(self._core.identity.cluster_id, body.message)
        if isinstance(body, messages.Digest):
            return self._core.digests.compute(body)
        return messages.Ok()

    def notify(self, body: messages.Body) -> None:
        """See ``PeerLink.notify``."""
        if isinstance(body, messages.Finish):
            self._core.service.finish(self._holds, body)


class LoopbackLinks(Links):
    """Links without a network."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._links: dict[int, LoopbackLink] = {}
        self._comms: dict[int, set[int]] = {}
        self._ids = itertools.count(1)
        self._address: Address | None = None
        self._failures = LinkFailures()

    @property
    def listen_address(self) -> Address | None:
        """The configured address; nothing listens there."""
        return self._address

    def listen(self, address: Address | None) -> None:
        """See ``Links.listen``."""
        self._address = address

    def require(self, cluster_id: int, operation: str) -> PeerLink:
        """See ``Links.require``."""
        link = self._links.get(cluster_id)
        if link is None:
            context = f"cluster {cluster_id} is not linked"
            raise failure(LLMStatusCode.LLM_NOT_YET_LINK, operation, context, peer=cluster_id, phase="link")
        return link

    def peek(self, cluster_id: int) -> PeerLink | None:
        """See ``Links.peek``."""
        return self._links.get(cluster_id)

    def forget_cache(self, cache_id: int) -> None:
        """See ``Links.forget_cache``."""
        for link in tuple(self._links.values()):
            link.forget_cache(cache_id)

    def any_live(self) -> bool:
        """See ``Links.any_live``."""
        return bool(self._links)

    def link_clusters(self, peers: Sequence[PeerAddress], timeout_ms: int) -> list[LLMStatusCode]:
        """See ``Links.link_clusters``."""
        del timeout_ms
        return [self._each("link_clusters", peer, self._link_one) for peer in peers]

    def _each(self, operation: str, peer: PeerAddress, work: Callable[[PeerAddress], None]) -> LLMStatusCode:
        try:
            work(peer)
        except LinkError as error:
            self._failures.add(operation, peer, error)
            return error.code
        self._failures.forget(peer.cluster_id)
        return LLMStatusCode.LLM_SUCCESS

    def _link_one(self, peer: PeerAddress) -> None:
        if len(peer.remotes) != 1:
            message = f"exactly one remote address is needed, {len(peer.remotes)} given"
            raise LinkError(LLMStatusCode.LLM_PARAM_INVALID, message)
        if peer.cluster_id in self._links:
            message = "the clusters are linked already"
            raise LinkError(LLMStatusCode.LLM_ALREADY_LINK, message)
        self._links[peer.cluster_id] = LoopbackLink(peer.cluster_id, self._core)

    def unlink_clusters(self, peers: Sequence[PeerAddress], timeout_ms: int, *, force: bool) -> list[LLMStatusCode]:
        """See ``Links.unlink_clusters``."""
        del timeout_ms

        def unlink(peer: PeerAddress) -> None:
            if not force and not self._core.options.hixl and len(peer.remotes) != 1:
                message = f"without force exactly one remote address is needed, {len(peer.remotes)} given"
                raise LinkError(LLMStatusCode.LLM_PARAM_INVALID, message)
            self._links.pop(peer.cluster_id, None)

        return [self._each("unlink_clusters", peer, unlink) for peer in peers]

    def last_failure(self, cluster_id: int) -> LLMException | None:
        """See ``Links.last_failure``."""
        return self._failures.get(cluster_id)

    def switch_role(self, address: Address | None) -> None:
        """See ``Links.switch_role``."""
        if self._links and not self._core.options.hixl:
            context = f"clusters {sorted(self._links)} are linked"
            raise failure(LLMStatusCode.LLM_EXIST_LINK, "switch_role", context, phase="link")
        self._address = address

    def link(self, name: str, ranks: Mapping[int, int], rank_table: str | None) -> int:
        """See ``Links.link``; the rank table is not looked at."""
        del name, rank_table
        own = self._core.identity.cluster_id
        if own not in ranks:
            raise invalid("link", f"cluster_rank_info {dict(ranks)} does not contain this cluster, {own}")
        comm_id = next(self._ids)
        self._comms[comm_id] = set(ranks) - {own}
        for cluster_id in self._comms[comm_id]:
            self._links.setdefault(cluster_id, LoopbackLink(cluster_id, self._core))
        return comm_id

    def unlink(self, comm_id: int) -> None:
        """See ``Links.unlink``."""
        self.status(comm_id)
        for cluster_id in self._comms.pop(comm_id):
            if not any(cluster_id in others for others in self._comms.values()):
                self._links.pop(cluster_id, None)

    def status(self, comm_id: int) -> MemStatus:
        """See ``Links.status``."""
        if comm_id not in self._comms:
            context = f"there is no rank-table link {comm_id}"
            raise failure(LLMStatusCode.LLM_NOT_YET_LINK, "query_register_mem_status", context, phase="link")
        return MemStatus.OK

    def explain(self, cluster_id: int) -> LinkReport:
        """See ``Links.explain``."""
        self.require(cluster_id, "explain_link")
        attempt = Attempt("inprocess", chosen=True, reason="loopback mode: the peer is this process")
        return LinkReport(cluster_id, "loopback", os.getpid(), LinkState.LINKED, "inprocess", (attempt,))

    def is_reached_by(self, cluster_id: int) -> bool:
        """See ``Links.is_reached_by``."""
        return self.peek(cluster_id) is not None

    def drain(self, deadline: Deadline) -> list[int]:
        """See ``Links.drain``."""
        del deadline
        return []

    def close(self) -> None:
        """See ``Links.close``."""
        self._links.clear()
