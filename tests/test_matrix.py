"""Every operation x every path x both modes x both initiators, in real processes, every byte compared.

Guards around every tensor, and everything in a tensor that an operation does not name, must keep their bytes.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from expect import expect
from llm_datadist import (
    BlocksCacheKey,
    CacheKey,
    CacheKeyByIdAndIndex,
    LayerSynchronizer,
    LLMStatusCode,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from peers import GUARD, Node, Peer, Peers, close_off

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

PATHS = ("inprocess", "process_vm", "mapped", "tcp")
POOL = '{"memory_size": 4194304, "page_shift": 12}'
TENSORS = 4
BLOCKS = 16
BLOCK_BYTES = 3000
BATCH = 4
ENTRY_BYTES = 10_000
"""Three whole blocks and a ragged one."""

_model_ids = itertools.count(1)


class Pair:
    """Two linked peers; the client made the link."""

    def __init__(self, client: Peer, server: Peer, path: str) -> None:
        self.client = client
        self.server = server
        self.path = path


@pytest.fixture(
    scope="module", params=list(itertools.product(PATHS, (True, False))), ids=lambda p: f"{p[0]}-{'A' if p[1] else 'M'}"
)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Linked peers for one path and mode."""
    path, accessible = request.param
    peers = Peers()
    try:
        properties = {"paths": path, "enable_remote_cache_accessible": accessible}
        mapped = {"first": close_off} if path == "mapped" else {}
        if mapped:
            properties["mem_pool_cfg"] = POOL
        server = peers.make(2, process=peers.process(**mapped), **properties)
        process = server.process if path == "inprocess" else peers.process(**mapped)
        client = peers.make(1, process=process, listen=False, **properties)
        for peer in (server, client):
            peer.call("use_pool", bool(mapped))
        assert client.link(server) == LLMStatusCode.LLM_SUCCESS
        yield Pair(client, server, path)
    finally:
        peers.close()


@pytest.fixture(params=("client", "server"))
def sides(request: pytest.FixtureRequest, pair: Pair) -> tuple[Peer, Peer]:
    """(initiator, other side)."""
    if request.param == "client":
        return pair.client, pair.server
    return pair.server, pair.client


def accessible(peer: Peer) -> bool:
    """The mode of a peer."""
    return bool(peer.call(lambda_accessible))


def lambda_accessible(node: Node) -> bool:
    """In the child: the mode."""
    return bool(node.config.enable_remote_cache_accessible)


def run_pull_blocks(node: Node, key: Any, name: str, src: Sequence[int], dst: Sequence[int], **kwargs: Any) -> None:
    """In the child."""
    node.manager.pull_blocks(key, node.caches[name], src, dst, **kwargs)


def run_pull_cache(node: Node, key: Any, name: str, batch_index: int, size: int, **kwargs: Any) -> None:
    """In the child."""
    node.manager.pull_cache(key, node.caches[name], batch_index, size, **kwargs)


def run_push(node: Node, method: str, key: Any, name: str, *args: Any) -> None:
    """In the child."""
    getattr(node.manager, method)(key, node.caches[name], *args)


class Ready(LayerSynchronizer):
    """Every layer is ready at once."""

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        """See ``LayerSynchronizer``."""
        del layer_index, timeout_in_millis
        return True


def run_async(node: Node, name: str, configs: list[Any], *args: Any) -> list[LLMStatusCode | None]:
    """In the child."""
    task = node.manager.transfer_cache_async(node.caches[name], Ready(), configs, *args)
    assert task.synchronize(20_000) == LLMStatusCode.LLM_SUCCESS, task.get_results(0)
    results: list[LLMStatusCode | None] = task.get_results(0)
    return results


def view(memory: list[np.ndarray], rows: int) -> list[np.ndarray]:
    """Tensors without guards, as (rows, bytes)."""
    return [tensor[GUARD : len(tensor) - GUARD].reshape(rows, -1) for tensor in memory]


def check(
    target: Peer, name: str, before: list[np.ndarray], change: Callable[[list[np.ndarray]], None], rows: int
) -> None:
    """The target's memory, guards included, is what it was before, with ``change`` applied."""
    change(view(before, rows))
    for number, (expected, actual) in enumerate(zip(before, target.memory(name), strict=True)):
        assert (expected == actual).all(), (
            f"tensor {number}: first difference at {int(np.argmax(expected != actual)) - GUARD}"
        )


