"""Numbers as people read and write them."""

from __future__ import annotations

import re
from typing import Final

_BYTE_UNITS: Final = {"": 0, "b": 0, "k": 10, "kib": 10, "m": 20, "mib": 20, "g": 30, "gib": 30}
_SIZE: Final = re.compile(r"\s*(\d{1,15})\s*([a-z]*)\s*", re.ASCII | re.IGNORECASE)
_SECOND_UNITS: Final = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_PLAIN: Final = (1e-3, 1e9)
"""Between these numbers are written without an exponent."""


def parse_bytes(text: str) -> int:
    """Bytes of a size such as ``4KiB``, ``4k`` or ``4096``; units are powers of 1024.

    Raises:
        ValueError: it is none.
    """
    match = _SIZE.fullmatch(text)
    if match is None or (shift := _BYTE_UNITS.get(match[2].lower())) is None:
        message = f"{text!r} is no size: use a whole number with KiB, MiB, GiB or without a unit, for example 64KiB"
        raise ValueError(message)
    return int(match[1]) << shift


def format_bytes(count: int) -> str:
    """A size in the largest unit that needs no fraction: ``4 KiB``, ``1000 B``."""
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count and count % (1 << shift) == 0:
            return f"{count >> shift} {unit}"
    return f"{count} B"


def format_number(value: float) -> str:
    """Three significant digits, and no fewer than the integer has: ``0.0123``, ``1.23``, ``12,345``."""
    low, high = _PLAIN
    if value and not low <= abs(value) < high:
        return f"{value:.2e}"
    exponent = int(f"{value:.2e}".partition("e")[2])  # of the rounded value: 0.9996 is 1.00
    return f"{value:,.{max(0, 2 - exponent)}f}"


def format_count(count: float) -> str:
    """A whole number with its digits grouped."""
    return f"{count:,.0f}"


def format_seconds(seconds: float) -> str:
    """A time in the largest unit of which it has at least one: ``12.3 µs``."""
    size, unit = next((each for each in _SECOND_UNITS if seconds >= each[0]), _SECOND_UNITS[-1])
    return f"{format_number(seconds / size)} {unit}"
