"""Horizontal bars as SVG elements, for figures that have names instead of places on an axis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from llm_datadist.cli.bench.markup import tag

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from xml.etree.ElementTree import Element

    from llm_datadist.cli.bench.axes import Axis

_WIDTH: Final = 640.0
_LEFT: Final = 6.0
_RIGHT: Final = 230.0
"""Room for the words behind the longest bar."""
_BAR: Final = 20.0
_HEADING: Final = 36.0
_BOTTOM: Final = 52.0


@dataclass(frozen=True, slots=True)
class Bar:
    """One figure and its spread."""

    text: str
    """Whose it is, and the figure; behind the bar."""
    style: str
    """Class in the style sheet."""
    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Category:
    """Bars to compare with each other."""

    label: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True)
class BarPlot:
    """What is drawn. Titles and descriptions are for those who do not see it, too."""

    title: str
    description: str
    x: Axis
    categories: tuple[Category, ...]


def draw(plot: BarPlot, identifier: str) -> Element:
    """The plot; ``identifier`` is unique within the page."""
    bottom = sum(_HEADING + _BAR * len(category.bars) for category in plot.categories) + 8
    return tag(
        "svg",
        tag("title", plot.title, id=f"{identifier}-title"),
        tag("desc", plot.description, id=f"{identifier}-desc"),
        *_grid(plot.x, bottom),
        *_bars(plot.x, plot.categories),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {_WIDTH:g} {bottom + _BOTTOM:g}",
        role="img",
        aria_labelledby=f"{identifier}-title {identifier}-desc",
    )


def _x(axis: Axis, value: float) -> float:
    return _LEFT + axis.place(value) * (_WIDTH - _RIGHT - _LEFT)


def _grid(axis: Axis, bottom: float) -> Iterator[Element]:
    for value, label in axis.ticks:
        x = _x(axis, value)
        yield tag("line", class_="grid", x1=x, x2=x, y1=0.0, y2=bottom)
        yield tag("text", label, class_="tick", x=x, y=bottom + 20, text_anchor="middle" if value else "start")
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    yield tag("text", axis.label, class_="label", x=middle, y=bottom + 44, text_anchor="middle")


def _bars(axis: Axis, categories: Sequence[Category]) -> Iterator[Element]:
    y = 0.0
    for category in categories:
        yield tag("text", category.label, class_="key", x=_LEFT, y=y + _HEADING - 7)
        y += _HEADING
        for bar in category.bars:
            middle = y + _BAR / 2
            width = max(1.0, _x(axis, bar.value) - _LEFT)
            yield tag("rect", class_=f"bar {bar.style}", x=_LEFT, y=y + 2, width=width, height=_BAR - 4)
            low, high = _x(axis, bar.low), _x(axis, bar.high)
            for part in ("halo", "whisker"):
                yield tag("line", class_=part, x1=low, x2=high, y1=middle, y2=middle)
            yield tag("text", bar.text, class_="tick", x=max(high, _LEFT + width) + 8, y=middle + 5)
            y += _BAR
