"""Block transfers after a first one: the same bytes and the same errors as the first one would give."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llm_datadist import BlocksCacheKey, LayerSynchronizer, LLMStatusCode, TransferWithCacheKeyConfig
from llm_datadist.engine.short import MOST_BLOCKS
from llm_datadist.paths.base import FEW
from peers import POISON, Node, Peer, Peers
from short_kit import (
    BLOCK_BYTES,
    BLOCKS,
    METHODS,
    OK,
    PATHS,
    SOURCE,
    TARGET,
    TENSORS,
    Outcome,
    attempt,
    blocks_of,
    make_pair,
    moved,
    same,
    wipe,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

PI = LLMStatusCode.LLM_PARAM_INVALID


class Index(IntEnum):
    TWO = 2


class Pair(NamedTuple):
    """Two linked peers; the client made the link."""

    client: Peer
    server: Peer

    def sides(self, method: str, *, swap: bool = False) -> tuple[Peer, Peer, Peer]:
        """(who calls, whose bytes move, who gets them)."""
        here, there = (self.server, self.client) if swap else (self.client, self.server)
        return (here, there, here) if method == "pull_blocks" else (here, here, there)


@pytest.fixture(scope="module", params=PATHS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A warm pair for one path."""
    peers = Peers()
    try:
        yield Pair(*make_pair(peers, request.param))
    finally:
        peers.close()


def both_ways(
    pair: Pair, method: str, src: Any, dst: Any, *args: Any, swap: bool = False, **kwargs: Any
) -> tuple[Outcome, Outcome]:
    """The call as a first one and as a later one; both must end the same, with the same bytes in place."""
    here, source, target = pair.sides(method, swap=swap)
    there = target if here is source else source
    outcomes, memories = [], []
    for forbid in (True, False):
        target.call(wipe, TARGET)
        outcomes.append(here.call(attempt, method, there.cluster_id, src, dst, *args, forbid=forbid, **kwargs))
        memories.append(blocks_of(target, TARGET))
    first, later = outcomes
    assert first.failure == later.failure
    untouched = [np.full((BLOCKS, BLOCK_BYTES), POISON, dtype=np.uint8)] * TENSORS
    expected = untouched
    if first.error is None:
        expected = moved(blocks_of(source, SOURCE), untouched, list(map(int, src)), list(map(int, dst)))
    for memory in memories:
        assert same(memory, expected)
    return first, later


LARGEST = FEW // TENSORS
"""Blocks up to which a path may plan with plain ints."""
GOOD = st.integers(0, BLOCKS - 1)
PAIR = st.tuples(GOOD, GOOD)
ODD = st.sampled_from(
    [
        -1,
        -(2**63) - 1,
        BLOCKS,
        2**31,
        2**63,
        2**64,
        True,
        False,
        np.int64(3),
        np.uint8(3),
        1.0,
        "1",
        None,
        Index.TWO,
    ]
)


@st.composite
def lists(draw: st.DrawFn) -> tuple[Any, Any]:
    """Two block lists: mostly good ones, some of them with a flaw."""
    pairs = draw(st.lists(PAIR, max_size=24) | st.lists(PAIR, min_size=LARGEST - 1, max_size=BLOCKS))
    sides: list[Any] = [[pair[side] for pair in pairs] for side in (0, 1)]
    at = draw(st.integers(0, 1))
    flaw = draw(st.sampled_from([None, None, None, "element", "length", "kind", "distinct", "distinct"]))
    if flaw == "element" and pairs:
        sides[at][draw(st.integers(0, len(pairs) - 1))] = draw(ODD)
    elif flaw == "length":
        sides[at] = sides[at][1:]
    elif flaw == "kind":
        sides[at] = draw(st.sampled_from([tuple(sides[at]), None, range(len(pairs)), np.array(sides[at]), "01"]))
    elif flaw == "distinct":
        sides = [draw(st.permutations(range(BLOCKS)))[: len(pairs)] for _ in (0, 1)]
    return sides[0], sides[1]


def is_plain(src: Any, dst: Any) -> bool:
    """Whether these lists belong on the short way."""
    return (
        type(src) is type(dst) is list
        and 0 < len(src) == len(dst)
        and all(type(each) is int and 0 <= each < BLOCKS for each in [*src, *dst])
        and len(set(dst)) == len(dst)
    )


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(given_lists=lists(), swap=st.booleans())
def test_a_later_call_is_like_a_first_one(pair: Pair, method: str, given_lists: tuple[Any, Any], swap: bool) -> None:
    first, later = both_ways(pair, method, *given_lists, swap=swap)
    assert not first.short
    assert later.short == is_plain(*given_lists)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("src", "dst", "failure"),
    [
        ([3], [7], None),
        (list(range(LARGEST)), list(range(LARGEST))[::-1], None),
        (list(range(LARGEST + 1)), list(range(LARGEST + 1))[::-1], None),
        (list(range(3, BLOCKS)), list(range(BLOCKS - 3)), None),
        ([*range(LARGEST), 0], [*range(LARGEST), 5], None),
        ([1, 2, 3, 4], [6, 6, 7, 6], None),
        ([1, 1, 1], [6, 7, 8], None),
        ((1, 2), [3, 4], None),
        ([1, 2], (3, 4), None),
        ([True, False], [3, 4], None),
        ([Index.TWO], [3], None),
        ([np.int64(1)], [3], "TypeError"),
        ([1], [np.int64(3)], "TypeError"),
        ([1, 2], [3, -1], "TypeError"),
        ([-1], [3], "TypeError"),
        ([BLOCKS], [3], "LLMException"),
        ([0, 1], [3, BLOCKS], "LLMException"),
        ([0, 2**64], [3, 4], "LLMException"),
        ([1, 2], [3], "LLMException"),
        ([], [3], "LLMException"),
        ([], [], "LLMException"),
        ([1], [], "LLMException"),
    ],
    ids=str,
)
def test_the_rules_of_block_lists_hold_later_too(
    pair: Pair, method: str, src: Any, dst: Any, failure: str | None
) -> None:
    first, later = both_ways(pair, method, src, dst)
    assert (first.error, later.error) == (failure, failure)
    if failure == "LLMException":
        assert later.status is PI


