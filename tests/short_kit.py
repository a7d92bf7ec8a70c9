"""Block transfers between peers, tried both ways, and where they went."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from llm_datadist import BlocksCacheKey, LLMException, LLMStatusCode
from llm_datadist.status import EXCEPTIONS
from peers import GUARD, POISON, Node, Peer

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from peers import Peers

OK = LLMStatusCode.LLM_SUCCESS
METHODS = ("pull_blocks", "push_blocks")
PATHS = ("inprocess", "process_vm", "tcp")
TENSORS = 4
BLOCKS = 96
BLOCK_BYTES = 80
SOURCE, TARGET = "source", "target"
MODELS = {SOURCE: 0, TARGET: 1}
"""Each peer has both caches: others pull from ``source`` and push to ``target``."""


class Outcome(NamedTuple):
    """What became of one call."""

    error: str | None
    """Name of the exception's type."""
    status: LLMStatusCode | None
    text: str
    short: bool
    """Whether it went the short way to its end."""

    @property
    def failure(self) -> tuple[str | None, LLMStatusCode | None, str]:
        """What the caller sees of it."""
        return self.error, self.status, self.text


def watch(node: Node) -> None:
    """In the child: take notes of which transfers go the short way, and let tests forbid it."""
    way = node.manager._engine.short
    for method in ("pull", "push"):
        real = getattr(way, method)

        def noted(*args: Any, real: Any = real) -> bool:
            if node.extra["forbid"]:
                return False
            node.extra["short"] = real(*args)
            return bool(node.extra["short"])

        setattr(way, method, noted)
    node.extra["forbid"] = False


def attempt(
    node: Node,
    method: str,
    cluster_id: int,
    *args: Any,
    cache: str | None = None,
    model_id: int | None = None,
    forbid: bool = False,
    **kwargs: Any,
) -> Outcome:
    """In the child: one ``pull_blocks`` or ``push_blocks``, by default between the caches that are meant for it.

    ``forbid`` lets it go the long way, as a first one does.
    """
    node.extra |= {"forbid": forbid, "short": False}
    theirs, ours = sides_of(method)
    key = BlocksCacheKey(cluster_id, MODELS[theirs] if model_id is None else model_id)
    error: Exception | None = None
    try:
        getattr(node.manager, method)(key, node.caches[cache or ours], *args, **kwargs)
    except (LLMException, TypeError, ValueError, AttributeError) as caught:
        error = caught
    node.extra["forbid"] = False
    known = isinstance(error, LLMException)
    assert not known or type(error) is EXCEPTIONS[error.status_code]
    return Outcome(
        "LLMException" if known else type(error).__name__ if error else None,
        error.status_code if known else None,
        str(error or ""),
        bool(node.extra["short"]),
    )


def sides_of(method: str) -> tuple[str, str]:
    """Names of the peer's cache and of the own one."""
    return (SOURCE, TARGET) if method == "pull_blocks" else (TARGET, SOURCE)


def wipe(node: Node, name: str) -> None:
    """In the child."""
    for tensor in node.arenas[name].memory:
        tensor[:] = POISON


def forget(node: Node, name: str) -> None:
    """In the child: forget a cache but keep its name, its handle and its memory."""
    node.manager.unregister_cache(node.caches[name].cache_id)


def with_caches(*peers: Peer) -> None:
    """Both caches for each peer, with bytes of its own."""
    for peer in peers:
        peer.call(watch)
        for name, model_id in MODELS.items():
            seed = 10 * peer.cluster_id + model_id
            peer.call("register_blocks", name, TENSORS, BLOCKS, BLOCK_BYTES, model_id=model_id, seed=seed)


def warm(here: Peer, there: Peer) -> None:
    """From now on small transfers of ``here`` go the short way."""
    for method in METHODS:
        for expected in (False, True):
            outcome = here.call(attempt, method, there.cluster_id, [0], [0])
            assert outcome == Outcome(None, None, "", expected)


def make_pair(peers: Peers, path: str, **properties: object) -> tuple[Peer, Peer]:
    """(client, server), linked by the client and warm in both directions."""
    properties["paths"] = path
    server = peers.make(2, **properties)
    process = server.process if path == "inprocess" else None
    client = peers.make(1, process=process, listen=False, **properties)
    with_caches(client, server)
    assert client.link(server) == OK
    warm(client, server)
    warm(server, client)
    return client, server


def blocks_of(peer: Peer, name: str) -> list[np.ndarray]:
    """The tensors of a cache by block; its guards must be as they were."""
    memory = peer.memory(name)
    for tensor in memory:
        assert (tensor[:GUARD] == POISON).all()
        assert (tensor[-GUARD:] == POISON).all()
    return [tensor[GUARD:-GUARD].reshape(-1, BLOCK_BYTES) for tensor in memory]


def moved(
    source: list[np.ndarray], target: list[np.ndarray], src: Sequence[int], dst: Sequence[int]
) -> list[np.ndarray]:
    """``target`` after blocks of ``source`` have been copied in list order."""
    result = [tensor.copy() for tensor in target]
    for here, there in zip(source, result, strict=True):
        for one, other in zip(src, dst, strict=True):
            there[other] = here[one]
    return result


def same(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    """Whether two caches hold the same bytes."""
    return len(one) == len(other) and all((a == b).all() for a, b in zip(one, other, strict=True))
