"""The worker's half of the connector: owns the transfer library of one rank, and moves KV off the engine's thread."""

from __future__ import annotations

import dataclasses
import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from llm_datadist import BlocksCacheKey, CacheDesc, DataType, LLMDataDist, LLMException, LLMRole
from llm_datadist.integrations.vllm import caches, messages, params, tensors
from llm_datadist.integrations.vllm.arrivals import ABORTED, Arrivals
from llm_datadist.integrations.vllm.loads import LoadError, Puller
from llm_datadist.integrations.vllm.logs import logger
from llm_datadist.integrations.vllm.messages import Cancel, Done, Register, Renew, Stopped, Written
from llm_datadist.integrations.vllm.metadata import Address
from llm_datadist.integrations.vllm.peers import Peers, UnreachableError
from llm_datadist.integrations.vllm.pushes import Pusher
from llm_datadist.integrations.vllm.stats import Stats
from llm_datadist.integrations.vllm.worker_leases import SLOTS, Leases

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from llm_datadist.integrations.vllm.metadata import Orders
    from llm_datadist.integrations.vllm.options import Options
    from llm_datadist.integrations.vllm.orders import Load

_THREADS: Final = 16
"""Most that wait for peers at a time; they exist only once so many loads have run at a time."""
_RENEWERS: Final = 16
"""Most that wait at a time for an answer to a renewal, each for another worker."""
_MAIL_TIMEOUT_MS: Final = 600_000
_IDLE_WAIT_S: Final = 0.01
"""An engine that has nothing to compute waits so long for the end of a load or a lease, instead of going round: its
cores are needed for the transfer. A request that arrives meanwhile waits for it, too."""


@dataclasses.dataclass
class Results:
    """What has ended since the last step."""

    sent: set[str] = dataclasses.field(default_factory=set)
    received: set[str] = dataclasses.field(default_factory=set)
    failed: set[str] = dataclasses.field(default_factory=set)
    """Of those received. By request, not by block: vLLM then computes all of it. From the first bad block on would be
    wrong behind a sliding window, where the blocks before it were never there."""


