"""Where the pages of a KV cache lie, cut into the pieces that a transfer moves.

A page is what a block id names in one layer. It is cut into ``heads`` slices (so that ranks with different numbers of
heads can exchange them), and each slice into ``chunks`` by tokens where the page format allows it (so that engines with
different block sizes can). A piece is the unit of the transfer library's block ids; adjacent pieces are moved together,
so small pieces cost little. Numbers only: nothing here knows tensors or engines.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeAlias

    import numpy.typing as npt

    Ids: TypeAlias = npt.NDArray[np.int64]

CHUNK_TOKENS: Final = 16
"""Token-major pages are cut into chunks of this many tokens, or fewer if the block size asks for it."""


@dataclasses.dataclass(frozen=True)
class View:
    """One layer's tensor: addresses in bytes."""

    layer: str
    address: int
    blocks: int
    page_bytes: int
    """What one block occupies, from its first to its last byte."""
    stride: int
    """From one block to the next."""
    heads: int
    """Equal contiguous slices of a page, one for each KV head; 1 if a page cannot be cut by head."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """How the layers of one cache are cut; equal for all of them."""

    group: int
    """Number of the KV group whose block ids the pages have."""
    piece_bytes: int
    heads: int
    chunks: int
    tokens: int
    """Of one block."""
    blocks: int
    stride: int
    """In pieces."""

    @property
    def piece_tokens(self) -> int:
        """Tokens of one piece."""
        return self.tokens // self.chunks

    @property
    def pieces(self) -> int:
        """From the first piece of the first block to the last piece of the last one."""
        return (self.blocks - 1) * self.stride + self.heads * self.chunks


@dataclasses.dataclass(frozen=True)
class Pages:
    """One cache: the layers of a group whose pages have the same shape, each storage once."""

    shape: Shape
    addresses: tuple[int, ...]
    layers: dict[str, int]
    """Index of each layer in ``addresses``; layers that share their storage have the same one."""


def arrange(views: Sequence[View], group: int, tokens: int, *, token_major: bool) -> list[Pages]:
    """The caches of a group's layers, in a fixed order that both sides arrive at.

    Args:
        views: its layers, in the engine's order.
        group: its number.
        tokens: of one block.
        token_major: whether the bytes of a page, or of a head's slice of it, lie in the order of the tokens.
    """
    alike: dict[Shape, list[View]] = {}
    for view in views:
        alike.setdefault(_cut(view, group, tokens, token_major=token_major), []).append(view)
    return [_cache(shape, members) for shape, members in alike.items()]


def _cut(view: View, group: int, tokens: int, *, token_major: bool) -> Shape:
    head_bytes = view.page_bytes // view.heads
    chunks = tokens // math.gcd(tokens, CHUNK_TOKENS) if token_major else 1
    piece = head_bytes // chunks
    if head_bytes * view.heads != view.page_bytes or piece * chunks != head_bytes:
        what = (
            f"layer {view.layer}: a page of {view.page_bytes} bytes is not {view.heads} heads of {chunks} equal chunks"
        )
        raise ValueError(what)
    if view.stride % piece:
        what = f"layer {view.layer}: blocks are {view.stride} bytes apart, no multiple of a piece of {piece} bytes"
        raise ValueError(what)
    return Shape(group, piece, view.heads, chunks, tokens, view.blocks, view.stride // piece)


def _cache(shape: Shape, views: list[View]) -> Pages:
    addresses = list(dict.fromkeys(view.address for view in views))
    return Pages(shape, tuple(addresses), {view.layer: addresses.index(view.address) for view in views})


def piece_ids(block_ids: Ids, chunks: Ids, heads: Sequence[int], per_block: int, stride: int) -> list[int]:
    """The pieces that hold some heads of a request's tokens.

    Args:
        block_ids: the request's blocks, that of its first token first.
        chunks: which chunks of the request, counted from its first token.
        heads: which heads of the rank, in the order in which the other side has them.
        per_block: chunks of one block.
        stride: from one block to the next, in pieces.
    """
    first = block_ids[chunks // per_block] * stride + chunks % per_block
    slices = np.asarray(heads, np.int64) * per_block
    ids: list[int] = (first[:, None] + slices[None, :]).ravel().tolist()
    return ids
