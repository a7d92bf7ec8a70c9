"""One point in time by which an operation must end, on the monotonic clock, and what goes with the operation."""

from __future__ import annotations

import time


class Deadline:
    """A fixed end on the monotonic clock; everything an operation waits for is measured against the same one."""

    __slots__ = ("_at", "queued_s", "transfer_id")

    def __init__(self, at: float, transfer_id: int = 0) -> None:
        """``transfer_id`` names the transfer that it belongs to, in messages on both sides; 0 if there is none."""
        self._at = at
        self.transfer_id: int = transfer_id
        self.queued_s: float = 0.0
        """How long the operation has waited for its turn, so far."""

    @classmethod
    def after(cls, seconds: float, transfer_id: int = 0) -> Deadline:
        """The deadline this many seconds from now."""
        return cls(time.monotonic() + seconds, transfer_id)

    def remaining(self) -> float:
        """Seconds left; zero when it has passed, never negative."""
        return max(0.0, self._at - time.monotonic())

    def expired(self) -> bool:
        """Whether it has passed."""
        return time.monotonic() >= self._at

    def at_most(self, seconds: float) -> Deadline:
        """The earlier of this deadline and ``seconds`` from now."""
        return Deadline(min(self._at, time.monotonic() + seconds), self.transfer_id)