@pytest.mark.parametrize("method", METHODS)
def test_an_element_that_has_no_hash_is_named(pair: Pair, method: str) -> None:
    """The short way comes first, and looks for duplicates."""
    for src, dst in (([1, 2], [[1], [2]]), ([[1], [2]], [1, 2]), ([{}, 2], [{}, 2])):
        first, later = both_ways(pair, method, src, dst)
        assert first.error == later.error == "TypeError"
        assert "only support int, but got" in later.text


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("per_layer", [1, 4, 2.0, np.int64(2), True, "2", None, 0, 3], ids=repr)
def test_tensors_per_layer_are_checked_later_too(pair: Pair, method: str, per_layer: Any) -> None:
    first, later = both_ways(pair, method, [1], [2], tensor_num_per_layer=per_layer)
    assert not later.short
    wrong = type(per_layer) not in (int, bool) or not per_layer
    assert bool(first.error) == (wrong or (method == "push_blocks" and bool(TENSORS % per_layer)))


def test_layer_ranges_go_the_long_way(pair: Pair) -> None:
    """And move only their layers."""
    for method in METHODS:
        here, source, target = pair.sides(method)
        target.call(wipe, TARGET)
        ranges = {"src_layer_range": range(1), "dst_layer_range": range(1, 2)}
        outcome = here.call(attempt, method, 2, [3], [4], **ranges)
        assert outcome == Outcome(None, None, "", short=False)
        untouched = [np.full((BLOCKS, BLOCK_BYTES), POISON, dtype=np.uint8)] * TENSORS
        layer = moved(blocks_of(source, SOURCE)[:2], untouched[:2], [3], [4])
        assert same(blocks_of(target, TARGET), [*untouched[:2], *layer])


@pytest.mark.parametrize("method", METHODS)
def test_own_cluster_unlinked_cluster_and_unknown_model(pair: Pair, method: str) -> None:
    for cluster_id, status in ((1, None), (77, LLMStatusCode.LLM_NOT_YET_LINK)):
        first, later = (
            pair.client.call(attempt, method, cluster_id, [1], [2], forbid=forbid) for forbid in (True, False)
        )
        assert first.failure == later.failure
        assert later.error == "LLMException"
        assert status is None or later.status is status
    outcome = pair.client.call(attempt, method, 2, [1], [2], model_id=99)
    assert outcome.status is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST


class Ready(LayerSynchronizer):
    """Every layer is ready at once."""

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        """See ``LayerSynchronizer``."""
        del layer_index, timeout_in_millis
        return True


def send_cut(node: Node, cluster_id: int, model_id: int, blocks: list[int], block_bytes: int) -> None:
    """In the child: send block 0 of the source layer by layer, cut into the peer's smaller blocks."""
    layers = range(TENSORS // 2)
    configs = [TransferWithCacheKeyConfig(BlocksCacheKey(cluster_id, model_id), layers, layers)]
    task = node.manager.transfer_cache_async(node.caches[SOURCE], Ready(), configs, None, blocks, block_bytes)
    assert task.synchronize(20_000) is OK, task.get_results(0)


def test_caches_of_different_block_size_do_not_become_a_pair(pair: Pair) -> None:
    """A layer-wise transfer may cut a block into smaller ones; pushing block by block stays refused."""
    model, small = 7, BLOCK_BYTES // 4
    pair.server.call("register_blocks", "small", TENSORS, 4 * BLOCKS, small, model_id=model)
    pair.client.call(send_cut, 2, model, [0, 1, 2, 3], small)
    before = pair.server.memory("small")
    outcome = pair.client.call(attempt, "push_blocks", 2, [5], [5], model_id=model)
    assert same(before, pair.server.memory("small"))
    assert outcome.status is PI


def test_very_many_blocks_go_the_long_way(pair: Pair) -> None:
    """Where they are planned in less time; and the last that do not."""
    model, blocks = 9, MOST_BLOCKS + 1
    for peer in (pair.client, pair.server):
        peer.call("register_blocks", "wide", TENSORS, blocks, BLOCK_BYTES, model_id=model, seed=peer.cluster_id)
    source = blocks_of(pair.server, "wide")
    for count, short in ((1, False), (MOST_BLOCKS, True), (blocks, False)):
        src, dst = list(range(count))[::-1], list(range(0, count, 2)) + list(range(1, count, 2))
        expected = moved(source, blocks_of(pair.client, "wide"), src, dst)
        outcome = pair.client.call(attempt, "pull_blocks", 2, src, dst, cache="wide", model_id=model)
        assert outcome == Outcome(None, None, "", short)
        assert same(blocks_of(pair.client, "wide"), expected)


def test_models_are_told_apart(pair: Pair) -> None:
    """Pairings with two caches of the same peer, used in turn."""
    pair.server.call("register_blocks", "other", TENSORS, BLOCKS, BLOCK_BYTES, model_id=5, seed=55)
    sources = {0: blocks_of(pair.server, SOURCE), 5: blocks_of(pair.server, "other")}
    for turn in range(6):
        model = (0, 5)[turn % 2]
        assert pair.client.call(attempt, "pull_blocks", 2, [turn], [turn], model_id=model).error is None
        target = blocks_of(pair.client, TARGET)
        for tensor, source in zip(target, sources[model], strict=True):
            assert (tensor[turn] == source[turn]).all()
