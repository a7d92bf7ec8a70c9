"""What comes with a request: clients can send anything."""

from __future__ import annotations

from typing import Any

import pytest

from llm_datadist.integrations.vllm.params import VERSION, CacheFacts, Facts, Lease, Remote, Worker, decode, encode

CACHE = CacheFacts(0, "full", 2, 3, 1, 8, 16, 16, 3)
FACTS = Facts("1", "m", "d", "c", "f", 1, (CACHE,))
GOOD = Remote(VERSION, "P", FACTS, (Worker("a", "127.0.0.1", 1),), 16, ((1,),), Lease("r", 1, "ab", 30.0))


def changed(path: str, value: Any) -> dict[str, Any]:
    made = encode(GOOD)
    at: Any = made
    *way, last = path.split(".")
    for name in way:
        at = at[int(name) if name.isdigit() else name]
    at[last] = value
    return made


def test_what_is_encoded_is_decoded() -> None:
    assert decode(encode(GOOD)) == GOOD


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("facts.ranks", 0),
        ("facts.ranks", 2),
        ("facts.caches.0.replicas", 0),
        ("facts.caches.0.replicas", 2),
        ("facts.caches.0.heads", 0),
        ("facts.caches.0.piece_tokens", 0),
        ("facts.caches.0.piece_tokens", 5),
        ("facts.caches.0.block_tokens", -16),
        ("facts.caches.0.stride", 0),
        ("facts.caches.0.group", -1),
        ("blocks", [[-1]]),
        ("lease.seconds", 0),
        ("lease.seconds", float("nan")),
        ("lease.seconds", float("inf")),
        ("lease.slot", -1),
        ("lease.generation", "0"),
        ("workers", []),
        ("workers", [{"cluster": "0", "host": "h", "port": 1}]),
        ("workers", [{"cluster": "1", "host": "h", "port": 0}]),
        ("workers", [{"cluster": "x", "host": "h", "port": 1}]),
    ],
)
def test_numbers_that_cannot_be_are_refused(path: str, value: Any) -> None:
    with pytest.raises(ValueError, match="is not what a prefill engine sends"):
        decode(changed(path, value))


def test_ranks_without_heads_are_refused() -> None:
    """One for each of a number that a client makes up."""
    made = changed("facts.ranks", 6)
    made["workers"] *= 6
    with pytest.raises(ValueError, match="a number is out of range"):
        decode(made)
