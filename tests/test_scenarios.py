"""Situations of docs/scenarios.md that no other test module is about."""

from __future__ import annotations

import gc
import mmap
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from expect import expect
from llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    CacheKeyByIdAndIndex,
    DataType,
    LayerSynchronizer,
    LLMException,
    LLMStatusCode,
    TransferWithCacheKeyConfig,
)
from llm_datadist.wire import messages
from peers import GUARD, POISON, TIMEOUT_S, Node
from test_links import pull_one, with_caches

if TYPE_CHECKING:
    from peers import Peers

OK = LLMStatusCode.LLM_SUCCESS
INVALID = LLMStatusCode.LLM_PARAM_INVALID
BLOCKS, USED, PADDING = 16, 1000, 64
paths = pytest.mark.parametrize("paths", ["process_vm", "tcp"])


def register_views(node: Node, seed: int | None) -> None:
    """In the child: K and V are two views of one storage, one of them at an odd address; blocks have padding."""
    size = BLOCKS * (USED + PADDING)
    node.extra["storage"] = storage = np.full(2 * size + 7, POISON, np.uint8)
    views = [storage[at : at + size].reshape(BLOCKS, USED + PADDING) for at in (0, size + 7)]
    node.extra["views"] = views
    if seed is not None:
        for view in views:
            view[:, :USED] = np.random.default_rng(seed).integers(0, 256, (BLOCKS, USED), dtype=np.uint8)
    desc = CacheDesc(2, [BLOCKS, USED + PADDING], DataType.DT_UINT8)
    addrs = [view.ctypes.data for view in views]
    node.caches["views"] = node.manager.register_blocks_cache(desc, addrs, BlocksCacheKey(1, 0))


def storage(node: Node) -> np.ndarray:
    """In the child: a copy of all of it."""
    copy: np.ndarray = node.extra["storage"].copy()
    return copy


def pull_views(node: Node, src: list[int], dst: list[int]) -> None:
    """In the child."""
    node.manager.pull_blocks(BlocksCacheKey(1, 0), node.caches["views"], src, dst)


@paths
def test_views_of_padded_storage(peers: Peers, paths: str) -> None:
    """A block is as long as the step to the next one: the last one arrives, and nothing beside the blocks changes."""
    server, client = peers.make(1, paths=paths), peers.make(2, paths=paths, listen=False)
    server.call(register_views, 1)
    client.call(register_views, None)
    assert client.link(server) == OK
    client.call(pull_views, [0, BLOCKS - 1], [1, BLOCKS - 1])
    ours, theirs = client.call(storage), server.call(storage)
    size = BLOCKS * (USED + PADDING)
    expected = np.full_like(ours, POISON)
    for start in (0, size + 7):
        want, have = (array[start : start + size].reshape(BLOCKS, USED + PADDING) for array in (expected, theirs))
        want[[1, BLOCKS - 1]] = have[[0, BLOCKS - 1]]
    assert np.array_equal(ours, expected)


def register_nothing(node: Node, num_tensors: int, shape: list[int], addrs: list[int]) -> None:
    """In the child."""
    desc = CacheDesc(num_tensors, shape, DataType.DT_UINT8)
    node.manager.register_blocks_cache(desc, addrs, BlocksCacheKey(1, 77))


@pytest.mark.parametrize(
    ("num_tensors", "shape", "addrs"),
    [(2, [4, 512], []), (2, [4, 0], [4096, 8192]), (2, [0, 512], [4096, 8192]), (1, [4, 512], [0]), (0, [4, 512], [])],
)
def test_a_registration_of_nothing_harms_nobody(
    peers: Peers, num_tensors: int, shape: list[int], addrs: list[int]
) -> None:
    """No address, no byte, address 0: refused, and what is registered is as good as before."""
    server, client = peers.make(1), peers.make(2, listen=False)
    with_caches(server, client)
    assert client.link(server) == OK
    client.call(pull_one, 1)
    with pytest.raises((LLMException, ValueError, TypeError)):
        server.call(register_nothing, num_tensors, shape, addrs)
    client.call(pull_one, 1)
    expect(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, lambda: client.call(pull_one, 1, 77))


