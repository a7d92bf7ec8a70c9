"""Memory for ``gpu_check.py``: of the host and of a GPU, layers that are computed there, and NIXL by itself."""

from __future__ import annotations

import contextlib
import importlib
import threading
import time
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from llm_datadist import LayerSynchronizer

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

TENSORS: Final = 4
WAIT_S: Final = 60.0


class Host:
    """Tensors in host memory."""

    def __init__(self, tensors: int, size: int) -> None:
        self.memory: Bytes = np.zeros((tensors, size), dtype=np.uint8)
        self.addresses: list[int] = [tensor.ctypes.data for tensor in self.memory]

    def store(self, content: Bytes) -> None:
        """Write it all."""
        self.memory[:] = content

    def load(self) -> Bytes:
        """Read it all."""
        return self.memory.copy()

    def copy_from(self, other: Host | Gpu) -> None:
        """A plain copy of it all, complete when this returns."""
        if isinstance(other, Gpu):
            other.copy_to(self)
        else:
            np.copyto(self.memory, other.memory)


class Gpu:
    """Tensors in the memory of GPU 0."""

    def __init__(self, tensors: int, size: int) -> None:
        self.torch = importlib.import_module("torch")
        self.memory = [self.torch.zeros(size, dtype=self.torch.uint8, device="cuda:0") for _ in range(tensors)]
        self.addresses: list[int] = [tensor.data_ptr() for tensor in self.memory]
        self._synchronize()

    def _synchronize(self) -> None:
        self.torch.cuda.synchronize()

    def store(self, content: Bytes) -> None:
        """Write it all; a transfer may read it when this returns."""
        for tensor, values in zip(self.memory, content, strict=True):
            tensor.copy_(self.torch.from_numpy(values))
        self._synchronize()

    def load(self) -> Bytes:
        """Read it all."""
        return np.stack([tensor.cpu().numpy() for tensor in self.memory])

    def copy_from(self, other: Host | Gpu) -> None:
        """A plain copy of it all, complete when this returns."""
        sources = other.memory if isinstance(other, Gpu) else map(self.torch.from_numpy, other.memory)
        for tensor, source in zip(self.memory, sources, strict=True):
            tensor.copy_(source)
        self._synchronize()

    def copy_to(self, other: Host) -> None:
        """As ``copy_from``, the other way."""
        for tensor, target in zip(self.memory, other.memory, strict=True):
            self.torch.from_numpy(target).copy_(tensor)
        self._synchronize()


class CudaLayers(LayerSynchronizer):
    """Tells when layers are ready that kernels on a stream compute.

    An event that has not been recorded yet counts as complete for CUDA, so the host says when it has been.
    """

    def __init__(self, layers: int) -> None:
        self._cuda = importlib.import_module("torch").cuda
        self._events = [self._cuda.Event() for _ in range(layers)]
        self._recorded = [threading.Event() for _ in range(layers)]

    def done(self, layer: int) -> None:
        """To be called once the kernels of a layer have been launched, on their stream."""
        self._events[layer].record()
        self._recorded[layer].set()

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        """Wait for the kernels of the layer; False gives the transfer up."""
        del timeout_in_millis
        if not self._recorded[layer_index].wait(WAIT_S):
            return False
        self._events[layer_index].synchronize()
        return True


class HostLayers(LayerSynchronizer):
    """The same without CUDA."""

    def __init__(self, layers: int) -> None:
        self._ready = [threading.Event() for _ in range(layers)]

    def done(self, layer: int) -> None:
        """A layer has been computed."""
        self._ready[layer].set()

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        """Wait for it."""
        del timeout_in_millis
        return self._ready[layer_index].wait(WAIT_S)


def random_bytes(seed: int, size: int) -> Bytes:
    """The content of all tensors for a seed: both processes know it without telling each other."""
    return np.random.default_rng(seed).integers(0, 256, (TENSORS, size), dtype=np.uint8)


class BareNixl:
    """NIXL by itself, over the memory of one bulk cache."""

    def __init__(self, name: str, memory: Host | Gpu, size: int) -> None:
        api: Any = None
        for module in ("nixl_cu12._api", "nixl_cu13._api", "nixl._api"):
            with contextlib.suppress(ImportError):
                api = api or importlib.import_module(module)
        if api is None:
            message = "NIXL is not installed"
            raise ImportError(message)
        self._kind, self._memory = "VRAM" if isinstance(memory, Gpu) else "DRAM", memory
        self._agent = api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))
        descriptors = [(address, size, 0, "") for address in memory.addresses]
        self._agent.register_memory(self._agent.get_reg_descs(descriptors, self._kind))

    def about(self) -> tuple[bytes, str, list[int]]:
        """What the other side needs to know."""
        return self._agent.get_agent_metadata(), self._kind, self._memory.addresses

    def mover(
        self, operation: str, about: tuple[bytes, str, list[int]], runs: list[tuple[int, int, int]]
    ) -> Callable[[], object]:
        """A function that moves runs (here, there, bytes) of all tensors once."""
        metadata, kind, addresses = about
        agent, peer = self._agent, self._agent.add_remote_agent(metadata)
        here, there = (
            np.array([(base + run[side], run[2], 0) for base in bases for run in runs], dtype=np.uint64)
            for side, bases in enumerate((self._memory.addresses, addresses))
        )

        def move() -> None:
            near, far = agent.get_xfer_descs(here, self._kind), agent.get_xfer_descs(there, kind)
            handle = agent.initialize_xfer(operation, near, far, peer)
            state, end = agent.transfer(handle), time.monotonic() + WAIT_S
            while state == "PROC" and time.monotonic() < end:
                state = agent.check_xfer_state(handle)
            agent.release_xfer_handle(handle)
            if state != "DONE":
                message = f"the transfer ended in state {state}"
                raise RuntimeError(message)

        return move
