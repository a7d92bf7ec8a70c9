"""The report for people: what is wrong first, what is well in one line each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.table import Table
from rich.text import Text

from llm_datadist.cli.doctor.findings import Level

if TYPE_CHECKING:
    from rich.console import Console

    from llm_datadist.cli.doctor.findings import Finding, Report

_STYLES: Final = {Level.PROBLEM: "bold red", Level.WARNING: "yellow", Level.NOTE: "cyan", Level.OK: "green"}


def show(report: Report, console: Console) -> None:
    """Print it."""
    counts = report.counts()
    summary = ", ".join(f"{count} {_plural(level, count)}" for level, count in counts.items() if count)
    head = f"llm-datadist {report.version}, Linux {report.kernel}, Python {report.python}: "
    worst = report.findings[0].level if report.findings else Level.OK
    console.print(Text.assemble(head, (summary, _STYLES[worst])), soft_wrap=True)
    console.print()
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in report.findings:
        level = Text(finding.level.value, style=_STYLES[finding.level])
        table.add_row(level, finding.name, _words(finding))
    console.print(table)


def _plural(level: Level, count: int) -> str:
    return level.value if count == 1 or level is Level.OK else f"{level.value}s"


def _words(finding: Finding) -> Text:
    words = Text(finding.seen)
    if finding.level is not Level.OK:
        words.append(f"\n{finding.meaning}", style="dim")
        if finding.fix:
            words.append("\nfix: ", style="bold")
            words.append(finding.fix)
        words.append("\n")
    return words
