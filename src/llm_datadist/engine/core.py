"""The parts of one engine, wired together."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from typing import TYPE_CHECKING, Final

from llm_datadist.engine.catalogue import Catalogue
from llm_datadist.engine.collapser import Collapser
from llm_datadist.engine.links import LinkEnder, LinkTable
from llm_datadist.engine.notifications import Mailbox
from llm_datadist.engine.service import CacheService, refuse
from llm_datadist.engine.verify import DigestService
from llm_datadist.memory import digests
from llm_datadist.memory.regions import RegionTable
from llm_datadist.net.handover import HandoverServer
from llm_datadist.net.loop import Loop
from llm_datadist.net.waiting import WaitingRoom, share_of_descriptors
from llm_datadist.net.workers import Workers
from llm_datadist.observe.metrics import Metrics
from llm_datadist.observe.recorder import Recorder
from llm_datadist.observe.transfer_log import TransferLog
from llm_datadist.paths import inprocess
from llm_datadist.paths.ladder import one_sided
from llm_datadist.paths.mapped import Mapped
from llm_datadist.paths.nixl import Nixl
from llm_datadist.paths.nixl_agent import NixlHost
from llm_datadist.paths.nixl_options import NixlUnavailableError
from llm_datadist.paths.tcp_server import DataServer
from llm_datadist.status import LLMStatusCode
from llm_datadist.utils import limits, log
from llm_datadist.utils.deadline import Deadline
from llm_datadist.utils.process import boot_id, dumpable, own_start_time, pid_namespace, user_namespace
from llm_datadist.wire.auth import handover_request
from llm_datadist.wire.messages import Identity, Offer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from llm_datadist.engine.admission import Admission
    from llm_datadist.engine.catalogue import CacheEntry
    from llm_datadist.engine.link import Link
    from llm_datadist.engine.options import EngineOptions
    from llm_datadist.engine.session import Session
    from llm_datadist.memory.shared import Area
    from llm_datadist.wire import messages

_MAX_NEWCOMERS: Final = 512
_CONTROL_THREADS: Final = 64
_SERVE_THREADS: Final = 64
"""Also bound how many stalled peers it takes to delay the others."""
_TRANSFER_THREADS: Final = 32
"""Transfers that run in the background at a time; also bound how many stalled ones it takes to delay the others."""
_MAX_COPY_THREADS: Final = 4
_SERVED_S: Final = 2.0


class Core:
    """What the rooms of an engine share. Threads are started when they are first needed."""

    def __init__(
        self,
        cluster_id: int,
        options: EngineOptions,
        admission: Admission,
        release: Callable[[CacheEntry], object],
        pools: Sequence[Area],
    ) -> None:
        """Take what they need of the system.

        Raises:
            OSError: it gives no descriptors or no memory; nothing is left behind.
            RuntimeError: it gives no thread; nothing is left behind.
        """
        self.options = options
        self.admission = admission
        with contextlib.ExitStack() as undo:
            self.regions: RegionTable = RegionTable()
            undo.callback(self.regions.close)
            self.loop: Loop = Loop(f"datadist-{cluster_id}")
            undo.pop_all()
        self.identity: Identity = Identity(
            cluster_id=cluster_id,
            incarnation=secrets.token_bytes(16),
            boot_id=boot_id(),
            pid_namespace=pid_namespace(),
            pid=os.getpid(),
            start_time=own_start_time(),
            user_namespace=user_namespace(),
        )
        name = f"datadist-{cluster_id}"
        cores = len(os.sched_getaffinity(0))
        self.copy_threads: int = min(_MAX_COPY_THREADS, cores)
        self.control_workers: Workers = Workers(f"{name}-control", _CONTROL_THREADS)
        self.confirm_workers: Workers = Workers(f"{name}-confirm", _CONTROL_THREADS)
        """Apart from ``control_workers``: peers that do not go on with a handshake hold up other handshakes alone."""
        self.dial_workers: Workers = Workers(f"{name}-dial", _CONTROL_THREADS)
        self.end_workers: Workers = Workers(f"{name}-end", _CONTROL_THREADS)
        self.serve_workers: Workers = Workers(f"{name}-serve", _SERVE_THREADS)
        self.transfer_workers: Workers = Workers(f"{name}-transfer", _TRANSFER_THREADS)
        self.copiers: Workers = Workers(f"{name}-copy", max(_MAX_COPY_THREADS, cores))
        self.catalogue: Catalogue = Catalogue(self.regions, one_sided=options.remote_accessible)
        self.collapser: Collapser = Collapser(name, self.catalogue)
        self.service: CacheService = CacheService(self.catalogue, self.regions, self.loop, release)
        self.recorder: Recorder = Recorder()
        self.metrics: Metrics | None = Metrics() if options.metrics else None
        if self.metrics is not None:
            self.recorder.add(self.metrics)
        if log.get_logger().isEnabledFor(logging.DEBUG):
            self.recorder.add(TransferLog())
        self.data_server: DataServer = DataServer(self.regions, self.loop, self.serve_workers, self.recorder)
        self.nixl: NixlHost = NixlHost(options.nixl, self.regions, pools)
        self.digests: DigestService = DigestService(self.regions, self.serve_workers)
        self.mailbox: Mailbox = Mailbox()
        self.table: LinkTable = LinkTable()
        self.sessions: set[Session] = set()
        """Of all control connections."""
        self.newcomers: WaitingRoom[Session] = WaitingRoom(
            self.loop, share_of_descriptors(_MAX_NEWCOMERS), lambda session, reason: session.channel.close(reason)
        )
        """Control connections that peers have opened, until they have introduced themselves."""
        self.handover: HandoverServer | None = self._share(pools)
        self.offer: Offer = Offer(
            probe_region=self.regions.probe_region,
            nonce=self.regions.nonce,
            table_fd=self.regions.fd,
            paths=list(options.paths),
            handover=self.handover.name if self.handover else None,
            digest=digests.ALGORITHM if digests.available() else None,
            dumpable=dumpable(),
        )
        self.pending: dict[bytes, Link] = {}
        """Links that peers have begun, by token, until they are confirmed."""
        self.ender: LinkEnder = LinkEnder(self.table, self.loop, self._link_ended, self.reached_by)
        inprocess.publish(self.identity.incarnation, self.regions)

    def _share(self, pools: Sequence[Area]) -> HandoverServer | None:
        """Let linked peers on this host have the pools; None where there is nothing to have."""
        if not pools or Mapped.name not in self.options.paths:
            return None
        try:
            return HandoverServer([*self.regions.areas, *pools], self.loop, self._knows)
        except OSError as error:
            log.warn("peers cannot map the memory pools of this process: %s", limits.with_hint(error))
            return None

    def reached_by(self, link: Link) -> bool:
        """Whether a peer may reach our memory without our doing, so that it has to be asked when it has stopped."""
        return link.knows_agent or one_sided(link.peer, self.identity, self.options.paths)

    def tell_agent(self, link: Link, ask: messages.AskAgent) -> messages.Body:
        """What a peer needs in order to reach our memory over NIXL. May take a while."""
        options, refusal = self.options.nixl, None
        if Nixl.name not in self.options.paths:
            refusal = "the path nixl is not permitted by this side's configuration"
        elif ask.backend != options.backend:
            refusal = f"the backend of NIXL is {options.backend} on one side, and {ask.backend} on the other"
        refusal = refusal or options.objection(on_devices=ask.on_devices)
        if refusal is not None:
            return refuse(LLMStatusCode.LLM_LINK_FAILED, refusal)
        link.knows_agent = True
        try:
            return self.nixl.agent().tell(ask.regions)
        except NixlUnavailableError as error:
            hint = f" [{error.hint}]" if error.hint else ""
            return refuse(LLMStatusCode.LLM_LINK_FAILED, f"{error}{hint}")

    def _knows(self, request: bytes) -> bool:
        """Whether this is the hand-over request of a link, in whatever state."""
        links = [session.link for session in list(self.sessions)]
        return any(
            link is not None and secrets.compare_digest(handover_request(link.key, link.token), request)
            for link in links
        )

    def _link_ended(self, link: Link) -> None:
        self.pending.pop(link.token, None)
        if link.give_up is not None:
            link.give_up.cancel()
        self.data_server.give_up(link.token, None, lambda: None)
        if self.handover is not None:
            self.handover.give_up(link.token)
        link.close_arrivals()

    def close(self) -> None:
        """Stop the threads and give the region table back; links must have ended."""
        inprocess.withdraw(self.identity.incarnation)
        self.collapser.close()
        self.ender.close()
        self.mailbox.close()
        if self.handover is not None:
            self.handover.close()
        self.data_server.close()
        self.nixl.close()
        self.digests.close()
        if not self.regions.wait_idle(Deadline.after(_SERVED_S)):
            log.error("requests of peers are still being served after finalize: keep registered memory mapped")
        for workers in (
            self.control_workers,
            self.confirm_workers,
            self.dial_workers,
            self.end_workers,
            self.serve_workers,
            self.transfer_workers,
            self.copiers,
        ):
            workers.close()
        self.loop.close()
        for session in list(self.sessions):  # of links that were begun meanwhile
            session.channel.close("this engine has been finalized")
        self.regions.close()
