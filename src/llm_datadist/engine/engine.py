"""One engine: what a ``LLMDataDist`` is made of. Every method may be called from any thread."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import secrets
import threading
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np

from llm_datadist.engine import background, constraints, local, loopback, notifications, placement
from llm_datadist.engine.admission import Admission
from llm_datadist.engine.catalogue import DuplicateKeyError, geometry_of
from llm_datadist.engine.core import Core
from llm_datadist.engine.errors import failure, invalid
from llm_datadist.engine.gauges import gauges
from llm_datadist.engine.geometry_checks import check_addresses, check_room, check_spec
from llm_datadist.engine.memory_report import MemoryReport
from llm_datadist.engine.network import NetworkLinks
from llm_datadist.engine.pools import Pools
from llm_datadist.engine.requests import CacheKind, PullRequest, PushRequest
from llm_datadist.engine.short import ShortTransfers
from llm_datadist.engine.transfers import Transfers
from llm_datadist.memory.huge_pages import advise
from llm_datadist.memory.regions import RegionError
from llm_datadist.status import LLMException, LLMStatusCode
from llm_datadist.utils import limits, log, switching
from llm_datadist.utils.deadline import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from concurrent.futures import Future

    from llm_datadist.engine.catalogue import CacheEntry
    from llm_datadist.engine.link import LinkReport
    from llm_datadist.engine.network import Links
    from llm_datadist.engine.options import EngineOptions
    from llm_datadist.engine.requests import (
        CacheSpec,
        Key,
        MemStatus,
        Notification,
        PeerAddress,
        PrefixKey,
        RequestKey,
    )
    from llm_datadist.observe.events import Observer
    from llm_datadist.observe.metrics import Family
    from llm_datadist.observe.recorder import Watch

R = TypeVar("R", PullRequest, PushRequest)
_MIN_RELEASE_S: Final = 1.0
_AGAIN_S: Final = 1.0


class Engine:
    """Caches, links and transfers of one cluster member."""

    def __init__(self, cluster_id: int, options: EngineOptions) -> None:
        """Reserve pools, start to listen.

        Raises:
            LLMException: LLM_OUT_OF_MEMORY, LLM_FAILED (cannot listen, no descriptors or threads), LLM_PARAM_INVALID.
        """
        self.options = options
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        admission = Admission(options)  # before anything is reserved: it may refuse the options
        self._pools = Pools(options)
        alone = loopback.enabled()
        areas = [] if alone else self._pools.areas
        try:
            self._core = Core(cluster_id, options, admission, self._release_later, areas)
        except (OSError, RuntimeError, MemoryError) as error:
            self._pools.close()
            raise _cannot_start(error) from error
        self._undo_switching = switching.shorten(options.switch_interval_us)
        self._links: Links = loopback.LoopbackLinks(self._core) if alone else NetworkLinks(self._core)
        self._transfers = Transfers(self._core, self._links)
        self.short: ShortTransfers = ShortTransfers(self._core, self._links)
        self._timeout_s = options.sync_timeout_ms / 1000
        self._transfer_ids = itertools.count(int.from_bytes(secrets.token_bytes(7), "big") + 1)
        try:
            self._links.listen(options.listen)
        except BaseException:
            self.close()
            raise

    @property
    def listen_address(self) -> tuple[str, int] | None:
        """Where it listens, with the port that the system chose if 0 was asked for."""
        return self._links.listen_address

    def close(self) -> None:
        """End all links in good order, then give everything back; idempotent, bounded, without effect in a fork."""
        with self._lock:
            if self._closed or os.getpid() != self._pid:
                return
            self._closed = True
        self._links.close()
        self._core.close()
        self._pools.close()
        self._undo_switching()

    def _check(self, operation: str) -> None:
        if os.getpid() != self._pid:
            context = f"it was initialised in process {self._pid} and does not work in its child {os.getpid()}"
            hint = "initialise an LLMDataDist of its own after the fork"
            raise failure(LLMStatusCode.LLM_FAILED, operation, context, phase="check", hint=hint)
        if self._closed:
            raise failure(LLMStatusCode.LLM_FAILED, operation, "it has been finalized", phase="check")

    # Caches

    def register(self, spec: CacheSpec, addrs: Sequence[int], keys: Sequence[Key | None], *, accessible: bool) -> int:
        """Make the caller's memory a cache; its id. First the memory is moved into huge pages, see ``advise``.

        Raises:
            LLMException: LLM_PARAM_INVALID.
            TypeError: an address outside uint64.
        """
        operation = "register_blocks_cache" if spec.kind is CacheKind.BLOCKS else "register_cache"
        self._check(operation)
        cache_id = self._core.catalogue.next_id()
        check_addresses(addrs)
        check_spec(spec, operation)
        if self.options.strict_constraints:
            constraints.check_register(
                operation,
                spec,
                accessible=accessible,
                linked=self._links.any_live(),
                registered=self._core.catalogue.all(),
            )
        if not addrs or len(addrs) != spec.num_tensors:
            raise invalid(operation, f"{len(addrs)} addresses for {spec.num_tensors} tensors")
        size = geometry_of(spec).tensor_size
        check_room(addrs, size, operation, accessible=accessible)
        device = placement.device_of(operation, addrs, size, on_device=spec.on_device)
        wanted = self.options.huge_pages and device is None
        advice = advise((addr, addr + size) for addr in addrs) if wanted else None
        with self._lock:
            limit, used = self.options.max_registered_addrs, self._core.catalogue.registered_addrs()
            if used + len(addrs) > limit:
                context = f"{used} addresses are registered and {len(addrs)} more exceed the limit of {limit}"
                hint = f"set LLMConfig.max_registered_addrs (llm.MaxRegisteredAddrs) to at least {used + len(addrs)}"
                raise invalid(operation, context, hint=hint)
            entry = self._add(operation, cache_id, spec, addrs, keys, accessible=accessible, device=device)
        self._core.collapser.follow(entry, advice)
        return cache_id

    def allocate(self, spec: CacheSpec, keys: Sequence[Key | None]) -> tuple[int, list[int]]:
        """Make a cache of pool memory; its id and the addresses of its tensors.

        Raises:
            LLMException: LLM_PARAM_INVALID, LLM_OUT_OF_MEMORY.
        """
        operation = "allocate_blocks_cache" if spec.kind is CacheKind.BLOCKS else "allocate_cache"
        self._check(operation)
        cache_id = self._core.catalogue.next_id()
        check_spec(spec, operation)
        placement.check_allocation(operation, on_device=spec.on_device)
        if len(keys) > spec.shape[0]:
            raise invalid(operation, f"{len(keys)} keys for {spec.shape[0]} batch entries")
        size = geometry_of(spec).tensor_size
        addrs = self._pools.allocate(on_device=spec.on_device, size=size, count=spec.num_tensors)
        try:
            advice = self._pools.advise(on_device=spec.on_device, addresses=addrs) if self.options.huge_pages else None
            entry = self._add(operation, cache_id, spec, addrs, keys, owned=True)
        except BaseException:
            self._pools.free(on_device=spec.on_device, addresses=addrs)
            raise
        entry.advice = advice
        return cache_id, addrs

    def _add(
        self,
        operation: str,
        cache_id: int,
        spec: CacheSpec,
        addrs: Sequence[int],
        keys: Sequence[Key | None],
        *,
        accessible: bool = True,
        owned: bool = False,
        device: int | None = None,
    ) -> CacheEntry:
        where = np.array(addrs, dtype=np.uint64)
        try:
            return self._core.catalogue.add(
                cache_id, spec, where, keys, accessible=accessible, owned=owned, device=device
            )
        except (DuplicateKeyError, RegionError) as error:
            raise invalid(operation, str(error)) from error

    def unregister(self, cache_id: int) -> None:
        """Forget a cache; its memory is the caller's again when this returns. Unknown ids are fine.

        Raises:
            LLMException: LLM_LINK_BUSY if transfers still use the memory after the synchronous timeout; call again.
        """
        self._check("unregister_cache")
        if self.options.strict_constraints:
            constraints.check_unregister(linked=self._links.any_live())
        entry = self._core.catalogue.get(cache_id)
        if entry is not None:
            self._take_back(entry, "unregister_cache")

    def deallocate(self, cache_id: int) -> None:
        """Give up an allocated cache; its memory goes when its last key does. Unknown and registered ids are fine.

        Raises:
            LLMException: LLM_FEATURE_NOT_ENABLED without a pool; LLM_LINK_BUSY as for ``unregister``.
        """
        self._check("deallocate_cache")
        self._need_pool("deallocate_cache")
        doomed = self._core.catalogue.deallocate(cache_id)
        if doomed is not None:
            self._take_back(doomed, "deallocate_cache")

    def remove_key(self, key: RequestKey | PrefixKey) -> None:
        """Forget a key of an allocated cache. Unknown keys and those of registered caches are left alone.

        Raises:
            LLMException: LLM_FEATURE_NOT_ENABLED without a pool; LLM_LINK_BUSY as for ``unregister``.
        """
        self._check("remove_cache_key")
        self._need_pool("remove_cache_key")
        doomed = self._core.catalogue.remove_key(key)
        if doomed is not None:
            self._take_back(doomed, "remove_cache_key")

    def _need_pool(self, operation: str) -> None:
        if not self._pools:
            hint = "set LLMConfig.mem_pool_cfg or host_mem_pool_cfg"
            raise failure(LLMStatusCode.LLM_FEATURE_NOT_ENABLED, operation, "there is no memory pool", hint=hint)

    def _take_back(self, entry: CacheEntry, operation: str) -> None:
        """Hide a cache, then wait until nobody uses its memory any more.

        Users are transfers of this process, requests that are served for peers, and peers' one-sided copies.
        """
        core = self._core
        deadline = Deadline.after(max(_MIN_RELEASE_S, self.options.sync_timeout_ms / 1000) + _MIN_RELEASE_S)
        users: list[str] = []
        if not core.catalogue.wait_unpinned_after_hiding(entry, deadline):
            users.append("transfers of this process or held for peers")
        regions = [int(region) for region in entry.regions]
        core.regions.remove(regions)
        if not core.regions.wait_unused(regions, deadline):
            users.append("requests that are being served")
        busy = self._links.drain(deadline) if not users else []
        if busy:
            users.append(f"transfers of cluster {', '.join(map(str, busy))}")
        if users:
            context = f"the memory of cache {entry.cache_id} is still in use by {' and '.join(users)}"
            hint = "keep it mapped and call again"
            raise failure(LLMStatusCode.LLM_LINK_BUSY, operation, context, retryable=True, hint=hint)
        self._links.forget_cache(entry.cache_id)
        core.nixl.forget(regions)
        if core.catalogue.forget(entry) and entry.owned:
            self._pools.free(on_device=entry.spec.on_device, addresses=[int(addr) for addr in entry.addrs])

    def _release_later(self, entry: CacheEntry) -> None:
        """A peer's pull released the last key of a cache: take its memory back, not on the loop's thread."""

        def take_back() -> None:
            try:
                self._take_back(entry, "release")
            except LLMException as error:
                log.warn("%s", error)
                self._core.loop.call_later(_AGAIN_S, lambda: self._release_later(entry))

        self._core.control_workers.run(take_back)

    def copy_cache(self, dst_id: int, src_id: int, dst_batch: int, src_batch: int, offset: int, size: int) -> None:
        """See ``local.copy_cache``."""
        self._check("copy_cache")
        with self._held("copy_cache", dst_id) as target, self._held("copy_cache", src_id) as source:
            placement.require_host("copy_cache", source, target)
            local.copy_cache(source, target, src_batch, dst_batch, offset, size)

    def copy_blocks(self, cache_id: int, pairs: Sequence[tuple[int, int]]) -> None:
        """See ``local.copy_blocks``."""
        self._check("copy_blocks")
        with self._held("copy_blocks", cache_id) as entry:
            placement.require_host("copy_blocks", entry)
            local.copy_blocks(entry, pairs)

    def swap_blocks(
        self, src_addrs: Sequence[int], dst_addrs: Sequence[int], block_size: int, pairs: Sequence[tuple[int, int]]
    ) -> None:
        """See ``local.swap_blocks``."""
        self._check("swap_blocks")
        placement.require_host_addresses("swap_blocks", [*src_addrs, *dst_addrs], block_size)
        local.swap_blocks(src_addrs, dst_addrs, block_size, pairs)

    @contextlib.contextmanager
    def _held(self, operation: str, cache_id: int) -> Iterator[CacheEntry]:
        entry = self._core.catalogue.pin(cache_id)
        if entry is None:
            context = f"there is no cache {cache_id}"
            raise failure(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, operation, context, phase="lookup")
        try:
            yield entry
        finally:
            self._core.catalogue.unpin(entry)

    def remap(self, mem_infos: Sequence[tuple[int, int]]) -> None:
        """Accept repaired memory: (address, size) pairs. There is nothing to do for ordinary memory.

        Raises:
            LLMException: LLM_PARAM_INVALID for an empty list, LLM_NOT_YET_LINK without a link.
        """
        self._check("remap_registered_memory")
        if not mem_infos:
            raise invalid("remap_registered_memory", "mem_infos is empty")
        if not self._links.any_live():
            code = LLMStatusCode.LLM_NOT_YET_LINK
            raise failure(code, "remap_registered_memory", "no cluster is linked", hint="link first")

    # Transfers

    def deadline(self) -> Deadline:
        """When a transfer that starts now must have ended."""
        return Deadline.after(self._timeout_s, next(self._transfer_ids))

    def pull(self, request: PullRequest, deadline: Deadline | None = None) -> None:
        """See ``Transfers.pull``; the default deadline is that of a transfer that starts now."""
        self._check_request(request)
        self._observed(self._transfers.pull, request, deadline or self.deadline())

    def push(self, request: PushRequest, deadline: Deadline | None = None) -> None:
        """See ``Transfers.push``; the default deadline is that of a transfer that starts now."""
        self._check_request(request)
        self._observed(self._transfers.push, request, deadline or self.deadline())

    def begin(self, request: PullRequest | PushRequest, deadline: Deadline) -> Future[None]:
        """See ``pull`` and ``push``, on a thread of the engine: returns at once; what they raise is in the future.

        Raises:
            LLMException: what can be refused without a look at the peer; LLM_FAILED: there is no thread.
        """
        self._check_request(request)
        if isinstance(request, PullRequest):
            return background.begin(self._core, request, deadline, functools.partial(self.pull, request, deadline))
        return background.begin(self._core, request, deadline, functools.partial(self.push, request, deadline))

    def send_notify(self, cluster_id: int, message: bytes, timeout_ms: int) -> None:
        """See ``notifications.deliver``."""
        self._check("send_notify")
        notifications.check_size("send_notify", message)
        link = self._links.require(cluster_id, "send_notify")
        notifications.deliver(link, message, "send_notify", Deadline.after(timeout_ms / 1000))

    def get_notifies(self, timeout_ms: int) -> list[Notification]:
        """See ``Mailbox.take``."""
        self._check("get_notifies")
        return self._core.mailbox.take(timeout_ms / 1000)

    def notify_fileno(self) -> int:
        """See ``Mailbox.fileno``."""
        self._check("notify_fileno")
        return self._core.mailbox.fileno()

    def _observed(self, transfer: Callable[[R, Deadline, Watch], object], request: R, deadline: Deadline) -> None:
        try:
            with self._core.recorder.watch(deadline, request.operation, request.cluster_id) as watch:
                transfer(request, deadline, watch)
        except LLMException as error:
            error.transfer_id = deadline.transfer_id
            raise

    def _check_request(self, request: PullRequest | PushRequest) -> None:
        self._check(request.operation)
        if request.notify is not None:
            notifications.check_size(request.operation, request.notify)
        if self.options.strict_constraints:
            constraints.check_request(request, self._core.catalogue.get(request.cache_id), self.options)

    # Links

    def link_clusters(self, peers: Sequence[PeerAddress], timeout_ms: int) -> list[LLMStatusCode]:
        """Link several clusters at once; one status each, failures are logged with their reason."""
        self._check("link_clusters")
        if self.options.strict_constraints:
            constraints.check_link(peers)
        return self._links.link_clusters(peers, timeout_ms)

    def unlink_clusters(self, peers: Sequence[PeerAddress], timeout_ms: int, *, force: bool) -> list[LLMStatusCode]:
        """Unlink several clusters at once; one status each, failures are logged with their reason."""
        self._check("unlink_clusters")
        return self._links.unlink_clusters(peers, timeout_ms, force=force)

    def last_link_error(self, cluster_id: int) -> LLMException | None:
        """Why the last ``link_clusters`` or ``unlink_clusters`` for a cluster failed, if it did."""
        self._check("last_link_error")
        return self._links.last_failure(cluster_id)

    def switch_role(self, listen: tuple[str, int] | None) -> None:
        """Change where it listens; None stops listening.

        Raises:
            LLMException: LLM_EXIST_LINK, LLM_FEATURE_NOT_ENABLED, LLM_PARAM_INVALID or LLM_FAILED.
        """
        self._check("switch_role")
        self._links.switch_role(listen)

    def link(self, comm_name: str, ranks: Mapping[int, int], rank_table: str | None) -> int:
        """Begin a rank-table link; its id.

        Raises:
            LLMException: LLM_PARAM_INVALID, LLM_LINK_FAILED, LLM_FEATURE_NOT_ENABLED with the hixl backend.
        """
        self._check("link")
        self._need_comms("link")
        return self._links.link(comm_name, ranks, rank_table)

    def unlink(self, comm_id: int) -> None:
        """End a rank-table link.

        Raises:
            LLMException: LLM_NOT_YET_LINK for an unknown id, LLM_FEATURE_NOT_ENABLED with the hixl backend.
        """
        self._check("unlink")
        self._need_comms("unlink")
        self._links.unlink(comm_id)

    def query_register_mem_status(self, comm_id: int) -> MemStatus:
        """Progress of a rank-table link.

        Raises:
            LLMException: as for ``unlink``.
        """
        self._check("query_register_mem_status")
        self._need_comms("query_register_mem_status")
        return self._links.status(comm_id)

    def _need_comms(self, operation: str) -> None:
        if self.options.hixl:
            context = "rank-table links do not exist with the transfer backend hixl"
            raise failure(LLMStatusCode.LLM_FEATURE_NOT_ENABLED, operation, context, hint="use link_clusters")

    def explain(self, cluster_id: int) -> LinkReport:
        """Which path leads to a cluster, and why it is this one.

        Raises:
            LLMException: LLM_NOT_YET_LINK.
        """
        self._check("explain_link")
        return self._links.explain(cluster_id)

    def is_reached_by(self, cluster_id: int) -> bool:
        """Whether a cluster's transfers may still touch memory here."""
        self._check("is_reached_by")
        return self._links.is_reached_by(cluster_id)

    def observe(self, observer: Observer) -> None:
        """Tell an observer of every transfer that ends from now on, and of every request of a peer that is served."""
        self._check("observe")
        self._core.recorder.add(observer)

    def unobserve(self, observer: Observer) -> None:
        """Tell it no longer."""
        self._core.recorder.remove(observer)

    def metrics(self) -> tuple[Family, ...]:
        """What it holds now and, with the option, what it has counted."""
        self._check("metrics")
        counted = self._core.metrics.families() if self._core.metrics is not None else ()
        return (*gauges(self._core), *counted)

    def explain_memory(self) -> MemoryReport:
        """How the memory of all caches is backed."""
        self._check("explain_memory")
        return MemoryReport.of(self._core.catalogue.all(), wanted=self.options.huge_pages)


def _cannot_start(error: BaseException) -> LLMException:
    reason, hint = limits.explain(error)
    code = LLMStatusCode.LLM_OUT_OF_MEMORY if limits.out_of_memory(error) else LLMStatusCode.LLM_FAILED
    return failure(code, "init", f"cannot start: {reason}", retryable=True, hint=hint)
