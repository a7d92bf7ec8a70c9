"""Huge pages under registered memory, in the background: what registering had no time for.

In a virtual machine that has not used most of its memory yet, the host provides each new huge page while it is filled,
ten times as slowly as later. Waiting for that would hold up the caller for seconds a GiB, and doing without would leave
copies at half their speed for as long as the cache lives.
"""

from __future__ import annotations

import functools
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from llm_datadist.memory import huge_pages
from llm_datadist.memory.huge_pages import Outcome
from llm_datadist.net.workers import Workers

if TYPE_CHECKING:
    from llm_datadist.engine.catalogue import CacheEntry, Catalogue
    from llm_datadist.memory.huge_pages import Advice

_PIECE: Final = 8 << 20
"""Bytes that are moved at once: whoever takes the memory back waits for that, some 40 ms where it is slow."""


class Collapser:
    """Goes on with the huge pages of caches, one after the other, with half of a core at most. Thread-safe."""

    def __init__(self, name: str, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._workers = Workers(f"{name}-collapse", 1)
        self._closed = threading.Event()
        self._moving = threading.Lock()

    def follow(self, entry: CacheEntry, advice: Advice | None) -> None:
        """Enter what became of a cache's huge pages, and go on if the time was over. Does not block."""
        entry.advice = advice
        if advice is not None and advice.outcome is Outcome.OUT_OF_TIME:
            entry.advice = replace(advice, outcome=Outcome.UNDER_WAY)

            def dropped() -> None:
                entry.advice = advice

            self._workers.run(functools.partial(self._go_on, entry, advice), dropped)

    def _go_on(self, entry: CacheEntry, advice: Advice) -> None:
        size = entry.geometry.tensor_size
        ranges = [(int(addr), int(addr) + size) for addr in entry.addrs]
        huge, outcome = 0, Outcome.DONE
        for piece in huge_pages.pieces(ranges, _PIECE):
            began = time.monotonic()
            with self._moving:
                # Held as by a transfer: the memory is not given back to its owner meanwhile.
                if self._closed.is_set() or self._catalogue.pin(entry.cache_id) is None:
                    return
                try:
                    done, problem = huge_pages.collapse(piece)
                finally:
                    self._catalogue.unpin(entry)
            huge += done
            outcome = outcome if problem is Outcome.DONE else problem
            if problem in huge_pages.FINAL:
                break
            self._closed.wait(time.monotonic() - began)
        entry.advice = replace(advice, huge=huge, outcome=outcome)

    def close(self) -> None:
        """End it; when this returns, nothing is moved any more. Idempotent."""
        self._closed.set()
        self._workers.close()
        with self._moving:
            pass