def test_path_in_use(pair: Pair) -> None:
    """Both directions use the path that was forced."""
    assert pair.client.call("path", 2) == pair.path
    assert pair.server.call("path", 1) == pair.path


def test_pull_blocks(sides: tuple[Peer, Peer]) -> None:
    """Shuffled lists, with runs that merge and a source block used twice."""
    here, there = sides
    model = next(_model_ids)
    there.call("register_blocks", "src", TENSORS, BLOCKS, BLOCK_BYTES, model_id=model, seed=model)
    here.call("register_blocks", "dst", TENSORS, BLOCKS, BLOCK_BYTES)
    src, dst = [3, 4, 5, 0, 15, 0, 9], [7, 8, 9, 2, 0, 15, 4]
    before, source = here.memory("dst"), view(there.memory("src"), BLOCKS)
    here.call(run_pull_blocks, BlocksCacheKey(there.cluster_id, model), "dst", src, tuple(dst))

    def change(tensors: list[np.ndarray]) -> None:
        for tensor, origin in zip(tensors, source, strict=True):
            tensor[dst] = origin[src]

    check(here, "dst", before, change, BLOCKS)


def test_pull_blocks_layer_range(sides: tuple[Peer, Peer]) -> None:
    """Only the tensors of the layers, and layers may be shifted."""
    here, there = sides
    model = next(_model_ids)
    there.call("register_blocks", "src", TENSORS, BLOCKS, BLOCK_BYTES, model_id=model, seed=model)
    here.call("register_blocks", "dst", TENSORS, BLOCKS, BLOCK_BYTES)
    before, source = here.memory("dst"), view(there.memory("src"), BLOCKS)
    key = BlocksCacheKey(there.cluster_id, model)
    here.call(run_pull_blocks, key, "dst", [1, 2], [2, 1], src_layer_range=range(1), dst_layer_range=range(1, 2))
    here.call(
        run_pull_blocks,
        key,
        "dst",
        [5],
        [5],
        src_layer_range=range(1),
        dst_layer_range=range(1),
        tensor_num_per_layer=1,
    )

    def change(tensors: list[np.ndarray]) -> None:
        for k in range(2):
            tensors[2 + k][[2, 1]] = source[k][[1, 2]]
        tensors[0][5] = source[0][5]

    check(here, "dst", before, change, BLOCKS)


def test_duplicate_destination_blocks_resolve_to_the_last_pair(sides: tuple[Peer, Peer]) -> None:
    """Twenty times, as it must not depend on luck."""
    here, there = sides
    model = next(_model_ids)
    there.call("register_blocks", "src", TENSORS, BLOCKS, BLOCK_BYTES, model_id=model, seed=model)
    here.call("register_blocks", "dst", TENSORS, BLOCKS, BLOCK_BYTES)
    before, source = here.memory("dst"), view(there.memory("src"), BLOCKS)
    for _ in range(20):
        here.call(run_pull_blocks, BlocksCacheKey(there.cluster_id, model), "dst", [1, 2, 3, 4], [6, 6, 7, 6])

    def change(tensors: list[np.ndarray]) -> None:
        for tensor, origin in zip(tensors, source, strict=True):
            tensor[6], tensor[7] = origin[4], origin[3]

    check(here, "dst", before, change, BLOCKS)


def _contiguous(peer: Peer, name: str, seed: int | None = None, keys: Sequence[CacheKey] = ()) -> int:
    cache_id: int = peer.call("register_contiguous", name, TENSORS, BATCH, ENTRY_BYTES, seed=seed, keys=keys)
    return cache_id


@pytest.mark.parametrize("size", [-1, 777])
def test_pull_cache_by_id(sides: tuple[Peer, Peer], size: int) -> None:
    """One batch entry into another one, whole or in part."""
    here, there = sides
    cache_id = _contiguous(there, "src", seed=5)
    _contiguous(here, "dst")
    before, source = here.memory("dst"), view(there.memory("src"), BATCH)
    here.call(run_pull_cache, CacheKeyByIdAndIndex(there.cluster_id, cache_id, 2), "dst", 1, size)
    count = ENTRY_BYTES if size < 0 else size

    def change(tensors: list[np.ndarray]) -> None:
        for tensor, origin in zip(tensors, source, strict=True):
            tensor[1, :count] = origin[2, :count]

    check(here, "dst", before, change, BATCH)


