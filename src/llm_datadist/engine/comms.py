"""Links by rank table: every member of a small group calls ``link`` with one table and is then linked with every other.

Of each pair the member with the higher rank connects to the other one, which listens at the address that the table
gives it (see ``ranktable``) and, if it has one, at its own listen address, too. Both wait for each other until
``link_total_time``; then every pair is linked, or the group has FAILED.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Final

from llm_datadist.engine.errors import LinkError, failure, invalid
from llm_datadist.engine.ranktable import RankTableError, addresses
from llm_datadist.engine.requests import MemStatus
from llm_datadist.net.address import text
from llm_datadist.net.channel import ChannelClosedError, ReplyTimeoutError
from llm_datadist.net.ports import why_not
from llm_datadist.status import LLMStatusCode, code_2_status
from llm_datadist.utils import limits, log
from llm_datadist.utils.deadline import Deadline
from llm_datadist.wire import messages

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from llm_datadist.engine.core import Core
    from llm_datadist.engine.link import Link
    from llm_datadist.engine.listeners import Listeners
    from llm_datadist.net.address import Address

    Dial = Callable[[Address, int, Deadline, str], Link]

_MAX_COMMS: Final = 512
_PAUSE_S: Final = 0.02
_MAX_PAUSE_S: Final = 0.2
_DIAL_S: Final = 5.0
_UNLINK_S: Final = 5.0
_FATAL: Final = frozenset({LLMStatusCode.LLM_PARAM_INVALID, LLMStatusCode.LLM_FAILED})


class Comm:
    """One group."""

    def __init__(self, comm_id: int, name: str, ranks: Mapping[int, int], deadline: Deadline) -> None:
        self.comm_id = comm_id
        self.name = name
        self.ranks: dict[int, int] = dict(ranks)
        self.deadline = deadline
        self.members: set[int] = set()
        """The others that are linked."""
        self.status: MemStatus = MemStatus.PREPARING
        self.reason: str = ""
        self.ended: threading.Event = threading.Event()
        """Set when the status is final, or when nobody is interested any more."""
        self.rendezvous: list[Address] = []
        """Where this side listens for it."""

    def fail(self, reason: str) -> None:
        """It will not come up."""
        if self.status is MemStatus.PREPARING:
            self.status, self.reason = MemStatus.FAILED, reason
            log.error("link(%r) failed: %s", self.name, reason)
        self.ended.set()


class Comms:
    """All groups of an engine. Thread-safe."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._lock = threading.Lock()
        self._ids = itertools.count(1)
        self._comms: dict[int, Comm] = {}
        self._dial: Dial
        self._listeners: Listeners

    def attach(self, dial: Dial, listeners: Listeners) -> None:
        """Give it its ways to connect and to listen; once, before anything else."""
        self._dial = dial
        self._listeners = listeners

    def link(self, name: str, ranks: Mapping[int, int], rank_table: str | None) -> int:
        """Begin to link a group; its id. Progress is told by ``status``.

        Raises:
            LLMException: LLM_PARAM_INVALID for a table that does not fit, LLM_LINK_FAILED if this side cannot listen,
            LLM_FAILED if the system gives no thread.
        """
        own = self._core.identity.cluster_id
        if own not in ranks:
            raise invalid("link", f"cluster_rank_info {dict(ranks)} does not contain this cluster, {own}")
        try:
            where = addresses(rank_table or "", ranks)
        except RankTableError as error:
            raise invalid("link", str(error)) from error
        with self._lock:
            if len(self._comms) >= _MAX_COMMS:
                raise invalid("link", f"{_MAX_COMMS} rank-table links are in use already", hint="unlink some first")
            comm = Comm(next(self._ids), name, ranks, Deadline.after(self._core.options.link_total_time_s))
            self._comms[comm.comm_id] = comm
        order = {cluster: (rank, cluster) for cluster, rank in ranks.items()}
        others = [cluster for cluster in ranks if cluster != own]
        if any(order[other] > order[own] for other in others):
            try:
                comm.rendezvous = self._listeners.open(where[own])
            except OSError as error:
                self._forget(comm)
                context, hint = why_not(where[own][-1], error)
                if len(where[own]) > 1:
                    context = f"of {', '.join(map(text, where[own]))}: {context}"
                raise failure(LLMStatusCode.LLM_LINK_FAILED, "link", context, phase="link", hint=hint) from error
        for other in others:
            if order[other] < order[own]:
                self._begin(comm, other, where[other])
        self._core.loop.call_later(comm.deadline.remaining(), lambda: self._expire(comm))
        return comm.comm_id

    def _begin(self, comm: Comm, other: int, where: list[Address]) -> None:
        thread = threading.Thread(
            target=self._meet, args=(comm, other, where), name=f"datadist-link-{comm.comm_id}-{other}", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:
            comm.ended.set()
            self.unlink(comm.comm_id)
            reason, hint = limits.explain(error)
            raise failure(LLMStatusCode.LLM_FAILED, "link", reason, phase="link", retryable=True, hint=hint) from error

    def _meet(self, comm: Comm, other: int, where: list[Address]) -> None:
        """Connect to one member, again and again until it is there."""
        pause = _PAUSE_S
        comm.reason = f"cluster {other} at {', '.join(map(text, where))}: no answer"
        while not comm.ended.is_set() and other not in comm.members:
            try:
                self.joined(comm.name, self._reach(comm, other, where))
                return
            except LinkError as error:
                comm.reason = f"cluster {other} at {', '.join(map(text, where))}: {error}"
                if error.code in _FATAL:
                    comm.fail(comm.reason)
                    return
            comm.ended.wait(pause)
            pause = min(_MAX_PAUSE_S, pause * 1.5)

    def _reach(self, comm: Comm, other: int, where: list[Address]) -> Link:
        link = self._core.table.get(other)
        if link is not None:
            return self._join(comm, link)
        code, reasons = LLMStatusCode.LLM_LINK_FAILED, []
        for address in where:
            try:
                link = self._dial(address, other, comm.deadline.at_most(_DIAL_S), comm.name)
            except LinkError as error:
                code = error.code
                reasons.append(str(error))
                continue
            link.made_for_comm = True
            return link
        raise LinkError(code, "; ".join(reasons) or "no address")

    def _join(self, comm: Comm, link: Link) -> Link:
        try:
            reply = link.request(messages.Join(comm=comm.name), comm.deadline.at_most(_DIAL_S))
        except (ChannelClosedError, ReplyTimeoutError) as error:
            raise LinkError(LLMStatusCode.LLM_LINK_FAILED, str(error)) from error
        if isinstance(reply, messages.Refuse):
            raise LinkError(code_2_status(reply.code), reply.reason)
        return link

    def _named(self, name: str | None, cluster_id: int) -> list[Comm]:
        with self._lock:
            return [
                comm
                for comm in self._comms.values()
                if comm.name == name and cluster_id in comm.ranks and comm.status is not MemStatus.FAILED
            ]

    def expects(self, name: str, cluster_id: int) -> bool:
        """Whether ``link`` has been called here for a group of this name with this member."""
        return bool(self._named(name, cluster_id))

    def joined(self, name: str, link: Link) -> None:
        """A member is linked."""
        for comm in self._named(name, link.cluster_id):
            link.comms.add(comm.comm_id)
            comm.members.add(link.cluster_id)
            if len(comm.members) == len(comm.ranks) - 1 and comm.status is MemStatus.PREPARING:
                comm.status = MemStatus.OK
                comm.ended.set()

    def refused(self, name: str | None, cluster_id: int, reason: str) -> None:
        """A member cannot be linked, ever."""
        for comm in self._named(name, cluster_id):
            comm.fail(f"cluster {cluster_id}: {reason}")

    def _expire(self, comm: Comm) -> None:
        if comm.status is MemStatus.PREPARING:
            missing = sorted(set(comm.ranks) - comm.members - {self._core.identity.cluster_id})
            who = ", ".join(map(str, missing))
            comm.fail(f"cluster {who} did not come within link_total_time ({comm.reason or 'no sign'})")

    def status(self, comm_id: int) -> MemStatus:
        """How far a group is. A member that is lost later makes it FAILED.

        Raises:
            LLMException: LLM_NOT_YET_LINK for an unknown id.
        """
        comm = self._get(comm_id, "query_register_mem_status")
        if comm.status is MemStatus.OK and any(self._core.table.get(other) is None for other in comm.members):
            return MemStatus.FAILED
        return comm.status

    def unlink(self, comm_id: int) -> None:
        """End a group: links that were made for it alone end, too. Waits for a preparation that still runs.

        Raises:
            LLMException: LLM_NOT_YET_LINK for an unknown id.
        """
        comm = self._get(comm_id, "unlink")
        comm.ended.wait(comm.deadline.remaining())
        self._forget(comm)
        links = [link for link in map(self._core.table.get, sorted(comm.members)) if link is not None]
        for link in links:
            link.comms.discard(comm.comm_id)
        unused = [link for link in links if link.made_for_comm and not link.comms]
        deadline = Deadline.after(_UNLINK_S)
        with contextlib.suppress(CancelledError):  # finalized meanwhile
            self._core.end_workers.each([functools.partial(self._core.ender.end, link, deadline) for link in unused])

    def _get(self, comm_id: int, operation: str) -> Comm:
        with self._lock:
            comm = self._comms.get(comm_id)
            known = sorted(self._comms)
        if comm is None:
            context = f"there is no rank-table link {comm_id} (there are: {known})"
            raise failure(LLMStatusCode.LLM_NOT_YET_LINK, operation, context, phase="link", hint="call link first")
        return comm

    def _forget(self, comm: Comm) -> None:
        with self._lock:
            known = self._comms.pop(comm.comm_id, None)
        comm.ended.set()
        if known is not None:  # else another thread is just doing it
            self._listeners.close(comm.rendezvous)

    def close(self) -> None:
        """Give up all groups; idempotent."""
        with self._lock:
            comms = list(self._comms.values())
        for comm in comms:
            comm.fail("finalized")
            self._forget(comm)
