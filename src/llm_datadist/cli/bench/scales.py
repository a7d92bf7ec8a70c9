"""How costs grow: of planning with the number of spans, of a small pull with the number of links."""

from __future__ import annotations

import contextlib
import statistics
import time
from typing import TYPE_CHECKING, Final

from llm_datadist import BlocksCacheKey
from llm_datadist.cli.bench import cases, driver, ours
from llm_datadist.cli.bench.results import Case, Scale
from llm_datadist.memory import syscalls

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from llm_datadist.cli.bench.results import Latency

SPAN_COUNTS: Final = (1_000, 10_000, 100_000, 1_000_000)
LINK_COUNTS: Final = (1, 8, 64, 512)
_TENSORS: Final = 64
_PLANNED_BYTES: Final = 64 << 20


def small(path: str) -> Case:
    """One block of one layer, for latencies."""
    return Case("pull_blocks", path, tensors=2, blocks=1, block_bytes=32 << 10)


def planning(span_counts: Sequence[int] = SPAN_COUNTS, rounds: int = 5) -> Scale:
    """Nanoseconds a span that ``pull_blocks`` spends above the system calls, which are left out.

    In this process; the calls have as many bytes and tensors each, and take turns. Span counts are rounded to whole
    blocks.

    Raises:
        RuntimeError: the calls could not be left out.
    """
    counts: list[int] = []
    seconds: list[list[float]] = []
    with contextlib.ExitStack() as stack:
        calls = []
        for count in span_counts:
            blocks = max(1, round(count / _TENSORS))
            size = max(1, _PLANNED_BYTES // (_TENSORS * blocks) // cases.WORD_BYTES) * cases.WORD_BYTES
            case = Case("pull_blocks", "process_vm", _TENSORS, blocks, size)
            calls.append(stack.enter_context(_idle_pull(case)))
            counts.append(_TENSORS * blocks)
            seconds.append([])
        for _ in range(rounds):
            for call, taken in zip(calls, seconds, strict=True):
                call()  # to warm up: the one before it may have had far more spans
                taken.append(call())
    ns = [statistics.median(taken) * 1e9 / count for taken, count in zip(seconds, counts, strict=True)]
    return Scale("spans of one pull_blocks", "ns a span above the system calls", counts, ns)


def links(
    link_counts: Sequence[int], plan: driver.Plan, calls: int, on_step: driver.OnStep = lambda _: None
) -> list[Latency]:
    """The latency of a small pull on the same host while so many links are up, in interleaved rounds.

    Raises:
        BenchError: see ``driver.latency``.
    """
    programs = [driver.Program.ours("--links", str(count)) for count in link_counts]
    return driver.latency([small("process_vm")], programs, plan, calls, on_step)


@contextlib.contextmanager
def _idle_pull(case: Case) -> Generator[Callable[[], float], None, None]:
    """A call that pulls the whole case between two engines of this process, without copying; its seconds."""
    owner = ours.start_engine(case, ours.OWNER_ID, listen=True, paths=case.path)
    caller = ours.start_engine(case, ours.CALLER_ID, listen=False, paths=case.path)
    try:
        source, destination = cases.Tensors(case), cases.Tensors(case)
        ours.register(owner, case, source)
        cache = ours.register(caller, case, destination)
        ours.link(caller, [ours.port_of(owner)])
        manager, key = caller.cache_manager, BlocksCacheKey(ours.OWNER_ID, ours.MODEL_ID)
        selection = cases.Selection.of(case, seed=1)
        local, remote = selection.local.tolist(), selection.remote.tolist()
        source.fill(seed=1)

        def call() -> float:
            with _nothing_copied(case.block_bytes):
                start = time.perf_counter()
                manager.pull_blocks(key, cache, remote, local)
                return time.perf_counter() - start

        call()
        if not destination.poisoned():
            message = "the system calls of a pull could not be left out: its bytes have moved"
            raise RuntimeError(message)
        yield call
    finally:
        caller.finalize()
        owner.finalize()


@contextlib.contextmanager
def _nothing_copied(block_bytes: int) -> Generator[None, None, None]:
    """In place of ``process_vm_readv``: succeed at once."""
    real = syscalls.process_vm_readv
    syscalls.process_vm_readv = lambda pid, local, remote, count: count * block_bytes  # noqa: ARG005 - as the real one
    try:
        yield
    finally:
        syscalls.process_vm_readv = real
