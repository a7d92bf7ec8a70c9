"""This library against NIXL, Mooncake and the bare limits of the machine, as one table.

Run it with a Python that has the project installed:

    python3 -m venv .venv && .venv/bin/pip install -q -e . && .venv/bin/python benchmarks/peers/run.py
"""

from __future__ import annotations

import argparse
import datetime as dt
import importlib.metadata
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import venvs
from measure import SECTIONS, Row, Table, measure

from llm_datadist.cli.bench.cases import describe
from llm_datadist.cli.bench.driver import Plan, Program, Step
from llm_datadist.cli.bench.results import Contestant, Report
from llm_datadist.cli.machine import fingerprint

if TYPE_CHECKING:
    from collections.abc import Iterable

_HERE: Final = Path(__file__).resolve().parent
_UCX: Final = {"UCX_MODULES": "^ib"}  # without RDMA, its module for that makes the process crash at its end
_MOONCAKE: Final = {"MC_FORCE_TCP": "1", "MC_TE_METRIC": "0"}
_PEERS: Final = {
    Contestant.NIXL: (venvs.NIXL, "nixl_contestant.py", _UCX),
    Contestant.NIXL_TCP: (venvs.NIXL, "nixl_contestant.py", {**_UCX, "UCX_TLS": "tcp"}),
    Contestant.MOONCAKE_TCP: (venvs.MOONCAKE, "mooncake_contestant.py", _MOONCAKE),
}
_COLUMNS: Final = ("what", "needed", "seen: median (min..max of the rounds)", "ok")


def main() -> int:
    """Measure, print and write.

    Returns:
        0 if nothing missed its goal, else 1.
    """
    options = _options()
    programs, absent = _contestants(options.venvs)
    plan = Plan(rounds=options.rounds)
    table = Table(programs, absent, plan, options.total << 20, _Progress())
    measure(table, options.only or list(SECTIONS))
    sys.stderr.write("\n")
    sys.stdout.write(_plain(table.rows))
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "table.md").write_text(_markdown(table.rows), encoding="utf-8")
    (options.output / "report.json").write_bytes(msgspec.json.format(msgspec.json.encode(_report(table))))
    return 1 if any(row.ok is False for row in table.rows) else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venvs", type=Path, default=Path(".bench-venvs"), help="where the peers are installed")
    parser.add_argument("--total", type=int, default=256, help="MiB that each call moves")
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds")
    parser.add_argument("--only", action="append", choices=list(SECTIONS), help="section to measure; may be repeated")
    parser.add_argument("--output", type=Path, default=Path("bench-report"), help="directory for table.md, report.json")
    return parser.parse_args()


def _contestants(cache: Path) -> tuple[dict[Contestant, Program], dict[Contestant, str]]:
    """The programs of all but ourselves, and why some are missing."""
    limits = (Contestant.LIMIT_PROCESS_VM, Contestant.LIMIT_SOCKETS)
    programs = {limit: Program.limit(limit) for limit in limits}
    absent = {}
    for contestant, (peer, script, environment) in _PEERS.items():
        try:
            python = venvs.ready(peer, cache)
        except venvs.SetupError as error:
            sys.stderr.write(f"{contestant.value} is left out: {error}\n")
            absent[contestant] = str(error)
        else:
            programs[contestant] = Program(contestant, (str(python), str(_HERE / script)), environment)
    return programs, absent


class _Progress:
    """One line on a terminal; elsewhere one line for each call of the driver."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def __call__(self, step: Step) -> None:
        """A step is done."""
        seconds = time.monotonic() - self._start
        text = f"{seconds:4.0f} s  {step.done}/{step.total}  {describe(step.case)}"
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()
        elif step.done == step.total:
            sys.stderr.write(f"{text}\n")


def _report(table: Table) -> Report:
    return Report(
        version=importlib.metadata.version("llm-datadist"),
        made_at=dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
        machine=fingerprint(),
        rounds=table.plan.rounds,
        throughputs=table.throughputs,
        latencies=table.latencies,
        scales=table.scales,
        command=shlex.join(["benchmarks/peers/run.py", *sys.argv[1:]]),
    )


def _cells(rows: Iterable[Row]) -> list[tuple[str, ...]]:
    marks = {True: "yes", False: "NO", None: "-"}
    # An error may quote what a program wrote, on many lines; its first line is what fits a table.
    return [_COLUMNS, *((row.what, row.needed, row.seen.partition("\n")[0], marks[row.ok]) for row in rows)]


def _plain(rows: Iterable[Row]) -> str:
    cells = _cells(rows)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells)
    return "\n".join(lines) + "\n"


def _markdown(rows: Iterable[Row]) -> str:
    head, *body = (f"| {' | '.join(cells)} |" for cells in _cells(rows))
    return "\n".join([head, f"|{'---|' * len(_COLUMNS)}", *body]) + "\n"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
