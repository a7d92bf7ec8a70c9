"""What the fault matrix does inside the processes of its cells: caches, operations, and a look at every byte."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import itertools
import logging
import mmap
import re
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    CacheKeyByIdAndIndex,
    DataType,
    LayerSynchronizer,
    LLMException,
    LLMStatusCode,
    TransferWithCacheKeyConfig,
)
from llm_datadist.memory import syscalls
from llm_datadist.paths import one_sided
from llm_datadist.utils import log
from peers import GUARD, POISON, TIMEOUT_S, Node
from until import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TENSORS = 4
BLOCKS = 16
BLOCK_BYTES = 32 << 10
NAMED = 12
"""Blocks that an operation moves; the others are neighbours."""
SOURCES, TARGETS = list(range(NAMED)), list(range(BLOCKS - 1, BLOCKS - 1 - NAMED, -1))
ENTRY_BYTES = NAMED * BLOCK_BYTES
BATCH = 2
TOTAL = TENSORS * ENTRY_BYTES
PART_BYTES = TOTAL // 8
"""Of one system call."""
OLD, MARK = 0x22, 0x33
"""What a destination holds before an operation, and what is put there when it has ended; no source byte is that."""
MODELS = {"source blocks": 0, "target blocks": 1}
SIZES = {
    "source blocks": BLOCKS * BLOCK_BYTES,
    "target blocks": BLOCKS * BLOCK_BYTES,
    "source cache": BATCH * ENTRY_BYTES,
    "target cache": BATCH * ENTRY_BYTES,
}
DESTINATIONS = {
    "pull_blocks": "target blocks",
    "pull_cache": "target cache",
    "push_blocks": "target blocks",
    "push_cache": "target cache",
    "transfer_cache_async": "target blocks",
}
OPERATIONS = tuple(DESTINATIONS)
AT_PEER = DESTINATIONS | {"pull_blocks": "source blocks", "pull_cache": "source cache"}
"""The cache of the peer that an operation names."""
POOL_THREADS = re.compile(r"-(control|dial|end|serve|copy)-\d+$")


class Outcome(NamedTuple):
    """How one call ended."""

    status: str
    text: str = ""
    quiescent: bool = True


class Level(NamedTuple):
    """What must not grow."""

    descriptors: int
    threads: int
    """Besides those of bounded pools, which stay."""


class _Ready(LayerSynchronizer):
    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        return True


def setup(node: Node) -> dict[str, int]:
    """All four caches, in memory of their own; their ids."""
    log.get_logger().setLevel(logging.CRITICAL)  # what fails here is meant to
    one_sided._LEAST_PART, one_sided._PARTS_PER_THREAD = PART_BYTES, 8
    for name, size in SIZES.items():
        node.arenas[name] = node.arena(TENSORS, size, None)
    reset(node)
    gc.collect()
    gc.freeze()  # what has been imported need not be looked at again in every cell
    return register_as_before(node)


def register_as_before(node: Node) -> dict[str, int]:
    """All four caches, in the memory that they had; their ids."""
    return register(node, {name: node.arenas[name].addrs for name in SIZES})


def register(node: Node, addrs: dict[str, list[int]]) -> dict[str, int]:
    """The four caches at these addresses, instead of those that there are; their ids."""
    unregister_all(node)
    key = node.datadist.cluster_id
    for name, tensors in addrs.items():
        if name in MODELS:
            desc = CacheDesc(TENSORS, [BLOCKS, BLOCK_BYTES], DataType.DT_UINT8)
            node.caches[name] = node.manager.register_blocks_cache(desc, tensors, BlocksCacheKey(key, MODELS[name]))
        else:
            desc = CacheDesc(TENSORS, [BATCH, ENTRY_BYTES], DataType.DT_UINT8)
            node.caches[name] = node.manager.register_cache(desc, tensors)
    return {name: int(node.caches[name].cache_id) for name in addrs}


def reset(node: Node) -> None:
    """The bytes that all caches begin with."""
    for name, arena in node.arenas.items():
        for at, tensor in enumerate(arena.memory):
            tensor[:GUARD] = tensor[-GUARD:] = POISON
            tensor[GUARD:-GUARD] = OLD if name.startswith("target") else source_bytes(at, SIZES[name])


@functools.lru_cache
def source_bytes(tensor: int, size: int) -> np.ndarray:
    """The content of a source tensor."""
    return np.random.default_rng(1000 * tensor + size % 997).integers(128, 256, size, dtype=np.uint8)


def unmap(node: Node) -> dict[str, int]:
    """Register caches whose memory is taken away without anybody being told; their ids."""
    size = TENSORS * len(SIZES) * max(SIZES.values())
    room = node.extra["room"] = mmap.mmap(-1, size)
    at = np.frombuffer(room, dtype=np.uint8).ctypes.data
    begins = itertools.count(at, max(SIZES.values()))
    addrs = {name: [next(begins) for _ in range(TENSORS)] for name in SIZES}
    ids = register(node, addrs)
    # Nothing else may come to lie there, so the addresses are kept, but without any access.
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(at), ctypes.c_size_t(size), 0) == 0
    return ids


def invalidate(node: Node) -> None:
    """Make what peers know of the caches stale."""
    node.register_blocks("extra", 1, 1, 64)
    node.unregister("extra")


def operate(node: Node, operation: str, peer: int, ids: dict[str, int]) -> Outcome:
    """One operation with a peer. The moment it has ended, its destination here is filled with ``MARK``."""
    manager, caches = node.manager, node.caches
    try:
        if operation == "pull_blocks":
            manager.pull_blocks(BlocksCacheKey(peer, 0), caches["target blocks"], SOURCES, TARGETS)
        elif operation == "pull_cache":
            manager.pull_cache(CacheKeyByIdAndIndex(peer, ids["source cache"], 1), caches["target cache"], 1)
        elif operation == "push_blocks":
            manager.push_blocks(BlocksCacheKey(peer, 1), caches["source blocks"], SOURCES, TARGETS)
        elif operation == "push_cache":
            manager.push_cache(CacheKeyByIdAndIndex(peer, ids["target cache"], 1), caches["source cache"], 1)
        else:
            config = TransferWithCacheKeyConfig(BlocksCacheKey(peer, 1), range(2), range(2))
            task = manager.transfer_cache_async(caches["source blocks"], _Ready(), [config], SOURCES, TARGETS)
            status = task.synchronize(int(TIMEOUT_S * 1000))
            return Outcome(status.name, quiescent=status is not LLMStatusCode.LLM_TIMEOUT)
    except LLMException as error:
        quiescent = getattr(error, "quiescent", "did not confirm" not in str(error))
        return Outcome(str(error.status_code and error.status_code.name), str(error), quiescent)
    finally:
        if operation.startswith("pull"):
            node.extra["verdict"] = verdict(node, DESTINATIONS[operation])
            mark(node, DESTINATIONS[operation])
    return Outcome(LLMStatusCode.LLM_SUCCESS.name)


def link(node: Node, peer: int, address: tuple[str, int], timeout: int) -> Outcome:
    """``link_clusters``."""
    return Outcome(node.link(peer, address, timeout).name)


def unlink(node: Node, peer: int, address: tuple[str, int] | None, timeout: int, *, force: bool = False) -> Outcome:
    """``unlink_clusters``."""
    return Outcome(node.unlink(peer, address, timeout=timeout, force=force).name)


def last_verdict(node: Node) -> str:
    """What ``verdict`` said when the last pull had ended."""
    said: str = node.extra.pop("verdict")
    return said


def verdict(node: Node, name: str) -> str:
    """How a destination looks: untouched, partial or complete; or which bytes are wrong."""
    kinds = set()
    for at, tensor in enumerate(node.arenas[name].memory):
        if not _is(tensor[:GUARD], POISON) or not _is(tensor[-GUARD:], POISON):
            return f"WRONG: memory around tensor {at}"
        for block, (found, right) in enumerate(_blocks(name, at, tensor[GUARD:-GUARD])):
            if right is None:
                if not _is(found, OLD):
                    return f"WRONG: block {block} of tensor {at}, which was not named"
                continue
            old, new = found == OLD, found == right
            if not (old | new).all():
                return f"WRONG: block {block} of tensor {at} has bytes that nobody sent"
            kinds.add("untouched" if old.all() else "complete" if new.all() else "partial")
    return kinds.pop() if len(kinds) == 1 else "partial"


def mark(node: Node, name: str) -> None:
    """Fill what is named in a destination with ``MARK``."""
    for at, tensor in enumerate(node.arenas[name].memory):
        for found, right in _blocks(name, at, tensor[GUARD:-GUARD]):
            if right is not None:
                found[:] = MARK


def still_marked(node: Node, name: str) -> bool:
    """Whether nothing has changed since then."""
    return all(
        _is(found, OLD if right is None else MARK)
        for at, tensor in enumerate(node.arenas[name].memory)
        for found, right in _blocks(name, at, tensor[GUARD:-GUARD])
    )


def _blocks(name: str, at: int, content: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
    """Each block or entry of a destination, and what has to come there, if anything."""
    if name == "target cache":
        entries = content.reshape(BATCH, -1)
        yield entries[0], None
        yield entries[1], source_bytes(at, SIZES["source cache"]).reshape(BATCH, -1)[1]
        return
    source = source_bytes(at, SIZES["source blocks"]).reshape(BLOCKS, -1)
    origin = dict(zip(TARGETS, SOURCES, strict=True))
    for block, found in enumerate(content.reshape(BLOCKS, -1)):
        yield found, source[origin[block]] if block in origin else None


def _is(array: np.ndarray, value: int) -> bool:
    return bool((array == value).all())


def arm(node: Node, number: int) -> None:
    """Hold the ``number``-th system call that copies, from now on, until ``disarm``."""
    entered, gate = node.extra["entered"], node.extra["gate"] = threading.Event(), threading.Event()
    node.extra["held since"] = None
    left = number

    def holding(real: Callable[..., int]) -> Callable[..., int]:
        def held(*args: int) -> int:
            nonlocal left
            left -= 1
            if left == 0:
                node.extra["held since"] = time.monotonic()
                entered.set()
                gate.wait(TIMEOUT_S)
            return real(*args)

        return held

    node.extra["real"] = syscalls.process_vm_readv, syscalls.process_vm_writev
    syscalls.process_vm_readv, syscalls.process_vm_writev = map(holding, node.extra["real"])


def entered(node: Node) -> bool:
    """Whether a call is held, or is so within a moment."""
    return bool(node.extra["entered"].wait(0.05))


def wait_held(node: Node, seconds: float) -> None:
    """Wait until the call that is held, if one is, has been so for longer than that."""
    since: float | None = node.extra["held since"]
    until(lambda: since is None or time.monotonic() > since + seconds)


def disarm(node: Node) -> None:
    """Let it go."""
    if "real" in node.extra:
        syscalls.process_vm_readv, syscalls.process_vm_writev = node.extra.pop("real")
        node.extra["gate"].set()


def set_deadline(node: Node, seconds: float) -> None:
    """What ``sync_kv_timeout`` sets, which this side alone knows."""
    node.manager._engine._timeout_s = seconds


def epoch(node: Node) -> int:
    """Of the region table: it grows when an ``unregister_cache`` has taken effect."""
    return int(node.manager._engine._core.regions.epoch)


def unregister_all(node: Node, first: str = "source blocks") -> str:
    """Unregister the four caches, keeping their memory; what went wrong."""
    for name in sorted(SIZES, key=lambda name: name != first):
        try:
            if name in node.caches:
                node.manager.unregister_cache(node.caches[name].cache_id)
                del node.caches[name]
        except LLMException as error:
            return str(error)
    return ""


def wait_epoch(node: Node, beyond: int) -> None:
    """Wait until the table is newer than that."""
    until(lambda: epoch(node) > beyond)


def wait_not_linked(node: Node, peer: int) -> None:
    """Wait until this side knows that the link ends."""
    table = node.manager._engine._core.table

    def ends() -> bool:
        link = table.get(peer)
        return link is None or link.state.name != "LINKED"

    until(ends)


def wait_level(node: Node, highest: Level) -> None:
    """Wait until this process has no more open than that."""

    def settled() -> bool:
        now = level(node)
        return now.descriptors <= highest.descriptors and now.threads <= highest.threads

    until(
        settled, what=lambda: f"left behind in cluster {node.datadist.cluster_id}: {highest} before, {level(node)} now"
    )


def level(_node: Node) -> Level:
    """What this process has open."""
    gc.collect()
    threads = [thread for thread in threading.enumerate() if not POOL_THREADS.search(thread.name)]
    return Level(len(list(Path("/proc/self/fd").iterdir())), len(threads))


def finalize(node: Node) -> None:
    """Finalize; idempotent."""
    with contextlib.suppress(LLMException):
        node.finalize()
