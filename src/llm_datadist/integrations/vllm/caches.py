"""Pages as caches of the transfer library."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final

from llm_datadist import BlocksCacheKey, CacheDesc, DataType
from llm_datadist.integrations.vllm.routes import reader_counts, routes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llm_datadist import Cache
    from llm_datadist.cache_manager import CacheManager
    from llm_datadist.integrations.vllm.heads import Source
    from llm_datadist.integrations.vllm.pages import Pages
    from llm_datadist.integrations.vllm.params import Facts
    from llm_datadist.integrations.vllm.peers import Peers

LEASES_MODEL: Final = 0
"""Model id of the slots of leases; cache i of the KV has i + 1."""


@dataclasses.dataclass(frozen=True)
class Registered:
    """One cache, registered."""

    pages: Pages
    cache: Cache


@dataclasses.dataclass(frozen=True)
class Side:
    """This worker's side of all transfers."""

    manager: CacheManager
    caches: Sequence[Registered]
    facts: Facts
    """Of its engine."""
    rank: int
    """In it."""
    peers: Peers

    def routes(self, theirs: Facts) -> dict[int, tuple[tuple[int, Source], ...]]:
        """For each rank of another engine from which this one gets pieces: which heads of which cache."""
        return routes(self.facts, self.rank, theirs)

    def reader_counts(self, theirs: Facts) -> tuple[int, ...]:
        """For each rank of another engine, how many ranks of this one get pieces from it."""
        return reader_counts(self.facts, theirs)


def register(manager: CacheManager, found: Sequence[Pages], cluster_id: int) -> list[Registered]:
    """Make the memory known where it is."""
    made = []
    for number, pages in enumerate(found):
        desc = CacheDesc(len(pages.addresses), [pages.shape.pieces, pages.shape.piece_bytes], DataType.DT_UINT8)
        key = BlocksCacheKey(cluster_id, LEASES_MODEL + 1 + number)
        cache = manager.register_blocks_cache(desc, list(pages.addresses), key, remote_accessible=True)
        made.append(Registered(pages, cache))
    return made
