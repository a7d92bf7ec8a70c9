"""Workers of the vLLM connector without vLLM: the transfer library, memory, and what moves KV between them.

What vLLM calls is shown with vLLM itself, by ``examples/vllm_pd/run``.
"""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from llm_datadist import BlocksCacheKey, CacheDesc, DataType, LLMConfig, LLMDataDist, LLMException, LLMRole
from llm_datadist.integrations.vllm import caches, messages
from llm_datadist.integrations.vllm.arrivals import Arrivals
from llm_datadist.integrations.vllm.loads import Puller
from llm_datadist.integrations.vllm.messages import Cancel, Done, Register, Stopped, Written
from llm_datadist.integrations.vllm.pages import View, arrange
from llm_datadist.integrations.vllm.params import VERSION, CacheFacts, Facts, Lease, Remote, Worker
from llm_datadist.integrations.vllm.peers import Peers
from llm_datadist.integrations.vllm.pushes import Pusher
from llm_datadist.integrations.vllm.worker_leases import SLOTS, Leases
from net_helpers import WAIT_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from llm_datadist.integrations.vllm.messages import Message
    from llm_datadist.integrations.vllm.orders import Load

LAYERS, BLOCKS, HEADS, TOKENS, HEAD_BYTES = 4, 12, 3, 16, 256
PAGE = HEADS * HEAD_BYTES
OURS, THEIRS = (5, 2, 9), (1, 7, 3)
"""Blocks of a request at the decode and at the prefill worker."""
LEASE = Lease("r", 3, "abc", 30.0)


class Rank:
    """One worker with the KV of some layers, all heads in one rank."""

    def __init__(self, cluster_id: int) -> None:
        self.cluster_id = cluster_id
        self.memory = np.random.default_rng(cluster_id).integers(0, 255, (LAYERS, BLOCKS, PAGE), np.uint8)
        config = LLMConfig()
        config.enable_cache_manager = config.enable_remote_cache_accessible = True
        config.allow_multiple_instances = True
        config.listen_ip_info = "127.0.0.1:0"
        self.dist = LLMDataDist(LLMRole.MIX, cluster_id)
        self.dist.init(config.generate_options())
        views = [View(f"layer{n}", self.memory[n].ctypes.data, BLOCKS, PAGE, PAGE, HEADS) for n in range(LAYERS)]
        pages = arrange(views, 0, TOKENS, token_major=False)
        shape = pages[0].shape
        cache = CacheFacts(0, "full", LAYERS, HEADS, 1, shape.piece_bytes, shape.piece_tokens, TOKENS, shape.stride)
        self.facts = Facts("1", "model", "f32", "auto", "format", 1, (cache,))
        self.leases = Leases()
        manager = self.dist.cache_manager
        registered = caches.register(manager, pages, cluster_id)
        manager.register_blocks_cache(
            CacheDesc(1, [SLOTS, 1], DataType.DT_UINT64),
            [self.leases.generations.ctypes.data],
            BlocksCacheKey(cluster_id, caches.LEASES_MODEL),
            remote_accessible=True,
        )
        self.pool = ThreadPoolExecutor(4)
        self.peers = Peers(self.dist, int(WAIT_S * 1000))
        side = caches.Side(manager, registered, self.facts, 0, self.peers)
        self.puller = Puller(side)
        self.pusher = Pusher(side, self.pool)
        self.peers.before_link = self.pusher.leave
        self.ends: dict[str, str] = {}
        self.changed = threading.Condition()
        self.arrivals = Arrivals(side, WAIT_S, self._ended)
        threading.Thread(target=self._mail, daemon=True).start()

    def _ended(self, load: Load, seconds: float, moved: int, error: str) -> None:
        with self.changed:
            self.ends[load.request] = error
            self.changed.notify_all()

    def end_of(self, request: str) -> str:
        """Why a load has failed; empty if it has not."""
        with self.changed:
            assert self.changed.wait_for(lambda: request in self.ends, WAIT_S)
            return self.ends[request]

    def _mail(self) -> None:
        while True:
            try:
                received = self.dist.get_notifies(60_000)
            except (LLMException, RuntimeError):
                return
            for each in received:
                message = messages.decode(each.message)
                assert message is not None
                self.got(each.cluster_id, message)

    def got(self, sender: int, message: Message) -> None:
        """As the connector's worker does it."""
        if isinstance(message, Done):
            self.leases.release(message.request, message.readers)
        elif isinstance(message, Register):
            self.pusher.register(sender, message)
        elif isinstance(message, Cancel):
            self.pusher.cancel(sender, message)
        elif isinstance(message, Written):
            self.arrivals.written(sender, message.transfer)
        elif isinstance(message, Stopped):
            self.pool.submit(self.arrivals.stopped, sender, message.transfer, message.reason)

    def remote(self, blocks: list[int] | None = None, lease: Lease | None = None) -> Remote:
        """What it tells decode engines."""
        assert self.dist.listen_address is not None
        host, port = self.dist.listen_address
        worker = Worker(f"{self.cluster_id:x}", host, port)
        tokens = TOKENS * len(blocks or ())
        return Remote(VERSION, "engine", self.facts, (worker,), tokens, (tuple(blocks or ()),), lease)

    def close(self) -> None:
        self.dist.finalize()
        self.pool.shutdown()


@contextlib.contextmanager
def two_ranks() -> Iterator[tuple[Rank, Rank]]:
    """A prefill and a decode worker."""
    with contextlib.ExitStack() as stack:
        made = []
        for cluster_id in (11, 12):
            made.append(Rank(cluster_id))
            stack.callback(made[-1].close)
        yield made[0], made[1]
