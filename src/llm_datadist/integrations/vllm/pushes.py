"""How a prefill worker pushes the KV of requests, each layer as soon as it is final, to whoever has registered."""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import TYPE_CHECKING, Final

from llm_datadist import BlocksCacheKey, LLMException
from llm_datadist.integrations.vllm.caches import LEASES_MODEL
from llm_datadist.integrations.vllm.logs import logger
from llm_datadist.integrations.vllm.messages import Stopped, Written
from llm_datadist.integrations.vllm.routes import Pieces, pieces, routes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from concurrent.futures import Executor

    from llm_datadist.integrations.vllm.caches import Side
    from llm_datadist.integrations.vllm.heads import Source
    from llm_datadist.integrations.vllm.messages import Cancel, Register
    from llm_datadist.integrations.vllm.orders import Hold, Part

_MAX_TRANSFERS: Final = 4096


@dataclasses.dataclass(frozen=True)
class _Job:
    """Some layers of one cache, final for a part of a request."""

    part: Part
    cache: int
    layers: range


@dataclasses.dataclass
class _Target:
    """A worker of a decode engine."""

    cluster_id: int
    register: Register | None
    sources: tuple[tuple[int, Source], ...] = ()
    pushed: int = 0
    """Jobs it has got."""
    planned: dict[tuple[int, Source], tuple[Part, Pieces | None]] = dataclasses.field(default_factory=dict)
    """Of the last part: the same for all of its layers."""
    active: bool = False
    """A thread is pushing to it."""
    stop: str = ""
    """Nothing more is pushed, for this reason."""
    told: bool = False


@dataclasses.dataclass
class _Transfer:
    """One request's KV on its way."""

    since: float
    """Of its last progress, in seconds of the monotonic clock."""
    readers: int = 0
    """How many targets there will be, once one has said so."""
    jobs: list[_Job] = dataclasses.field(default_factory=list)
    complete: bool = False
    """All jobs are there."""
    stop: str = ""
    digest: str = ""
    """Of the prompt whose KV it is, once there are jobs."""
    held: str = ""
    """The request, once it has ended and its blocks are kept for this."""
    seconds: float = 0.0
    targets: dict[int, _Target] = dataclasses.field(default_factory=dict)

    @property
    def over(self) -> bool:
        """Whether every reader has been told how it ended."""
        told = sum(each.told for each in self.targets.values())
        return told >= self.readers > 0


