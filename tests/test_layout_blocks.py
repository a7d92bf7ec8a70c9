"""Layout: blocks to blocks, entries to blocks. Against a naive model, and beyond 4 GiB against whole numbers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from layout_model import (
    LARGEST,
    Tensor,
    apply,
    assert_merged,
    copy_blocks,
    copy_pieces,
    source_bytes,
    target_bytes,
)
from llm_datadist.layout import plan
from llm_datadist.layout.plan import Geometry, Window
from llm_datadist.layout.spans import LayoutError

CENTRAL = settings(max_examples=5000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
USUAL = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def array(values: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(values, dtype=np.int64)


def geometry(tensor: Tensor) -> Geometry:
    return Geometry(tensor.size, tensor.entries)


@st.composite
def block_tensors(draw: st.DrawFn, stride: int | None = None) -> Tensor:
    """A tensor of few bytes and up to 60 blocks; some do not divide into blocks."""
    if stride is None:
        stride = draw(st.integers(1, 24))
    entries = draw(st.integers(1, min(60, LARGEST // (stride + 1))))
    return Tensor(entries, stride, draw(st.integers(0, min(entries - 1, 3))))


@st.composite
def block_pairs(draw: st.DrawFn, here: int, there: int, segments: int = 5) -> list[tuple[int, int]]:
    """Up to five stretches of neighbouring blocks: some join, some overlap, some have one block, some go backwards."""
    pairs = []
    for _ in range(draw(st.integers(1, segments))):
        first, other, count = draw(st.tuples(st.integers(0, here - 1), st.integers(0, there - 1), st.integers(1, 5)))
        steps = range(min(count, here - first, there - other))
        pairs += [(first + step, other + step) for step in (reversed(steps) if count == 5 else steps)]
    return pairs


@CENTRAL
@given(data=st.data(), into_local=st.booleans())
def test_blocks_move_what_a_byte_loop_moves(data: st.DataObject, into_local: bool) -> None:
    local = data.draw(block_tensors())
    remote = data.draw(block_tensors(local.stride))
    pairs = data.draw(block_pairs(local.entries, remote.entries))
    here, there = ([pair[side] for pair in pairs] for side in (0, 1))

    runs = plan.blocks(geometry(local), geometry(remote), array(here), array(there), into_local=into_local)

    source, target = (remote, local) if into_local else (local, remote)
    expected = target_bytes(target.size)
    copy_blocks(source_bytes(source.size), expected, local.stride, [(b, a) if into_local else (a, b) for a, b in pairs])
    assert apply(runs, source_bytes(source.size), target.size, into_local=into_local) == expected
    assert_merged(runs)


@CENTRAL
@given(data=st.data(), into_local=st.booleans())
def test_pieces_move_what_a_byte_loop_moves(data: st.DataObject, into_local: bool) -> None:
    blocks = data.draw(block_tensors())
    entry_size = data.draw(st.integers(blocks.stride, min(LARGEST, 9 * blocks.stride)))
    offset = data.draw(st.integers(0, LARGEST - entry_size))
    pieces = -(-entry_size // blocks.stride)
    ids = [there for _, there in data.draw(block_pairs(pieces, blocks.entries, segments=3))][:pieces]

    runs = plan.into_blocks(Window(offset, entry_size), geometry(blocks), array(ids), into_local=into_local)

    source = source_bytes(LARGEST)
    expected = target_bytes(blocks.size)
    copy_pieces(source[offset : offset + entry_size], expected, blocks.stride, ids)
    assert apply(runs, source, blocks.size, into_local=into_local) == expected
    assert_merged(runs)


@pytest.mark.parametrize("into_local", [False, True])
def test_every_short_list_of_pieces(into_local: bool) -> None:
    """All block lists up to five long, an entry of four and a half blocks: also every kind of repetition."""
    source, blocks = source_bytes(9), Tensor(5, 2)
    for ids in itertools.chain.from_iterable(itertools.product(range(5), repeat=n) for n in range(6)):
        runs = plan.into_blocks(Window(0, 9), geometry(blocks), array(list(ids)), into_local=into_local)
        expected = target_bytes(blocks.size)
        copy_pieces(source, expected, blocks.stride, list(ids))
        assert apply(runs, source, blocks.size, into_local=into_local) == expected
        assert_merged(runs)


@pytest.mark.parametrize("into_local", [False, True])
def test_every_short_list_of_block_pairs(into_local: bool) -> None:
    """All lists of three pairs among three blocks on both sides."""
    tensor = Tensor(3, 2)
    source = source_bytes(tensor.size)
    for here in itertools.product(range(3), repeat=3):
        for there in itertools.product(range(3), repeat=3):
            runs = plan.blocks(
                geometry(tensor), geometry(tensor), array(list(here)), array(list(there)), into_local=into_local
            )
            pairs = zip(there, here, strict=True) if into_local else zip(here, there, strict=True)
            expected = target_bytes(tensor.size)
            copy_blocks(source, expected, tensor.stride, list(pairs))
            assert apply(runs, source, tensor.size, into_local=into_local) == expected


def test_of_two_pairs_with_one_destination_the_last_counts() -> None:
    tensor = Geometry(64, 8)
    pulled = plan.blocks(tensor, tensor, array([3, 5, 3]), array([0, 1, 2]), into_local=True)
    assert [column.tolist() for column in (pulled.local, pulled.remote, pulled.lengths)] == [[40, 24], [8, 16], [8, 8]]
    pushed = plan.blocks(tensor, tensor, array([0, 1, 2]), array([3, 5, 3]), into_local=False)
    assert [column.tolist() for column in (pushed.local, pushed.remote, pushed.lengths)] == [[8, 16], [40, 24], [8, 8]]
    fan_out = plan.blocks(tensor, tensor, array([3, 5, 7]), array([0, 0, 0]), into_local=True)
    assert fan_out.local.tolist() == [24, 40, 56]
    assert fan_out.remote.tolist() == [0, 0, 0]


def test_a_whole_table_in_order_is_one_run() -> None:
    tensor = Geometry(4096 * 100, 100)
    runs = plan.blocks(tensor, tensor, np.arange(10, 90), np.arange(10, 90), into_local=True)
    assert [column.tolist() for column in (runs.local, runs.remote, runs.lengths)] == [[40960], [40960], [327680]]


def test_no_blocks_are_no_runs() -> None:
    for into_local in (False, True):
        tensor = Geometry(64, 8)
        assert len(plan.blocks(tensor, tensor, array([]), array([]), into_local=into_local).lengths) == 0
        assert len(plan.into_blocks(Window(0, 64), tensor, array([]), into_local=into_local).lengths) == 0


# Refusals: LayoutError and nothing else, whatever the number


@st.composite
def with_one_outside(draw: st.DrawFn, entries: int, length: int) -> list[int]:
    """Block indices of which exactly one is out of range."""
    ids = [draw(st.integers(0, entries - 1)) for _ in range(length)]
    outside = st.one_of(
        st.just(-1),
        st.just(entries),
        st.integers(-(2**63), -1),
        st.integers(entries, 2**63 - 1),
        st.just(entries + 2**32),
    )
    ids[draw(st.integers(0, length - 1))] = draw(outside)
    return ids


@USUAL
@given(data=st.data(), local_is_bad=st.booleans(), into_local=st.booleans())
def test_blocks_refuse_an_index_out_of_range(data: st.DataObject, local_is_bad: bool, into_local: bool) -> None:
    local = data.draw(block_tensors())
    remote = data.draw(block_tensors(local.stride))
    length = data.draw(st.integers(1, 6))
    sides = []
    for tensor, bad in ((local, local_is_bad), (remote, not local_is_bad)):
        good = st.lists(st.integers(0, tensor.entries - 1), min_size=length, max_size=length)
        sides.append(array(data.draw(with_one_outside(tensor.entries, length) if bad else good)))
    side = "local" if local_is_bad else "remote"
    with pytest.raises(LayoutError, match=rf"{side} block index -?\d+ is outside \[0, "):
        plan.blocks(geometry(local), geometry(remote), *sides, into_local=into_local)


@USUAL
@given(data=st.data(), into_local=st.booleans())
def test_pieces_refuse_an_index_out_of_range(data: st.DataObject, into_local: bool) -> None:
    blocks = data.draw(block_tensors())
    ids = data.draw(with_one_outside(blocks.entries, data.draw(st.integers(1, 6))))
    source = Window(data.draw(st.integers(0, 2**40)), blocks.stride * len(ids))
    with pytest.raises(LayoutError, match=r"destination block index -?\d+ is outside"):
        plan.into_blocks(source, geometry(blocks), array(ids), into_local=into_local)


@USUAL
@given(stride=st.integers(1, 2**40), difference=st.integers(1, 2**40), swap=st.booleans(), into_local=st.booleans())
def test_blocks_refuse_different_block_sizes(stride: int, difference: int, swap: bool, into_local: bool) -> None:
    sides = [Geometry(stride * 4, 4), Geometry((stride + difference) * 4, 4)]
    with pytest.raises(LayoutError, match="block sizes differ"):
        plan.blocks(*(reversed(sides) if swap else sides), array([0]), array([0]), into_local=into_local)


@pytest.mark.parametrize(("here", "there"), [([], [0]), ([0], []), ([0, 1], [0]), ([0, 1, 2], [0, 1, 2, 3])])
@pytest.mark.parametrize("into_local", [False, True])
def test_blocks_refuse_lists_of_different_length(here: list[int], there: list[int], into_local: bool) -> None:
    with pytest.raises(LayoutError, match=f"{len(here)} local and {len(there)} remote"):
        plan.blocks(Geometry(64, 8), Geometry(64, 8), array(here), array(there), into_local=into_local)


@USUAL
@given(size=st.integers(1, 2**40), block=st.integers(1, 2**40), extra=st.integers(1, 3), into_local=st.booleans())
def test_pieces_refuse_what_the_entry_does_not_have(size: int, block: int, extra: int, into_local: bool) -> None:
    if block > size:
        with pytest.raises(LayoutError, match="larger than the batch entry"):
            plan.into_blocks(Window(0, size), Geometry(block * 4, 4), array([0]), into_local=into_local)
        return
    block = max(block, -(-size // 50))
    pieces = -(-size // block)
    ids = array(list(range(pieces)))
    whole = plan.into_blocks(Window(0, size), Geometry(block * 80, 80), ids, into_local=into_local)
    assert int(whole.lengths.sum()) == size
    ids = array(list(range(pieces + extra)))
    with pytest.raises(LayoutError, match=f"{pieces + extra} blocks given, .* has {pieces} pieces"):
        plan.into_blocks(Window(0, size), Geometry(block * 80, 80), ids, into_local=into_local)


@pytest.mark.parametrize("into_local", [False, True])
def test_offsets_beyond_64_bits_are_refused_not_wrapped(into_local: bool) -> None:
    """A destination of raw addresses is as large as its largest index says: 2**40 blocks of 16 MiB are 2**64."""
    block, entries = 1 << 24, 1 << 40
    endless = Geometry(block * entries, entries)
    with pytest.raises(LayoutError):
        plan.blocks(endless, endless, array([entries - 1]), array([entries - 1]), into_local=into_local)
    with pytest.raises(LayoutError):
        plan.into_blocks(Window(0, block), endless, array([entries - 1]), into_local=into_local)


# Far beyond 4 GiB: the same blocks in whole numbers


def last_pairs(pairs: list[tuple[int, int]], *, side: int) -> list[tuple[int, int]]:
    """The pairs without those whose element on this side comes again."""
    return [pair for n, pair in enumerate(pairs) if pair[side] not in [later[side] for later in pairs[n + 1 :]]]


@USUAL
@given(
    stride=st.integers(1, 2**40),
    sizes=st.tuples(st.integers(1, 2**20), st.integers(1, 2**20)),
    into_local=st.booleans(),
    data=st.data(),
)
def test_block_offsets_are_exact_far_beyond_4_gib(
    stride: int, sizes: tuple[int, int], into_local: bool, data: st.DataObject
) -> None:
    pairs = data.draw(block_pairs(*sizes))
    sides = [Geometry(stride * entries + entries - 1, entries) for entries in sizes]
    ids = [array([pair[side] for pair in pairs]) for side in (0, 1)]
    runs = plan.blocks(*sides, *ids, into_local=into_local)
    moved = []
    for here, there, length in zip(runs.local.tolist(), runs.remote.tolist(), runs.lengths.tolist(), strict=True):
        assert (here % stride, there % stride, length % stride) == (0, 0, 0)
        moved += [(here // stride + n, there // stride + n) for n in range(length // stride)]
    assert sorted(moved) == sorted(last_pairs(pairs, side=0 if into_local else 1))
    assert_merged(runs)


@USUAL
@given(
    block=st.integers(2**20, 2**45),
    pieces=st.integers(1, 12),
    missing=st.integers(0, 2**45),
    offset=st.integers(0, 2**55),
    into_local=st.booleans(),
    data=st.data(),
)
def test_piece_offsets_are_exact_far_beyond_4_gib(
    block: int, pieces: int, missing: int, offset: int, into_local: bool, data: st.DataObject
) -> None:
    size = block * pieces - (missing % block if pieces > 1 else 0)
    entries = data.draw(st.integers(1, 2**15))
    ids = data.draw(st.lists(st.integers(0, entries - 1), max_size=pieces))
    runs = plan.into_blocks(Window(offset, size), Geometry(block * entries, entries), array(ids), into_local=into_local)
    sides = (runs.remote, runs.local) if into_local else (runs.local, runs.remote)
    moved = []
    for entry_at, block_at, run_length in zip(*(side.tolist() for side in sides), runs.lengths.tolist(), strict=True):
        at, to, left = entry_at - offset, block_at, run_length
        while left:
            assert (at % block, to % block) == (0, 0)
            length = min(block, left)
            assert length == block or at + length == size
            moved.append((at // block, to // block))
            at, to, left = at + length, to + length, left - length
    assert moved == last_pairs(list(enumerate(ids)), side=1)


@USUAL
@given(ids=st.lists(st.integers(0, 2**62), min_size=1, max_size=20), entries=st.integers(1, 2**40), data=st.data())
def test_last_of_each_is_the_same_for_small_and_large_caches(ids: list[int], entries: int, data: st.DataObject) -> None:
    ids = [each % min(entries, data.draw(st.sampled_from([5, 50, 2**40]))) for each in ids]
    expected = [n for n, each in enumerate(ids) if each not in ids[n + 1 :]]
    keep = plan.last_of_each(array(ids), entries)
    assert (list(range(len(ids))) if keep is None else keep.tolist()) == expected