def register_overlapping(node: Node) -> dict[str, int]:
    """In the child: the same 16 KiB as two equal caches, a nested one, and one that overlaps by a page; their ids."""
    node.extra["memory"] = memory = np.arange(5 * 4096, dtype=np.uint64).astype(np.uint8)
    base = memory.ctypes.data
    ids = {}
    for name, start, size in (("one", 0, 4), ("same", 0, 4), ("nested", 1, 2), ("overlapping", 3, 2)):
        desc = CacheDesc(1, [1, size * 4096], DataType.DT_UINT8)
        node.caches[name] = node.manager.register_cache(desc, [base + start * 4096])
        ids[name] = int(node.caches[name].cache_id)
    return ids


def pull_by_id(node: Node, cache_id: int, start: int, size: int) -> None:
    """In the child: one of them, and compare."""
    target = np.zeros(size * 4096, np.uint8)
    desc = CacheDesc(1, [1, size * 4096], DataType.DT_UINT8)
    cache = node.manager.register_cache(desc, [target.ctypes.data])
    try:
        node.manager.pull_cache(CacheKeyByIdAndIndex(1, cache_id, 0), cache)
    finally:
        node.manager.unregister_cache(cache.cache_id)
    expected = np.arange(5 * 4096, dtype=np.uint64).astype(np.uint8)[start * 4096 : (start + size) * 4096]
    assert (target == expected).all()


@paths
def test_memory_in_several_caches(peers: Peers, paths: str) -> None:
    """Each is its own; one that is unregistered takes nothing from the others."""
    server, client = peers.make(1, paths=paths), peers.make(2, paths=paths, listen=False)
    ids = server.call(register_overlapping)
    assert client.link(server) == OK
    where = {"one": (0, 4), "same": (0, 4), "nested": (1, 2), "overlapping": (3, 2)}
    for gone in ("one", "nested", "overlapping"):
        for name, cache_id in ids.items():
            client.call(pull_by_id, cache_id, *where[name])
        server.call(unregister_id, ids[gone])
        lost = ids.pop(gone)
        expect(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, lambda lost=lost: client.call(pull_by_id, lost, 0, 1))
    client.call(pull_by_id, ids["same"], 0, 4)


def unregister_id(node: Node, cache_id: int) -> None:
    """In the child."""
    node.manager.unregister_cache(cache_id)


class Gate(LayerSynchronizer):
    """Layers are ready when it is opened."""

    def __init__(self, gate: threading.Event) -> None:
        self._gate = gate

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        """See ``LayerSynchronizer``."""
        del layer_index, timeout_in_millis
        return self._gate.wait(TIMEOUT_S)


def begin_and_forget(node: Node) -> None:
    """In the child: start a task and let go of everything that it needs."""
    node.extra["gate"] = gate = threading.Event()
    config = TransferWithCacheKeyConfig(BlocksCacheKey(1, 0), range(1), range(1))
    node.manager.transfer_cache_async(node.caches["dst"], Gate(gate), [config], [0], [2])
    gc.collect()


def open_gate(node: Node) -> bool:
    """In the child: let it run and wait for the end of its thread."""
    node.extra["gate"].set()
    for thread in threading.enumerate():
        if "transfer_cache_async" in thread.name:
            thread.join(TIMEOUT_S)
    return not any("transfer_cache_async" in thread.name for thread in threading.enumerate())


@paths
def test_a_task_that_nobody_holds(peers: Peers, paths: str) -> None:
    """It does what it was asked to."""
    server, client = peers.make(1, paths=paths), peers.make(2, paths=paths, listen=False)
    with_caches(server, client)
    assert client.link(server) == OK
    client.call(begin_and_forget)
    assert client.call(open_gate)
    for ours, theirs in zip(client.memory("dst"), server.memory("src"), strict=True):
        assert (theirs[GUARD + 1024 : GUARD + 1536] == ours[GUARD : GUARD + 512]).all()


