"""The report for people: what is wrong and what helps first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from llm_datadist.cli.bench.units import format_number, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from llm_datadist.cli.ping.report import Found, Report
    from llm_datadist.paths.survey import PathFinding


def show(report: Report, console: Console) -> None:
    """Print it."""
    console.print(Text.assemble(f"llm-datadist ping {report.target}: ", _verdict(report)), soft_wrap=True)
    console.print()
    facts = _grid()
    for each in report.tried:
        outcome = "answers after" if each.ok else f"{each.status} after"
        facts.add_row("tried", f"{each.address}, {outcome} {format_seconds(each.seconds)}")
        if each.cause:
            facts.add_row("cause", each.cause)
        if each.fix:
            facts.add_row("fix", Text(each.fix, style="bold"))
    if report.peer:
        _add_peer(facts, report, report.peer)
    console.print(facts)
    if report.peer:
        console.print()
        console.print(_paths(report.peer))


def _grid() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _verdict(report: Report) -> Text:
    if report.peer is None:
        return Text("no link can be made", style="bold red")
    if report.peer.path is None:
        return Text("no path works, so no link can be made", style="bold red")
    slower = any(finding.hint for finding in _better(report.peer))
    words = f"works, a link would use {report.peer.path}"
    return Text(f"{words}; a faster path does not work" if slower else words, style="yellow" if slower else "green")


def _better(peer: Found) -> list[PathFinding]:
    """The paths that come before the one that a link would use."""
    names = [finding.name for finding in peer.paths]
    return list(peer.paths[: names.index(peer.path)] if peer.path else peer.paths)


def _add_peer(facts: Table, report: Report, peer: Found) -> None:
    where = "on this host" if peer.same_host else "on another host"
    facts.add_row("peer", f"cluster {peer.cluster_id}, pid {peer.pid}, {where}")
    mode = "remote-accessible" if peer.remote_accessible else "message"
    facts.add_row(
        "mode", f"{mode} (LLMConfig.enable_remote_cache_accessible must be {peer.remote_accessible} here, too)"
    )
    low, high = report.protocols
    facts.add_row("versions", f"protocol {peer.protocol}; llm-datadist {report.version} here speaks {low} to {high}")
    authenticated = "both sides know the secret" if peer.authenticated else "no secret"
    facts.add_row("protection", f"{authenticated}, {'TLS' if peer.encrypted else 'no TLS'}")


def _paths(peer: Found) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("path", "", "p50", "p99", "GB/s"):
        table.add_column(name, no_wrap=True, justify="left" if name in {"path", ""} else "right")
    table.add_column("why", overflow="fold")
    for finding in peer.paths:
        state = Text("used", style="green") if finding.name == peer.path else Text("works")
        why = Text(finding.reason)
        if not finding.works:
            state = Text("no", style="yellow" if finding.hint else "dim")
        if finding.hint:
            why.append("\nfix: ", style="bold")
            why.append(finding.hint)
        figures = finding.figures
        shown = ("", "", "")
        if figures:
            speed = format_number(figures.bytes_per_s / 1e9)
            shown = (format_seconds(figures.p50_s), format_seconds(figures.p99_s), speed)
        table.add_row(finding.name, state, *shown, why)
    return table
