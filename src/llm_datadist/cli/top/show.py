"""What top shows: engines, their transfers, their failures."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from rich.console import Group
from rich.table import Table
from rich.text import Text

from llm_datadist.cli.bench.units import format_count, format_number, format_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import RenderableType

    from llm_datadist.cli.top.rates import Rows

_UNITS: Final = ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"))
_BAD_STATES: Final = frozenset({"closing", "closed", "connecting"})


def view(seen: Sequence[tuple[str, Rows | str]], seconds: float) -> RenderableType:
    """All endpoints: what they did in the last ``seconds``, or why they tell nothing."""
    parts: list[RenderableType] = []
    good = [(url, rows) for url, rows in seen if not isinstance(rows, str)]
    parts.append(Text(f"llm-datadist top: {len(good)} of {len(seen)} endpoints, rates over {seconds:.1f} s"))
    parts += [Text(f"\n{rows}", style="red") for _, rows in seen if isinstance(rows, str)]
    if good:
        parts += [Text(""), _engines(good), Text(""), _operations(good)]
    if any(rows.failures for _, rows in good):
        parts += [Text(""), _failures(good)]
    return Group(*parts)


def _table(left: Sequence[str], right: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in right:
        table.add_column(name, no_wrap=True, justify="right")
    return table


def _engines(seen: Sequence[tuple[str, Rows]]) -> Table:
    numbers = ("running", "waiting", "held", "served/s", "served", "connections")
    table = _table(("cluster", "endpoint", "links", "paths"), numbers)
    for url, rows in seen:
        for row in rows.engines:
            table.add_row(
                row.cluster,
                url.removeprefix("http://").removesuffix("/metrics"),
                Text(_counts(row.links), style="yellow" if _BAD_STATES & set(row.links) else ""),
                _counts(row.paths),
                format_count(row.in_progress),
                _rate(row.waiting),
                format_count(row.holds),
                _rate(row.served_per_s),
                _speed(row.served_bytes_per_s),
                format_count(row.data_connections),
            )
    return table


def _operations(seen: Sequence[tuple[str, Rows]]) -> RenderableType:
    table = _table(("cluster", "operation", "path"), ("transfers/s", "bytes/s", "p50", "p99", "total"))
    for _, rows in seen:
        for row in rows.operations:
            table.add_row(
                row.cluster,
                row.operation,
                row.path or "-",
                _rate(row.per_s),
                _speed(row.bytes_per_s),
                _seconds(row.p50_s),
                _seconds(row.p99_s),
                format_count(row.total),
            )
    if table.row_count:
        return table
    return Text("no transfers have been counted: there were none, or LLMConfig.metrics is not True", style="dim")


def _failures(seen: Sequence[tuple[str, Rows]]) -> Table:
    table = _table(("cluster", "failures of", "status"), ("failures/s", "total"))
    for _, rows in seen:
        for row in rows.failures:
            style = "red" if row.per_s else ""
            table.add_row(
                row.cluster, row.operation, row.status, _rate(row.per_s), format_count(row.total), style=style
            )
    return table


def _counts(values: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(values.items())) or "none"


def _rate(value: float) -> str:
    return format_number(value) if value else "0"


def _seconds(value: float) -> str:
    return "-" if math.isnan(value) else format_seconds(value)


def _speed(value: float) -> str:
    for size, unit in _UNITS:
        if value >= size:
            return f"{format_number(value / size)} {unit}"
    return f"{format_count(value)} B/s"
