"""How soon a thread of this process gets the interpreter while another one runs Python code.

CPython lets a thread go on for 5 ms (``sys.getswitchinterval()``) before it makes it give way. A transfer needs the
interpreter some ten times: beside a main thread that computes in Python a pull of 5 ms takes 50; with 0.5 ms it takes
12.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class _Interval:
    """The one interval of the process, in microseconds, and who wants it to be how short."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may end an engine
        self._wanted: dict[object, int] = {}
        self._before = 0
        self._set_to = 0
        os.register_at_fork(after_in_child=self._forget)

    def shorten(self, microseconds: int) -> Callable[[], None]:
        owner = object()
        with self._lock:
            if not self._wanted:
                self._before = self._set_to = _now()
            self._wanted[owner] = microseconds or self._before
            self._apply()
        return lambda: self._release(owner)

    def _release(self, owner: object) -> None:
        with self._lock:
            if self._wanted.pop(owner, None) is not None:
                self._apply()

    def _apply(self) -> None:
        if _now() != self._set_to:
            return  # somebody else has set it meanwhile: it is theirs
        self._set_to = min([self._before, *self._wanted.values()])
        sys.setswitchinterval((self._set_to + 0.5) / 1e6)  # which cuts off what is less than a microsecond

    def _forget(self) -> None:
        """No engine works in a child."""
        self._lock = threading.RLock()
        if self._wanted:
            self._wanted.clear()
            self._apply()


def _now() -> int:
    return round(sys.getswitchinterval() * 1e6)


_interval = _Interval()


def shorten(microseconds: int) -> Callable[[], None]:
    """Let threads wait at most so long for the interpreter, until the returned function is called; it is idempotent.

    The shortest of all that is wanted counts; 0 wants nothing. It is never made longer than it was, and left alone once
    somebody else has set it.
    """
    return _interval.shorten(microseconds)
