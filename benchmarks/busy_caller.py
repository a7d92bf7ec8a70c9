"""Pulls by a background thread while the main thread of its process computes in Python, as engines do.

Run it with a Python that has the project installed: ``python benchmarks/busy_caller.py``. Takes half a minute. Compares
``LLMConfig.switch_interval_us`` as it is by default with Python's own switch interval, and with an idle main thread.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import statistics
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from llm_datadist import BlocksCacheKey, CacheDesc, DataType, LLMClusterInfo, LLMConfig, LLMDataDist, LLMRole

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_ROUNDS: Final = 5
_SECONDS: Final = 1.0
_LIMIT_S: Final = 60
_TENSORS: Final = 60
_BLOCKS: Final = 94
_BLOCK_BYTES: Final = 6144
"""1,500 tokens of a model of 30 layers, 34.7 MB."""
_KINDS: Final = {
    "idle main thread": ("idle", {}),
    "busy main thread": ("busy", {}),
    "busy main thread, Python's switch interval": ("busy", {"LLM_DATADIST_SWITCH_INTERVAL_US": "0"}),
}


def _member(cluster_id: int, role: LLMRole) -> tuple[LLMDataDist, Any, list[Any]]:
    config = LLMConfig()
    config.enable_cache_manager = config.enable_remote_cache_accessible = True
    if role is LLMRole.PROMPT:
        config.listen_ip_info = "127.0.0.1:0"
    member = LLMDataDist(role, cluster_id)
    member.init(config.generate_options())
    tensors = [np.full((_BLOCKS, _BLOCK_BYTES), cluster_id, np.int8) for _ in range(_TENSORS)]
    desc = CacheDesc(num_tensors=_TENSORS, shape=tensors[0].shape, data_type=DataType.DT_INT8)
    addresses = [each.ctypes.data for each in tensors]
    return member, member.cache_manager.register_blocks_cache(desc, addresses, BlocksCacheKey(cluster_id)), tensors


def _own(pipe: Connection) -> None:
    member, _, _tensors = _member(1, LLMRole.PROMPT)
    with contextlib.suppress(EOFError, BrokenPipeError):  # the other process was interrupted
        pipe.send(member.listen_address)
        pipe.recv()
    member.finalize()


def _measure(*, busy: bool) -> float:
    """Median seconds of a pull."""
    here, there = multiprocessing.Pipe()
    owner = multiprocessing.get_context("spawn").Process(target=_own, args=(there,))
    owner.start()
    there.close()  # or else the owner would not learn that this process has ended
    member, cache, tensors = _member(2, LLMRole.DECODER)
    cluster = LLMClusterInfo()
    cluster.remote_cluster_id = 1
    cluster.append_local_ip_info("127.0.0.1", 0)
    cluster.append_remote_ip_info(*here.recv())
    member.link_clusters([cluster], 5000)
    order = [np.random.default_rng(seed).permutation(_BLOCKS).tolist() for seed in (1, 2)]
    seconds: list[float] = []

    def pull() -> None:
        end = time.monotonic() + _SECONDS
        while time.monotonic() < end:
            begin = time.perf_counter()
            member.cache_manager.pull_blocks(BlocksCacheKey(1), cache, *order)
            seconds.append(time.perf_counter() - begin)

    thread = threading.Thread(target=pull)
    thread.start()
    count = 0
    while busy and thread.is_alive():
        for _ in range(1_000_000):
            count += 1
    thread.join()
    if not all((each == 1).all() for each in tensors):
        sys.exit("wrong bytes")
    here.send(None)
    owner.join(_LIMIT_S)
    member.finalize()
    return statistics.median(seconds)


def main() -> int:
    """Measure all kinds in turns and print a line for each path and kind; 0."""
    for path in ("process_vm", "tcp"):
        found: dict[str, list[float]] = {kind: [] for kind in _KINDS}
        for _ in range(_ROUNDS):
            for kind, (state, environment) in _KINDS.items():
                everything = os.environ | {"LLM_DATADIST_PATHS": path} | environment
                command = [sys.executable, __file__, state]
                ended = subprocess.run(  # noqa: S603 - this very script
                    command,
                    stdout=subprocess.PIPE,
                    env=everything,
                    timeout=_LIMIT_S,
                    check=True,
                    start_new_session=True,  # Ctrl-C is for this process, which ends it
                )
                found[kind].append(float(ended.stdout) * 1e3)
        for kind, each in found.items():
            median, low, high = statistics.median(each), min(each), max(each)
            sys.stdout.write(f"{path}, {kind}: {median:.1f} ms ({low:.1f}..{high:.1f}) a pull\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.stdout.write(f"{_measure(busy=sys.argv[1] == 'busy')}\n")
    else:
        try:
            sys.exit(main())
        except KeyboardInterrupt:
            sys.exit(130)
