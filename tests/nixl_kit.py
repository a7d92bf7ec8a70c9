"""What tests of the path over NIXL need: NIXL itself, and the transports that UCX has without RDMA."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING

import pytest

from llm_datadist.paths.nixl_options import INSTALL, installed

if TYPE_CHECKING:
    from peers import Peers, Process

needs_nixl = pytest.mark.skipif(installed() is None, reason=f"NIXL is not installed: {INSTALL}")
SHARED_MEMORY, TCP = "sm,self,tcp", "tcp"
TRANSPORTS = {"shared memory": SHARED_MEMORY, "TCP": TCP}
"""``UCX_TLS`` for each of them; with shared memory the connection itself is made over TCP."""


def use_ucx(transports: str) -> None:
    """In a child, before anything else: what UCX may use."""
    os.environ["UCX_TLS"] = transports


def process_with(peers: Peers, transports: str) -> Process:
    """A child process in which UCX uses these."""
    return peers.process(functools.partial(use_ucx, transports))
