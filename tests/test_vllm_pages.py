"""Which pieces of which worker are moved, however heads are spread and blocks are cut: checked against arrays."""

from __future__ import annotations

import sys
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_datadist.integrations.vllm import params
from llm_datadist.integrations.vllm.heads import Split
from llm_datadist.integrations.vllm.pages import View, arrange
from llm_datadist.integrations.vllm.params import CacheFacts, Facts
from llm_datadist.integrations.vllm.routes import Pieces, pieces, reader_counts, routes

PIECE = 2  # bytes
LAYER = "model.layers.0"


def facts(ranks: int, heads: int, replicas: int, block_tokens: int, piece_tokens: int, gap: int) -> Facts:
    chunks = block_tokens // piece_tokens
    per_rank = heads * replicas // ranks
    cache = CacheFacts(0, "kind", 1, heads, replicas, PIECE, piece_tokens, block_tokens, per_rank * chunks + gap)
    return Facts("1", "m", "d", "c", "f", ranks, (cache,))


@st.composite
def engines(draw: st.DrawFn, heads: int, piece_tokens: int) -> Facts:
    ranks, replicas = draw(
        st.sampled_from(
            [
                (ranks, replicas)
                for replicas in (1, 2, 3)
                for ranks in range(replicas, heads * replicas + 1, replicas)
                if heads % (ranks // replicas) == 0
            ]
        )
    )
    blocks = draw(st.integers(1, 3)) if piece_tokens == 1 else 1
    return facts(ranks, heads, replicas, blocks * piece_tokens, piece_tokens, draw(st.integers(0, 2)))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Facts, Facts, int]:
    heads = draw(st.sampled_from([1, 2, 3, 4, 6]))
    piece_tokens = draw(st.sampled_from([1, 4]))
    return draw(engines(heads, piece_tokens)), draw(engines(heads, piece_tokens)), heads


