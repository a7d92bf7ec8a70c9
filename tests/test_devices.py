"""Which memory is that of a GPU, and what registering it does; with a stand-in for the CUDA driver (``cuda_kit``)."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import cuda_kit
from cuda_kit import BLOCK_BYTES, SIZE, TENSORS, declare, load, register_at, set_driver, untouchable
from expect import PI, expect
from llm_datadist import Cache, CacheDesc, CacheKey, DataType, LLMStatusCode, Placement
from llm_datadist.memory import devices
from llm_datadist.memory.devices import DeviceMemoryError

if TYPE_CHECKING:
    from pathlib import Path

    from peers import Node, Peer, Peers

HOST, DEVICE = Placement.HOST, Placement.DEVICE
DISABLED = LLMStatusCode.LLM_FEATURE_NOT_ENABLED
AT = 0x7F00_0000_0000
POOL = '{"memory_size": 16777216, "page_shift": 12}'


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The stand-in, compiled."""
    return cuda_kit.build(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def peer(peers: Peers, library: str) -> Peer:
    """A peer in a process that uses CUDA."""
    made = peers.make(1, host_mem_pool_cfg=POOL, mem_pool_cfg=POOL)
    made.call(load, library)
    return made


def located(node: Node, address: int, size: int) -> Any:
    """In the child: the GPU of some memory, or what is wrong with it."""
    try:
        return devices.device_of(address, size)
    except DeviceMemoryError as error:
        return f"{error} [{error.hint}]"


def in_use(node: Node) -> tuple[bool, bool]:
    """In the child: whether the driver is loaded, and in use."""
    return devices.loaded(), devices.in_use()


def host_addresses(node: Node) -> list[int]:
    """In the child: ordinary memory."""
    node.extra["host"] = memory = np.zeros((TENSORS, SIZE), dtype=np.uint8)
    return [tensor.ctypes.data for tensor in memory]


def test_addresses_are_classified(peer: Peer) -> None:
    """Of two adjacent allocations, each is known to its last byte."""
    for start, size, device in ((AT, 4096, 0), (AT + 4096, 8192, 1)):
        peer.call(declare, start, size, device)
    for address, size, device in (
        (AT, 4096, 0),
        (AT, 1, 0),
        (AT + 4095, 1, 0),
        (AT + 4096, 8192, 1),
        (AT + 5000, 3, 1),
        (AT - 1, 1, None),
        (AT + 12288, 1 << 40, None),
        (4096, 1, None),
    ):
        assert peer.call(located, address, size) == device, (address, size)


def test_memory_of_two_kinds_or_allocations_is_refused(peer: Peer) -> None:
    for start, size, device in ((AT, 4096, 0), (AT + 4096, 8192, 1)):
        peer.call(declare, start, size, device)
    peer.call(declare, AT + (1 << 20), 4096, 0, managed=True)
    over = peer.call(located, AT + 4000, 97)
    assert f"beyond its allocation of 4096 bytes at {AT:#x} in memory of GPU 0" in over
    assert "expandable_segments:False" in over
    assert "begins in host memory and ends in memory of GPU 0" in peer.call(located, AT - 1, 2)
    assert "beyond its allocation" in peer.call(located, AT + 4096, 8193)
    assert "managed memory" in peer.call(located, AT + (1 << 20), 1)


def test_the_driver_decides_whether_cuda_is_in_use(peers: Peers, library: str) -> None:
    """It must be loaded, initialised, and have a context; to load it is not enough."""
    peer = peers.make(1)
    assert peer.call(in_use) == (False, False)
    peer.call(load, library, context=False)
    assert peer.call(in_use) == (True, False)
    peer.call(set_driver, 0, 1)
    assert peer.call(in_use) == (True, True)
    peer.call(set_driver, 0, -1, 0x1234)
    assert peer.call(in_use) == (True, True)
    peer.call(declare, AT, 4096)
    peer.call(set_driver, 3, 0)  # CUDA_ERROR_NOT_INITIALIZED
    assert peer.call(in_use) == (True, False)
    assert peer.call(located, AT, 4096) is None
    peer.call(set_driver, 201, 0)  # CUDA_ERROR_INVALID_CONTEXT
    assert "error 201 of cuPointerGetAttributes [initialise CUDA in this thread" in peer.call(located, AT, 4096)


def test_the_placement_is_checked(peer: Peer) -> None:
    """The text names tensor, address, size and memory, and what to do. Nothing is kept of what was refused."""
    gpu, host = peer.call(untouchable), peer.call(host_addresses)
    assert peer.call(register_at, "gpu", gpu, placement=DEVICE)
    assert peer.call(register_at, "host", host, placement=HOST)
    wrong = expect(PI, lambda: peer.call(register_at, "x", gpu, placement=HOST))
    assert f"placement is HOST, but tensor 0 ({SIZE} bytes at {gpu[0]:#x}) is in memory of GPU 0" in str(wrong)
    assert wrong.hint == "register it with Placement.DEVICE"
    wrong = expect(PI, lambda: peer.call(register_at, "x", host, placement=DEVICE))
    assert f"tensor 0 ({SIZE} bytes at {host[0]:#x}) is in host memory" in str(wrong)
    assert "Placement.HOST and remote_accessible=True" in str(wrong.hint)
    assert wrong.phase == "check"
    report = peer.call(memory_report)
    assert report.on_devices == ((0, TENSORS * SIZE),)
    assert report.size == TENSORS * SIZE
    assert str(report).splitlines()[-1] == "0.1 MiB more in memory of GPU 0"


def memory_report(node: Node) -> Any:
    """In the child."""
    return node.datadist.explain_memory()


def test_tensors_of_one_cache_are_in_one_memory(peer: Peer) -> None:
    gpu, host = peer.call(untouchable), peer.call(host_addresses)
    peer.call(declare, AT, SIZE, 1)
    mixed = expect(PI, lambda: peer.call(register_at, "x", [gpu[0], host[0]]))
    assert "is in memory of GPU 0, but tensor 1" in str(mixed)
    assert f"at {host[0]:#x}) in host memory" in str(mixed)
    mixed = expect(PI, lambda: peer.call(register_at, "x", [gpu[0], AT]))
    assert "in memory of GPU 1" in str(mixed)
    assert mixed.hint == "register one cache for each memory"
    beyond = expect(PI, lambda: peer.call(register_at, "x", [gpu[0], gpu[1]], block_bytes=BLOCK_BYTES + 1))
    assert f"tensor 0 ({SIZE + 8} bytes at {gpu[0]:#x}): it reaches beyond its allocation" in str(beyond)


def test_a_driver_that_is_not_used_changes_nothing(peers: Peers, library: str) -> None:
    """Both placements are host memory, as on a machine without CUDA."""
    peer = peers.make(1, mem_pool_cfg=POOL)
    peer.call(load, library, context=False)
    host = peer.call(host_addresses)
    for placement in (HOST, DEVICE):
        assert peer.call(register_at, placement.name, host, placement=placement)
    assert peer.call(allocate, DEVICE)


def allocate(node: Node, placement: Placement) -> bool:
    """In the child: a cache of the pool of a placement."""
    desc = CacheDesc(TENSORS, [2, 64], DataType.DT_UINT8, placement)
    return bool(node.manager.allocate_cache(desc).tensor_addrs and node.manager.allocate_blocks_cache(desc))


def test_pools_are_host_memory(peer: Peer) -> None:
    assert peer.call(allocate, HOST)
    refused = expect(PI, lambda: peer.call(allocate, DEVICE))
    assert "this process uses CUDA, but memory pools are host memory" in str(refused)


def local_copy(node: Node, call: str) -> None:
    """In the child: a copy within or from the cache "gpu"."""
    manager, cache = node.manager, node.caches["gpu"]
    if call == "copy_blocks":
        manager.copy_blocks(cache, {0: [1]})
    elif call == "copy_cache":
        desc = CacheDesc(TENSORS, [2, SIZE // 2], DataType.DT_UINT8)
        entry = manager.register_cache(desc, cache.tensor_addrs, [CacheKey(1, 5)])
        manager.copy_cache(entry, entry, dst_batch_index=1, src_batch_index=0)
    else:
        desc = CacheDesc(TENSORS, [4, BLOCK_BYTES], DataType.DT_UINT8, HOST)
        cpu = Cache.create_cpu_cache(desc, [tensor.ctypes.data for tensor in node.extra["host"]])
        pair = (cache, cpu) if call == "swap_out" else (cpu, cache)
        manager.swap_blocks(*pair, {0: 1})


@pytest.mark.parametrize("call", ["copy_blocks", "copy_cache", "swap_out", "swap_in"])
def test_local_copies_are_refused(peer: Peer, call: str) -> None:
    peer.call(host_addresses)
    peer.call(register_at, "gpu", peer.call(untouchable))
    refused = expect(DISABLED, lambda: peer.call(local_copy, call))
    assert "in memory of GPU 0, and only host memory is copied here" in str(refused)
    assert "torch.Tensor.copy_" in str(refused.hint)
    assert refused.phase == "check"


PROGRAM = """
    import sys, time
    import numpy as np
    import llm_datadist, llm_datadist.testing
    from llm_datadist import *

    with llm_datadist.testing.loopback():
        config = LLMConfig()
        config.enable_cache_manager = config.enable_remote_cache_accessible = True
        datadist = LLMDataDist(LLMRole.MIX, 1)
        datadist.init(config.generate_options())
        memory = np.zeros((64, 8, 64), dtype=np.uint8)
        desc = CacheDesc(64, [8, 64], DataType.DT_UINT8)
        datadist.cache_manager.register_blocks_cache(desc, [tensor.ctypes.data for tensor in memory])
        datadist.finalize()
    from llm_datadist.memory import devices
    begun = time.perf_counter()
    for _ in range(100):
        assert not devices.loaded()
    print((time.perf_counter() - begun) / 100)
    assert "libcuda" not in open("/proc/self/maps").read()
    assert not {"cuda", "torch", "pynvml"} & set(sys.modules), sorted(sys.modules)
"""


def test_a_process_without_cuda_pays_nothing(library: str, tmp_path: Path) -> None:
    """A driver that is installed is not loaded; to find out that it is not takes microseconds a registration."""
    folder = library.rpartition("/")[0]
    could = "import ctypes; ctypes.CDLL('libcuda.so.1')"
    for program in (could, textwrap.dedent(PROGRAM)):
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={"LD_LIBRARY_PATH": folder, "PATH": "/usr/bin"},
            cwd=tmp_path,
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1e-3