def test_pull_cache_layer_range(sides: tuple[Peer, Peer]) -> None:
    """The second layer only."""
    here, there = sides
    cache_id = _contiguous(there, "src", seed=6)
    _contiguous(here, "dst")
    before, source = here.memory("dst"), view(there.memory("src"), BATCH)
    key = CacheKeyByIdAndIndex(there.cluster_id, cache_id, 0)
    here.call(run_pull_cache, key, "dst", 3, -1, src_layer_range=range(1, 2), dst_layer_range=range(1, 2))

    def change(tensors: list[np.ndarray]) -> None:
        for k in (2, 3):
            tensors[k][3] = source[k][0]

    check(here, "dst", before, change, BATCH)


def test_pull_cache_by_key(sides: tuple[Peer, Peer], record_property: Callable[[str, object], None]) -> None:
    """Message mode: the position of the key is the batch entry; a registered cache keeps its key."""
    here, there = sides
    if accessible(here):
        _contiguous(here, "dst")
        with pytest.raises(TypeError):
            here.call(run_pull_cache, CacheKey(there.cluster_id, 1), "dst", 0, -1)
        record_property("refused", "TypeError")
        return
    request = next(_model_ids)
    _contiguous(
        there, "src", seed=7, keys=[CacheKey(there.cluster_id, 10_000 + request), CacheKey(there.cluster_id, request)]
    )
    _contiguous(here, "dst")
    before, source = here.memory("dst"), view(there.memory("src"), BATCH)
    for _ in range(2):
        here.call(run_pull_cache, CacheKey(there.cluster_id, request), "dst", 2, -1)

    def change(tensors: list[np.ndarray]) -> None:
        for tensor, origin in zip(tensors, source, strict=True):
            tensor[2] = origin[1]

    check(here, "dst", before, change, BATCH)


@pytest.mark.parametrize("blocks", [[5, 2, 9, 11], [4, 3]])
def test_pull_cache_into_blocks(sides: tuple[Peer, Peer], blocks: list[int]) -> None:
    """A batch entry other than the first is cut into blocks; the last piece is short."""
    here, there = sides
    cache_id = _contiguous(there, "src", seed=8)
    here.call("register_blocks", "dst", TENSORS, BLOCKS, BLOCK_BYTES)
    before, source = here.memory("dst"), view(there.memory("src"), BATCH)
    here.call(run_pull_blocks, CacheKeyByIdAndIndex(there.cluster_id, cache_id, 2), "dst", [], blocks)

    def change(tensors: list[np.ndarray]) -> None:
        for tensor, origin in zip(tensors, source, strict=True):
            for piece, block in enumerate(blocks):
                part = origin[2][piece * BLOCK_BYTES : (piece + 1) * BLOCK_BYTES]
                tensor[block, : len(part)] = part

    check(here, "dst", before, change, BLOCKS)


def test_push_blocks(sides: tuple[Peer, Peer], record_property: Callable[[str, object], None]) -> None:
    """Blocks of all layers, then of one layer."""
    here, there = sides
    model = next(_model_ids)
    there.call("register_blocks", "dst", TENSORS, BLOCKS, BLOCK_BYTES, model_id=model)
    here.call("register_blocks", "src", TENSORS, BLOCKS, BLOCK_BYTES, seed=model)
    before, source = there.memory("dst"), view(here.memory("src"), BLOCKS)
    key = BlocksCacheKey(there.cluster_id, model)
    if not accessible(here):
        _refused(here, "push_blocks", key, "src", [0], [0])
        record_property("refused", "LLM_PARAM_INVALID")
        check(there, "dst", before, lambda _tensors: None, BLOCKS)
        return
    here.call(run_push, "push_blocks", key, "src", [1, 2, 3, 12], [4, 5, 6, 0])
    here.call(run_push, "push_blocks", key, "src", [9], [9], range(1), range(1, 2), 2)

    def change(tensors: list[np.ndarray]) -> None:
        for tensor, origin in zip(tensors, source, strict=True):
            tensor[[4, 5, 6, 0]] = origin[[1, 2, 3, 12]]
        for k in range(2):
            tensors[2 + k][9] = source[k][9]

    check(there, "dst", before, change, BLOCKS)


