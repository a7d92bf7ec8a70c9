"""How a decode worker pulls the KV of a request from the workers of a prefill engine."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final

import numpy as np

from llm_datadist import BlocksCacheKey, CacheDesc, DataType, LLMException, LLMStatusCode
from llm_datadist.integrations.vllm.caches import LEASES_MODEL
from llm_datadist.integrations.vllm.logs import logger
from llm_datadist.integrations.vllm.messages import Done, Renew
from llm_datadist.integrations.vllm.params import differences
from llm_datadist.integrations.vllm.peers import UnreachableError
from llm_datadist.integrations.vllm.routes import pieces

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from llm_datadist.integrations.vllm.caches import Side
    from llm_datadist.integrations.vllm.heads import Source
    from llm_datadist.integrations.vllm.orders import Load, Renewal
    from llm_datadist.integrations.vllm.params import Lease, Remote, Worker

_SCRATCH: Final = 64
"""More than threads that load at a time."""
_RENEWED_AT_ONCE: Final = 32 << 10
"""Bytes in one message, whose length is bounded: clients may give their requests long ids."""
_NAME_HEAD: Final = 5
"""Bytes in front of a name, at most."""


class LoadError(Exception):
    """The KV of a request is not there, or may be wrong; the text says why."""


class Puller:
    """Pulls for one worker. Thread-safe; calls block until all is there."""

    def __init__(self, side: Side) -> None:
        self._side = side
        self._seen = np.zeros(_SCRATCH, np.uint64)
        desc = CacheDesc(1, [_SCRATCH, 1], DataType.DT_UINT64)
        self._seen_cache = side.manager.register_blocks_cache(desc, [self._seen.ctypes.data], remote_accessible=True)
        self._scratch = itertools.count()

    def pull(self, load: Load) -> int:
        """Get what a load asks for; how many bytes were moved.

        When this raises, no byte of the blocks changes any more.

        Raises:
            LoadError: not everything is there.
        """
        try:
            try:
                return self._pull(load)
            except LLMException as error:
                if error.status_code is not LLMStatusCode.LLM_NOT_YET_LINK:
                    raise
                logger.info("The load of request %s is tried again over new links: %s", load.request, error)
                for worker in load.remote.workers:
                    self._side.peers.lost(worker.cluster_id)
                return self._pull(load)
        except (LLMException, UnreachableError, ValueError) as error:
            raise LoadError(str(error)) from error

    def _pull(self, load: Load) -> int:
        remote = load.remote
        moved = 0
        for rank, parts in self._side.routes(remote.facts).items():
            cluster_id = self._side.peers.link(remote.workers[rank])
            for cache, source in parts:
                moved += self._pull_part(load, cluster_id, cache, source)
            if remote.lease is not None:
                self._check_lease(remote.workers[rank], remote.lease)
        return moved

    def _pull_part(self, load: Load, cluster_id: int, cache: int, source: Source) -> int:
        ours, theirs = self._side.facts.caches[cache], load.remote.facts.caches[cache]
        group = ours.group
        blocks = (load.blocks[group], load.remote.blocks[group] if group < len(load.remote.blocks) else ())
        found = pieces(ours, theirs, source, range(load.first, load.tokens), blocks)
        if not found.ours:
            return 0
        key = BlocksCacheKey(cluster_id, LEASES_MODEL + 1 + cache)
        self._side.manager.pull_blocks(key, self._side.caches[cache].cache, found.theirs, found.ours)
        return len(found.ours) * ours.piece_bytes * ours.layers

    def _check_lease(self, worker: Worker, lease: Lease) -> None:
        """After the blocks were read: whether they were kept until then.

        Raises:
            LoadError: they were not, or it cannot be known.
        """
        at = next(self._scratch) % _SCRATCH
        self._seen[at] = 0
        self._side.manager.pull_blocks(
            BlocksCacheKey(worker.cluster_id, LEASES_MODEL), self._seen_cache, [lease.slot], [at]
        )
        if int(self._seen[at]) != lease.value:
            text = (
                f"its blocks at the prefill engine were freed before they were read: the lease of {lease.seconds:g} s "
                "is over, and what was read may belong to another request; if decode engines are slower than that, set "
                "lease_seconds in the prefill engine's kv_connector_extra_config"
            )
            raise LoadError(text)

    def release(self, remote: Remote) -> None:
        """Tell the prefill engine that this worker needs nothing of a request any more; a failure is logged."""
        if remote.lease is None:
            return
        if differences(self._side.facts, remote.facts):  # then nobody reads anything, and there may be no routes
            for worker in remote.workers if self._side.rank == 0 else ():
                self._tell(worker, Done(remote.lease.request, 1))
            return
        counts = self._side.reader_counts(remote.facts)
        reading = self._side.routes(remote.facts)
        for rank, worker in enumerate(remote.workers):
            if rank in reading or (counts[rank] == 0 and self._side.rank == 0):
                self._tell(worker, Done(remote.lease.request, max(1, counts[rank])))

    def renewals(self, orders: Iterable[Renewal]) -> dict[Worker, list[str]]:
        """Which workers this one has to ask to keep what. Does not block."""
        found: dict[Worker, list[str]] = {}
        for each in orders if self._side.rank == 0 else ():
            for worker in each.remote.workers:
                found.setdefault(worker, []).append(each.name)
        return found

    def renew(self, worker: Worker, names: Sequence[str]) -> None:
        """Ask a worker to keep the blocks of requests that still wait; a failure is logged, and ends it."""
        # Each message takes the names that end in the same stretch of so many bytes.
        ends = itertools.accumulate(_NAME_HEAD + len(name.encode()) for name in names)
        at_once = itertools.groupby(zip(names, ends, strict=True), lambda each: each[1] // _RENEWED_AT_ONCE)
        for _, group in at_once:
            if not self._tell(worker, Renew(tuple(name for name, _ in group))):
                return

    def _tell(self, worker: Worker, message: Done | Renew) -> bool:
        try:
            self._side.peers.send(self._side.peers.link(worker), message)
        except UnreachableError as error:
            logger.debug("%s is not told %s: %s", worker, type(message).__name__, error)
        except LLMException as error:
            if error.status_code is LLMStatusCode.LLM_NOT_YET_LINK:
                self._side.peers.lost(worker.cluster_id)
            requests = message.requests if isinstance(message, Renew) else (message.request,)
            what = f"{type(message).__name__} of request {requests[0]}, {len(requests)} in all"
            logger.warning("A prefill worker was not told %s: its leases end in their own time: %s", what, error)
        else:
            return True
        return False
