"""The demo seen from the parent: it conducts both processes, draws, and judges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from rich import box
from rich.table import Table
from rich.text import Text

from llm_datadist.cli.kv import Verified
from llm_datadist.cli.machine import MEMINFO, memory_bytes
from llm_datadist.cli.models import BLOCK_TOKENS
from llm_datadist.cli.orders import Done, Link, Moved, Poison, Prepare, Ready, Transfer, Verify
from llm_datadist.cli.plan import Operation, Role
from llm_datadist.cli.show import Show, open_console, print_problem
from llm_datadist.cli.team import DemoError, Limits, started_team

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from llm_datadist.cli.plan import Plan
    from llm_datadist.cli.team import Team

_HEADROOM_BYTES: Final = 256 << 20


@dataclass(frozen=True, slots=True)
class Row:
    """One operation, as far as it came."""

    operation: Operation
    moved: Moved | None = None
    verified: Verified | None = None

    @property
    def ok(self) -> bool:
        """Whether every block arrived, and nothing else."""
        verified = self.verified
        return verified is not None and verified.blocks_ok == verified.blocks_total and not verified.problems


def run(plan: Plan, limits: Limits | None = None) -> int:
    """Run the demo and print what came of it.

    Returns:
        The exit code: 0 if every block of every operation is verified, else 1.
    """
    out = open_console()
    show = Show(out, total=_work(plan))
    rows: list[Row] = []
    try:
        check_memory(plan)
        out.print(headline(plan), highlight=False, markup=False, soft_wrap=True)
        with started_team(plan, limits or Limits.for_plan(plan), show.advance) as team, show.bar:
            conduct(team, show, rows)
    except DemoError as error:
        _print_table(out, rows)
        during = f"{rows[-1].operation.value}: " if rows and rows[-1].verified is None else ""
        print_problem("demo", f"{during}{error}")
        return 1
    _print_table(out, rows)
    for row in rows:
        for problem in row.verified.problems if row.verified else ():
            print_problem("demo", f"{row.operation.value}: {problem}")
    return 0 if all(row.ok for row in rows) else 1


def conduct(team: Team, show: Show, rows: list[Row]) -> None:
    """Prepare both processes, then do and verify each operation; ``rows`` gets one each, also for one that fails.

    Raises:
        DemoError: a process failed, ended, or kept silent for too long.
    """
    show.say(f"prefill process {team.pid(Role.PREFILL)}, decode process {team.pid(Role.DECODE)}")
    show.step("filling")
    ready = team.ask_all({Role.PREFILL: Prepare(), Role.DECODE: Prepare()})[Role.PREFILL]
    if not isinstance(ready, Ready):
        message = f"the prefill process answered with {ready}"
        raise DemoError(message)
    team.ask(Role.DECODE, Link(ready), Done)
    for operation in Operation:
        show.step(operation.value)
        rows.append(Row(operation))
        team.ask(Role.DECODE, Poison(), Done)
        moved = team.ask(operation.actor, Transfer(operation), Moved)
        rows[-1] = Row(operation, moved)
        show.advance(moved.bytes_moved)
        show.step(f"{operation.value}: verifying")
        rows[-1] = Row(operation, moved, team.ask(Role.DECODE, Verify(operation), Verified))
        show.say(" ".join(_cells(rows[-1])))


def check_memory(plan: Plan, meminfo: Path = MEMINFO) -> None:
    """Refuse what does not fit this machine, before anything is started.

    Raises:
        DemoError: too little memory is available.
    """
    available = memory_bytes("MemAvailable", meminfo)
    needed = plan.source_bytes + plan.destination_bytes + _HEADROOM_BYTES
    if available is not None and needed > available:
        message = (
            f"{plan.tokens} tokens of {plan.model_name.value} need {needed / 2**30:.1f} GiB of memory for both "
            f"processes, but only {available / 2**30:.1f} GiB are available: use fewer --tokens or a smaller --model"
        )
        raise DemoError(message)


def headline(plan: Plan) -> str:
    """What is moved."""
    caches = ", ".join(
        f"{cache.name} {cache.num_tensors} tensors of {cache.block_bytes // 1024} KiB a block"
        for cache in plan.model.caches
    )
    return f"{plan.model_name.value}, {plan.blocks} blocks of {BLOCK_TOKENS} tokens, seed {plan.seed}: {caches}"


def _work(plan: Plan) -> int:
    """Bytes to fill, to move and to check."""
    once_each = 2 * plan.source_bytes  # filling here, computing what should arrive there
    each_operation = plan.source_bytes + plan.destination_bytes  # moving, verifying
    return once_each + len(Operation) * each_operation


def _cells(row: Row) -> tuple[str, ...]:
    moved, verified = row.moved, row.verified
    motion = ("-", "-", "-", "-")
    if moved is not None:
        size, speed = moved.bytes_moved / 1e6, moved.bytes_moved / 1e9 / moved.seconds
        motion = (f"{size:.1f} MB", moved.path, f"{moved.seconds * 1e3:.1f} ms", f"{speed:.2f}")
    count = "failed" if verified is None else f"{verified.blocks_ok}/{verified.blocks_total}"
    return (row.operation.value, *motion, count)


def _print_table(console: Console, rows: list[Row]) -> None:
    if not rows:
        return
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("operation", overflow="fold")
    table.add_column("bytes", justify="right")
    table.add_column("path")
    table.add_column("time", justify="right")
    table.add_column("GB/s", justify="right")
    table.add_column("verified", justify="right")
    for row in rows:
        table.add_row(*_cells(row)[:-1], Text(_cells(row)[-1], style="green" if row.ok else "bold red"))
    console.print(table)
