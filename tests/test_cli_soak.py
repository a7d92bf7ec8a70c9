"""``llm-datadist soak`` as a user runs it, what it plans, and that it finds what it looks for."""

from __future__ import annotations

import os
import re
import signal
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cli_kit import WAIT_S, line_with, run, running, wait_gone
from llm_datadist.cli.soak.command import trends
from llm_datadist.cli.soak.conduct import Soak
from llm_datadist.cli.soak.member import Member
from llm_datadist.cli.soak.orders import Move, Moved, Verify
from llm_datadist.cli.soak.plan import BLOCKS, Event, Lane, Operation, Place, Schedule, Table, Transfer, groups
from llm_datadist.cli.soak.process import SoakError, Usage

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator

LINKED = [Operation.PULL_BLOCKS, Operation.PUSH_BLOCKS, Operation.LAYER_WISE, Operation.COPY_BLOCKS]


def numbers(output: str, name: str) -> list[int]:
    """The numbers of a row of a table."""
    found = re.search(rf"^ *{re.escape(name)} {{2,}}(.*)$", output, re.MULTILINE)
    assert found is not None, output
    return [int(word.replace(",", "")) for word in re.findall(r"[\d,]+(?![\d,.])", found[1])]


def pids_of(process: subprocess.Popen[str]) -> list[int]:
    """The processes of a soak."""
    return [int(pid) for pid in re.findall(r"\d+", line_with(process, "process ids"))]


# ---------------------------------------------------------------- as a user


def test_a_short_soak() -> None:
    done = run("soak", "--minutes", "0.12", "--processes", "3", "--seed", "3")
    assert (done.returncode, done.stderr) == (0, "")
    assert sum(numbers(done.stdout, operation.value)[0] for operation in Operation) > 50
    rounds = sum(numbers(done.stdout, event.value)[0] for event in Event)
    assert rounds > 2
    assert re.search(r"calls by path: inprocess \d+, mapped \d+, process_vm \d+, tcp \d+", done.stdout)


def test_a_process_that_ends_by_itself_is_a_failure() -> None:
    with running("soak", "--minutes", "5", "--processes", "2") as soak:
        pids = pids_of(soak)
        os.kill(pids[0], signal.SIGKILL)
        _, errors = soak.communicate(timeout=WAIT_S)
    assert soak.returncode == 1
    assert "the process has ended" in errors or "LLM_NOT_YET_LINK" in errors
    assert "seed 1: " in errors
    wait_gone(pids)


def test_interrupt() -> None:
    with running("soak", "--minutes", "5", "--processes", "2") as soak:
        pids = pids_of(soak)
        os.killpg(soak.pid, signal.SIGINT)
        _, errors = soak.communicate(timeout=WAIT_S)
    assert (soak.returncode, errors) == (130, "llm-datadist soak: interrupted\n")
    wait_gone(pids)


@pytest.mark.parametrize(("option", "value"), [("--minutes", "0"), ("--processes", "1"), ("--seed", "-1")])
def test_wrong_options_are_refused(option: str, value: str) -> None:
    done = run("soak", option, value)
    assert done.returncode == 2
    assert option in done.stderr


# ---------------------------------------------------------------- what it plans


@given(seed=st.integers(0, 2**64), processes=st.integers(2, 6))
@settings(deadline=None, max_examples=30)
def test_every_round_follows_from_the_seed_and_is_sound(seed: int, processes: int) -> None:
    """Each place is source and target of one transfer, within its group, and no target block is named twice."""
    one, other = Schedule(seed, processes), Schedule(seed, processes)
    places = sorted(place for group in groups(processes) for place in group)
    group_of = {place: number for number, group in enumerate(groups(processes)) for place in group}
    for _ in range(5):
        plan = one.next()
        assert plan == other.next()
        assert sorted(transfer.source for transfer in plan.transfers) == places
        assert sorted(transfer.target for transfer in plan.transfers) == places
        for transfer in plan.transfers:
            assert transfer.source != transfer.target
            assert group_of[transfer.source] == group_of[transfer.target]
            src, dst = transfer.table.src, transfer.table.dst
            assert 0 < len(src) == len(dst) == len(set(dst))
            assert {*src, *dst} <= set(range(BLOCKS))
        assert group_of[plan.victim] == group_of[plan.other]
        if plan.event in {Event.KILL, Event.STOP}:
            assert plan.victim.process > 0


