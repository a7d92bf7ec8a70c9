"""Axes: where a value lies between the two ends of a plot, and which values are marked."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from llm_datadist.cli.bench.units import format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_LINEAR_TICKS: Final = 5
_LOG_TICKS: Final = 8
_NICE_STEPS: Final = (1.0, 2.0, 2.5, 5.0, 10.0)
_NINES: Final = ((0.0, "0"), (0.5, "50 %"), (0.9, "90 %"), (0.99, "99 %"), (0.999, "99.9 %"), (0.9999, "99.99 %"))
_ZEROS: Final = re.compile(r"\.0+\b")


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis. ``low`` and ``high`` are what its ends are after ``transform``, and differ."""

    label: str
    transform: Callable[[float], float]
    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    """Value, before ``transform``, and its label."""

    def place(self, value: float) -> float:
        """0 at the low end, 1 at the high end."""
        return (self.transform(value) - self.low) / (self.high - self.low)


def linear(label: str, values: Sequence[float]) -> Axis:
    """From 0 to a round number above all values."""
    top = max(values, default=0.0) or 1.0
    step = _nice_step(top / _LINEAR_TICKS)
    count = math.ceil(top / step * (1 - 1e-9))
    ticks = tuple((number * step, f"{number * step:.6g}") for number in range(count + 1))
    return Axis(label, float, 0.0, count * step, ticks)


def measured(label: str, values: Sequence[int], text: Callable[[int], str]) -> Axis:
    """Logarithmic, marked at the very values that were measured, which are positive; at some, if there are many."""
    distinct = sorted(set(values)) or [1]
    step = math.ceil(len(distinct) / _LOG_TICKS)
    low, high = _apart(math.log2(distinct[0]), math.log2(distinct[-1]))
    ticks = tuple((float(value), text(value)) for value in distinct[::step])
    return Axis(label, math.log2, low, high, ticks)


def times(label: str, seconds: Sequence[float]) -> Axis:
    """Logarithmic, for positive times, with ends and marks at 1, 2 and 5 of powers of ten, or fewer marks."""
    least, most = min(seconds, default=1e-6), max(seconds, default=1e-6)
    decades = range(math.floor(math.log10(least)) - 1, math.ceil(math.log10(most)) + 2)
    fine = [step * 10.0**decade for decade in decades for step in (1, 2, 5)]
    low = max(value for value in fine if value <= least)
    high = min(value for value in fine if value > max(most, low))
    shown = [value for value in fine if low <= value <= high]
    step = 1 if len(shown) <= _LOG_TICKS else 3
    ticks = tuple((value, _short_seconds(value)) for value in shown[-1::-step])
    return Axis(label, math.log10, math.log10(low), math.log10(high), ticks)


def nines(label: str, calls: int) -> Axis:
    """Shares of calls from 0 to almost 1, every further nine as wide as the one before; 99.9 % is always on it."""
    high = max(3.1, math.log10(max(calls, 1)))
    return Axis(label, nines_place, 0.0, high, tuple(tick for tick in _NINES if nines_place(tick[0]) <= high))


def nines_place(share: float) -> float:
    """Where :func:`nines` puts a share below 1, in powers of ten."""
    return -math.log10(1 - share)


def _short_seconds(seconds: float) -> str:
    return _ZEROS.sub("", format_seconds(seconds))


def _apart(low: float, high: float) -> tuple[float, float]:
    """A single value lies in the middle."""
    return (low, high) if high > low else (low - 1, high + 1)


def _nice_step(least: float) -> float:
    decade = 10.0 ** math.floor(math.log10(least))
    return next((step for nice in _NICE_STEPS if (step := nice * decade) >= least), 10 * decade)
