"""Which ranks of two engines hold which KV heads, when their tensor-parallel sizes may differ."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Split:
    """How an engine spreads its KV heads over its ranks: evenly, each head ``replicas`` times in consecutive ranks."""

    ranks: int
    heads: int
    """Of the whole model."""
    replicas: int = 1

    def of(self, rank: int) -> range:
        """The heads of a rank."""
        share = self.heads * self.replicas // self.ranks
        first = rank // self.replicas * share
        return range(first, first + share)


@dataclasses.dataclass(frozen=True)
class Source:
    """What a rank reads from one rank of the other engine: head ``theirs[i]`` of its pages becomes ``ours[i]``."""

    rank: int
    ours: tuple[int, ...]
    theirs: tuple[int, ...]


def sources(reader: Split, rank: int, owner: Split) -> list[Source]:
    """From whom a rank of ``reader`` gets its heads, each from one rank; readers spread over those that hold it."""
    found: dict[int, list[tuple[int, int]]] = {}
    mine = reader.of(rank)
    for ours, head in enumerate(mine):
        holders = [each for each in range(owner.ranks) if head in owner.of(each)]
        holder = holders[rank % len(holders)]
        found.setdefault(holder, []).append((ours, head - owner.of(holder).start))
    return [
        Source(holder, tuple(ours for ours, _ in pairs), tuple(theirs for _, theirs in pairs))
        for holder, pairs in sorted(found.items())
    ]
