"""How soon who waits for a transfer in the background learns that its last byte has come.

The peer, another process, looks at its memory all the time and notes when the last byte of a push is there; this one
notes when its wait is over. Both clocks are the same. Run: ``python benchmarks/completion.py``. Takes seconds.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import select
import statistics
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from llm_datadist import BlocksCacheKey, CacheDesc, DataType, LLMClusterInfo, LLMConfig, LLMDataDist, LLMRole

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    from llm_datadist import Cache, TransferTask

_TENSORS: Final = 2
_BLOCKS: Final = 16
_BLOCK_BYTES: Final = 64 << 10
_ROUNDS: Final = 200
_LIMIT_S: Final = 20.0


def _start(cluster_id: int, listen: str | None) -> tuple[LLMDataDist, np.ndarray[Any, Any], Cache]:
    config = LLMConfig()
    config.enable_cache_manager = config.enable_remote_cache_accessible = True
    if listen:
        config.listen_ip_info = listen
    datadist = LLMDataDist(LLMRole.MIX, cluster_id)
    datadist.init(config.generate_options())
    memory = np.zeros((_TENSORS, _BLOCKS, _BLOCK_BYTES), dtype=np.uint8)
    desc = CacheDesc(_TENSORS, [_BLOCKS, _BLOCK_BYTES], DataType.DT_UINT8)
    addresses = [tensor.ctypes.data for tensor in memory]
    cache = datadist.cache_manager.register_blocks_cache(desc, addresses, BlocksCacheKey(cluster_id, 0))
    return datadist, memory, cache


def _watch(pipe: Connection) -> None:
    """The peer: for each number that it gets, tell when the last bytes of all blocks have become that number."""
    datadist, memory, _ = _start(2, "127.0.0.1:0")
    pipe.send(datadist.listen_address)
    last = memory[:, :, -1]
    while (number := pipe.recv()) is not None:
        pipe.send("looking")
        end = time.monotonic() + _LIMIT_S
        while not (last == number).all() and time.monotonic() < end:
            pass
        pipe.send(time.monotonic())
    datadist.finalize()


def _block(task: TransferTask) -> None:
    task.result(_LIMIT_S)


def _callback(task: TransferTask) -> None:
    called = threading.Event()
    task.add_done_callback(called.set)
    called.wait(_LIMIT_S)


def _descriptor(task: TransferTask) -> None:
    select.select([task], [], [], _LIMIT_S)
    task.close()


def _await(begin: Callable[[], TransferTask]) -> float:
    async def wait() -> float:
        await begin()
        return time.monotonic()

    return asyncio.run(wait())


def _measure(way: str, begin: Callable[[], TransferTask]) -> float:
    """When the wait was over."""
    if way == "await":
        return _await(begin)
    {"result": _block, "callback": _callback, "descriptor": _descriptor}[way](begin())
    return time.monotonic()


def main() -> int:
    """Measure, print a line for each way to wait; 0."""
    ours, theirs = multiprocessing.Pipe()
    peer = multiprocessing.get_context("spawn").Process(target=_watch, args=(theirs,), daemon=True)
    peer.start()
    address = ours.recv()
    datadist, memory, cache = _start(1, None)
    info = LLMClusterInfo()
    info.remote_cluster_id = 2
    info.append_local_ip_info("127.0.0.1", 0)
    info.append_remote_ip_info(*address)
    datadist.link_clusters([info], 5000)
    blocks = list(range(_BLOCKS))
    number = 0

    def begin() -> TransferTask:
        return datadist.cache_manager.push_blocks_async(BlocksCacheKey(2, 0), cache, blocks, blocks)

    sys.stdout.write(f"{datadist.explain_link(2)}\nfrom the last byte to the end of the wait, us:\n")
    for way in ("result", "await", "callback", "descriptor"):
        seen = []
        for _ in range(_ROUNDS):
            number = number % 255 + 1
            memory[:] = number
            ours.send(number)
            ours.recv()  # it looks
            over = _measure(way, begin)
            seen.append((over - ours.recv()) * 1e6)
        seen.sort()
        late = sum(each > 1000 for each in seen)  # noqa: PLR2004 - a millisecond
        sys.stdout.write(
            f"{way:>10}: p50 {statistics.median(seen):.0f}, p90 {seen[_ROUNDS * 9 // 10]:.0f}, max {seen[-1]:.0f}; "
            f"{late} of {_ROUNDS} above 1 ms\n"
        )
    ours.send(None)
    peer.join(_LIMIT_S)
    datadist.finalize()
    return 0


if __name__ == "__main__":
    sys.exit(main())
