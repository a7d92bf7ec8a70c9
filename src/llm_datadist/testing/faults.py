"""What can be made to go wrong, for the faulty path and for the TCP proxy."""

from __future__ import annotations

import enum
import random
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class FaultKind(enum.Enum):
    """What happens once ``Fault.at`` bytes have passed."""

    DROP = "drop"
    """The rest is lost, and nobody is told."""
    DELAY = "delay"
    """The rest comes ``Fault.seconds`` later."""
    CUT = "cut"
    """The connection breaks."""
    STALL = "stall"
    """Nothing more comes until ``Fault.release``."""
    CORRUPT = "corrupt"
    """The next ``Fault.length`` bytes come changed, every one of them."""


class Fault:
    """One fault: what, where, and whether it has happened. Thread-safe.

    ``at`` counts bytes from the moment at which the fault is injected, on each connection and in each direction for
    itself; for the faulty path it counts those of one transfer. Who shares ``seed`` sees the same changed bytes.
    """

    def __init__(
        self, kind: FaultKind, at: int = 0, *, seconds: float = 0.0, length: int | None = 1, seed: int = 0
    ) -> None:
        """Describe it.

        Args:
            kind: what happens.
            at: after how many bytes, 0 is before the first one.
            seconds: of a DELAY.
            length: bytes that CORRUPT changes; None for all that follow.
            seed: of the changes that CORRUPT makes.

        Raises:
            ValueError: a number is negative.
        """
        if at < 0 or seconds < 0 or (length is not None and length < 1):
            message = (
                f"fault at={at}, seconds={seconds}, length={length}: length must be positive, the others 0 or more"
            )
            raise ValueError(message)
        self.kind = kind
        self.at = at
        self.seconds = seconds
        self.length = length
        self.seed = seed
        self._reached = threading.Event()
        self._lock = threading.Lock()
        self._released = False
        self._listeners: list[Callable[[], object]] = []

    def __repr__(self) -> str:
        return f"Fault({self.kind}, at={self.at}, seconds={self.seconds}, length={self.length}, seed={self.seed})"

    def wait(self, timeout_s: float) -> bool:
        """Wait until it has happened for the first time; whether it has."""
        return self._reached.wait(timeout_s)

    def release(self) -> None:
        """End it: what is stalled or delayed goes on, and it happens to nothing that comes later. Idempotent."""
        with self._lock:
            self._released = True
            listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener()

    @property
    def released(self) -> bool:
        """Whether it has been ended."""
        return self._released

    def happen(self) -> None:
        """Note that it happens now; for those who inject it."""
        self._reached.set()

    def when_released(self, listener: Callable[[], object]) -> None:
        """Call ``listener`` once it is released, at once if it is; for those who inject it."""
        with self._lock:
            if not self._released:
                self._listeners.append(listener)
                return
        listener()

    def changer(self) -> Callable[[bytes], bytes]:
        """A function that changes every byte of what it gets, in the same way each time one begins anew."""
        source = random.Random(self.seed)  # noqa: S311 - to be repeated, not to be secret

        def change(data: bytes) -> bytes:
            return bytes(byte ^ source.randrange(1, 256) for byte in data)

        return change