class Worker:
    """One rank. The engine's thread calls; loads and messages have threads of their own, which block and never poll."""

    def __init__(self, options: Options, config: VllmConfig, kv_cache_config: KVCacheConfig, rank: int) -> None:
        tensors.check(config, kv_cache_config, options.mode)
        self._options = options
        self._config = config
        self._kv_cache_config = kv_cache_config
        self._rank = rank
        self._cluster_id = secrets.randbits(63) | 1
        self._dist: LLMDataDist | None = None
        self._pool = ThreadPoolExecutor(_THREADS, "llm-datadist-vllm")
        self._renewers = ThreadPoolExecutor(_RENEWERS, "llm-datadist-vllm-renew")
        """Threads of their own: a peer that is lost may keep all others busy for longer than a lease of another one."""
        self._renewing: set[params.Worker] = set()
        self._leases = Leases()
        self._changed = threading.Condition()
        self._results = Results()
        self._running = 0
        """Loads whose end the scheduler waits for."""
        self._looked = 0.0
        self._stats = Stats()

    # ------------------------------------------------------------ life

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Start the transfer library, and make the KV cache known to it, where it is."""
        if self._options.mode == "push":
            tensors.check_push(kv_caches)
        dist = LLMDataDist(LLMRole.MIX, self._cluster_id)
        if self._options.populate:
            for tensor in kv_caches.values():
                tensor.zero_()  # as it is; but now all of its memory is there
        found = tensors.pages_of(kv_caches, self._config, self._kv_cache_config)
        parallel = self._config.parallel_config
        number = parallel.data_parallel_index * parallel.tensor_parallel_size + self._rank
        dist.init(self._options.generate(number, len(kv_caches)))
        self._dist = dist
        facts = tensors.facts(self._config, found)
        manager = dist.cache_manager
        registered = caches.register(manager, [pages for pages, _ in found], self._cluster_id)
        desc = CacheDesc(1, [SLOTS, 1], DataType.DT_UINT64)
        key = BlocksCacheKey(self._cluster_id, caches.LEASES_MODEL)
        manager.register_blocks_cache(desc, [self._leases.generations.ctypes.data], key, remote_accessible=True)
        self._peers = Peers(dist, self._options.link_timeout_ms)
        side = caches.Side(manager, registered, facts, self._rank, self._peers)
        self._puller = Puller(side)
        self._pusher = Pusher(side, self._pool)
        if self._options.mode != "push":
            self._pusher.refusal = f"it works in mode {self._options.mode!r}, and a push was expected"
        self._pusher.failed = self._push_failed
        self._pusher.changed = self._wake
        self._peers.before_link = self._pusher.leave
        timeout_s = float(self._options.push_timeout_seconds)
        self._arrivals = Arrivals(side, timeout_s, self._ended)
        if dist.listen_address is None:
            raise RuntimeError("the transfer library does not listen")
        host, port = dist.listen_address
        self.address: Address = Address(params.Worker(f"{self._cluster_id:x}", host, port), facts)
        threading.Thread(target=self._read_mail, name="llm-datadist-vllm-mail", daemon=True).start()
        size = sum(len(each.addresses) * each.shape.pieces * each.shape.piece_bytes for each, _ in found)
        logger.info("Rank %d listens on %s:%d; %d caches, %.2f GiB", self._rank, host, port, len(found), size / 2**30)

    def shutdown(self) -> None:
        """Stop; when this returns nothing touches the KV cache any more."""
        for pool in (self._pool, self._renewers):
            pool.shutdown(wait=False, cancel_futures=True)
        if self._dist is not None:
            self._dist.finalize()

    # ------------------------------------------------------------ one step

    def begin(self, orders: Orders) -> None:
        """Start what the scheduler has ordered; does not block."""
        self._leases.close(orders.closed)
        self._leases.open(orders.opened)
        self._leases.hold(each for each in orders.holds if not each.transfer)
        for load in orders.loads:
            if load.reported:
                with self._changed:
                    self._running += 1
                if load.transfer and not load.error:
                    self._arrivals.note(load)
            self._pool.submit(self._load, load)
        for request in orders.cancelled:
            self._pool.submit(self._arrivals.cancel, request)
        self._pusher.begin(orders.parts)
        self._pusher.hold(each for each in orders.holds if each.transfer)
        self._pusher.drop(orders.dropped)
        for remote in orders.links:
            self._pool.submit(self._link, remote)
        for remote in orders.releases:
            self._pool.submit(self._puller.release, remote)
        for worker, names in self._puller.renewals(orders.renewals).items():
            if worker not in self._renewing:
                self._renewing.add(worker)
                self._renewers.submit(self._renew, worker, names)

    def layer_done(self, layer: str) -> None:
        """The layer's KV of this step is final."""
        self._pusher.layer_done(layer)

    def step_done(self) -> None:
        """All layers' KV of this step is final."""
        self._pusher.step_done()

    def end(self, orders: Orders | None) -> Results:
        """What has ended. An idle engine waits a moment for loads, instead of going round."""
        self._look_around()
        for request in self._leases.expire() + self._pusher.expire(self._options.push_timeout_seconds):
            self._stats.count("expired_leases")
            logger.warning(
                "The blocks of request %s are freed: no decode engine has read them, or asked to keep them, for %g s "
                "(kv_connector_extra_config['lease_seconds'])",
                request,
                self._options.lease_seconds,
            )
        with self._changed:
            sent = self._freed()
            if orders is not None and orders.may_wait and not sent and not self._results.received:
                self._wait()
            found, self._results = self._results, Results()
        found.sent |= sent or self._freed()
        return found

    def _freed(self) -> set[str]:
        return self._leases.over() | self._pusher.freed()

    def _wait(self) -> None:
        """A moment, if somebody else is to end something."""
        if self._running or self._leases.kept or self._pusher.keeps:
            self._changed.wait(_IDLE_WAIT_S)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _look_around(self) -> None:
        """Once a second, while pushes are expected; this is called in every step, and there are steps meanwhile."""
        now = time.monotonic()
        if self._running and now - self._looked >= 1:
            self._looked = now
            self._pool.submit(self._arrivals.watch)

    def stats(self) -> Stats | None:
        """What was counted since the last call."""
        if self._stats.is_empty():
            return None
        with self._changed:
            found, self._stats = self._stats, Stats()
        return found

    # ------------------------------------------------------------ in other threads

    def _link(self, remote: params.Remote) -> None:
        try:
            for worker in remote.workers:
                self._peers.link(worker)
        except (UnreachableError, LLMException) as error:
            logger.debug("no link ahead of need: %s", error)

    def _renew(self, worker: params.Worker, names: Sequence[str]) -> None:
        try:
            self._puller.renew(worker, names)
        finally:
            self._renewing.discard(worker)

    def _push_failed(self) -> None:
        with self._changed:
            self._stats.count("failed_pushes")

    def _load(self, load: Load) -> None:
        if load.transfer and not load.error:
            try:
                self._arrivals.expect(load)
            except Exception as problem:  # noqa: BLE001 - whatever it is, the scheduler waits for an end
                logger.exception("unexpected")
                self._arrivals.abandon(load.transfer, repr(problem))
            return
        begin = time.perf_counter()
        moved, error = 0, load.error
        try:
            if not error:
                moved = self._puller.pull(load)
        except LoadError as problem:
            error = str(problem)
        except Exception as problem:  # noqa: BLE001 - whatever it is, the scheduler waits for an end
            logger.exception("unexpected")
            error = repr(problem)
        self._ended(load, time.perf_counter() - begin, moved, error)
        self._puller.release(load.remote)

    def _ended(self, load: Load, seconds: float, moved: int, error: str) -> None:
        failed = error not in {"", ABORTED}
        if failed:
            logger.error("The KV of request %s was not loaded: %s", load.request, error)
        with self._changed:
            self._running -= 1
            self._results.received.add(load.request)
            if failed:
                self._stats.count("failed_loads")
                self._results.failed.add(load.request)
            elif not error:
                self._stats.transferred(seconds, moved)
            self._changed.notify_all()

    def _read_mail(self) -> None:
        dist = self._dist
        while dist is not None and dist.is_initialized:
            try:
                received = dist.get_notifies(_MAIL_TIMEOUT_MS)
            except (LLMException, RuntimeError):  # finalized
                return
            for each in received:
                try:
                    self._received(each.cluster_id, each.message)
                except Exception:  # noqa: BLE001 - one that makes no sense must not be the last that is read
                    logger.exception("A message of cluster %x has failed", each.cluster_id)

    def _received(self, sender: int, data: bytes) -> None:
        message = messages.decode(data)
        if isinstance(message, Written):
            self._arrivals.written(sender, message.transfer)
        elif isinstance(message, Register):
            self._pusher.register(sender, message)
        elif isinstance(message, Cancel):
            self._pusher.cancel(sender, message)
        elif isinstance(message, Stopped):
            self._pool.submit(self._arrivals.stopped, sender, message.transfer, message.reason)
        elif isinstance(message, Renew):
            self._leases.renew(message.requests)
            self._pusher.renew(message.requests)
        elif isinstance(message, Done):
            known = self._leases.release(message.request, message.readers)
            with self._changed:
                if not known:
                    self._stats.count("late_notices")
                self._changed.notify_all()
        else:
            logger.warning("A peer has sent a message that this worker does not know: %r", data[:64])
