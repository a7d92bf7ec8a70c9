"""Waiting for what no event tells."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
MOST_S = 30.0
"""Longer than anything takes here, on a machine however busy: who waits this long has found a failure. Less than a test
waits for a child process (``peers.TIMEOUT_S``), so that a child that waits in vain can say so."""
_PAUSE_S = 0.02


def until(condition: Callable[[], T], seconds: float = MOST_S, *, what: Callable[[], object] | None = None) -> T:
    """Wait until it holds; its value. ``what`` tells how things are if it never does."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, what() if what else f"it has not come about within {seconds:g} s"
        time.sleep(_PAUSE_S)
    return found