def memory(facts: Facts, rank: int, blocks: list[int], chunks: int) -> np.ndarray:
    """A rank's cache in which each piece of the request holds the number of its head and chunk."""
    cache = facts.caches[0]
    held = np.full((max(blocks) + 1) * cache.stride, -1, np.int64)
    for local, head in enumerate(facts.split(0).of(rank)):
        for chunk in range(chunks):
            block = blocks[chunk // cache.chunks]
            held[block * cache.stride + local * cache.chunks + chunk % cache.chunks] = head * 1000 + chunk
    return held


def _pieces(few: int, *args: Any) -> Pieces:
    """With so many chunks looked at one by one."""
    with mock.patch.object(sys.modules[pieces.__module__], "_FEW", few):
        return pieces(*args)


@given(pairs(), st.integers(1, 9), st.data())
def test_every_rank_gets_its_heads_from_whoever_has_them(
    pair: tuple[Facts, Facts, int], chunks: int, data: st.DataObject
) -> None:
    ours, theirs, _ = pair
    mine, other = ours.caches[0], theirs.caches[0]
    needed = [-(-chunks // each.chunks) for each in (mine, other)]
    our_blocks, their_blocks = (data.draw(st.permutations(range(1, count + 1))) for count in needed)
    kept = data.draw(st.integers(0, needed[0] - 1))  # blocks that are here already
    wanted = [0] * kept + our_blocks[kept:]
    tokens = chunks * mine.piece_tokens
    first = kept * mine.block_tokens
    reads = [0] * theirs.ranks
    for rank in range(ours.ranks):
        right = memory(ours, rank, our_blocks, chunks)
        got = np.where(right >= 0, -2, -1)
        for begin in range(kept):  # what is not wanted is not touched
            size = len(ours.split(0).of(rank)) * mine.chunks
            place = slice(our_blocks[begin] * mine.stride, our_blocks[begin] * mine.stride + size)
            got[place] = right[place]
        for owner, parts in routes(ours, rank, theirs).items():
            reads[owner] += 1
            source = memory(theirs, owner, their_blocks, chunks)
            for _, part in parts:
                alike = [
                    _pieces(few, mine, other, part, range(first, tokens), (wanted, their_blocks)) for few in (0, 64)
                ]
                assert alike[0] == alike[1]
                got[alike[0].ours] = source[alike[0].theirs]
        assert (got == right).all()
    assert tuple(reads) == reader_counts(ours, theirs)


@pytest.mark.parametrize("few", [0, 64])
def test_what_the_other_side_has_not_is_an_error(few: int) -> None:
    engine = facts(1, 1, 1, 4, 4, 0)
    ((_, source),) = routes(engine, 0, engine)[0]
    cache = engine.caches[0]
    with pytest.raises(ValueError, match="tokens 0 to 8 are wanted, but the other side has only 1"):
        _pieces(few, cache, cache, source, range(8), ([5, 6], [7]))
    with pytest.raises(ValueError, match="has only 1"):
        _pieces(few, cache, cache, source, range(8), ([5, 6], [0, 7]))


@pytest.mark.parametrize(
    ("ranks", "heads", "replicas", "expected"),
    [
        (1, 3, 1, [[0, 1, 2]]),
        (3, 3, 1, [[0], [1], [2]]),
        (4, 2, 2, [[0], [0], [1], [1]]),
        (4, 1, 4, [[0], [0], [0], [0]]),
    ],
)
def test_heads_of_ranks(ranks: int, heads: int, replicas: int, expected: list[list[int]]) -> None:
    assert [list(Split(ranks, heads, replicas).of(rank)) for rank in range(ranks)] == expected


# ------------------------------------------------------------ tensors


def view(layer: str = LAYER, address: int = 4096, page: int = 96, stride: int = 96, heads: int = 3) -> View:
    return View(layer, address, 10, page, stride, heads)


def test_pages_are_cut_by_head() -> None:
    (pages,) = arrange([view(), view("model.layers.1", 8192)], 0, 128, token_major=False)
    assert pages.addresses == (4096, 8192)
    assert (pages.shape.piece_bytes, pages.shape.pieces, pages.shape.stride) == (32, 30, 3)


def test_token_major_pages_are_cut_by_tokens_too() -> None:
    (pages,) = arrange([view(heads=1, page=96, stride=96)], 0, 48, token_major=True)
    assert (pages.shape.chunks, pages.shape.piece_tokens, pages.shape.piece_bytes) == (3, 16, 32)


def test_layers_that_share_their_storage_are_moved_once() -> None:
    (pages,) = arrange([view(), view("shared")], 0, 128, token_major=False)
    assert pages.addresses == (4096,)
    assert pages.layers == {LAYER: 0, "shared": 0}


def test_layers_of_other_shapes_are_caches_of_their_own() -> None:
    found = arrange([view(), view("wide", 8192, page=192, stride=192)], 0, 128, token_major=False)
    assert [pages.shape.piece_bytes for pages in found] == [32, 64]


def test_interleaved_layers_end_with_their_last_page() -> None:
    (pages,) = arrange([view(stride=192), view("second", 4096 + 96, stride=192)], 0, 128, token_major=False)
    assert pages.shape.pieces == 9 * 6 + 3


def test_a_stride_that_cuts_a_piece_is_refused() -> None:
    with pytest.raises(ValueError, match="blocks are 100 bytes apart"):
        arrange([view(stride=100)], 0, 128, token_major=False)


# ------------------------------------------------------------ what engines tell each other

REMOTE = params.Remote(
    params.VERSION,
    "engine",
    facts(1, 3, 1, 128, 128, 0),
    (params.Worker("ffffffffffffffff", "10.0.0.1", 4000),),
    tokens=5,
    blocks=((1,),),
    lease=params.Lease("cmpl-1", 3, "8000000000000001", 30.0),
)


def test_params_survive_the_way_through_json() -> None:
    found = params.encode(REMOTE)
    assert params.decode(found) == REMOTE
    assert REMOTE.workers[0].cluster_id == 2**64 - 1


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"version": 2}, "version 2, but this side has 1"),
        ({"workers": []}, "out of range"),
        ({"workers": [{"cluster": "x", "host": "h", "port": 1}]}, "invalid literal"),
        ({"workers": [{"cluster": "1", "host": "h", "port": 0}]}, "out of range"),
        ({"blocks": [[-1]]}, "out of range"),
        ({"tokens": "many"}, "tokens"),
        ({"lease": {"request": "r", "slot": -1, "generation": "1", "seconds": 1}}, "out of range"),
        ({"facts": None}, "facts"),
    ],
)
def test_wrong_params_are_named(change: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        params.decode({**params.encode(REMOTE), **change})


@pytest.mark.parametrize("value", [None, 3, [], "text"])
def test_params_of_another_kind_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match="kv_transfer_params"):
        params.decode(value)


def test_differences_name_both_sides() -> None:
    other = facts(1, 3, 1, 64, 64, 0)
    assert params.differences(REMOTE.facts, REMOTE.facts) == []
    (found,) = params.differences(REMOTE.facts, other)
    assert "--block-size" in found
    assert found.endswith("of cache 0 (kind): 64 there, 128 here")
