"""Links to other processes, behind the one interface that the engine uses."""

from __future__ import annotations

import abc
import functools
import threading
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Final

from llm_datadist.engine.comms import Comms
from llm_datadist.engine.errors import LinkError, failure, invalid
from llm_datadist.engine.handshake import Handshaker
from llm_datadist.engine.links import Linker
from llm_datadist.engine.listeners import Listeners
from llm_datadist.net.address import text
from llm_datadist.net.channel import ChannelClosedError, ReplyTimeoutError
from llm_datadist.net.ports import why_not
from llm_datadist.status import LLMStatusCode
from llm_datadist.utils import log
from llm_datadist.utils.deadline import Deadline
from llm_datadist.wire import messages

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from llm_datadist.engine.core import Core
    from llm_datadist.engine.link import Link, LinkReport, PeerLink
    from llm_datadist.engine.requests import MemStatus, PeerAddress
    from llm_datadist.net.address import Address
    from llm_datadist.status import LLMException

_CLOSE_S: Final = 1.0


class Links(abc.ABC):
    """Everything the engine wants of its links."""

    @property
    @abc.abstractmethod
    def listen_address(self) -> Address | None:
        """Where this engine listens."""

    @abc.abstractmethod
    def listen(self, address: Address | None) -> None:
        """Start to listen, at ``init``.

        Raises:
            LLMException: it cannot be bound.
        """

    @abc.abstractmethod
    def require(self, cluster_id: int, operation: str) -> PeerLink:
        """The live link to a cluster.

        Raises:
            LLMException: LLM_NOT_YET_LINK.
        """

    @abc.abstractmethod
    def peek(self, cluster_id: int) -> PeerLink | None:
        """The link to a cluster, if there is one, in whatever state."""

    @abc.abstractmethod
    def forget_cache(self, cache_id: int) -> None:
        """See ``PeerLink.forget_cache``; for all links."""

    @abc.abstractmethod
    def any_live(self) -> bool:
        """Whether any cluster is linked."""

    @abc.abstractmethod
    def link_clusters(self, peers: Sequence[PeerAddress], timeout_ms: int) -> list[LLMStatusCode]:
        """Link several clusters at once; one status each."""

    @abc.abstractmethod
    def unlink_clusters(self, peers: Sequence[PeerAddress], timeout_ms: int, *, force: bool) -> list[LLMStatusCode]:
        """Unlink several clusters at once; one status each."""

    @abc.abstractmethod
    def last_failure(self, cluster_id: int) -> LLMException | None:
        """See ``LinkFailures.get``."""

    @abc.abstractmethod
    def switch_role(self, address: Address | None) -> None:
        """Change where it listens.

        Raises:
            LLMException: LLM_EXIST_LINK, LLM_FEATURE_NOT_ENABLED, LLM_PARAM_INVALID or LLM_FAILED.
        """

    @abc.abstractmethod
    def link(self, name: str, ranks: Mapping[int, int], rank_table: str | None) -> int:
        """Begin a rank-table link; its id."""

    @abc.abstractmethod
    def unlink(self, comm_id: int) -> None:
        """End a rank-table link."""

    @abc.abstractmethod
    def status(self, comm_id: int) -> MemStatus:
        """Progress of a rank-table link."""

    @abc.abstractmethod
    def explain(self, cluster_id: int) -> LinkReport:
        """What there is to tell about a link.

        Raises:
            LLMException: LLM_NOT_YET_LINK.
        """

    @abc.abstractmethod
    def is_reached_by(self, cluster_id: int) -> bool:
        """Whether a cluster's transfers may still touch memory here: linked, or not yet ended."""

    @abc.abstractmethod
    def drain(self, deadline: Deadline) -> list[int]:
        """Wait until every peer's transfers that run now have ended; clusters that did not say so in time."""

    @abc.abstractmethod
    def close(self) -> None:
        """End all links in good order, within about two seconds; idempotent."""


