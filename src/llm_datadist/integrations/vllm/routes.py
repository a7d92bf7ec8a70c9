"""Which pieces of which worker a worker of the other engine reads or writes."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Final

import numpy as np

from llm_datadist.integrations.vllm.heads import sources
from llm_datadist.integrations.vllm.pages import piece_ids

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llm_datadist.integrations.vllm.heads import Source
    from llm_datadist.integrations.vllm.params import CacheFacts, Facts


_FEW: Final = 16
"""Chunks up to which they are looked at one by one."""


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
    chunks = range(span.start // ours.piece_tokens, -(-span.stop // ours.piece_tokens))
    make = _few if len(chunks) <= _FEW else _many
    found = make(ours, theirs, source, chunks, blocks)
    if found is None:
        held = sum(1 for block in blocks[1] if block)
        text = f"tokens {span.start} to {span.stop} are wanted, but the other side has only {held} of their blocks"
        raise ValueError(text)
    return found


def _few(
    ours: CacheFacts, theirs: CacheFacts, source: Source, chunks: range, blocks: tuple[Sequence[int], Sequence[int]]
) -> Pieces | None:
    """As ``_many``, in plain Python: for one chunk 3 us instead of 65, for a dozen the same, less with cold caches."""
    mine, other = blocks
    found = Pieces([], [])
    for chunk in chunks:
        place, within = divmod(chunk, ours.chunks)
        if place >= len(mine) or not mine[place]:
            continue
        there, part = divmod(chunk, theirs.chunks)
        if there >= len(other) or not other[there]:
            return None
        first, begin = mine[place] * ours.stride + within, other[there] * theirs.stride + part
        found.ours.extend([first + head * ours.chunks for head in source.ours])
        found.theirs.extend([begin + head * theirs.chunks for head in source.theirs])
    return found


def _many(
    ours: CacheFacts, theirs: CacheFacts, source: Source, wanted: range, blocks: tuple[Sequence[int], Sequence[int]]
) -> Pieces | None:
    """The pieces of these chunks; None if the other side does not have one of them."""
    mine, other = (np.asarray(each, np.int64) for each in blocks)
    chunks = np.arange(wanted.start, wanted.stop)
    places = chunks // ours.chunks
    within = places < len(mine)
    chunks = chunks[within][mine[places[within]] != 0]
    places = chunks // theirs.chunks
    if chunks.size and (places[-1] >= len(other) or not other[places].all()):
        return None
    return Pieces(
        piece_ids(mine, chunks, source.ours, ours.chunks, ours.stride),
        piece_ids(other, chunks, source.theirs, theirs.chunks, theirs.stride),
    )
