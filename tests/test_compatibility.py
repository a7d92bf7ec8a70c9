"""Caches that do not fit each other: one message that lists all differences; data types that differ are only noted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from expect import PI, expect
from llm_datadist import BlocksCacheKey, CacheDesc, CacheKeyByIdAndIndex, DataType, LLMStatusCode
from llm_datadist.engine.compatibility import differences, note_data_types
from llm_datadist.engine.requests import CacheKind, CacheSpec
from llm_datadist.layout.plan import Geometry
from loopback_kit import addrs, tensors
from net_helpers import logged
from peers import POISON, Node

if TYPE_CHECKING:
    from llm_datadist.cache_manager import CacheManager
    from peers import Peers

OK = LLMStatusCode.LLM_SUCCESS
THEIRS = BlocksCacheKey(2, 1)


def blocks(manager: CacheManager, memory: list[Any], shape: Any, kind: DataType, key: Any = None) -> Any:
    return manager.register_blocks_cache(CacheDesc(len(memory), shape, kind), addrs(memory), key)


@pytest.mark.parametrize("mode", ["linked", "messaging"])
def test_everything_that_differs_is_listed(request: pytest.FixtureRequest, mode: str) -> None:
    """Nothing was moved."""
    manager = request.getfixturevalue(mode)
    source, target = tensors(4, 64), tensors(2, 64)
    blocks(manager, source, (4, 16), DataType.DT_UINT8, THEIRS)
    into = blocks(manager, target, (4, 4), DataType.DT_FLOAT, None)
    error = expect(PI, lambda: manager.pull_blocks(THEIRS, into, [0], [1]))
    assert str(error).endswith(
        "local cache 2 and cache 1 of cluster 2 differ: data type DT_FLOAT here, DT_UINT8 there; "
        "number of tensors 2 here, 4 there)."
    )
    narrow = blocks(manager, target, (2, 4), DataType.DT_FLOAT16, None)
    error = expect(PI, lambda: manager.pull_blocks(THEIRS, narrow, [0], [1]))
    assert "block sizes differ: 8 bytes here, 16 bytes at the peer" in str(error)
    assert str(error).endswith(
        "local cache 3 and cache 1 of cluster 2 differ: data type DT_FLOAT16 here, DT_UINT8 there; number of tensors "
        "2 here, 4 there; bytes of a block or batch entry 8 here, 16 there; number of blocks or batch entries 2 here, "
        "4 there; bytes of a tensor 16 here, 64 there)."
    )
    assert all(np.array_equal(array, before) for array, before in zip(target, tensors(2, 64), strict=True))


@pytest.mark.parametrize("mode", ["linked", "messaging"])
def test_kinds_that_differ(request: pytest.FixtureRequest, mode: str) -> None:
    manager = request.getfixturevalue(mode)
    source, target = tensors(2, 64), tensors(2, 64)
    blocks(manager, source, (4, 16), DataType.DT_UINT8, THEIRS)
    into = manager.register_cache(CacheDesc(2, (2, 32), DataType.DT_UINT8), addrs(target))
    error = expect(PI, lambda: manager.pull_cache(CacheKeyByIdAndIndex(2, 1), into))
    assert "kind contiguous here, blocks there; bytes of a block or batch entry 32 here, 16 there" in str(error)


def test_push(linked: CacheManager) -> None:
    source, target = tensors(2, 64), tensors(2, 64)
    blocks(linked, target, (2, 32), DataType.DT_UINT8, THEIRS)
    out = blocks(linked, source, (4, 16), DataType.DT_UINT8)
    error = expect(PI, lambda: linked.push_blocks(THEIRS, out, [0], [1]))
    assert "bytes of a block or batch entry 16 here, 32 there" in str(error)


def test_what_does_not_differ_is_not_listed(linked: CacheManager) -> None:
    memory = tensors(2, 64)
    blocks(linked, memory, (4, 16), DataType.DT_UINT8, THEIRS)
    into = blocks(linked, tensors(2, 64), (4, 16), DataType.DT_UINT8)
    error = expect(PI, lambda: linked.pull_blocks(THEIRS, into, [9], [1]))
    assert "remote block index 9 is outside [0, 4)" in str(error)
    assert "differ" not in str(error)


def test_a_legal_difference_is_no_obstacle(linked: CacheManager) -> None:
    """More blocks there, as everywhere; another data type of the same block size."""
    source, target = tensors(2, 128), tensors(2, 64)
    blocks(linked, source, (8, 16), DataType.DT_UINT8, THEIRS)
    into = blocks(linked, target, (4, 8), DataType.DT_BF16)
    with logged() as records:
        for _ in range(3):
            linked.pull_blocks(THEIRS, into, [7], [0])
    assert np.array_equal(target[0][:16], source[0][112:])
    told = [record.getMessage() for record in records if "bytes are copied as they are" in record.getMessage()]
    assert told == [
        "local cache 2 holds DT_BF16, cache 1 of cluster 2 DT_UINT8: bytes are copied as they are, without conversion"
    ]
    linked.unregister_cache(into.cache_id)
    again = blocks(linked, target, (4, 8), DataType.DT_BF16)
    with logged() as records:
        linked.pull_blocks(THEIRS, again, [7], [0])
    assert any("local cache 3 holds DT_BF16" in record.getMessage() for record in records)


def test_pairs_that_were_told_of_are_forgotten_some_time() -> None:
    link: Any = SimpleNamespace(noted=set(), cluster_id=1)
    for cache_id in range(3000):
        local: Any = SimpleNamespace(cache_id=cache_id, spec=SimpleNamespace(dtype="a"))
        note_data_types(link, local, SimpleNamespace(cache_id=1, dtype="b"))  # type: ignore[arg-type]
    assert 0 < len(link.noted) <= 1024


def test_equal_caches_have_no_differences() -> None:
    geometry = Geometry(64, 4)
    spec = CacheSpec(2, (4, 16), 1, "DT_UINT8", on_device=True, kind=CacheKind.BLOCKS)
    ours: Any = SimpleNamespace(geometry=geometry, spec=spec)
    theirs: Any = SimpleNamespace(geometry=geometry, kind=CacheKind.BLOCKS, dtype="DT_UINT8", num_tensors=2)
    assert list(differences(ours, theirs)) == []


def pull_two(node: Node) -> str:
    """In the child: the text of the failure."""
    error = expect(PI, lambda: node.manager.pull_blocks(BlocksCacheKey(1, 0), node.caches["mine"], [0, 1], [0, 1]))
    return str(error)


@pytest.mark.parametrize("paths", ["process_vm", "tcp"])
def test_between_processes_nothing_is_touched(peers: Peers, paths: str) -> None:
    """A decoder with blocks twice as large as the prefiller's, and fewer layers."""
    prefiller, decoder = peers.make(1, paths=paths), peers.make(2, paths=paths, listen=False)
    prefiller.call("register_blocks", "mine", 4, 8, 512, model_id=0, seed=1)
    decoder.call("register_blocks", "mine", 2, 8, 1024)
    assert decoder.link(prefiller) == OK
    text = decoder.call(pull_two)
    assert "number of tensors 2 here, 4 there; bytes of a block or batch entry 1024 here, 512 there" in text
    assert all((tensor == POISON).all() for tensor in decoder.memory("mine"))