class NetworkLinks(Links):
    """Real links."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._comms = Comms(core)
        handshaker = Handshaker(core, self._comms)
        self._listeners = Listeners(core.loop, handshaker.accept, handshaker.accept_data, core.admission.tls)
        self._comms.attach(handshaker.dial, self._listeners)
        options = core.options
        need_local = not options.has_comm_res and not options.hixl
        self._linker = Linker(
            core.table, handshaker.dial, core.ender, core.dial_workers, hixl=options.hixl, need_local=need_local
        )

    @property
    def listen_address(self) -> Address | None:
        """See ``Links.listen_address``."""
        return self._listeners.primary

    def listen(self, address: Address | None) -> None:
        """See ``Links.listen``."""
        self._switch(address, "init")

    def _switch(self, address: Address | None, operation: str) -> None:
        if address is None:
            self._listeners.switch(None)
            return
        try:
            self._listeners.switch(address)
        except ValueError as error:
            raise invalid(operation, f"listen_ip_info: {error}") from error
        except OSError as error:
            context, hint = why_not(address, error)
            raise failure(LLMStatusCode.LLM_FAILED, operation, context, phase="link", hint=hint) from error

    def require(self, cluster_id: int, operation: str) -> PeerLink:
        """See ``Links.require``."""
        return self._core.table.require(cluster_id, operation)

    def peek(self, cluster_id: int) -> PeerLink | None:
        """See ``Links.peek``."""
        return self._core.table.peek(cluster_id)

    def forget_cache(self, cache_id: int) -> None:
        """See ``Links.forget_cache``."""
        for link in self._core.table.all():
            link.forget_cache(cache_id)

    def any_live(self) -> bool:
        """See ``Links.any_live``."""
        return bool(self._core.table.all())

    def link_clusters(self, peers: Sequence[PeerAddress], timeout_ms: int) -> list[LLMStatusCode]:
        """See ``Links.link_clusters``."""
        return self._linker.link(peers, timeout_ms)

    def unlink_clusters(self, peers: Sequence[PeerAddress], timeout_ms: int, *, force: bool) -> list[LLMStatusCode]:
        """See ``Links.unlink_clusters``.

        With ``force`` the peer may never hear of it. So its requests are not waited for, but stopped: when this
        returns, they touch nothing here any more.
        """
        links = [self._core.table.get(peer.cluster_id) for peer in peers] if force else []
        statuses = self._linker.unlink(peers, timeout_ms, force=force)
        deadline = Deadline.after(_CLOSE_S)
        ends = [(link, threading.Event()) for link in links if link is not None]
        for link, stopped in ends:
            self._core.data_server.give_up(link.token, None, stopped.set)
        for _, stopped in ends:
            stopped.wait(deadline.remaining())
        return statuses

    def last_failure(self, cluster_id: int) -> LLMException | None:
        """See ``Links.last_failure``."""
        return self._linker.failures.get(cluster_id)

    def switch_role(self, address: Address | None) -> None:
        """See ``Links.switch_role``."""
        if self._core.options.hixl:
            initial = self._core.options.listen
            if address is not None and address != initial:
                context = (
                    f"with the transfer backend hixl the listen address stays {text(initial) if initial else 'unset'}"
                )
                raise failure(LLMStatusCode.LLM_FEATURE_NOT_ENABLED, "switch_role", context, phase="check")
            return
        linked = sorted(link.cluster_id for link in self._core.table.all())
        if linked:
            context = f"clusters {', '.join(map(str, linked))} are linked"
            hint = "unlink them first"
            raise failure(LLMStatusCode.LLM_EXIST_LINK, "switch_role", context, phase="link", hint=hint)
        self._switch(address, "switch_role")

    def link(self, name: str, ranks: Mapping[int, int], rank_table: str | None) -> int:
        """See ``Links.link``."""
        return self._comms.link(name, ranks, rank_table)

    def unlink(self, comm_id: int) -> None:
        """See ``Links.unlink``."""
        self._comms.unlink(comm_id)

    def status(self, comm_id: int) -> MemStatus:
        """See ``Links.status``."""
        return self._comms.status(comm_id)

    def explain(self, cluster_id: int) -> LinkReport:
        """See ``Links.explain``."""
        self._core.table.require(cluster_id, "explain_link")
        link = self._core.table.get(cluster_id)
        if link is None:  # lost between the two lines
            return self.explain(cluster_id)
        on_devices = any(entry.device is not None for entry in self._core.catalogue.all())
        return link.report(self._core.data_server.count(link.token), on_devices=on_devices)

    def is_reached_by(self, cluster_id: int) -> bool:
        """See ``Links.is_reached_by``."""
        core = self._core
        if core.table.get(cluster_id) is not None:  # in this order: what leaves one is in the next already
            return True
        return any(link.cluster_id == cluster_id for link in core.ender.fading()) or core.data_server.serves(cluster_id)

    def drain(self, deadline: Deadline) -> list[int]:
        """See ``Links.drain``."""
        core = self._core

        def quiet(link: Link) -> bool:
            if not core.reached_by(link):
                return True  # its requests are served by us and held by leases
            try:
                link.request(messages.Drain(), deadline)
            except ChannelClosedError:
                return True
            except ReplyTimeoutError:
                return False
            return True

        busy = self._on_each(quiet)
        gone = [link for link in core.ender.fading() if not link.channel.wait_over(deadline)]
        return [*busy, *(link.cluster_id for link in gone)]

    def _on_each(self, work: Callable[[Link], bool]) -> list[int]:
        """Clusters for which ``work``, of all at once, is false."""
        links = self._core.table.all()
        try:
            results = self._core.end_workers.each([functools.partial(work, link) for link in links])
        except CancelledError:  # another thread has just finalized the engine
            results = [work(link) for link in links]
        return [link.cluster_id for link, done in zip(links, results, strict=True) if not done]

    def close(self) -> None:
        """See ``Links.close``."""
        core = self._core
        self._listeners.close_all()
        self._comms.close()
        core.table.close()

        def end(deadline: Deadline, link: Link) -> bool:
            try:
                core.ender.agree(link, deadline)
            except LinkError as error:
                log.info("cluster %d: %s", link.cluster_id, error)
            return True

        self._on_each(functools.partial(end, Deadline.after(_CLOSE_S)))
        if core.table.all():
            # Peers that still copy are stopped by the table; then they can say that they have ended.
            core.regions.stop()
            self._on_each(functools.partial(end, Deadline.after(_CLOSE_S)))
        for link in core.table.all():
            core.ender.give_up(link, "finalized")
        for session in list(core.sessions):
            session.channel.close("finalized")
