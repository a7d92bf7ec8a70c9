"""Keys and memory of allocated caches, as a peer in another process uses them up (message mode)."""

from __future__ import annotations

import ctypes
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from expect import expect
from llm_datadist import CacheDesc, CacheKey, CacheKeyByIdAndIndex, DataType, LLMException, LLMStatusCode
from peers import GUARD, TIMEOUT_S, Node, Peer

if TYPE_CHECKING:
    from peers import Peers

NOT_EXIST = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
TENSORS, BATCH, ENTRY = 4, 2, 1 << 16
POOL = TENSORS * BATCH * ENTRY
PREFIX = 77


@pytest.fixture(params=["process_vm", "tcp"])
def pair(request: pytest.FixtureRequest, peers: Peers) -> tuple[Peer, Peer]:
    """(owner with a pool that holds exactly one cache, reader with a contiguous cache)."""
    properties: dict[str, Any] = {"paths": request.param, "enable_remote_cache_accessible": False}
    owner = peers.make(1, mem_pool_cfg=f'{{"memory_size": {POOL}, "page_shift": 16}}', **properties)
    reader = peers.make(2, listen=False, **properties)
    reader.call("register_contiguous", "dst", TENSORS, BATCH, ENTRY)
    assert reader.link(owner) == LLMStatusCode.LLM_SUCCESS
    return owner, reader


def allocate(node: Node, keys: list[CacheKey]) -> int:
    """In the child: a cache that takes the whole pool, each entry filled with 1 + its number; its id."""
    desc = CacheDesc(TENSORS, [BATCH, ENTRY], DataType.DT_UINT8)
    cache = node.manager.allocate_cache(desc, keys)
    for addr in cache.tensor_addrs:
        memory = np.frombuffer((ctypes.c_uint8 * (BATCH * ENTRY)).from_address(addr), dtype=np.uint8)
        for entry in range(BATCH):
            memory.reshape(BATCH, ENTRY)[entry] = entry + 1
    node.caches["owned"] = cache
    return int(cache.cache_id)


def deallocate(node: Node) -> None:
    """In the child."""
    node.manager.deallocate_cache(node.caches["owned"])


def remove_key(node: Node, key: CacheKey) -> None:
    """In the child."""
    node.manager.remove_cache_key(key)


def pull(node: Node, key: Any, batch_index: int = 0, **kwargs: Any) -> None:
    """In the child."""
    node.manager.pull_cache(key, node.caches["dst"], batch_index, **kwargs)


def request(number: int) -> CacheKey:
    """A key of the owner."""
    return CacheKey(1, number)


def wait_for_pool(owner: Peer) -> None:
    """The pool is whole again soon: the memory goes back when the peer's last pull has been noted."""
    until = time.monotonic() + TIMEOUT_S
    while True:
        try:
            owner.call(allocate, [])
            return
        except LLMException as error:
            if error.status_code != LLMStatusCode.LLM_OUT_OF_MEMORY or time.monotonic() > until:
                raise


def test_memory_lives_until_the_last_key_is_pulled(pair: tuple[Peer, Peer]) -> None:
    """Deallocated first: pulls by key still work, each key once, and then the memory is back in the pool."""
    owner, reader = pair
    owner.call(allocate, [request(10), request(11)])
    owner.call(deallocate)
    expect(LLMStatusCode.LLM_OUT_OF_MEMORY, lambda: owner.call(allocate, []))
    reader.call(pull, request(11), 1)
    expect(NOT_EXIST, lambda: reader.call(pull, request(11), 1))
    reader.call(pull, request(10), 0)
    expect(NOT_EXIST, lambda: reader.call(pull, request(10), 0))
    for tensor in reader.memory("dst"):
        entries = tensor[GUARD:-GUARD].reshape(BATCH, ENTRY)
        assert (entries[0] == 1).all()
        assert (entries[1] == 2).all()
    wait_for_pool(owner)


def test_layers_release_a_key_when_all_are_covered(pair: tuple[Peer, Peer]) -> None:
    """Each key of the cache for itself."""
    owner, reader = pair
    owner.call(allocate, [request(10), request(11)])
    first = {"src_layer_range": range(1), "dst_layer_range": range(1)}
    second = {"src_layer_range": range(1, 2), "dst_layer_range": range(1, 2)}
    reader.call(pull, request(10), **first)
    reader.call(pull, request(10), **first)
    reader.call(pull, request(10), **second)
    expect(NOT_EXIST, lambda: reader.call(pull, request(10), **first))
    reader.call(pull, request(11), **second)
    reader.call(pull, request(11), **first)
    expect(NOT_EXIST, lambda: reader.call(pull, request(11), **second))


def test_pull_by_id_releases_the_key_of_that_entry(pair: tuple[Peer, Peer]) -> None:
    """Only that one; entries without a key can be pulled again and again."""
    owner, reader = pair
    cache_id = owner.call(allocate, [request(10)])
    for _ in range(2):
        reader.call(pull, CacheKeyByIdAndIndex(1, cache_id, 1))
    reader.call(pull, CacheKeyByIdAndIndex(1, cache_id, 0))
    expect(NOT_EXIST, lambda: reader.call(pull, request(10)))
    reader.call(pull, CacheKeyByIdAndIndex(1, cache_id, 0))
    expect(NOT_EXIST, lambda: reader.call(pull, CacheKeyByIdAndIndex(1, cache_id, BATCH)))


def test_prefix_keys_stay(pair: tuple[Peer, Peer]) -> None:
    """Until they are removed; by id as well."""
    owner, reader = pair
    prefix = CacheKey(1, 2**64 - 1, 0, PREFIX)
    cache_id = owner.call(allocate, [prefix])
    for _ in range(2):
        reader.call(pull, prefix)
        reader.call(pull, CacheKeyByIdAndIndex(1, cache_id, 0))
    owner.call(deallocate)
    reader.call(pull, prefix)
    owner.call(remove_key, prefix)
    expect(NOT_EXIST, lambda: reader.call(pull, prefix))
    wait_for_pool(owner)


def test_failed_pull_releases_nothing(pair: tuple[Peer, Peer]) -> None:
    """A pull that does not fit is refused, and the key is still there."""
    owner, reader = pair
    owner.call(allocate, [request(10)])
    reader.call("register_contiguous", "dst", TENSORS, 1, 2 * ENTRY)
    expect(LLMStatusCode.LLM_PARAM_INVALID, lambda: reader.call(pull, request(10)))
    reader.call(pull, request(10), size=ENTRY)
    expect(NOT_EXIST, lambda: reader.call(pull, request(10), size=ENTRY))
