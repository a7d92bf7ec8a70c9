"""What a prefill engine tells a decode engine: the object ``kv_transfer_params["llm_datadist"]``.

It is complete in itself: routers pass ``kv_transfer_params`` on unread, and nobody else has to be asked. 64-bit numbers
are hexadecimal text, because JSON of other languages rounds them.
"""

from __future__ import annotations

import array
import hashlib
import math
from typing import TYPE_CHECKING, Any, Final

import msgspec

from llm_datadist.integrations.vllm.heads import Split

if TYPE_CHECKING:
    from collections.abc import Sequence

VERSION: Final = 1
KEY: Final = "llm_datadist"
"""Where the object is in ``kv_transfer_params``."""


class CacheFacts(msgspec.Struct, frozen=True):
    """One cache of every worker; both sides have theirs in the same order."""

    group: int
    kind: str
    """What the engine calls its KV group."""
    layers: int
    heads: int
    """Of the whole model, as pages are cut; 1 if they are not cut by head."""
    replicas: int
    piece_bytes: int
    piece_tokens: int
    block_tokens: int
    stride: int
    """From one block to the next, in pieces."""

    @property
    def chunks(self) -> int:
        """Pieces of one head in one block."""
        return self.block_tokens // self.piece_tokens


class Facts(msgspec.Struct, frozen=True):
    """What both engines must agree on, and how the owner spreads its heads."""

    engine_version: str
    model: str
    dtype: str
    cache_dtype: str
    page_format: str
    """Attention backends, and what else decides how tokens lie within a page."""
    ranks: int
    caches: tuple[CacheFacts, ...]

    def split(self, cache: int) -> Split:
        """Of the heads of a cache."""
        facts = self.caches[cache]
        return Split(self.ranks, facts.heads, facts.replicas)


class Worker(msgspec.Struct, frozen=True):
    """One rank of an engine, and how to link to it."""

    cluster: str
    host: str
    port: int

    @property
    def cluster_id(self) -> int:
        """As a number."""
        return int(self.cluster, 16)


class Lease(msgspec.Struct, frozen=True):
    """The owner keeps the blocks of a request; each of its workers shows ``generation`` in ``slot`` as long."""

    request: str
    slot: int
    generation: str
    seconds: float

    @property
    def value(self) -> int:
        """What stands in the slot."""
        return int(self.generation, 16)


class Remote(msgspec.Struct, frozen=True, omit_defaults=True):
    """A prefill engine, and, for a pull, where the KV of one request lies in it."""

    version: int
    engine: str
    facts: Facts
    workers: tuple[Worker, ...]
    tokens: int = 0
    blocks: tuple[tuple[int, ...], ...] = ()
    """For each KV group the request's blocks, that of its first token first; 0 where a group keeps none."""
    lease: Lease | None = None
    digest: str = ""
    """Of the tokens whose KV it is."""
    seconds: float = 0.0
    """For a push: how long the engine keeps blocks for which nobody has asked."""


def digest(tokens: Sequence[int]) -> str:
    """What tells prompts apart."""
    return hashlib.blake2b(array.array("q", tokens).tobytes(), digest_size=8).hexdigest()


def encode(remote: Remote) -> dict[str, Any]:
    """As JSON allows it."""
    return dict(msgspec.to_builtins(remote))


def decode(value: object) -> Remote:
    """Read what came with a request.

    Raises:
        ValueError: it is not what :func:`encode` makes, or of another version; the message says what is wrong.
    """
    if isinstance(value, dict) and value.get("version", VERSION) != VERSION:
        text = f"kv_transfer_params[{KEY!r}] has version {value['version']!r}, but this side has {VERSION}"
        raise ValueError(text)
    try:
        remote = msgspec.convert(value, Remote)
        bad = any(not 0 < each.cluster_id < 1 << 64 or not 0 < each.port < 1 << 16 for each in remote.workers)
        bad = bad or not all(_possible(each, remote.facts.ranks) for each in remote.facts.caches)
        bad = bad or not 0 <= remote.seconds < math.inf
        if remote.lease is not None:
            bad = bad or not 0 < remote.lease.value < 1 << 64 or remote.lease.slot < 0
            bad = bad or not 0 < remote.lease.seconds < math.inf
    except (msgspec.ValidationError, ValueError) as error:
        text = f"kv_transfer_params[{KEY!r}] is not what a prefill engine sends: {error}"
        raise ValueError(text) from error
    bad = bad or any(block < 0 for each in remote.blocks for block in each)
    if bad or not 0 < remote.facts.ranks == len(remote.workers):
        text = f"kv_transfer_params[{KEY!r}] is not what a prefill engine sends: a number is out of range"
        raise ValueError(text)
    return remote


def _possible(cache: CacheFacts, ranks: int) -> bool:
    """Whether there can be such a cache: the arithmetic with its numbers works."""
    numbers = (cache.layers, cache.heads, cache.replicas, cache.piece_bytes, cache.piece_tokens, cache.block_tokens)
    if cache.group < 0 or min(*numbers, cache.stride, ranks) < 1:
        return False
    even = ranks % cache.replicas == 0 and cache.heads * cache.replicas % ranks == 0
    return even and cache.block_tokens % cache.piece_tokens == 0


_CACHE_FACTS: Final = {
    "group": "KV group",
    "kind": "kind of the KV group",
    "layers": "number of layers",
    "heads": "number of KV heads",
    "piece_tokens": "tokens that are moved as one (--block-size, unless pages lie in the order of their tokens)",
    "piece_bytes": "bytes that are moved as one",
}


def differences(ours: Facts, theirs: Facts) -> list[str]:
    """Why two engines cannot exchange KV, one line each; empty if they can."""
    found = [
        f"{name.replace('_', ' ')}: {getattr(theirs, name)!r} there, {getattr(ours, name)!r} here"
        for name in ("engine_version", "model", "dtype", "cache_dtype", "page_format")
        if getattr(ours, name) != getattr(theirs, name)
    ]
    if len(ours.caches) != len(theirs.caches):
        found.append(f"caches: {len(theirs.caches)} there, {len(ours.caches)} here")
        return found
    for number, (mine, other) in enumerate(zip(ours.caches, theirs.caches, strict=True)):
        found += [
            f"{text} of cache {number} ({mine.kind}): {getattr(other, name)} there, {getattr(mine, name)} here"
            for name, text in _CACHE_FACTS.items()
            if getattr(mine, name) != getattr(other, name)
        ]
    return found
