"""GPU memory over NIXL, as far as that can be shown without a GPU.

A stand-in for the CUDA driver declares ordinary memory to be that of a GPU (``cuda_kit``), so NIXL is told that it is
host memory, too: its VRAM descriptors need a GPU. All else is real: which path is taken, keys, descriptors, bytes.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import pytest

import cuda_kit
from cuda_kit import BLOCKS, SIZE, TENSORS, content, load, register
from llm_datadist import LLMStatusCode
from llm_datadist.paths import nixl_options
from llm_datadist.paths.nixl_options import NixlOptions
from test_device_transfers import FEW, MANY, explain, fill, move, scribble

if TYPE_CHECKING:
    from peers import Node, Peers

pytestmark = pytest.mark.skipif(nixl_options.installed() is None, reason="NIXL is not installed")


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The stand-in, compiled."""
    return cuda_kit.build(tmp_path_factory.mktemp("cuda"))


def take_for_host(node: Node) -> None:
    """In the child: let NIXL take GPU memory for host memory."""
    bindings = nixl_options.load(NixlOptions())
    bindings.VRAM_SEG = bindings.DRAM_SEG


def unregister(node: Node, name: str) -> None:
    """In the child."""
    node.manager.unregister_cache(node.caches.pop(name).cache_id)


@pytest.mark.parametrize("accessible", [True, False])
def test_all_placements(peers: Peers, library: str, accessible: bool) -> None:
    """Without RDMA, and without a word in the configuration: only GPU memory goes over NIXL."""
    server, client = (peers.make(number, enable_remote_cache_accessible=accessible) for number in (1, 2))
    for peer in (server, client):
        peer.call(load, library)
        peer.call(take_for_host)
        for model_id, device in enumerate((None, 0, 1)):
            peer.call(register, f"cache {device}", device, peer.cluster_id, model_id)
    assert client.link(server) == LLMStatusCode.LLM_SUCCESS
    client.call(move, "pull_blocks", 1, "cache None", MANY)
    assert client.call(explain, 1)[1] == ["process_vm"]
    operations = ("pull_blocks", "push_blocks") if accessible else ("pull_blocks",)
    for near, (model_id, far) in itertools.product((None, 0, 1), enumerate((None, 0, 1))):
        for operation, blocks in itertools.product(operations, (FEW, MANY)):
            ours, theirs = (client, f"cache {near}"), (server, f"cache {far}")
            source, target = (theirs, ours) if operation == "pull_blocks" else (ours, theirs)
            source[0].call(scribble, source[1], len(blocks) + 7 * model_id)
            target[0].call(fill, target[1], 0)
            for _ in range(2):
                client.call(move, operation, 1, ours[1], blocks, model_id)
            expected = np.zeros((TENSORS, BLOCKS, SIZE // BLOCKS), dtype=np.uint8)
            expected[:, blocks] = source[0].call(content, source[1]).reshape(expected.shape)[:, blocks]
            assert (target[0].call(content, target[1]).reshape(expected.shape) == expected).all()
    reasons, used = client.call(explain, 1)
    assert used == ["process_vm", "nixl"]
    assert reasons["nixl"].startswith("for GPU memory: NIXL")
    server.call(unregister, "cache 1")
    client.call(move, "pull_blocks", 1, "cache 0", MANY, 1)
