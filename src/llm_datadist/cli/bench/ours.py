"""The contestant of this library: the public API with default options, remote-accessible mode.

Run by the driver as ``python -m llm_datadist.cli.bench.ours``.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKeyByIdAndIndex,
    DataType,
    LayerSynchronizer,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
    TransferWithCacheKeyConfig,
)
from llm_datadist.cli.bench import cases
from llm_datadist.cli.bench.contestant import Contestant, Owner, serve

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from llm_datadist.cli.bench.protocol import Offer
    from llm_datadist.cli.bench.results import Case

_LOCALHOST: Final = "127.0.0.1"
CALLER_ID: Final = 1
OWNER_ID: Final = 2
MODEL_ID: Final = 0
_TIMEOUT_MS: Final = 60_000
_TENSORS_PER_LAYER: Final = 2


class OurOwner(Owner):
    """Registers its memory and listens; with ``--links`` in many engines, which all know the same memory."""

    def open(self) -> dict[str, Any]:
        """See ``Owner.open``."""
        self._engines = [
            start_engine(self.case, cluster_id, listen=True)
            for cluster_id in range(OWNER_ID, OWNER_ID + self.options.links)
        ]
        caches = [register(engine, self.case, self.tensors) for engine in self._engines]
        return {"ports": [port_of(engine) for engine in self._engines], "cache_id": caches[0].cache_id}


class OurContestant(Contestant):
    """Links to all engines of the owner; pulls from and pushes to the first one."""

    def open(self, offer: Offer) -> None:
        """See ``Contestant.open``."""
        self._engine = start_engine(self.case, CALLER_ID, listen=False)
        cache = register(self._engine, self.case, self.tensors)
        link(self._engine, offer.extra["ports"])
        path = self._engine.explain_link(OWNER_ID).path
        if path != self.case.path:
            message = f"the link uses the path {path}, not {self.case.path}: {self._engine.explain_link(OWNER_ID)}"
            raise RuntimeError(message)
        self._call = self._bind(cache, offer.extra["cache_id"])

    def _bind(self, cache: Cache, remote_cache_id: int) -> Callable[[], None]:
        """The public call that moves the whole case."""
        manager, operation = self._engine.cache_manager, self.case.operation
        key, whole = (
            BlocksCacheKey(OWNER_ID, MODEL_ID),
            CacheKeyByIdAndIndex(OWNER_ID, remote_cache_id, 0),
        )
        local, remote = self.selection.local.tolist(), self.selection.remote.tolist()
        if operation == "pull_blocks":
            return lambda: manager.pull_blocks(key, cache, remote, local)
        if operation == "push_blocks":
            per_layer = _TENSORS_PER_LAYER if self.case.tensors % _TENSORS_PER_LAYER == 0 else 1
            return lambda: manager.push_blocks(key, cache, local, remote, tensor_num_per_layer=per_layer)
        if operation == "pull_cache":
            return lambda: manager.pull_cache(whole, cache)
        if operation == "push_cache":
            return lambda: manager.push_cache(whole, cache, tensor_num_per_layer=1)
        layers = range(self.case.tensors // _TENSORS_PER_LAYER)
        config = TransferWithCacheKeyConfig(key, layers, layers)

        def send_layers() -> None:
            computed = ComputedLayers(self.options.layer_seconds)
            task = manager.transfer_cache_async(cache, computed, [config], local, remote)
            if (status := task.synchronize(_TIMEOUT_MS)) != LLMStatusCode.LLM_SUCCESS:
                message = f"transfer_cache_async ended with {status}"
                raise RuntimeError(message)

        return send_layers

    def move(self) -> None:
        """See ``Contestant.move``."""
        self._call()


class ComputedLayers(LayerSynchronizer):
    """Stands for a model on a device of its own: one layer after the other is ready, each after the same time."""

    def __init__(self, layer_s: float) -> None:
        self._layer_s = layer_s
        self._start = time.perf_counter()

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        """Wait until the layer is computed."""
        del timeout_in_millis
        wait_s = self._start + (layer_index + 1) * self._layer_s - time.perf_counter()
        if self._layer_s and wait_s > 0:
            time.sleep(wait_s)
        return True


def start_engine(case: Case, cluster_id: int, *, listen: bool, paths: str | None = None) -> LLMDataDist:
    """Remote-accessible, default options; on this host ``paths`` None is forced only to make a case use TCP."""
    config = LLMConfig()
    config.enable_cache_manager = True
    config.enable_remote_cache_accessible = True
    config.allow_multiple_instances = True
    config.sync_kv_timeout = _TIMEOUT_MS
    config.max_registered_addrs = max(config.max_registered_addrs, case.tensors)
    if paths is None and case.path == "tcp":  # anything else is found by default
        paths = case.path
    if paths is not None:
        config.paths = paths
    if listen:
        config.listen_ip_info = f"{_LOCALHOST}:0"
    engine = LLMDataDist(LLMRole.MIX, cluster_id)
    engine.init(config.generate_options())
    return engine


def port_of(engine: LLMDataDist) -> int:
    """Where it listens."""
    if engine.listen_address is None:
        message = "the owner does not listen"
        raise RuntimeError(message)
    return engine.listen_address[1]


def register(engine: LLMDataDist, case: Case, tensors: cases.Tensors) -> Cache:
    """Make the memory known, as the kind of cache that the case's operation needs."""
    manager = engine.cache_manager
    if case.operation in cases.WHOLE:
        desc = CacheDesc(case.tensors, [1, case.blocks * case.block_bytes], DataType.DT_UINT8)
        return manager.register_cache(desc, tensors.addresses)
    desc = CacheDesc(case.tensors, [case.blocks, case.block_bytes], DataType.DT_UINT8)
    return manager.register_blocks_cache(desc, tensors.addresses, BlocksCacheKey(engine.cluster_id, MODEL_ID))


def link(engine: LLMDataDist, ports: list[int]) -> None:
    """Link to clusters ``OWNER_ID``, ``OWNER_ID + 1``, ... that listen on these ports of this host."""
    clusters = []
    for number, port in enumerate(ports):
        cluster = LLMClusterInfo()
        cluster.remote_cluster_id = OWNER_ID + number
        cluster.append_local_ip_info(_LOCALHOST, 0)
        cluster.append_remote_ip_info(_LOCALHOST, port)
        clusters.append(cluster)
    status, each = engine.link_clusters(clusters, _TIMEOUT_MS)
    if status != LLMStatusCode.LLM_SUCCESS:
        message = f"linking {len(ports)} clusters ended with {status}: {set(each)}"
        raise RuntimeError(message)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--links", type=int, default=1, help="engines of the owner, each of them linked")
    parser.add_argument("--layer-seconds", type=float, default=0.0, help="stand-in for the time to compute a layer")


if __name__ == "__main__":
    serve(OurOwner, OurContestant, _options)