def test_a_long_schedule_leaves_nothing_out() -> None:
    schedule = Schedule(1, 4)
    plans = [schedule.next() for _ in range(200)]
    assert {plan.event for plan in plans} == set(Event)
    seen = {(transfer.source.lane, transfer.operation) for plan in plans for transfer in plan.transfers}
    assert {operation for _, operation in seen} == set(Operation)
    assert {lane for lane, _ in seen} == set(Lane)


# ---------------------------------------------------------------- what it finds


class Pair:
    """Two members in this process, linked."""

    def __init__(self) -> None:
        self.places = [Place(0, list(Lane).index(Lane.INPROCESS), slot) for slot in range(2)]
        self.source, self.target = (Member(place, 5) for place in self.places)
        self.target.link((self.source.ready(),))

    def transfer(self, operation: Operation, table: Table) -> Transfer:
        return Transfer(operation, *self.places, table)

    def move(self, transfer: Transfer) -> Moved:
        actor = self.source if transfer.operation.by_source else self.target
        return actor.move(Move(transfer, self.source.ready(), self.target.ready(), 0.0))

    def problems(self, transfer: Transfer, *, complete: bool, seeds: tuple[int, ...] = (5,)) -> str:
        return "; ".join(self.target.verify(Verify(transfer, seeds, complete)).problems)

    def spoil(self, block: int) -> None:
        """Change one byte of a target block."""
        self.target._target.tensors[3][block, 100] ^= 1


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.target.close()
    made.source.close()


@pytest.mark.parametrize("operation", LINKED)
def test_right_bytes_are_right_and_wrong_ones_are_found(pair: Pair, operation: Operation) -> None:
    """One byte of what was moved, or of what lies beside it."""
    transfer = pair.transfer(operation, Table((1, 2, 1, 2), (8, 9, 20, 21)))
    for block, complaint in ((9, "block 9 of tensor 3"), (10, "block 10 of tensor 3"), (None, "")):
        assert pair.move(transfer).path == "inprocess"
        if block is not None:
            pair.spoil(block)
        found = pair.problems(transfer, complete=True)
        assert complaint in found
        assert bool(found) == (block is not None)


def test_an_interrupted_transfer_may_leave_anything_but_only_where_it_was_to_go(pair: Pair) -> None:
    transfer = pair.transfer(Operation.PULL_BLOCKS, Table((1, 2), (8, 9)))
    pair.spoil(8)
    assert pair.problems(transfer, complete=False) == ""
    pair.spoil(10)
    assert "block 10 of tensor 3" in pair.problems(transfer, complete=False)


def test_contents_of_another_seed_are_wrong(pair: Pair) -> None:
    """Or right, where the source was registered anew meanwhile."""
    transfer = pair.transfer(Operation.PULL_BLOCKS, Table((1, 2), (8, 9)))
    for seeds, good in (((6,), False), ((6, 5), True)):
        pair.move(transfer)
        assert (pair.problems(transfer, complete=True, seeds=seeds) == "") == good


def test_what_never_arrived_is_found(pair: Pair) -> None:
    transfer = pair.transfer(Operation.PULL_BLOCKS, Table((1, 2), (8, 9)))
    assert "was never written" in pair.problems(transfer, complete=True)


@pytest.mark.parametrize("field", ["descriptors", "threads", "private_bytes"])
def test_counters_that_grow_are_found(field: str) -> None:
    def usages(step: int) -> list[Usage]:
        flat = {"descriptors": 100, "threads": 30, "private_bytes": 100 << 20}
        return [Usage(**{**flat, field: flat[field] + step * number}) for number in range(40)]

    assert all(trend.flat for trend in trends(usages(0)))
    step = 1 << 20 if field == "private_bytes" else 1
    assert [trend.flat for trend in trends(usages(step))].count(False) == 1


def test_a_soak_that_cannot_start_says_why() -> None:
    """A process that is gone before it was asked anything."""
    soak = Soak(2, 1)
    try:
        os.kill(soak.pids[0], signal.SIGKILL)
        with pytest.raises(SoakError, match="process 0: Start: the process has ended"):
            soak.start()
    finally:
        soak.kill()
