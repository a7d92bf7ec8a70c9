"""Answers what peers ask over their control connections. Handlers run on the loop's thread and do not block."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import msgspec

from llm_datadist.engine.catalogue import info_of
from llm_datadist.memory.devices import memory_name
from llm_datadist.status import LLMStatusCode
from llm_datadist.wire import messages

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm_datadist.engine.catalogue import CacheEntry, Catalogue
    from llm_datadist.engine.requests import RequestKey
    from llm_datadist.memory.regions import RegionTable
    from llm_datadist.net.loop import Loop, Timer

_HOLD_GRACE_S: Final = 5.0
_MAX_HOLDS: Final = 4096


@dataclass(slots=True)
class _Hold:
    entry: CacheEntry
    key: RequestKey | None
    timer: Timer


@dataclass(slots=True)
class Holds:
    """The caches that one peer holds for its running transfers."""

    by_id: dict[int, _Hold] = field(default_factory=dict)


class CacheService:
    """Look-ups of this engine's caches for its peers."""

    def __init__(
        self, catalogue: Catalogue, regions: RegionTable, loop: Loop, release: Callable[[CacheEntry], object]
    ) -> None:
        self._catalogue = catalogue
        self._regions = regions
        self._loop = loop
        self._release = release
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self.num_holds: int = 0
        """Of all peers."""

    def fetch(self) -> messages.Catalogue:
        """The published catalogue."""
        return self._catalogue.snapshot()

    def lookup(self, holds: Holds, ask: messages.Lookup) -> messages.Body:
        """Find a cache and hold it for the asker."""
        if len(holds.by_id) >= _MAX_HOLDS:
            return refuse(LLMStatusCode.LLM_LINK_BUSY, f"{_MAX_HOLDS} caches are held for this peer already")
        try:
            entry, index, key = self._catalogue.find(ask.key)
        except KeyError:
            return refuse(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, f"there is no cache for {describe(ask.key)}")
        hold = next(self._ids)
        # If the asker is stopped for so long that it cannot tell, its hold ends; it finds out that the region is gone.
        timer = self._loop.call_later(
            ask.timeout_ms / 1000 + _HOLD_GRACE_S,
            lambda: self.finish(holds, messages.Finish(hold=hold, success=False)),
        )
        with self._lock:
            holds.by_id[hold] = _Hold(entry, key, timer)
            self.num_holds += 1
        return messages.Found(hold=hold, cache=info_of(entry), batch_index=index)

    def finish(self, holds: Holds, end: messages.Finish) -> messages.Body:
        """End a hold; after success the pulled key may go, and with it the cache."""
        with self._lock:
            hold = holds.by_id.pop(end.hold, None)
            self.num_holds -= hold is not None
        if hold is None:
            return refuse(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, "the cache was held too long and has been released")
        hold.timer.cancel()
        doomed = None
        if end.success and hold.key is not None:
            tensors = range(end.start, min(end.stop, hold.entry.spec.num_tensors))
            doomed = self._catalogue.consume(hold.entry, hold.key, tensors)
        self._catalogue.unpin(hold.entry)
        if doomed is not None:
            self._release(doomed)
        return messages.Ok()

    def drop(self, holds: Holds) -> None:
        """The peer is gone: end all its holds."""
        for hold in list(holds.by_id):
            self.finish(holds, messages.Finish(hold=hold, success=False))

    def resolve(self, ask: messages.Resolve) -> messages.Body:
        """Which regions hold these addresses."""
        regions, offsets = [], []
        for address in ask.addresses:
            found = self._regions.find(address, ask.size)
            if found is None:
                return refuse(
                    LLMStatusCode.LLM_PARAM_INVALID,
                    f"the {ask.size} bytes at destination address {address:#x} are not in one registered tensor",
                )
            regions.append(found[0])
            offsets.append(found[1])
        devices = {self._regions.view.device(region) for region in regions}
        if len(devices) > 1:
            names = " and ".join(sorted(map(memory_name, devices)))
            return refuse(
                LLMStatusCode.LLM_PARAM_INVALID, f"the destination addresses are in {names}: name one of them"
            )
        return messages.Resolved(regions=regions, offsets=offsets, device=devices.pop() if devices else None)


def refuse(code: LLMStatusCode, reason: str) -> messages.Refuse:
    """A refusal whose reason is cut to what a message may carry."""
    return messages.Refuse(code=int(code) & 0xFFFFFFFF, reason=reason[:4000])


def describe(key: messages.KeyRef) -> str:
    """A key for people."""
    given = {name: value for name, value in msgspec.structs.asdict(key).items() if value not in (None, False)}
    return ", ".join(f"{name} {value}" for name, value in given.items())
