"""What a benchmark case means in bytes, and the figures made of its rounds."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_datadist.cli.bench import cases
from llm_datadist.cli.bench.results import (
    Case,
    Contestant,
    Latency,
    Memory,
    Order,
    Throughput,
    latency_ratio,
    ratio,
)


@st.composite
def small_cases(draw: st.DrawFn) -> Case:
    return Case(
        "pull_blocks",
        "process_vm",
        tensors=draw(st.integers(1, 3)),
        blocks=draw(st.integers(1, 40)),
        block_bytes=8 * draw(st.integers(1, 5)),
        order=draw(st.sampled_from(Order)),
        memory=draw(st.sampled_from(Memory)),
    )


seeds = st.integers(0, 2**32)


def transfer(case: Case, selection: cases.Selection, source: cases.Tensors, target: cases.Tensors) -> None:
    """Move a pull's bytes span by span."""
    spans = cases.Spans.of(case, selection, target.addresses, source.addresses)
    for local, remote, length in zip(spans.local, spans.remote, spans.lengths, strict=True):
        ctypes.memmove(int(local), int(remote), int(length))


@given(case=small_cases(), seed=seeds)
def test_a_selection_names_each_block_once_on_each_side_and_follows_from_the_seed(case, seed):
    selection = cases.Selection.of(case, seed)
    assert sorted(selection.local) == sorted(selection.remote) == list(range(case.blocks))
    again = cases.Selection.of(case, seed)
    assert (selection.local == again.local).all()
    assert (selection.remote == again.remote).all()
    if case.order is Order.SORTED:
        assert (np.diff(selection.local) == 1).all()


def test_runs_are_shuffled_but_whole():
    ids = cases.Selection.of(Case("pull_blocks", "tcp", 1, 80, 8, Order.RUNS), seed=3).local.reshape(10, 8)
    assert (np.diff(ids, axis=1) == 1).all()
    assert (ids[:, 0] % 8 == 0).all()
    assert (np.diff(ids[:, 0]) != 8).any()


def test_the_two_sides_are_shuffled_differently():
    selection = cases.Selection.of(Case("pull_blocks", "tcp", 1, 100, 8), seed=3)
    assert (selection.local != selection.remote).any()


@given(case=small_cases(), seed=seeds)
def test_moving_the_spans_brings_every_byte(case, seed):
    source, target = cases.Tensors(case), cases.Tensors(case)
    selection = cases.Selection.of(case, seed)
    assert target.poisoned()
    source.fill(seed)
    transfer(case, selection, source, target)
    assert not target.poisoned()
    assert target.wrong(selection.remote, selection.local, seed) == 0


@given(case=small_cases(), seed=seeds, data=st.data())
def test_each_byte_is_compared(case, seed, data):
    source, target = cases.Tensors(case), cases.Tensors(case)
    selection = cases.Selection.of(case, seed)
    source.fill(seed)
    transfer(case, selection, source, target)
    tensor = data.draw(st.integers(0, case.tensors - 1))
    byte = data.draw(st.integers(0, case.blocks * case.block_bytes - 1))
    ctypes.c_uint8.from_address(target.addresses[tensor] + byte).value ^= 1
    assert target.wrong(selection.remote, selection.local, seed) == 1


def test_blocks_of_the_wrong_tensor_or_place_are_wrong():
    case = Case("pull_blocks", "tcp", tensors=2, blocks=2, block_bytes=4096)
    one, two = cases.Tensors(case), cases.Tensors(case)
    one.fill(1)
    swapped = np.array([1, 0])
    ids = np.array([0, 1])
    assert one.wrong(ids, ids, 1) == 0
    assert one.wrong(swapped, ids, 1) > 0
    assert one.wrong(ids, ids, 2) > 0
    size = case.blocks * case.block_bytes
    for source, target in zip(one.addresses, reversed(two.addresses), strict=True):
        ctypes.memmove(target, source, size)
    assert two.wrong(ids, ids, 1) > 0


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"operation": "steal"}, "operation is 'steal'"),
        ({"tensors": 0}, "tensors is 0"),
        ({"blocks": -1}, "blocks is -1"),
        ({"block_bytes": 12}, "block_bytes is 12: use a positive multiple of 8"),
        ({"block_bytes": 0}, "block_bytes is 0"),
        ({"operation": "pull_cache"}, "order is shuffled for pull_cache"),
    ],
)
def test_a_case_that_cannot_be_measured_is_refused(change, names):
    values = {"operation": "pull_blocks", "path": "tcp", "tensors": 1, "blocks": 1, "block_bytes": 8, **change}
    with pytest.raises(ValueError, match=names):
        cases.check(Case(**values))


CASE = Case("pull_blocks", "tcp", tensors=1, blocks=1000, block_bytes=1_000_000)


def test_throughput_is_that_of_the_median_round():
    found = Throughput(CASE, Contestant.OURS, [1.0, 0.5, 9.0], [2.0, 1.0, 30.0])
    assert found.gb_per_s == 1.0
    assert found.cpu_s_per_gb == 2.0


def test_a_ratio_is_of_medians_and_its_extremes_are_of_rounds():
    ours = Throughput(CASE, Contestant.OURS, [1.0, 2.0, 4.0], [0.0] * 3)
    theirs = Throughput(CASE, Contestant.NIXL, [3.0, 8.0, 2.0], [0.0] * 3)
    found = ratio(ours, theirs)
    assert (found.median, found.low, found.high) == (1.5, 0.5, 4.0)


def test_a_latency_ratio_compares_quantiles_round_by_round():
    ours = Latency(CASE, Contestant.OURS, [1.0, 1.0, 4.0, 4.0])
    theirs = Latency(CASE, Contestant.NIXL, [2.0, 2.0, 2.0, 2.0])
    found = latency_ratio(ours, theirs, 0.5, rounds=2)
    assert (found.median, found.low, found.high) == (1.25, 0.5, 2.0)
