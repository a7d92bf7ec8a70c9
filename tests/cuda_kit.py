"""GPU memory for tests on machines without a GPU.

A stand-in for the CUDA driver (``cuda_standin.c``), compiled here and loaded in child processes only, declares ordinary
memory to be that of a GPU; everything around it is real. It shows what the library makes of the driver's documented
answers. That a real driver answers so, only a machine with a GPU can show (``benchmarks/gpu_check.py``).
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import pathlib
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llm_datadist import BlocksCacheKey, CacheDesc, DataType, Placement
from llm_datadist.paths.base import Path, PathRejectedError, Transport
from llm_datadist.paths.process_vm import ProcessVm

if TYPE_CHECKING:
    from llm_datadist.layout.spans import Spans
    from llm_datadist.paths.base import Context
    from llm_datadist.paths.base import Peer as PathPeer
    from llm_datadist.utils.deadline import Deadline
    from peers import Node

SOURCE = pathlib.Path(__file__).with_name("cuda_standin.c")
TENSORS = 2
BLOCKS = 8
BLOCK_BYTES = 4096
SIZE = BLOCKS * BLOCK_BYTES


def build(folder: pathlib.Path) -> str:
    """The stand-in, compiled into a folder; skips the test without a compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler for the stand-in of the CUDA driver")
    target = folder / "libcuda.so.1"
    command = [compiler, "-shared", "-fPIC", "-O1", "-Wl,-soname,libcuda.so.1", "-o", str(target), str(SOURCE)]
    subprocess.run(command, check=True, timeout=60)
    return str(target)


def _standin(node: Node) -> Any:
    return node.extra["driver"]


def load(node: Node, library: str, *, context: bool = True) -> None:
    """In the child: load the driver, which sees two GPUs; with a context on the first one."""
    node.extra["driver"] = driver = ctypes.CDLL(library)
    driver.standin_declare.argtypes = [ctypes.c_ulonglong, ctypes.c_size_t, ctypes.c_int, ctypes.c_int]
    driver.standin_set.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
    driver.standin_set(0, 2, 0 if context else -1, None)


def set_driver(node: Node, code: int, active: int = -1, context: int | None = None) -> None:
    """In the child: what all calls of the driver return, which primary context is active, and the current context."""
    _standin(node).standin_set(code, 2, active, context)


def declare(node: Node, address: int, size: int, device: int = 0, managed: bool = False) -> None:
    """In the child: this memory is one allocation on a GPU."""
    _standin(node).standin_declare(address, size, device, managed)


def untouchable(node: Node, tensors: int = TENSORS, size: int = SIZE) -> list[int]:
    """In the child: addresses that nobody can read or write, not even the kernel, as those of a GPU."""
    maps = [mmap.mmap(-1, size, prot=mmap.PROT_READ | mmap.PROT_WRITE) for _ in range(tensors)]
    addresses = [ctypes.addressof(ctypes.c_char.from_buffer(each)) for each in maps]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for address in addresses:
        assert libc.mprotect(address, size, 0) == 0
        declare(node, address, size)
    node.extra.setdefault("maps", []).append(maps)
    return addresses


def register_at(
    node: Node,
    name: str,
    addresses: list[int],
    *,
    placement: Placement = Placement.DEVICE,
    model_id: int | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> int:
    """In the child: a blocks cache at these addresses; its id."""
    desc = CacheDesc(len(addresses), [BLOCKS, block_bytes], DataType.DT_UINT8, placement)
    key = None if model_id is None else BlocksCacheKey(node.datadist.cluster_id, model_id)
    cache = node.manager.register_blocks_cache(desc, addresses, key, remote_accessible=True)
    node.caches[name] = cache
    return cache.cache_id


def register(node: Node, name: str, device: int | None, seed: int | None = None, model_id: int | None = None) -> int:
    """In the child: a blocks cache in host memory, or in what is declared to be that of a GPU, but can be touched."""
    memory = np.zeros((TENSORS, SIZE), dtype=np.uint8)
    if seed is not None:
        memory[:] = np.random.default_rng(seed).integers(0, 256, memory.shape, dtype=np.uint8)
    addresses = [tensor.ctypes.data for tensor in memory]
    if device is not None:
        for address in addresses:
            declare(node, address, SIZE, device)
    node.extra[name] = memory
    placement = Placement.HOST if device is None else Placement.DEVICE
    return register_at(node, name, addresses, placement=placement, model_id=model_id)


def content(node: Node, name: str) -> np.ndarray:
    """In the child: a copy of a cache's memory."""
    return node.extra[name].copy()


MOVED: list[str] = []
"""In the child: in which memory the two sides of each transfer over the path below were."""


class ReachingPath(Path):
    """What the stand-in calls GPU memory is ordinary memory: ``process_vm`` can copy it if it is let."""

    name = "reaching"
    reaches_devices = True

    def __init__(self, path: Path) -> None:
        self._path: Any = path
        self._path.view.bases = functools.partial(self._path.view.bases, devices=True)

    def read(self, spans: Spans, deadline: Deadline, epoch: int = 0) -> None:
        MOVED.append(str(spans.devices))
        self._path.read(spans, deadline, epoch)

    def write(self, spans: Spans, deadline: Deadline, epoch: int = 0) -> None:
        MOVED.append(str(spans.devices))
        self._path.write(spans, deadline, epoch)

    def close(self) -> None:
        self._path.close()

    def abort(self) -> None:
        self._path.abort()

    def describe(self) -> str:
        return "for tests"


class Reaching(Transport):
    """A path that reaches GPU memory; an entry point adds it, see ``install_reaching``."""

    name = "reaching"
    reaches_devices = True

    def connect(self, peer: PathPeer, context: Context, deadline: Deadline) -> Path:
        return ReachingPath(ProcessVm().connect(peer, context, deadline))


class Picky(Reaching):
    """One that declines host memory."""

    name = "picky"

    def connect(self, peer: PathPeer, context: Context, deadline: Deadline) -> Path:
        if not context.devices.any:
            message = "not for host memory"
            raise PathRejectedError(message)
        path = super().connect(peer, context, deadline)
        path.name = self.name
        return path


def install_reaching(folder: pathlib.Path) -> None:
    """Write an installed package that adds both paths; ``see`` it in a child."""
    information = folder / "reaching-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: reaching\nVersion: 1.0\n", encoding="utf-8")
    (information / "entry_points.txt").write_text(
        "[llm_datadist.paths]\nreaching = cuda_kit:Reaching\npicky = cuda_kit:Picky\n", encoding="utf-8"
    )


def see(folder: str) -> None:
    """In the child, before anything else: find what is installed in a folder, too."""
    sys.path.append(folder)


def moved(node: Node) -> list[str]:
    """In the child: what went over that path since the last look."""
    seen, MOVED[:] = list(MOVED), []
    return seen
