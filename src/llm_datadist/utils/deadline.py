"""One point in time by which an operation must end, on the monotonic clock."""

from __future__ import annotations

import time


class Deadline:
    """A fixed end on the monotonic clock; everything an operation waits for is measured against the same one."""

    __slots__ = ("_at",)

    def __init__(self, at: float) -> None:
        self._at = at

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """The deadline this many seconds from now."""
        return cls(time.monotonic() + seconds)

    def remaining(self) -> float:
        """Seconds left; zero when it has passed, never negative."""
        return max(0.0, self._at - time.monotonic())

    def expired(self) -> bool:
        """Whether it has passed."""
        return time.monotonic() >= self._at

    def at_most(self, seconds: float) -> Deadline:
        """The earlier of this deadline and ``seconds`` from now."""
        return Deadline(min(self._at, time.monotonic() + seconds))
