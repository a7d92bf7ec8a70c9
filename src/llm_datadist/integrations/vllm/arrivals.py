"""How a decode worker waits for KV that prefill workers push into its blocks."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from typing import TYPE_CHECKING, Final

from llm_datadist import LLMException, LLMStatusCode
from llm_datadist.integrations.vllm.logs import logger
from llm_datadist.integrations.vllm.messages import Cancel, Register
from llm_datadist.integrations.vllm.peers import UnreachableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm_datadist.integrations.vllm.caches import Side
    from llm_datadist.integrations.vllm.orders import Load
    from llm_datadist.integrations.vllm.params import Worker


ABORTED: Final = "the request was aborted"
"""How a load ends that is not wanted any more: no failure."""


@dataclasses.dataclass
class _Arrival:
    load: Load
    begin: float
    deadline: float
    pending: dict[int, int]
    """Workers that have not said how it ended, and how many readers each has."""
    told: set[int] = dataclasses.field(default_factory=set)
    """Workers that may know of it."""
    error: str = ""
    telling: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    """Held while a worker is told: none may learn that it is wanted after it has learnt that it is not."""


class Arrivals:
    """Pushes that this worker waits for. Thread-safe.

    A load ends when no worker writes to its blocks any more: each has said that it has written all, or that it has
    stopped, or its link and all transfers over it have ended, and it is not made again before it can have forgotten the
    load.
    """

    def __init__(self, side: Side, timeout_s: float, ended: Callable[[Load, float, int, str], None]) -> None:
        self._side = side
        self._timeout_s = timeout_s
        self._ended = ended
        self._lock = threading.Lock()
        self._arrivals: dict[str, _Arrival] = {}

    def note(self, load: Load) -> None:
        """A load is to be expected: from now on it can be cancelled. Does not block."""
        counts = self._side.reader_counts(load.remote.facts)
        now = time.monotonic()
        workers = load.remote.workers
        pending = {workers[at].cluster_id: counts[at] for at in self._side.routes(load.remote.facts)}
        with self._lock:
            self._arrivals[load.transfer] = _Arrival(load, now, now + self._timeout_s, pending)

    def expect(self, load: Load) -> None:
        """Register with all workers that have something for this one. May block for the link timeout.

        If the load was cancelled meanwhile, or needs nothing, they are told that.
        """
        counts = self._side.reader_counts(load.remote.facts)
        mine = self._side.routes(load.remote.facts)
        arrival = self._arrivals.get(load.transfer)
        cancelled = load.reported and arrival is None
        for rank, worker in enumerate(load.remote.workers):
            wanted = rank in mine
            if not wanted and (counts[rank] or self._side.rank):
                continue  # others of this engine read from it, or tell it that nobody does
            readers = max(1, counts[rank])
            first = load.first if wanted else load.tokens
            message: Register | Cancel = Register(
                load.transfer, readers, self._side.facts, self._side.rank, first, load.tokens, load.blocks, load.digest
            )
            if cancelled:
                message = Cancel(load.transfer, readers)
            error = self._tell(worker, message, arrival)
            if error:
                self._gone(load.transfer, worker.cluster_id, error)

    def _tell(self, worker: Worker, message: Register | Cancel, arrival: _Arrival | None) -> str:
        """Tell a worker; why it does not know of the load, or empty if it does, or may."""
        cluster_id = worker.cluster_id
        told = False
        try:
            if not self._owed(cluster_id):  # so a link that has ended may be made again: it has nothing to write
                self._side.peers.forget_ended(cluster_id)
            self._side.peers.link(worker)
            with arrival.telling if arrival is not None else contextlib.nullcontext():
                given_up = "" if arrival is None else arrival.error
                if given_up and isinstance(message, Register):
                    message = Cancel(message.transfer, message.readers)
                elif arrival is not None:
                    told = True
                    arrival.told.add(cluster_id)
                self._side.peers.send(cluster_id, message)
        except UnreachableError as error:
            return f"the prefill worker cannot be told: {error}"
        except LLMException as error:
            late, ended = (
                error.status_code is code for code in (LLMStatusCode.LLM_TIMEOUT, LLMStatusCode.LLM_NOT_YET_LINK)
            )
            text = f"the prefill worker {'has not confirmed in time' if late else 'cannot be told'}: {error}"
            if ended and told:
                self._condemn(cluster_id)
            if arrival is None or not told or not (late or (ended and self._side.peers.may_write(cluster_id))):
                return text
            arrival.error = arrival.error or text  # it may have arrived
            self._stop_others(arrival)
            return ""
        return given_up

    def _owed(self, cluster_id: int) -> bool:
        """Whether a worker knows of a load, and has not said how it ended."""
        with self._lock:
            return any(cluster_id in each.told and cluster_id in each.pending for each in self._arrivals.values())

    def _condemn(self, cluster_id: int) -> None:
        self._side.peers.condemn(cluster_id, self._timeout_s, "its link has ended while it could write to this worker")

    def abandon(self, transfer: str, error: str) -> None:
        """End a load for an error of this side, as soon as nobody writes."""
        with self._lock:
            arrival = self._arrivals.get(transfer)
            if arrival is not None:
                arrival.error = arrival.error or error
        if arrival is not None:
            self._stop_others(arrival)

    def written(self, cluster_id: int, transfer: str) -> None:
        """A worker has written all that it had."""
        self._gone(transfer, cluster_id, "")

    def stopped(self, cluster_id: int, transfer: str, reason: str) -> None:
        """A worker writes nothing more."""
        self._gone(transfer, cluster_id, f"the prefill engine has not pushed all of it: {reason}")

    def cancel(self, request: str) -> None:
        """The request is not wanted any more; its load ends as soon as nobody writes."""
        with self._lock:
            found = [each for each in self._arrivals.values() if each.load.request == request]
            for each in found:
                each.error = each.error or ABORTED
        for each in found:
            self._stop_others(each)

    def watch(self) -> None:
        """Give up what takes too long, and what comes from a worker whose link has ended."""
        now = time.monotonic()
        with self._lock:
            every = list(self._arrivals.values())
        for each in every:
            for cluster_id in each.told & each.pending.keys():
                if not self._side.peers.is_linked(cluster_id):
                    self._condemn(cluster_id)
                    if not self._side.peers.may_write(cluster_id):
                        self._gone(each.load.transfer, cluster_id, "the link to the prefill worker has ended")
            if now > each.deadline:
                each.deadline = now + self._timeout_s
                each.error = each.error or f"nothing was pushed for {self._timeout_s:g} s (push_timeout_seconds)"
                self._stop_others(each)

    def _gone(self, transfer: str, cluster_id: int, error: str) -> None:
        with self._lock:
            arrival = self._arrivals.get(transfer)
            if arrival is None or arrival.pending.pop(cluster_id, None) is None:
                return
            first_error = bool(error) and not arrival.error
            arrival.error = arrival.error or error
            over = not arrival.pending
            if over:
                del self._arrivals[transfer]
        if over:
            moved = 0 if arrival.error else self._bytes(arrival.load)
            self._ended(arrival.load, time.monotonic() - arrival.begin, moved, arrival.error)
        elif first_error:
            self._stop_others(arrival)

    def _stop_others(self, arrival: _Arrival) -> None:
        for cluster_id, readers in list(arrival.pending.items()):
            with arrival.telling:
                told = cluster_id in arrival.told
            if not told:  # nor will it be
                self._gone(arrival.load.transfer, cluster_id, arrival.error)
                continue
            try:
                self._side.peers.send(cluster_id, Cancel(arrival.load.transfer, max(1, readers)))
            except LLMException as error:
                logger.warning("A prefill worker was not told to stop: %s", error)

    def _bytes(self, load: Load) -> int:
        total = 0
        for number, each in enumerate(self._side.facts.caches):
            blocks = sum(1 for block in load.blocks[each.group] if block)
            heads = len(self._side.facts.split(number).of(self._side.rank))
            total += blocks * each.chunks * heads * each.piece_bytes * each.layers
        return total