class Pusher:
    """Pushes of one worker. The engine's thread orders, threads of the pool push."""

    def __init__(self, side: Side, pool: Executor) -> None:
        self._side = side
        self._pool = pool
        self._where = {
            layer: (cache, at) for cache, each in enumerate(side.caches) for layer, at in each.pages.layers.items()
        }
        self._lock = threading.Lock()
        self._told = threading.Condition(self._lock)
        self._transfers: dict[str, _Transfer] = {}
        self._open: list[tuple[Part, set[tuple[int, int]]]] = []
        """The parts of this step, and which layers are not final yet."""
        self._freed: set[str] = set()
        self.refusal: str = ""
        """Why nothing is pushed at all."""
        self.failed: Callable[[], None] = lambda: None
        """Called when a push has failed."""
        self.changed: Callable[[], None] = lambda: None
        """Called when ``freed`` may have something new."""

    # ------------------------------------------------------------ the engine's thread

    def begin(self, parts: Iterable[Part]) -> None:
        """A step begins that makes parts of requests final."""
        every = set(self._where.values())
        self._open = [(part, set(every)) for part in parts]

    def layer_done(self, layer: str) -> None:
        """A layer is final for all parts of the step."""
        if self._open and (where := self._where.get(layer)) is not None:
            self._final([where])

    def step_done(self) -> None:
        """All layers are final for all parts of the step."""
        if not self._open:
            return
        self._final(sorted(self._where.values()))
        with self._lock:
            for part, _ in self._open:
                if part.last:
                    transfer = self._transfer(part.transfer)
                    transfer.complete = True
                    self._kick(part.transfer, transfer)
        self._open = []

    def _final(self, places: Sequence[tuple[int, int]]) -> None:
        with self._lock:
            for part, missing in self._open:
                now = [place for place in places if place in missing]
                missing.difference_update(now)
                if now:
                    transfer = self._transfer(part.transfer)
                    transfer.digest = part.digest
                    transfer.jobs += [_Job(part, cache, range(at, at + 1)) for cache, at in now]
                    self._kick(part.transfer, transfer)

    def hold(self, orders: Iterable[Hold]) -> None:
        """Requests have ended, and their blocks are kept until all is pushed."""
        with self._lock:
            for each in orders:
                transfer = self._transfer(each.transfer)
                transfer.held, transfer.seconds, transfer.since = each.request, each.seconds, time.monotonic()
                self._finish(each.transfer, transfer)

    def drop(self, transfers: Iterable[tuple[str, str]]) -> None:
        """Requests have ended otherwise; whoever waits for them is told."""
        with self._lock:
            for name, why in transfers:
                transfer = self._transfer(name)
                transfer.stop = why
                self._kick(name, transfer)
                self._finish(name, transfer)  # if all have been told already

    def expire(self, orphan_seconds: float) -> list[str]:
        """Give up transfers for which nobody has registered in time; requests whose blocks were kept for them."""
        now = time.monotonic()
        found = []
        with self._lock:
            for name, each in list(self._transfers.items()):
                if now - each.since < (each.seconds if each.held else orphan_seconds):
                    continue
                each.stop = each.stop or "the other half of the request has not come in time"
                self._kick(name, each)
                if not each.held:
                    del self._transfers[name]
                    continue
                found.append(each.held)
                self._freed.add(each.held)
                each.held, each.since = "", now  # who registers now is told
        return found

    @property
    def keeps(self) -> bool:
        """Whether blocks of any request are kept for a push."""
        with self._lock:
            return any(each.held for each in self._transfers.values())

    def freed(self) -> set[str]:
        """Requests whose blocks are not needed any more; each is given once."""
        with self._lock:
            found, self._freed = self._freed, set()
            return found

    # ------------------------------------------------------------ other threads

    def register(self, cluster_id: int, message: Register) -> None:
        """A decode worker wants a transfer."""
        parts = routes(message.facts, message.rank, self._side.facts).get(self._side.rank, ())
        with self._lock:
            refusal = self.refusal
            if not refusal and len(self._transfers) >= _MAX_TRANSFERS and message.transfer not in self._transfers:
                refusal = "too many transfers wait at the prefill engine"
            if refusal:
                logger.warning("A push is refused (%s): %s", message.transfer, refusal)
                target = _Target(cluster_id, message, stop=refusal)
                self._pool.submit(self._tell, "", _Transfer(0.0), target)
                return
            transfer = self._transfer(message.transfer)
            transfer.readers = message.readers
            transfer.targets[cluster_id] = _Target(cluster_id, message, parts)
            self._kick(message.transfer, transfer)

    def cancel(self, cluster_id: int, message: Cancel) -> None:
        """A decode worker does not want a transfer any more."""
        with self._lock:
            transfer = self._transfer(message.transfer)
            transfer.readers = message.readers
            target = transfer.targets.setdefault(cluster_id, _Target(cluster_id, None))
            target.stop = target.stop or "it was cancelled"
            target.told = False  # it waits for an answer, also if it has got one
            self._kick(message.transfer, transfer)

    def leave(self, cluster_id: int, seconds: float) -> bool:
        """Push nothing more that a decode worker has asked for over a link that has ended: it may have given it up.

        To be called before this side links it again. Whether all that ran has ended, after so many seconds at most.
        """

        def left() -> list[_Target]:
            every = (each.targets.get(cluster_id) for each in self._transfers.values())
            return [each for each in every if each is not None and not each.told]

        with self._lock:
            for target in left():
                target.stop = target.stop or "the link to the decode worker has ended"
            for name, transfer in list(self._transfers.items()):
                self._kick(name, transfer)
            return self._told.wait_for(lambda: not left(), seconds)

    def renew(self, names: Iterable[str]) -> None:
        """Decode engines still want these transfers, but have no blocks for them yet."""
        now = time.monotonic()
        with self._lock:
            for name in names:
                transfer = self._transfers.get(name)
                if transfer is not None and not transfer.stop:
                    transfer.since = now

    def _transfer(self, name: str) -> _Transfer:
        now = time.monotonic()
        transfer = self._transfers.setdefault(name, _Transfer(now))
        transfer.since = now
        return transfer

    def _kick(self, name: str, transfer: _Transfer) -> None:
        """Have threads push what is there. With the lock held."""
        for target in transfer.targets.values():
            target.stop = target.stop or transfer.stop or _other_prompt(target.register, transfer.digest)
            work = target.pushed < len(transfer.jobs) or transfer.complete or target.stop
            if work and not target.active and not target.told:
                target.active = True
                self._pool.submit(self._serve, name, transfer, target)

    def _serve(self, name: str, transfer: _Transfer, target: _Target) -> None:
        while True:
            with self._lock:
                jobs = transfer.jobs[target.pushed :]
                ended = target.stop or (not jobs and transfer.complete)
                if not jobs and not ended:
                    target.active = False
                    return
            if ended:
                break
            done, why = self._push(target, jobs)
            with self._lock:
                target.pushed += done
                transfer.since = time.monotonic()
                target.stop = target.stop or why
        self._tell(name, transfer, target)

    def _push(self, target: _Target, jobs: Sequence[_Job]) -> tuple[int, str]:
        """Push the first jobs, those that one call can do; how many, and why it went wrong."""
        first = jobs[0]
        count = 1
        layers = first.layers
        while count < len(jobs) and _follows(jobs[count], first, layers):
            layers = range(layers.start, jobs[count].layers.stop)
            count += 1
        try:
            for cache, source in target.sources:
                if cache == first.cache:
                    self._push_part(target, first, source, layers)
        except Exception as error:  # noqa: BLE001 - whatever it is, the decode engine waits for an end
            why = str(error) or repr(error)
            logger.error("A push to cluster %x has failed: %s", target.cluster_id, why)
            self.failed()
            return count, why
        return count, ""

    def _push_part(self, target: _Target, job: _Job, source: Source, layers: range) -> None:
        part, found = target.planned.get((job.cache, source), (None, None))
        if part is not job.part:
            found = self._plan(target, job, source)
            target.planned[job.cache, source] = (job.part, found)
        if found is None:
            return
        key = BlocksCacheKey(target.cluster_id, LEASES_MODEL + 1 + job.cache)
        cache = self._side.caches[job.cache].cache
        self._side.manager.push_blocks(
            key, cache, found.theirs, found.ours, src_layer_range=layers, dst_layer_range=layers, tensor_num_per_layer=1
        )

    def _plan(self, target: _Target, job: _Job, source: Source) -> Pieces | None:
        """What of a part goes where; None if nothing."""
        register = target.register
        if register is None:
            return None
        theirs, ours = register.facts.caches[job.cache], self._side.facts.caches[job.cache]
        begin = job.part.first // theirs.block_tokens * theirs.block_tokens  # all of a block that was not full
        span = range(max(register.first, begin), min(register.tokens, job.part.tokens))
        if not span:
            return None
        found = pieces(theirs, ours, source, span, (register.blocks[theirs.group], job.part.blocks[ours.group]))
        return found if found.ours else None

    def _tell(self, name: str, transfer: _Transfer, target: _Target) -> None:
        """Tell a reader how it ended; nothing is written to it any more."""
        transfer_id = target.register.transfer if target.register is not None else name
        message = Stopped(transfer_id, target.stop) if target.stop else Written(transfer_id)
        try:
            self._side.peers.send(target.cluster_id, message)
        except LLMException as error:
            logger.warning("A decode worker was not told %r: %s", message, error)
        with self._lock:
            target.active, target.told = False, True
            self._finish(name, transfer)
            self._told.notify_all()
        self.changed()

    def _finish(self, name: str, transfer: _Transfer) -> None:
        if not transfer.over or not (transfer.held or transfer.stop):
            return
        if transfer.held:
            self._freed.add(transfer.held)
        self._transfers.pop(name, None)


def _other_prompt(register: Register | None, digest: str) -> str:
    """Why a reader must not get the KV: it wants that of another prompt of the same request of a client."""
    wanted = "" if register is None else register.digest
    return "it is of another prompt" if wanted and digest and wanted != digest else ""


def _follows(job: _Job, first: _Job, layers: range) -> bool:
    return job.part is first.part and job.cache == first.cache and job.layers.start == layers.stop
