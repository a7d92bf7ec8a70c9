"""Layout: batch entries, layer ranges, spans. Against a naive model, and beyond 4 GiB against whole numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from layout_model import (
    LARGEST,
    Tensor,
    apply,
    assert_merged,
    copy_entry,
    read,
    source_bytes,
    span_rows,
    target_bytes,
)
from llm_datadist.layout import plan
from llm_datadist.layout.plan import Geometry, Window
from llm_datadist.layout.spans import LayoutError, Runs, Spans, merge
from llm_datadist.memory import iovec

if TYPE_CHECKING:
    import random

CENTRAL = settings(max_examples=5000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
FREQUENT = settings(max_examples=1500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
USUAL = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
TIB = 1 << 40


def array(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(values, dtype=np.int64)


def rows(runs: Runs) -> list[tuple[int, int, int]]:
    """(local, remote, length) of each run, as whole numbers."""
    return list(zip(runs.local.tolist(), runs.remote.tolist(), runs.lengths.tolist(), strict=True))


def spans_of(runs: Runs, bases: list[int], regions: list[int], starts: list[int] | None = None) -> Spans:
    return Spans(
        np.array(bases, dtype=np.uint64),
        np.array(regions, dtype=np.uint64),
        array(*(starts or [0] * len(bases))),
        runs,
    )


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """A tensor of few bytes; some do not divide into entries."""
    entries = draw(st.integers(1, 9))
    stride = draw(st.integers(1, LARGEST // (entries + 1)))
    return Tensor(entries, stride, draw(st.integers(0, entries - 1)))


@CENTRAL
@given(local=tensors(), remote=tensors(), into_local=st.booleans(), data=st.data())
def test_contiguous_moves_what_a_byte_loop_moves(
    local: Tensor, remote: Tensor, into_local: bool, data: st.DataObject
) -> None:
    here, there = data.draw(st.integers(0, local.entries - 1)), data.draw(st.integers(0, remote.entries - 1))
    size = data.draw(st.integers(1, min(local.stride, remote.stride)))

    windows = (
        plan.entry(Geometry(local.size, local.entries), here),
        plan.entry(Geometry(remote.size, remote.entries), there),
    )
    runs = plan.contiguous(*windows, size)

    at = here * local.stride, there * remote.stride
    source, target = (remote, local) if into_local else (local, remote)
    source_at, target_at = reversed(at) if into_local else at
    expected = target_bytes(target.size)
    copy_entry(source_bytes(source.size), source_at, expected, target_at, size)
    assert apply(runs, source_bytes(source.size), target.size, into_local=into_local) == expected


@USUAL
@given(tensor=tensors(), other=tensors(), excess=st.integers(1, 2**63 - 1 - LARGEST), longer=st.booleans())
def test_contiguous_refuses_more_than_an_entry(tensor: Tensor, other: Tensor, excess: int, longer: bool) -> None:
    windows = [Window(0, tensor.stride), Window(0, other.stride)]
    size = min(tensor.stride, other.stride) + (1 if longer else excess)
    with pytest.raises(LayoutError, match=f"{size} bytes do not fit the (local|remote) batch entry"):
        plan.contiguous(*windows, size)


@pytest.mark.parametrize("size", [-1, -(2**40)])
def test_contiguous_refuses_a_negative_size(size: int) -> None:
    with pytest.raises(LayoutError):
        plan.contiguous(Window(8, 8), Window(8, 8), size)


@USUAL
@given(tensor=tensors(), index=st.integers(-(2**70), 2**70))
def test_entry_is_refused_exactly_when_it_is_out_of_range(tensor: Tensor, index: int) -> None:
    geometry = Geometry(tensor.size, tensor.entries)
    for candidate in (index, index % (tensor.entries + 2) - 1):
        if 0 <= candidate < tensor.entries:
            assert plan.entry(geometry, candidate) == Window(candidate * tensor.stride, tensor.stride)
        else:
            with pytest.raises(LayoutError, match="batch index"):
                plan.entry(geometry, candidate)


@USUAL
@given(
    stride=st.integers(1, 2**50),
    entries=st.integers(1, 2**12),
    data=st.data(),
)
def test_offsets_of_batch_entries_are_exact_far_beyond_4_gib(stride: int, entries: int, data: st.DataObject) -> None:
    geometry = Geometry(stride * entries, entries)
    here, there = (data.draw(st.integers(0, entries - 1)) for _ in range(2))
    size = data.draw(st.integers(1, stride))
    runs = plan.contiguous(plan.entry(geometry, here), plan.entry(geometry, there), size)
    assert rows(runs) == [(here * stride, there * stride, size)]


# Layer ranges


def naive_tensors(num_tensors: int, layers: range | None, per_layer: int, *, given: bool) -> list[int] | None:
    """The tensors whose layer is in the range; None where the specification refuses."""
    if given and num_tensors % per_layer:
        return None
    if layers is None:
        return list(range(num_tensors))
    wanted = [layer * per_layer + part for layer in layers for part in range(per_layer)]
    return wanted if all(0 <= tensor < num_tensors for tensor in wanted) else None


@FREQUENT
@given(
    num_tensors=st.integers(1, 12),
    first=st.integers(-2, 7),
    count=st.integers(0, 8),
    per_layer=st.integers(1, 4),
    given_somewhere=st.booleans(),
)
def test_tensor_range_is_the_tensors_of_these_layers(
    num_tensors: int, first: int, count: int, per_layer: int, given_somewhere: bool
) -> None:
    layers = range(first, first + count) if count else None
    expected = naive_tensors(num_tensors, layers, per_layer, given=given_somewhere)
    if expected is None:
        with pytest.raises(LayoutError, match=r"the local cache|the .* tensors of the local cache"):
            plan.tensor_range("local", num_tensors, layers, per_layer, given=given_somewhere)
    else:
        assert list(plan.tensor_range("local", num_tensors, layers, per_layer, given=given_somewhere)) == expected


@pytest.mark.parametrize("layers", [range(2**32 - 2, 2**32 - 1), range(2**70, 2**70 + 1), range(-1, 1), range(2**62)])
def test_tensor_range_refuses_layers_far_outside(layers: range) -> None:
    with pytest.raises(LayoutError, match="outside the remote cache of 64 tensors"):
        plan.tensor_range("remote", 64, layers, 2, given=False)


# Whole transfers: selected tensors, one run of each


@st.composite
def pulls(draw: st.DrawFn) -> tuple[Tensor, Tensor, int, range | None, range | None, int, int]:
    """(local tensor, remote tensor, tensors per layer, local layers, remote layers, spare tensors of both sides)."""
    per_layer, layers = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    local_first, remote_first = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    spare = draw(st.integers(0, 1)), draw(st.integers(0, 1))
    local, remote = (Tensor(draw(st.integers(1, 3)), draw(st.integers(1, 4))) for _ in range(2))
    return (
        local,
        remote,
        per_layer,
        range(local_first, local_first + layers),
        range(remote_first, remote_first + layers),
        (local_first + layers + spare[0]) * per_layer,
        (remote_first + layers + spare[1]) * per_layer,
    )


@CENTRAL
@given(case=pulls(), gap=st.integers(0, 9), data=st.data())
def test_spans_move_every_selected_tensor_and_nothing_else(
    case: tuple[Tensor, Tensor, int, range, range, int, int], gap: int, data: st.DataObject
) -> None:
    local, remote, per_layer, here, there, num_local, num_remote = case
    into, outof = data.draw(st.integers(0, local.entries - 1)), data.draw(st.integers(0, remote.entries - 1))
    size = data.draw(st.integers(1, min(local.stride, remote.stride)))
    base, step = 0x7F00_0000_1000, local.size + gap
    # The peer's tensors are regions of their own, all cut from the same different bytes; region ids in no order.
    pool = source_bytes(LARGEST)
    regions = {(n * 7 + 3) << 16 | n: pool[n * remote.size :][: remote.size] for n in range(num_remote)}
    region_of = list(regions)

    window = (
        plan.entry(Geometry(local.size, local.entries), into),
        plan.entry(Geometry(remote.size, remote.entries), outof),
    )
    runs = plan.contiguous(*window, size)
    targets = plan.tensor_range("local", num_local, here, per_layer, given=True)
    sources = plan.tensor_range("remote", num_remote, there, per_layer, given=True)
    bases = [base + step * n for n in range(num_local)]
    spans = spans_of(runs, bases[targets.start : targets.stop], region_of[sources.start : sources.stop])

    expected = target_bytes(step * num_local)
    for source_layer, target_layer in zip(there, here, strict=True):
        for part in range(per_layer):
            source = regions[region_of[source_layer * per_layer + part]]
            at = step * (target_layer * per_layer + part) + into * local.stride
            copy_entry(source, outof * remote.stride, expected, at, size)
    memory = target_bytes(step * num_local)
    read(spans, memory, base, regions)
    assert memory == expected
    assert spans.total == size * len(targets)
    assert len(spans) == len(targets)


RUNS = st.lists(st.tuples(st.integers(0, 2**60), st.integers(0, 2**60), st.integers(1, 2**55)), min_size=1, max_size=4)
TENSORS = st.lists(
    st.tuples(st.integers(0, 2**63), st.integers(1, 2**64 - 1), st.integers(0, 2**60)), min_size=1, max_size=4
)


def columns(values: list[tuple[int, ...]]) -> list[list[int]]:
    return [list(column) for column in zip(*values, strict=True)]


def test_spans_go_tensor_by_tensor() -> None:
    spans = spans_of(Runs(array(0, 64), array(128, 512), array(8, 16)), [1 << 20, 2**63], [7, 2**64 - 1], [0, 32])
    every = [
        (1 << 20, 7, 128, 8),
        ((1 << 20) + 64, 7, 512, 16),
        (2**63, 2**64 - 1, 160, 8),
        (2**63 + 64, 2**64 - 1, 544, 16),
    ]
    assert span_rows(spans) == every
    assert span_rows(spans[slice(1, 2), slice(0, 2)]) == every[2:]
    assert span_rows(spans[slice(0, 2), slice(1, 2)]) == [every[1], every[3]]
    assert spans.here.iovecs(spans.runs.lengths).tolist() == [[address, length] for address, *_, length in every]


def test_spans_of_nothing_are_nothing() -> None:
    spans = spans_of(Runs(array(), array(), array()), [1, 2], [1, 2])
    assert len(spans) == 0
    assert spans.total == 0
    assert spans.runs.extent == (0, 0)
    assert spans.cut() is spans


@USUAL
@given(tensors=TENSORS, given_runs=RUNS)
def test_spans_are_exact_at_64_bits(tensors: list[tuple[int, ...]], given_runs: list[tuple[int, ...]]) -> None:
    spans = spans_of(Runs(*(array(*column) for column in columns(given_runs))), *columns(tensors))
    assert spans.total == len(tensors) * sum(length for *_, length in given_runs)
    assert len(spans) == len(tensors) * len(given_runs)
    assert spans.here.iovecs(spans.runs.lengths).tolist() == [
        [base + local, length] for base, *_ in tensors for local, _, length in given_runs
    ]
    assert spans.runs.extent == (
        min(remote for _, remote, _ in given_runs),
        max(remote + length for _, remote, length in given_runs),
    )


@USUAL
@given(tensors=TENSORS, given_runs=RUNS, max_entries=st.integers(1, 20))
def test_the_parts_of_spans_are_all_of_them_in_order(
    tensors: list[tuple[int, ...]], given_runs: list[tuple[int, ...]], max_entries: int
) -> None:
    spans = spans_of(Runs(*(array(*column) for column in columns(given_runs))), *columns(tensors))
    parts = [spans[part] for part in iovec.parts(len(tensors), spans.runs.lengths, max_entries, 2**62)]
    assert [row for part in parts for row in span_rows(part)] == span_rows(spans)
    assert all(len(part) <= max_entries for part in parts)
    assert sum(part.total for part in parts) == spans.total


def test_a_single_span() -> None:
    spans = Spans.single(2**64 - 64, 2**64 - 1, 64)
    assert span_rows(spans) == [(2**64 - 64, 2**64 - 1, 0, 64)]
    assert (len(spans), spans.total, spans.runs.extent) == (1, 64, (0, 64))


# Merging


@FREQUENT
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 4), st.sampled_from([0, 0, 0, 1, 3]), st.sampled_from([0, 0, 0, 1, 2])), max_size=12
    )
)
def test_merge_keeps_every_byte_pair_in_order_and_joins_all_that_can_be(steps: list[tuple[int, int, int]]) -> None:
    local = remote = 0
    given_rows = []
    for length, skip_local, skip_remote in steps:
        local, remote = local + skip_local, remote + skip_remote
        given_rows.append((local, remote, length))
        local, remote = local + length, remote + length
    columns = zip(*given_rows, strict=True) if given_rows else ((), (), ())
    merged = merge(*(array(*column) for column in columns))

    def byte_pairs(runs: list[tuple[int, int, int]]) -> list[tuple[int, int]]:
        return [(here + byte, there + byte) for here, there, length in runs for byte in range(length)]

    assert byte_pairs(rows(merged)) == byte_pairs(given_rows)
    assert (merged.lengths > 0).all()
    assert_merged(merged)


def test_merge_joins_only_what_is_adjacent_on_both_sides() -> None:
    local_only = merge(array(0, 8), array(0, 9), array(8, 8))
    remote_only = merge(array(0, 9), array(0, 8), array(8, 8))
    crossed = merge(array(8, 0), array(0, 8), array(8, 8))
    local_down = merge(array(8, 0), array(9, 0), array(8, 8))
    assert [len(runs.lengths) for runs in (local_only, remote_only, crossed, local_down)] == [2, 2, 2, 2]
    assert rows(merge(array(0, 8, 99, 16), array(4, 12, 7, 20), array(8, 8, 0, 8))) == [(0, 4, 24)]


def test_merge_joins_what_goes_down() -> None:
    """As block lists do that an allocator got back the last block first."""
    assert rows(merge(array(24, 16, 8), array(40, 32, 24), array(8, 8, 8))) == [(8, 24, 24)]
    assert rows(merge(array(9, 4, 0), array(9, 4, 0), array(3, 5, 4))) == [(0, 0, 12)]
    # Two pieces of each block go up, the blocks go down.
    assert rows(merge(array(16, 20, 8, 12), array(36, 40, 28, 32), array(4, 4, 4, 4))) == [(8, 28, 16)]
    # What was joined downwards fits upwards.
    assert rows(merge(array(8, 0, 16), array(9, 1, 17), array(8, 8, 8))) == [(0, 1, 24)]


@FREQUENT
@given(
    segments=st.lists(st.tuples(st.integers(1, 4), st.booleans(), st.booleans()), max_size=6),
    order=st.randoms(use_true_random=False),
    lengths=st.lists(st.integers(0, 3), min_size=24, max_size=24),
)
def test_merge_keeps_the_byte_pairs_of_segments_in_either_direction(
    segments: list[tuple[int, bool, bool]], order: random.Random, lengths: list[int]
) -> None:
    """Segments that follow each other in memory, some after a gap, in any order, forwards or backwards."""
    at, given_rows = 0, []
    for number, (count, backwards, gap) in enumerate(segments):
        segment = []
        for length in lengths[4 * number : 4 * number + count]:
            segment.append((at, at + 7, length))
            at += length
        given_rows.append(segment[::-1] if backwards else segment)
        at += gap
    order.shuffle(given_rows)
    flat = [row for segment in given_rows for row in segment]
    merged = merge(*(array(*column) for column in zip(*flat, strict=True))) if flat else merge(*[array()] * 3)

    def byte_pairs(runs: list[tuple[int, int, int]]) -> list[tuple[int, int]]:
        return sorted((here + byte, there + byte) for here, there, length in runs for byte in range(length))

    assert byte_pairs(rows(merged)) == byte_pairs(flat)
    assert (merged.lengths > 0).all()
    assert_merged(merged)


def test_merge_sums_lengths_beyond_4_gib() -> None:
    count = 5000
    starts = np.arange(count, dtype=np.int64) * TIB
    assert rows(merge(starts, starts + 3, np.full(count, TIB, dtype=np.int64))) == [(0, 3, count * TIB)]


# Cutting spans


@USUAL
@given(
    lengths=st.lists(
        st.one_of(
            st.integers(1, 4096),
            st.integers(1, 70).map(lambda n: n * iovec.MAX_PIECE),
            st.integers(-1, 1).map(lambda n: 5 * iovec.MAX_PIECE + n),
            st.integers(1, 5 << 30),
        ),
        max_size=6,
    ),
    address=st.integers(0, 2**63),
    tensors=st.integers(1, 3),
)
def test_cut_keeps_every_byte_in_order(lengths: list[int], address: int, tensors: int) -> None:
    count = len(lengths)
    runs = Runs(array(*(n << 40 for n in range(count))), array(*(n << 41 for n in range(count))), array(*lengths))
    bases, starts = [address + (n << 45) for n in range(tensors)], [n << 50 for n in range(tensors)]
    spans = spans_of(runs, bases, [n + 1 << 16 for n in range(tensors)], starts)
    pieces = span_rows(spans.cut())
    assert all(0 < length <= iovec.MAX_PIECE for *_, length in pieces)
    left = iter(pieces)
    for start, region, offset, length in span_rows(spans):
        done = 0
        while done < length:
            *where, moved = next(left)
            assert where == [start + done, region, offset + done]
            done += moved
        assert done == length
    assert next(left, None) is None


def test_cut_makes_no_more_pieces_than_needed() -> None:
    spans = spans_of(Runs(array(0, 1 << 40), array(5, 6), array((4 << 30) + 8192, 7)), [1 << 20, 1 << 50], [1, 2])
    pieces = spans.cut()
    assert len(pieces) == 2 * (65 + 1)
    assert pieces.runs.lengths.tolist()[-2:] == [8192, 7]
    assert pieces.total == spans.total == 2 * ((4 << 30) + 8199)


def test_cut_leaves_short_spans_alone() -> None:
    spans = spans_of(Runs(array(0), array(0), array(iovec.MAX_PIECE)), [0], [1])
    assert spans.cut() is spans