def test_push_cache(sides: tuple[Peer, Peer], record_property: Callable[[str, object], None]) -> None:
    """One batch entry into another one."""
    here, there = sides
    cache_id = _contiguous(there, "dst")
    _contiguous(here, "src", seed=9)
    before, source = there.memory("dst"), view(here.memory("src"), BATCH)
    key = CacheKeyByIdAndIndex(there.cluster_id, cache_id, 3)
    if not accessible(here):
        _refused(here, "push_cache", key, "src", 1)
        record_property("refused", "LLM_PARAM_INVALID")
        check(there, "dst", before, lambda _tensors: None, BATCH)
        return
    here.call(run_push, "push_cache", key, "src", 1)

    def change(tensors: list[np.ndarray]) -> None:
        for tensor, origin in zip(tensors, source, strict=True):
            tensor[3] = origin[1]

    check(there, "dst", before, change, BATCH)


def _refused(peer: Peer, method: str, *args: Any) -> None:
    expect(LLMStatusCode.LLM_PARAM_INVALID, lambda: peer.call(run_push, method, *args))


def _configs(here: Peer, there: Peer, name: str, key: Any, layers: range) -> list[Any]:
    """The transfer config for the mode: a key, or the raw addresses of the layers' tensors."""
    if accessible(here):
        return [TransferWithCacheKeyConfig(key, layers, layers)]
    addrs = there.call("addrs", name)
    return [TransferConfig(there.cluster_id, addrs[2 * layers.start : 2 * layers.stop], layers)]


def test_async_blocks_to_blocks(sides: tuple[Peer, Peer]) -> None:
    """Layer by layer, all layers."""
    here, there = sides
    model = next(_model_ids)
    there.call("register_blocks", "dst", TENSORS, BLOCKS, BLOCK_BYTES, model_id=model)
    here.call("register_blocks", "src", TENSORS, BLOCKS, BLOCK_BYTES, seed=model)
    before, source = there.memory("dst"), view(here.memory("src"), BLOCKS)
    configs = _configs(here, there, "dst", BlocksCacheKey(there.cluster_id, model), range(2))
    assert here.call(run_async, "src", configs, [0, 1, 7], [3, 2, 15]) == [LLMStatusCode.LLM_SUCCESS]

    def change(tensors: list[np.ndarray]) -> None:
        for tensor, origin in zip(tensors, source, strict=True):
            tensor[[3, 2, 15]] = origin[[0, 1, 7]]

    check(there, "dst", before, change, BLOCKS)


def test_async_cache_to_blocks(sides: tuple[Peer, Peer]) -> None:
    """The second layer of a batch entry, cut into blocks."""
    here, there = sides
    model = next(_model_ids)
    there.call("register_blocks", "dst", TENSORS, BLOCKS, BLOCK_BYTES, model_id=model)
    _contiguous(here, "src", seed=model)
    before, source = there.memory("dst"), view(here.memory("src"), BATCH)
    configs = _configs(here, there, "dst", BlocksCacheKey(there.cluster_id, model), range(1, 2))
    here.call(run_async, "src", configs, None, [8, 1, 3, 2], BLOCK_BYTES)

    def change(tensors: list[np.ndarray]) -> None:
        for k in (2, 3):
            for piece, block in enumerate([8, 1, 3, 2]):
                part = source[k][0][piece * BLOCK_BYTES : (piece + 1) * BLOCK_BYTES]
                tensors[k][block, : len(part)] = part

    check(there, "dst", before, change, BLOCKS)


def test_async_cache_to_cache(sides: tuple[Peer, Peer]) -> None:
    """One batch entry; raw addresses name the first one."""
    here, there = sides
    cache_id = _contiguous(there, "dst")
    _contiguous(here, "src", seed=11)
    before, source = there.memory("dst"), view(here.memory("src"), BATCH)
    configs = _configs(here, there, "dst", CacheKeyByIdAndIndex(there.cluster_id, cache_id, 0), range(2))
    configs[0].src_batch_index = 2
    here.call(run_async, "src", configs)

    def change(tensors: list[np.ndarray]) -> None:
        for tensor, origin in zip(tensors, source, strict=True):
            tensor[0] = origin[2]

    check(there, "dst", before, change, BATCH)