LARGE_TENSORS, LARGE_BLOCKS, LARGE_BYTES = 160, 8192, 4096


def register_large(node: Node, *, marked: bool) -> None:
    """In the child: K and V of 80 layers, 8,192 blocks each; memory that is not used costs nothing."""
    size = LARGE_BLOCKS * LARGE_BYTES
    node.extra["large"] = memory = mmap.mmap(-1, LARGE_TENSORS * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    array = np.frombuffer(memory, dtype=np.uint8)
    node.extra["array"] = tensors = array.reshape(LARGE_TENSORS, LARGE_BLOCKS, LARGE_BYTES)
    if marked:
        for layer in (0, 79):
            numbers = np.arange(LARGE_BLOCKS, dtype=np.uint32) + layer
            tensors[2 * layer, :, :4] = numbers.view(np.uint8).reshape(-1, 4)
    addrs = [tensor.ctypes.data for tensor in tensors]
    desc = CacheDesc(LARGE_TENSORS, [LARGE_BLOCKS, LARGE_BYTES], DataType.DT_UINT8)
    node.caches["large"] = node.manager.register_blocks_cache(desc, addrs, BlocksCacheKey(1, 0))


def metadata_bytes(node: Node) -> int:
    """In the child: of what a peer fetches."""
    catalogue = node.datadist._engine._core.service.fetch()
    return len(messages.encode(messages.Envelope(body=catalogue, id=1)))


def pull_scattered(node: Node, layer: int) -> bool:
    """In the child: 4,096 blocks without neighbours; whether each one is right."""
    src = np.arange(0, LARGE_BLOCKS, 2)
    dst = LARGE_BLOCKS - 2 - src
    layers = range(layer, layer + 1)
    node.manager.pull_blocks(
        BlocksCacheKey(1, 0),
        node.caches["large"],
        src.tolist(),
        dst.tolist(),
        src_layer_range=layers,
        dst_layer_range=layers,
    )
    found = node.extra["array"][2 * layer][dst, :4].copy().view(np.uint32)[:, 0]
    return bool((found == src + layer).all())


def test_metadata_of_a_large_cache(peers: Peers) -> None:
    """What peers learn of it grows with its tensors, not with its blocks."""
    properties: dict[str, Any] = {"huge_pages": False}
    server, client = peers.make(1, **properties), peers.make(2, listen=False, **properties)
    server.call(register_large, marked=True)
    client.call(register_large, marked=False)
    assert server.call(metadata_bytes) < 64 << 10
    assert client.link(server) == OK
    for layer in (0, 79):
        assert client.call(pull_scattered, layer)


def threads(node: Node) -> int:
    """In the child."""
    del node
    return threading.active_count()


def test_many_peers(peers: Peers) -> None:
    """One decode engine and 64 prefill engines, one after the other: the number of threads does not depend on them."""
    properties: dict[str, Any] = {"paths": "tcp"}
    client = peers.make(1000, listen=False, **properties)
    with_caches(client)
    processes = [peers.process() for _ in range(4)]
    servers = [peers.make(number + 1, process=processes[number % 4], **properties) for number in range(64)]
    after: list[int] = []
    for number, server in enumerate(servers, 1):
        server.call("register_blocks", "src", 2, 4, 512, model_id=0, seed=number)
        assert client.link(server) == OK
        if number in (8, 64):
            for one in servers[:number]:
                client.call(pull_one, one.cluster_id)
                (first, _) = client.memory("dst")
                assert (first[GUARD : GUARD + 512] == one.memory("src")[0][GUARD : GUARD + 512]).all()
            after.append(client.call(threads))
    assert after[1] <= after[0] + 4
