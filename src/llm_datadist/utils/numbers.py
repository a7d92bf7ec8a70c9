"""Whole numbers in text that somebody else wrote."""

from __future__ import annotations

_MAX_DIGITS = 20  # of 2**64; ``int`` itself refuses thousands of digits with another kind of error


def small_number(text: str) -> int | None:
    """The number that ``text`` spells in at most 20 ASCII digits; None for anything else."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS else None
