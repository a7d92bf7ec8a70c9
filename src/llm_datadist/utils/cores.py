"""The core on which a thread runs, and is to run.

Threads that wake each other often stay on one core while others are idle: right after all cores were busy, as a model's
computing keeps them, Linux may not look for an idle one when it wakes a thread (SIS_UTIL, ``select_idle_cpu``).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

current: Callable[[], int] = ctypes.PyDLL(None).sched_getcpu
"""The core that the calling thread runs on. Takes less than a microsecond."""


@contextlib.contextmanager
def bound(within: Callable[[set[int]], set[int]]) -> Iterator[None]:
    """Have the calling thread run on those of its cores alone that ``within`` picks; none: on all, as before.

    Takes some 30 us. Only for threads of this library, whose cores nobody else sets.
    """
    permitted: set[int] | None = None
    with contextlib.suppress(OSError):  # a sandbox that does not permit it: everything works without
        permitted = os.sched_getaffinity(0)
        if wanted := within(permitted) & permitted:
            os.sched_setaffinity(0, wanted)
        else:
            permitted = None
    try:
        yield
    finally:
        if permitted is not None:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, permitted)


class Apart:
    """Threads that work at the same time, each on a core of its own as far as there are enough."""

    def __init__(self) -> None:
        """The calling thread is one of them."""
        self._taken = {current()}
        self._lock = threading.Lock()

    def run(self, work: Callable[[], object]) -> None:
        """Do ``work``; the calling thread is another one."""
        with self._lock:
            if current() in self._taken:
                with bound(lambda permitted: permitted - self._taken):
                    pass  # it has been moved, and may be moved again
            self._taken.add(current())
        work()
