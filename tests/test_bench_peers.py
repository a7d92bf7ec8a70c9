"""The table of ``benchmarks/peers``, with stand-ins for the peers."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import fake_contestant
from llm_datadist.cli.bench.driver import Plan, Program
from llm_datadist.cli.bench.results import Contestant, Ratio

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks" / "peers"))
import goals
import measure

if TYPE_CHECKING:
    from collections.abc import Mapping

LIMITS = {limit: Program.limit(limit) for limit in (Contestant.LIMIT_PROCESS_VM, Contestant.LIMIT_SOCKETS)}


def fake(contestant: Contestant, manner: str) -> Program:
    return Program(contestant, (sys.executable, fake_contestant.__file__, "--manner", manner))


def table(peers: Mapping[Contestant, str]) -> measure.Table:
    """A table with stand-ins of these manners; other peers are absent."""
    programs = LIMITS | {contestant: fake(contestant, manner) for contestant, manner in peers.items()}
    absent = {each: "it is not for this machine" for each in goals.NAMES if each not in programs}
    return measure.Table(programs, absent, Plan(rounds=2), 1 << 20, lambda _: None)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(goals, "SAME_HOST", goals.SAME_HOST[1:2])  # the one whose CPU time counts
    monkeypatch.setattr(goals, "TCP", goals.TCP[:1])


def test_rows_are_ratios_to_each_contestant_and_of_cpu_time():
    made = table({Contestant.NIXL: "honest"})
    measure.measure(made, ["same-host"])
    nixl, limit, cpu = made.rows
    assert nixl.what == "pull_blocks, same host, 64 KiB blocks against NIXL"
    assert nixl.needed == ">= 2.5x"
    assert " GB/s" in nixl.seen
    assert limit.what.endswith("against the bare process_vm calls")
    assert cpu.needed == "<= 1x"
    assert "s/GB" in cpu.seen
    measured = [each.contestant for each in made.throughputs]
    assert measured == [Contestant.OURS, Contestant.NIXL, Contestant.LIMIT_PROCESS_VM]


def test_peers_that_are_absent_or_fail_are_named_and_the_others_measured():
    made = table({Contestant.NIXL_TCP: "raises"})
    measure.measure(made, ["tcp"])
    nixl, mooncake, limit = made.rows
    assert nixl.ok is None
    assert "not measured: nixl_tcp: ValueError: cannot move" in nixl.seen
    assert mooncake.ok is None
    assert mooncake.seen == "not measured: it is not for this machine"
    assert limit.ok is not None


def test_a_failure_of_ours_is_a_row_that_failed(monkeypatch):
    monkeypatch.setattr(goals, "SAME_HOST", (replace(goals.SAME_HOST[0], path="inprocess"),))
    made = table({})
    measure.measure(made, ["same-host"])
    (row,) = made.rows
    assert row.ok is False
    assert "failed: llm_datadist: RuntimeError: the link uses the path process_vm" in row.seen


@pytest.mark.parametrize(("median", "least", "most"), [(1.0, True, True), (0.9, False, True), (1.1, True, False)])
def test_the_median_decides(median, least, most):
    made = table({})
    made.least("speed", Ratio(median, 0.1, 9.0), 1.0)
    made.most("time", Ratio(median, 0.1, 9.0), 1.0)
    assert [row.ok for row in made.rows] == [least, most]
    assert made.rows[0].seen == f"{median:.2f}x (0.10..9.00)"


def test_the_other_sections_need_no_peers(monkeypatch):
    monkeypatch.setattr(measure.scales, "SPAN_COUNTS", (64, 640))
    monkeypatch.setattr(measure.scales, "LINK_COUNTS", (1, 3))
    monkeypatch.setattr(goals, "LAYERS", 2)
    made = table({})
    measure.measure(made, ["small", "planning", "links", "layer-wise"])
    assert [row.ok is None for row in made.rows] == [True, True, False, False, False]
    assert [scale.x for scale in made.scales][1] == [1, 3]
