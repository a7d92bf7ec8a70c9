"""Line plots as SVG elements. Colours come from the style sheet of the page, by the classes of the series."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from llm_datadist.cli.bench.markup import tag

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from xml.etree.ElementTree import Element

    from llm_datadist.cli.bench.axes import Axis

_WIDTH: Final = 640.0
_HEIGHT: Final = 380.0
_LEFT: Final = 82.0
_RIGHT: Final = 38.0
_BOTTOM: Final = 58.0
_LEGEND_LINE: Final = 24.0
_LETTER: Final = 7.6
"""Width of a letter in the legend, on average, rounded up."""
_SWATCH: Final = 44.0
_LABEL_ROOM: Final = 120.0
"""Nearer to the left end a label stands above its mark, else to its upper left: there a rising curve leaves room."""
_MARK: Final = 4.5
_MARKS: Final = {
    "circle": "M{l},{y}a{r},{r} 0 1,0 {d},0a{r},{r} 0 1,0 -{d},0z",
    "square": "M{l},{t}h{d}v{d}h-{d}z",
    "diamond": "M{x},{t}L{e},{y}L{x},{b}L{l},{y}z",
    "triangle": "M{x},{t}L{e},{b}L{l},{b}z",
}


@dataclass(frozen=True, slots=True)
class Point:
    """One figure of a series."""

    x: float
    y: float
    text: str
    """The figure in words, shown where a pointer rests on the mark."""
    low: float | None = None
    high: float | None = None
    """Ends of the spread, where there is one."""
    label: str = ""
    """Written above the mark."""


@dataclass(frozen=True, slots=True)
class Series:
    """A line with marks."""

    name: str
    style: str
    """Class in the style sheet: colour and dashes."""
    mark: str
    """Shape of the marks: circle, square, diamond or triangle."""
    points: tuple[Point, ...]
    """From left to right."""
    curve: tuple[tuple[float, float], ...] = ()
    """What the line follows between the marks; empty: straight from mark to mark."""


@dataclass(frozen=True, slots=True)
class Plot:
    """What is drawn. Titles and descriptions are for those who do not see it, too."""

    title: str
    description: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]


def draw(plot: Plot, identifier: str) -> Element:
    """The plot; ``identifier`` is unique within the page."""
    legend, top = _legend(plot.series)
    frame = _Frame(plot, top)
    return tag(
        "svg",
        tag("title", plot.title, id=f"{identifier}-title"),
        tag("desc", plot.description, id=f"{identifier}-desc"),
        *legend,
        *frame.grid(),
        *(element for series in plot.series for element in frame.band(series)),
        # The first series is what the plot is about: it is drawn last, on top.
        *(element for series in reversed(plot.series) for element in frame.line(series)),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {_WIDTH:g} {_HEIGHT + top:g}",
        role="img",
        aria_labelledby=f"{identifier}-title {identifier}-desc",
    )


class _Frame:
    """Places values on the drawing area."""

    def __init__(self, plot: Plot, top: float) -> None:
        self._plot = plot
        self._top = top
        self._bottom = top + _HEIGHT - _BOTTOM

    def _x(self, value: float) -> float:
        return _LEFT + self._plot.x.place(value) * (_WIDTH - _RIGHT - _LEFT)

    def _y(self, value: float) -> float:
        return self._bottom - self._plot.y.place(value) * (self._bottom - self._top)

    def grid(self) -> Iterator[Element]:
        """Axes, their ticks and labels."""
        right = _WIDTH - _RIGHT
        for value, label in self._plot.y.ticks:
            y = self._y(value)
            yield tag("line", class_="grid", x1=_LEFT, x2=right, y1=y, y2=y)
            yield tag("text", label, class_="tick", x=_LEFT - 8, y=y + 5, text_anchor="end")
        for value, label in self._plot.x.ticks:
            x = self._x(value)
            yield tag("line", class_="grid", x1=x, x2=x, y1=self._top, y2=self._bottom)
            yield tag("text", label, class_="tick", x=x, y=self._bottom + 20, text_anchor="middle")
        yield tag("line", class_="axis", x1=_LEFT, x2=right, y1=self._bottom, y2=self._bottom)
        middle = (self._top + self._bottom) / 2
        yield tag(
            "text", self._plot.x.label, class_="label", x=(_LEFT + right) / 2, y=self._bottom + 46, text_anchor="middle"
        )
        yield tag(
            "text",
            self._plot.y.label,
            class_="label",
            transform=f"translate(14,{middle:.1f}) rotate(-90)",
            text_anchor="middle",
        )

    def band(self, series: Series) -> Iterator[Element]:
        """The spread; of a single point it is a vertical stroke."""
        lows = [(point.x, point.low) for point in series.points if point.low is not None]
        highs = [(point.x, point.high) for point in series.points if point.high is not None]
        if lows and highs:
            yield tag("path", class_=f"band {series.style}", d=self._path([*lows, *reversed(highs)]) + "z")

    def line(self, series: Series) -> Iterator[Element]:
        """The line and its marks."""
        path = series.curve or [(point.x, point.y) for point in series.points]
        if path:
            yield tag("path", class_=f"line {series.style}", d=self._path(path))
        for point in series.points:
            mark = _mark(series.mark, self._x(point.x), self._y(point.y))
            yield tag("path", tag("title", f"{series.name}, {point.text}"), class_=f"mark {series.style}", d=mark)
            if point.label:
                yield self._label(point)

    def _label(self, point: Point) -> Element:
        x, y = self._x(point.x), self._y(point.y)
        if x < _LEFT + _LABEL_ROOM:
            return tag("text", point.label, class_="note", x=x, y=y - 12, text_anchor="middle")
        return tag("text", point.label, class_="note", x=x - 6, y=y - 8, text_anchor="end")

    def _path(self, points: Sequence[tuple[float, float]]) -> str:
        return "M" + "L".join(f"{self._x(x):.1f},{self._y(y):.1f}" for x, y in points)


def _legend(series: Sequence[Series]) -> tuple[list[Element], float]:
    """The legend, in as many lines as it needs, and how far down the drawing area begins."""
    if len(series) == 1:  # the title says what it is
        return [], _LEGEND_LINE / 2
    elements = []
    x, y = _LEFT, _LEGEND_LINE / 2 + 2
    for each in series:
        width = _SWATCH + _LETTER * len(each.name) + 18
        if x > _LEFT and x + width > _WIDTH:
            x, y = _LEFT, y + _LEGEND_LINE
        elements += [
            tag("path", class_=f"line {each.style}", d=f"M{x:.1f},{y:.1f}h{_SWATCH - 10:g}"),
            tag("path", class_=f"mark {each.style}", d=_mark(each.mark, x + (_SWATCH - 10) / 2, y)),
            tag("text", each.name, class_="key", x=x + _SWATCH - 2, y=y + 5),
        ]
        x += width
    return elements, y + _LEGEND_LINE


def _mark(shape: str, x: float, y: float) -> str:
    edges = {"l": x - _MARK, "e": x + _MARK, "t": y - _MARK, "b": y + _MARK, "x": x, "y": y, "r": _MARK, "d": 2 * _MARK}
    return _MARKS[shape].format(**{name: f"{value:.1f}" for name, value in edges.items()})
