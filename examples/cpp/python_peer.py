#!/usr/bin/env python3
"""The Python side of the two examples: cluster 2, which starts the C++ program and looks at the result.

``python_peer.py decode PROGRAM`` takes what a C++ prefill pushes; ``python_peer.py prefill PROGRAM`` offers what a C++
decode pulls.
"""

from __future__ import annotations

import subprocess
import sys

import numpy as np

from llm_datadist import BlocksCacheKey, CacheDesc, DataType, LLMConfig, LLMDataDist, LLMRole

TENSORS, BLOCKS, WIDTH = 8, 8, 16
Tensors = list["np.ndarray[tuple[int, ...], np.dtype[np.int32]]"]


def computed() -> Tensors:
    """What prefill computes."""
    count = BLOCKS * WIDTH
    return [np.arange(count, dtype=np.int32).reshape(BLOCKS, WIDTH) + tensor * 1000 for tensor in range(TENSORS)]


def start(role: LLMRole) -> tuple[LLMDataDist, int]:
    """An initialised object that listens, and its port."""
    config = LLMConfig()
    config.device_id = 0
    config.enable_cache_manager = True
    config.enable_remote_cache_accessible = True  # as C++ peers always have it
    config.listen_ip_info = "127.0.0.1:0"
    datadist = LLMDataDist(role, 2)
    datadist.init(config.generate_options())
    address = datadist.listen_address
    if address is None:
        sys.exit("it does not listen")
    return datadist, address[1]


def decode(program: str) -> None:
    """Take what the C++ prefill pushes."""
    datadist, port = start(LLMRole.DECODER)
    memory = [np.full((BLOCKS, WIDTH), -1, dtype=np.int32) for _ in range(TENSORS)]
    desc = CacheDesc(TENSORS, [BLOCKS, WIDTH], DataType.DT_INT32)
    addrs = [tensor.ctypes.data for tensor in memory]
    datadist.cache_manager.register_blocks_cache(desc, addrs, BlocksCacheKey(2, 0))
    subprocess.run([program, str(port)], check=True, timeout=60)  # noqa: S603 - the program is the point
    expected = [np.full((BLOCKS, WIDTH), -1, dtype=np.int32) for _ in range(TENSORS)]
    for tensor, values in zip(expected, computed(), strict=True):
        tensor[1:4] = values[5:8]
    datadist.finalize()
    if not all(map(np.array_equal, memory, expected)):
        sys.exit("decode: the bytes are not those that prefill wrote")
    print("decode: every byte is as prefill wrote it")  # noqa: T201 - an example talks to people


def prefill(program: str) -> None:
    """Offer what the C++ decode pulls and compares."""
    datadist, port = start(LLMRole.PROMPT)
    memory = computed()
    desc = CacheDesc(TENSORS, [BLOCKS, WIDTH], DataType.DT_INT32)
    addrs = [tensor.ctypes.data for tensor in memory]
    datadist.cache_manager.register_blocks_cache(desc, addrs, BlocksCacheKey(2, 0))
    datadist.cache_manager.register_cache(desc, addrs)
    subprocess.run([program, str(port)], check=True, timeout=60)  # noqa: S603 - the program is the point
    datadist.finalize()


if __name__ == "__main__":
    {"decode": decode, "prefill": prefill}[sys.argv[1]](sys.argv[2])
