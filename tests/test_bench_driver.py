"""The benchmark's driver with real contestants: ours and the bare limits on tiny cases, and some that misbehave."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import fake_contestant
from llm_datadist.cli.bench import scales
from llm_datadist.cli.bench.driver import BenchError, Plan, Program, Step, latency, run
from llm_datadist.cli.bench.results import Case, Contestant, Memory, Order

TINY = Case("pull_blocks", "process_vm", tensors=2, blocks=6, block_bytes=4096)
PARALLEL = Case("pull_blocks", "process_vm", tensors=2, blocks=40, block_bytes=32 << 10, order=Order.RUNS)
"""More than a mebibyte: several threads and connections."""
PLAN = Plan(rounds=2)
WAIT_S = 60.0


def fake(manner: str = "honest", notes: Path | str = "") -> Program:
    command = (sys.executable, fake_contestant.__file__, "--manner", manner, "--notes", str(notes))
    return Program(Contestant.NIXL, command)


def limit_of(case: Case) -> Program:
    return Program.limit(Contestant.LIMIT_SOCKETS if case.path == "tcp" else Contestant.LIMIT_PROCESS_VM)


def wait_until_all_ended(notes: Path) -> None:
    pids = [int(note.name) for note in notes.iterdir()]
    assert len(pids) >= 2
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            process = os.pidfd_open(pid)
            try:
                assert select.select([process], [], [], WAIT_S)[0], f"process {pid} still runs"
            finally:
                os.close(process)


@pytest.mark.parametrize("path", ["process_vm", "tcp"])
@pytest.mark.parametrize(
    "operation", ["pull_blocks", "push_blocks", "pull_cache", "push_cache", "transfer_cache_async"]
)
def test_each_operation_is_measured_beside_its_limit(operation, path):
    order = Order.SORTED if operation.endswith("cache") else Order.SHUFFLED
    case = Case(operation, path, tensors=4, blocks=12, block_bytes=32 << 10, order=order, memory=Memory.SMALL)
    ours, limit = run([case], [Program.ours(), limit_of(case)], PLAN)
    assert (ours.case, ours.contestant) == (case, Contestant.OURS)
    assert limit.contestant in {Contestant.LIMIT_PROCESS_VM, Contestant.LIMIT_SOCKETS}
    for found in (ours, limit):
        assert len(found.seconds) == len(found.cpu_seconds) == PLAN.rounds
        assert found.gb_per_s > 0


def test_memcpy_stands_beside_pushes_too():
    (found,) = run(
        [msgspec.structs.replace(TINY, operation="push_blocks")], [Program.limit(Contestant.LIMIT_MEMCPY)], PLAN
    )
    assert found.gb_per_s > 0


def test_results_come_case_by_case_and_program_by_program_and_progress_is_told():
    steps: list[Step] = []
    programs = [Program.limit(Contestant.LIMIT_MEMCPY), limit_of(PARALLEL), Program.ours("--busy-owner")]
    found = run([TINY, PARALLEL], programs, PLAN, steps.append)
    assert [(each.case, each.contestant) for each in found] == [
        (case, program.contestant) for case in (TINY, PARALLEL) for program in programs
    ]
    assert [step.done for step in steps] == list(range(1, steps[0].total + 1))
    assert [step.contestant for step in steps[:4]] == [*(each.contestant for each in programs), programs[0].contestant]


def test_latencies_are_of_each_call():
    (ours, many) = scales.links([1, 3], PLAN, calls=7)
    assert len(ours.seconds) == len(many.seconds) == 7 * PLAN.rounds
    assert ours.quantile(0.5) <= ours.quantile(0.99)


def test_layers_may_take_their_time():
    case = Case("transfer_cache_async", "process_vm", tensors=6, blocks=2, block_bytes=4096)
    (found,) = run([case], [Program.ours("--layer-seconds", "0.002")], PLAN)
    assert len(found.seconds) == PLAN.rounds


def test_only_the_one_whose_turn_it_is_runs(tmp_path):
    run([TINY], [fake("watches", tmp_path), fake("watches", tmp_path), fake("watches", tmp_path)], PLAN)
    wait_until_all_ended(tmp_path)


@pytest.mark.parametrize(
    ("manner", "reason"),
    [
        ("moves nothing", r"nixl: 4[89]\d{3} wrong bytes of 49152 compared"),
        ("spoils a byte", "nixl: 1 wrong bytes of 49152 compared"),
        ("raises", "nixl: ValueError: cannot move"),
        ("dies", "nixl: ended with exit code 3 before its work was done; it wrote:\n[^$]*my last words"),
        # What is noticed first: that its process has gone, or how.
        ("owner dies", "nixl: (ProcessLookupError: .* No such process|ChildError: owner: was killed by SIGKILL)"),
        ("owner refuses", "nixl: ChildError: owner: RuntimeError: no memory for you"),
    ],
)
def test_a_contestant_that_fails_is_named_with_the_case_and_the_reason(manner, reason, tmp_path):
    with pytest.raises(
        BenchError, match=rf"(?s){reason}.*while measuring pull_blocks over process_vm, 2 tensors"
    ) as found:
        run([TINY], [fake("honest", tmp_path), fake(manner, tmp_path)], PLAN)
    assert found.value.contestant is Contestant.NIXL
    wait_until_all_ended(tmp_path)


def test_a_contestant_that_hangs_is_given_up(tmp_path):
    with pytest.raises(BenchError, match="nixl: no answer within 5 s"):
        run([TINY], [fake("hangs", tmp_path)], Plan(rounds=2, patience_s=5))
    wait_until_all_ended(tmp_path)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("print('hello')", "said what is no message"),
        ("""print('{"type":"Ran","seconds":1,"cpu_seconds":1}')""", "answered with Ran"),
        ("""print('{"type":"Ran","seconds":0,"cpu_seconds":1}')""", "said what is no message: Expected `float` > 0"),
        ("pass", "ended with exit code 0 before its work was done"),
    ],
)
def test_a_program_that_is_no_contestant_is_refused(script, reason):
    with pytest.raises(BenchError, match=reason):
        run([TINY], [Program(Contestant.NIXL, (sys.executable, "-c", script))], PLAN)


def test_a_program_that_does_not_exist_is_named():
    with pytest.raises(BenchError, match="nixl: cannot start /nowhere/at-all: No such file"):
        run([TINY], [Program(Contestant.NIXL, ("/nowhere/at-all",))], PLAN)


def test_the_path_of_the_case_must_be_the_one_that_is_used():
    case = Case("pull_blocks", "inprocess", 2, 6, 4096)
    with pytest.raises(BenchError, match="the link uses the path process_vm, not inprocess"):
        run([case], [Program.ours()], PLAN)


def test_nothing_is_left_after_an_interrupt(tmp_path):
    def interrupt(step: Step) -> None:
        if step.done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run([TINY], [fake(notes=tmp_path), fake(notes=tmp_path)], PLAN, interrupt)
    wait_until_all_ended(tmp_path)


def test_nothing_is_left_when_the_driver_is_killed(tmp_path):
    script = (
        "import sys; from test_bench_driver import *\n"
        "run([TINY], [fake(notes=sys.argv[1]), fake('hangs', sys.argv[1])], PLAN, lambda _: print(flush=True))"
    )
    command = (sys.executable, "-c", script, str(tmp_path))
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parent) as killed:
        try:
            assert select.select([killed.stdout], [], [], WAIT_S)[0]  # one is stopped by now, the other one works
        finally:
            killed.kill()
    wait_until_all_ended(tmp_path)


def test_a_case_that_cannot_be_measured_is_refused_before_anything_starts():
    with pytest.raises(ValueError, match="blocks is 0"):
        latency([Case("pull_blocks", "tcp", 1, 0, 8)], [fake("dies")], PLAN, 1)


def test_planning_is_measured_by_whole_blocks_of_all_tensors():
    found = scales.planning([64, 1000], rounds=2)
    assert found.x == [64, 1024]
    assert all(ns > 0 for ns in found.y)


def test_planning_must_not_copy(monkeypatch):
    monkeypatch.setattr(scales, "_nothing_copied", lambda _: contextlib.nullcontext())
    with pytest.raises(RuntimeError, match="could not be left out"):
        scales.planning([64], rounds=1)
