"""A deterministic, structure-aware mutator: the same seed gives the same inputs, on every machine."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

LONGEST: Final = 1 << 16
_EDGES: Final = (0, 1, 2, 127, 128, 255, 256, 2**15, 2**16 - 1, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53)
_LARGE: Final = (2**62 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
_VALUES: Final[tuple[Any, ...]] = (
    None,
    True,
    False,
    -1,
    -(2**31),
    -(2**63),
    0.5,
    float("nan"),
    float("inf"),
    "",
    "x" * 200,
    "\ud7ff\u0000",
    b"",
    bytes(16),
    bytes(300),
    [],
    {},
    [[]],
    {"": None},
)


class Mutator:
    """Makes inputs out of examples."""

    def __init__(self, examples: Sequence[bytes], form: str, seed: int) -> None:
        self._examples = list(examples)
        self._rng = random.Random(seed)
        self._form = form
        self._bytes: tuple[Callable[[bytearray], None], ...] = (
            self._flip,
            self._set,
            self._number,
            self._insert,
            self._delete,
            self._repeat,
            self._splice,
        )

    def __iter__(self) -> Iterator[bytes]:
        """Inputs without end."""
        while True:
            yield self.one()

    def one(self) -> bytes:
        """The next input: an example, changed in its structure, in its bytes, or in both."""
        raw = self._rng.choice(self._examples)
        if self._form != "bytes" and self._rng.random() < 0.6:  # noqa: PLR2004
            raw = self._restructured(raw)
            if self._rng.random() < 0.7:  # noqa: PLR2004
                return raw[:LONGEST]
        data = bytearray(raw)
        for _ in range(self._rng.choice((0, 1, 1, 1, 2, 3, 8))):
            self._rng.choice(self._bytes)(data)
        return bytes(data[:LONGEST])

    # Structure

    def _restructured(self, raw: bytes) -> bytes:
        try:
            tree = msgspec.msgpack.decode(raw) if self._form == "msgpack" else json.loads(raw)
        except (msgspec.MsgspecError, ValueError):
            return raw
        for _ in range(self._rng.choice((1, 1, 2, 4))):
            tree = self._changed(tree)
        try:
            return msgspec.msgpack.encode(tree) if self._form == "msgpack" else json.dumps(tree, default=str).encode()
        except (msgspec.MsgspecError, ValueError, OverflowError, UnicodeError, RecursionError):
            return raw

    def _changed(self, tree: Any) -> Any:
        """One place in a tree, changed."""
        if isinstance(tree, dict) and tree and self._rng.random() < 0.85:  # noqa: PLR2004
            tree = dict(tree)
            key = self._rng.choice(list(tree))
            what = self._rng.random()
            if what < 0.1:  # noqa: PLR2004
                del tree[key]
            elif what < 0.15:  # noqa: PLR2004
                tree[self._rng.choice(("type", "body", "id", "x" * 300))] = tree.pop(key)
            else:
                tree[key] = self._changed(tree[key])
            return tree
        if isinstance(tree, list) and tree and self._rng.random() < 0.7:  # noqa: PLR2004
            at = self._rng.randrange(len(tree))
            if self._rng.random() < 0.3:  # noqa: PLR2004
                return tree[:at] + [tree[at]] * self._rng.choice((0, 2, 9, 100)) + tree[at + 1 :]
            return [*tree[:at], self._changed(tree[at]), *tree[at + 1 :]]
        return self._value(tree)

    def _value(self, old: Any) -> Any:
        what = self._rng.random()
        if what < 0.5:  # noqa: PLR2004
            return self._rng.choice((*_EDGES, *_LARGE))
        if what < 0.9:  # noqa: PLR2004
            return self._rng.choice(_VALUES)
        for _ in range(self._rng.choice((1, 3, 50, 2000))):
            old = [old]
        return old

    # Bytes

    def _at(self, data: bytearray) -> int:
        return self._rng.randrange(len(data) + 1)

    def _flip(self, data: bytearray) -> None:
        if data:
            data[self._rng.randrange(len(data))] ^= 1 << self._rng.randrange(8)

    def _set(self, data: bytearray) -> None:
        if data:
            data[self._rng.randrange(len(data))] = self._rng.choice((0, 1, 0x7F, 0x80, 0xC0, 0xDC, 0xDF, 0xFF))

    def _number(self, data: bytearray) -> None:
        size = self._rng.choice((1, 2, 4, 8))
        number = self._rng.choice((*_EDGES, *_LARGE)) + self._rng.choice((-1, 0, 1))
        at = self._rng.choice((self._at(data), self._at(data) // 8 * 8))
        data[at : at + size] = (number % (1 << 8 * size)).to_bytes(size, self._rng.choice(("little", "big")))

    def _insert(self, data: bytearray) -> None:
        at = self._at(data)
        data[at:at] = self._rng.randbytes(self._rng.choice((1, 2, 4, 16, 300)))

    def _delete(self, data: bytearray) -> None:
        at = self._at(data)
        del data[at : at + self._rng.choice((1, 2, 4, 8, 32, 1 << 20))]

    def _repeat(self, data: bytearray) -> None:
        at, size = self._at(data), self._rng.choice((1, 4, 32))
        data[at:at] = bytes(data[at : at + size]) * self._rng.choice((1, 2, 30))

    def _splice(self, data: bytearray) -> None:
        other = self._rng.choice(self._examples)
        data[self._at(data) :] = other[self._rng.randrange(len(other) + 1) :]
