"""Which pieces of which worker a worker of the other engine reads or writes."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import numpy as np

from llm_datadist.integrations.vllm.heads import sources
from llm_datadist.integrations.vllm.pages import piece_ids

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llm_datadist.integrations.vllm.heads import Source
    from llm_datadist.integrations.vllm.params import CacheFacts, Facts


@functools.lru_cache(maxsize=256)
def routes(ours: Facts, rank: int, theirs: Facts) -> dict[int, tuple[tuple[int, Source], ...]]:
    """For each rank of the other engine that a rank of ours reads from: which heads of which cache."""
    found: dict[int, list[tuple[int, Source]]] = {}
    for cache in range(len(ours.caches)):
        for source in sources(ours.split(cache), rank, theirs.split(cache)):
            found.setdefault(source.rank, []).append((cache, source))
    return {rank: tuple(parts) for rank, parts in sorted(found.items())}


@functools.lru_cache(maxsize=256)
def reader_counts(ours: Facts, theirs: Facts) -> tuple[int, ...]:
    """For each rank of the other engine, how many ranks of ours read from it."""
    reading = [routes(ours, rank, theirs) for rank in range(ours.ranks)]
    return tuple(sum(rank in each for each in reading) for rank in range(theirs.ranks))


@dataclasses.dataclass(frozen=True)
class Pieces:
    """Block ids for the transfer library: piece ``theirs[i]`` belongs at ``ours[i]``, in every layer of the cache."""

    ours: list[int]
    theirs: list[int]


def pieces(
    ours: CacheFacts, theirs: CacheFacts, source: Source, span: range, blocks: tuple[Sequence[int], Sequence[int]]
) -> Pieces:
    """The pieces of a span of tokens that our side wants.

    Args:
        ours: of the cache.
        theirs: of the same cache on the other side.
        source: which heads.
        span: the tokens, counted from the request's first one.
        blocks: our and their blocks of the request, from that of its first token; 0 at ours: not wanted.

    Raises:
        ValueError: the other side does not have what is wanted.
    """
    mine, other = (np.asarray(each, np.int64) for each in blocks)
    chunks = np.arange(span.start // ours.piece_tokens, -(-span.stop // ours.piece_tokens))
    places = chunks // ours.chunks
    within = places < len(mine)
    chunks = chunks[within][mine[places[within]] != 0]
    places = chunks // theirs.chunks
    if chunks.size and (places[-1] >= len(other) or not other[places].all()):
        held = int((other != 0).sum())
        text = f"tokens {span.start} to {span.stop} are wanted, but the other side has only {held} of their blocks"
        raise ValueError(text)
    return Pieces(
        piece_ids(mine, chunks, source.ours, ours.chunks, ours.stride),
        piece_ids(other, chunks, source.theirs, theirs.chunks, theirs.stride),
    )
