#!/usr/bin/env python3
"""Python begins, C++ listens; and C++ inside a process that runs Python. Usage: interop.py BUILD_FOLDER.

C++ begins and Python listens in examples/cpp.
"""

from __future__ import annotations

import ctypes
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    CacheKeyByIdAndIndex,
    DataType,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
)

SHAPE = (8, 16)
DESC = CacheDesc(4, list(SHAPE), DataType.DT_INT32)
ROUNDS, CALLS = 20, 100
MOST_RATIO = 1.5
"""Of what a pull takes from C++ to what it takes from Python."""


def config(path: str) -> LLMConfig:
    """A configuration that fits C++ peers."""
    made = LLMConfig()
    made.device_id = 0
    made.enable_cache_manager = True
    made.enable_remote_cache_accessible = True
    made.allow_multiple_instances = True
    made.paths = path
    return made


def member(cluster_id: int, made: LLMConfig) -> LLMDataDist:
    """An initialised object."""
    datadist = LLMDataDist(LLMRole.MIX, cluster_id)
    datadist.init(made.generate_options())
    return datadist


def cluster(cluster_id: int, port: int) -> LLMClusterInfo:
    """A peer on this machine."""
    info = LLMClusterInfo()
    info.remote_cluster_id = cluster_id
    info.append_local_ip_info("127.0.0.1", 0)
    info.append_remote_ip_info("127.0.0.1", port)
    return info


def check(good: object, what: str) -> None:
    """End with a message unless ``good``."""
    if not good:
        sys.exit(f"interop: {what}")


def python_begins(program: Path, path: str) -> None:
    """Pull from and push into a C++ process."""
    peer = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: S603
    if peer.stdin is None or peer.stdout is None:
        sys.exit("interop: no pipes")
    port = int(peer.stdout.readline())
    theirs = np.arange(1000, 1000 + 4 * 128, dtype=np.int32).reshape(4, *SHAPE)
    memory, blocks = np.zeros((4, *SHAPE), dtype=np.int32), np.zeros((4, 8, 4), dtype=np.int32)
    datadist = member(2, config(path))
    manager = datadist.cache_manager
    cache = manager.register_cache(DESC, [tensor.ctypes.data for tensor in memory])
    block_cache = manager.register_blocks_cache(
        CacheDesc(4, [8, 4], DataType.DT_INT32), [tensor.ctypes.data for tensor in blocks], BlocksCacheKey(2, 0)
    )
    check(datadist.link_clusters([cluster(1, port)], 10_000)[0] == LLMStatusCode.LLM_SUCCESS, "no link")
    check(datadist.explain_link(1).path == path, f"not over {path}")
    manager.pull_cache(CacheKeyByIdAndIndex(1, 1, 5), cache, 2)
    check(np.array_equal(memory[:, 2], theirs[:, 5]), "pull_cache: wrong bytes")
    manager.pull_blocks(CacheKeyByIdAndIndex(1, 1, 6), block_cache, [], [3, 1, 0, 7])
    check(np.array_equal(blocks[:, [3, 1, 0, 7]].reshape(4, 16), theirs[:, 6]), "pull_blocks: wrong bytes")
    memory[:, 4] = 7
    manager.push_cache(CacheKeyByIdAndIndex(1, 1, 0), cache, 4, range(1), range(1, 2))
    theirs[2:, 0] = 7
    out, _ = peer.communicate("\n", timeout=60)
    check(np.array_equal(np.array(out.split(), dtype=np.int32).reshape(4, *SHAPE), theirs), "push_cache: wrong bytes")
    check(peer.returncode == 0, "the C++ peer failed")
    datadist.finalize()


def hosted(library: Path, path: str) -> None:
    """C++ and Python in one process, as two members."""
    made = config(path)
    made.listen_ip_info = "127.0.0.1:0"
    peer = member(2, made)
    source = np.arange(4 * 128, dtype=np.int32).reshape(4, *SHAPE)
    peer.cache_manager.register_blocks_cache(DESC, [tensor.ctypes.data for tensor in source], BlocksCacheKey(2, 0))
    address = peer.listen_address
    if address is None:
        sys.exit("interop: it does not listen")
    native = ctypes.CDLL(str(library))
    native.HostedMedian.restype = ctypes.c_double
    check(native.HostedOpen(address[1]) == 0, "HostedOpen")
    check(native.HostedPull() == 0, "HostedPull")
    check([native.HostedElement(i) for i in range(16)] == source[2, 3].tolist(), "HostedPull: wrong bytes")
    if path != "tcp":  # where the kernel happens to place the peer's thread can double what a small pull takes
        compare_calls(native, address[1], path)
    native.HostedClose()
    peer.finalize()


def compare_calls(native: ctypes.CDLL, port: int, path: str) -> None:
    """End with a message if a pull takes too long from C++: rounds in turns with Python, the quickest of each."""
    memory = np.zeros((4, *SHAPE), dtype=np.int32)
    same = member(3, config(path))
    cache = same.cache_manager.register_blocks_cache(
        DESC, [tensor.ctypes.data for tensor in memory], BlocksCacheKey(3, 0)
    )
    check(same.link_clusters([cluster(2, port)], 10_000)[0] == LLMStatusCode.LLM_SUCCESS, "no link")
    key = BlocksCacheKey(2, 0)

    def python_median() -> float:
        times = []
        for _ in range(CALLS):
            start = time.perf_counter()
            same.cache_manager.pull_blocks(key, cache, [3], [0])
            times.append((time.perf_counter() - start) * 1e6)
        return statistics.median(times)

    rounds = [(python_median(), native.HostedMedian(CALLS)) for _ in range(ROUNDS)]
    from_python, from_cpp = min(each[0] for each in rounds), min(each[1] for each in rounds)
    print(f"{path}: a pull takes {from_python:.1f} us from Python, {from_cpp:.1f} us from C++")  # noqa: T201
    check(0 < from_cpp < MOST_RATIO * from_python, "a call from C++ costs too much")
    same.finalize()


if __name__ == "__main__":
    build: Path = Path(sys.argv[1])
    for each in ("process_vm", "tcp"):
        python_begins(build / "tests" / "interop_peer", each)
    for each in ("inprocess,process_vm,tcp", "tcp"):
        hosted(build / "tests" / "libllm_datadist_hosted.so", each)
    print("interop: all bytes are right")  # noqa: T201
