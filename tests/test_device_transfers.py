"""Transfers from and to GPU memory: over a path that reaches it, or refused before a byte moves (``cuda_kit``)."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

import cuda_kit
from cuda_kit import (
    SIZE,
    TENSORS,
    content,
    install_reaching,
    load,
    moved,
    register,
    register_at,
    see,
    untouchable,
)
from expect import PI, expect
from llm_datadist import BlocksCacheKey, LayerSynchronizer, LLMStatusCode, TransferConfig
from llm_datadist.engine import transfers
from llm_datadist.memory.devices import HOST_ONLY

if TYPE_CHECKING:
    from pathlib import Path

    from peers import Node, Peers

OK, DISABLED = LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_FEATURE_NOT_ENABLED
POOL = '{"memory_size": 16777216, "page_shift": 12}'
FEW, MANY = [3, 1], [0, 1, 2, 3, 4, 5, 6, 7]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The stand-in, compiled."""
    return cuda_kit.build(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def reaching(tmp_path: Path) -> str:
    """A folder with a package that adds a path to GPU memory."""
    install_reaching(tmp_path)
    return str(tmp_path)


def move(node: Node, operation: str, cluster_id: int, name: str, blocks: list[int], model_id: int = 0) -> None:
    """In the child: blocks between cache ``name`` and the peer's cache of that model."""
    key = BlocksCacheKey(cluster_id, model_id)
    getattr(node.manager, operation)(key, node.caches[name], blocks, blocks)


def explain(node: Node, cluster_id: int) -> tuple[dict[str, str], list[str]]:
    """In the child: what became of each path, and those in use."""
    attempts = node.datadist.explain_link(cluster_id).attempts
    return {each.name: each.reason for each in attempts}, [each.name for each in attempts if each.chosen]


def fill(node: Node, name: str, value: int) -> None:
    """In the child."""
    node.extra[name][:] = value


PATHS = ["process_vm", "mapped,tcp", "tcp"]
WITH_REACHING = "process_vm,mapped,reaching,tcp"


@pytest.mark.parametrize("paths", [*PATHS, "process_vm,mapped,tcp", "inprocess"])
def test_without_a_path_to_it_nothing_moves(peers: Peers, library: str, paths: str) -> None:
    """Whichever side is on the GPU. Nobody, not even the kernel, could touch that memory; the link goes on."""
    server = peers.make(1, paths=paths, mem_pool_cfg=POOL)
    process = server.process if paths == "inprocess" else None
    client = peers.make(2, process=process, paths=paths, mem_pool_cfg=POOL)
    for peer in (server, client):
        peer.call(load, library)
    assert client.link(server) == OK
    for peer in (server, client):
        peer.call(register_at, "gpu", peer.call(untouchable), model_id=1)
        peer.call(register, "host", None, peer.cluster_id, 0)
    before = [peer.call(content, "host") for peer in (server, client)]
    for operation in ("pull_blocks", "push_blocks"):
        for name, model_id, sides in (
            ("gpu", 0, "memory of GPU 0 here, host memory there"),
            ("host", 1, "host memory here, memory of GPU 0 there"),
            ("gpu", 1, "memory of GPU 0 here, memory of GPU 0 there"),
        ):
            for blocks in (FEW, MANY):
                refused = expect(DISABLED, lambda: client.call(move, operation, 1, name, blocks, model_id))  # noqa: B023
                assert f"the caches are in {sides}, and no path to the peer reaches GPU memory" in str(refused)
                assert refused.phase == "check"
                assert not refused.retryable
                assert "install NIXL on both sides" in refused.hint
                for path in paths.split(","):
                    assert f"{path}: " in str(refused)
                assert str(refused).count("it reaches host memory only") >= len(paths.split(","))
    assert all((peer.call(content, "host") == old).all() for peer, old in zip((server, client), before, strict=True))
    reasons, used = client.call(explain, 1)
    assert len(used) == 1
    assert all("it reaches host memory only" in reasons[name] for name in used)
    client.call(move, "pull_blocks", 1, "host", MANY)
    assert (client.call(content, "host") == before[0]).all()


def test_host_caches_of_one_pair_do_not_mention_it(peers: Peers) -> None:
    server, client = peers.make(1), peers.make(2)
    for peer in (server, client):
        peer.call(register, "host", None, peer.cluster_id, 0)
    assert client.link(server) == OK
    client.call(move, "pull_blocks", 1, "host", MANY)
    reasons, _ = client.call(explain, 1)
    assert not any("host memory only" in reason for reason in reasons.values())


def test_a_path_that_reaches_it_is_taken(peers: Peers, library: str, reaching: str) -> None:
    """All combinations, in both directions, by few blocks and by many; host memory stays where it is fastest.

    The path is told in which memory each side is, and transfers by few blocks take their short way over it, too.
    """
    server, client = (
        peers.make(number, paths=WITH_REACHING, process=peers.process(functools.partial(see, reaching)))
        for number in (1, 2)
    )
    for peer in (server, client):
        peer.call(load, library)
        for model_id, device in enumerate((None, 0, 1)):
            peer.call(register, f"cache {device}", device, peer.cluster_id, model_id)
    assert client.link(server) == OK
    for here, there in ((client, server), (server, client)):
        for near in (None, 0, 1):
            for model_id, far in enumerate((None, 0, 1)):
                sides = " ".join(
                    f"{'host memory' if device is None else f'memory of GPU {device}'} {where}"
                    for device, where in ((near, "here,"), (far, "there"))
                )
                for operation, blocks in itertools.product(("pull_blocks", "push_blocks"), (FEW, MANY)):
                    ours, theirs = (here, near), (there, far)
                    source, target = (theirs, ours) if operation == "pull_blocks" else (ours, theirs)
                    source[0].call(scribble, f"cache {source[1]}", len(blocks) + 7 * model_id)
                    target[0].call(fill, f"cache {target[1]}", 0)
                    for _ in range(2):  # the second time by the short way
                        here.call(move, operation, there.cluster_id, f"cache {near}", blocks, model_id)
                    expected = np.zeros((TENSORS, 8, SIZE // 8), dtype=np.uint8)
                    sent = source[0].call(content, f"cache {source[1]}").reshape(expected.shape)
                    expected[:, blocks] = sent[:, blocks]
                    assert (target[0].call(content, f"cache {target[1]}").reshape(expected.shape) == expected).all()
                    seen = here.call(moved)
                    assert [each for each in seen if "GPU" in each] == ([] if near is far is None else [sides] * 2)
        reasons, used = here.call(explain, there.cluster_id)
        assert used == ["process_vm", "reaching"]
        assert reasons["reaching"] == "for GPU memory: for tests"
        assert "it reaches host memory only" in reasons["process_vm"]


def test_a_path_may_decline_host_memory(peers: Peers, library: str, reaching: str) -> None:
    """It is tried again when GPU memory takes part; which memory that is, it is told."""
    see_it = functools.partial(see, reaching)
    server, client = (peers.make(number, process=peers.process(see_it), paths="picky,process_vm") for number in (1, 2))
    for peer in (server, client):
        peer.call(load, library)
        peer.call(register, "host", None, peer.cluster_id, 0)
        peer.call(register, "gpu", 1, peer.cluster_id, 1)
    assert client.link(server) == OK
    client.call(move, "pull_blocks", 1, "host", MANY)
    reasons, used = client.call(explain, 1)
    assert used == ["process_vm"]
    assert reasons["picky"] == "not for host memory"
    client.call(move, "pull_blocks", 1, "gpu", MANY)
    assert client.call(explain, 1)[1] == ["process_vm", "picky"]
    client.call(move, "pull_blocks", 1, "host", MANY)
    assert client.call(moved) == ["host memory here, host memory there"] * 2 + [
        "memory of GPU 1 here, host memory there"
    ]


def scribble(node: Node, name: str, seed: int) -> None:
    """In the child: random bytes."""
    memory = node.extra[name]
    memory[:] = np.random.default_rng(seed).integers(0, 256, memory.shape, dtype=np.uint8)


def test_message_mode(peers: Peers, library: str, reaching: str) -> None:
    """A pull whose source is looked up, and a push to raw addresses; those of two memories are refused."""
    server, client = (
        peers.make(
            number,
            paths=WITH_REACHING,
            process=peers.process(functools.partial(see, reaching)),
            enable_remote_cache_accessible=False,
        )
        for number in (1, 2)
    )
    for peer in (server, client):
        peer.call(load, library)
    server.call(register, "gpu", 1, 5, 0)
    server.call(register, "host", None, 6, 1)
    client.call(register, "host", None)
    client.call(register, "mine", 0, 7)
    assert client.link(server) == OK
    client.call(move, "pull_blocks", 1, "host", MANY)
    assert (client.call(content, "host") == server.call(content, "gpu")).all()
    addresses = {name: server.call(addresses_of, name) for name in ("gpu", "host")}
    client.call(push_to, 1, "mine", addresses["gpu"])
    assert (server.call(content, "gpu") == client.call(content, "mine")).all()
    seen = [each for each in client.call(moved) if "GPU" in each]
    assert seen == ["host memory here, memory of GPU 1 there", "memory of GPU 0 here, memory of GPU 1 there"]
    mixed = expect(PI, lambda: client.call(push_to, 1, "mine", [addresses["gpu"][0], addresses["host"][1]]))
    assert "the destination addresses are in host memory and memory of GPU 1: name one of them" in str(mixed)


def addresses_of(node: Node, name: str) -> list[int]:
    """In the child."""
    return list(node.caches[name].tensor_addrs)


class Ready(LayerSynchronizer):
    """Every layer is."""

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        return True


def push_to(node: Node, cluster_id: int, name: str, addresses: list[int]) -> None:
    """In the child: a layer-wise push of all blocks to raw addresses; raises what it failed with."""
    config = TransferConfig(cluster_id, addresses, range(1))
    task = node.manager.transfer_cache_async(node.caches[name], Ready(), [config], MANY, MANY)
    if task.synchronize(20_000) != OK:
        raise task.get_errors()[0]


def test_verified_transfers_do_not_look_into_it(peers: Peers, library: str, reaching: str) -> None:
    pytest.importorskip("xxhash")
    server, client = (
        peers.make(
            number, paths=WITH_REACHING, process=peers.process(functools.partial(see, reaching)), verify_transfers=True
        )
        for number in (1, 2)
    )
    for peer in (server, client):
        peer.call(load, library)
        peer.call(register, "gpu", 0, peer.cluster_id, 0)
    assert client.link(server) == OK
    refused = expect(DISABLED, lambda: client.call(move, "pull_blocks", 1, "gpu", FEW))
    assert "verify_transfers is on, but does not look into GPU memory" in str(refused)
    assert client.call(moved) == []


@pytest.mark.parametrize("paths", PATHS)
def test_a_peer_is_not_believed(peers: Peers, library: str, paths: str) -> None:
    """Who asks for GPU memory as if it were the host's is refused by the table of its owner."""
    server, client = peers.make(1, paths=paths), peers.make(2, paths=paths)
    server.call(load, library)
    server.call(register_at, "gpu", server.call(untouchable), model_id=0)
    client.call(register, "host", None, 3)
    assert client.link(server) == OK
    client.call(forget_devices)
    for operation in ("pull_blocks", "push_blocks"):
        for blocks in (FEW, MANY):
            refused = expect(PI, lambda: client.call(move, operation, 1, "host", blocks))  # noqa: B023
            assert "the cache is in memory of GPU 0, which cannot be reached this way" in str(refused)


def forget_devices(node: Node) -> None:
    """In the child: take all caches for host memory, as an older version would."""
    for name in ("plan_pull", "plan_push"):
        plan = getattr(transfers, name)
        setattr(transfers, name, lambda *args, plan=plan: replace(plan(*args), devices=HOST_ONLY))
