"""How the memory of an engine's caches is backed, for operators."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from llm_datadist.memory import huge_pages
from llm_datadist.memory.devices import memory_name
from llm_datadist.memory.huge_pages import Outcome, Usage

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from llm_datadist.engine.catalogue import CacheEntry

_REST: Final = 0.05
"""A smaller share than this without huge pages makes no difference."""


@dataclass(frozen=True, slots=True)
class Cause:
    """Why memory is not in huge pages, and what helps."""

    reason: str
    hint: str


_OFF: Final = Cause(
    "huge pages are turned off for this engine",
    "turn LLMConfig.huge_pages (llm.HugePages, LLM_DATADIST_HUGE_PAGES) on",
)
_SMALL: Final = Cause(
    "parts of tensors do not fill a huge page",
    "put tensors next to each other in one large allocation",
)
_UNUSED: Final = Cause("parts are not in use yet", "nothing to do: they get huge pages when they are written")
_SWITCHED_OFF: Final = Cause(
    "the system gives no huge pages to memory that is written for the first time",
    "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled, or register again once the memory is in use",
)
_OUTCOMES: Final = {
    Outcome.REFUSED: Cause(
        "the kernel refused: the memory is mapped from a file, pinned, barred by PR_SET_THP_DISABLE, or was not yet "
        "in use when it was registered",
        "register it again, and before it is pinned",
    ),
    Outcome.UNMAPPED: Cause("memory was registered that was not mapped", "map it before it is registered"),
    Outcome.NO_MEMORY: Cause(
        "the system had no huge page left",
        "echo 1 > /proc/sys/vm/compact_memory, or raise the memory limit, and register again",
    ),
    Outcome.OUT_OF_TIME: Cause(
        "the time for it was over",
        "register or allocate again to go on, or register memory before it is first written",
    ),
    Outcome.UNDER_WAY: Cause(
        "the time for it was over, and the rest is being moved in the background",
        "nothing to do; register memory before it is first written to have it at once",
    ),
    Outcome.UNSUPPORTED: Cause(
        "the kernel cannot move memory into huge pages (Linux 6.1 can)", "register memory before it is first written"
    ),
}


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """What ``explain_memory`` tells of registered and allocated caches together, as things are at this moment."""

    tensors: int
    size: int
    """Bytes of all tensors; bytes that several share count once."""
    whole: int
    """Bytes of ``size`` that fill huge pages: no others can be in them."""
    resident: int
    """Bytes of ``whole`` that are in use: the rest gets its memory when it is first written."""
    huge: int
    """Bytes of ``whole`` that are in huge pages."""
    seconds: float
    """How much longer registering and allocating took for it."""
    causes: tuple[Cause, ...]
    """Why memory is not in huge pages; empty if nearly all is."""
    on_devices: tuple[tuple[int, int], ...] = ()
    """Each GPU with caches in its memory, and their bytes there. All other fields are about host memory."""

    @classmethod
    def of(cls, entries: Sequence[CacheEntry], *, wanted: bool) -> MemoryReport:
        """The report on these caches; ``wanted`` tells whether the engine asks for huge pages."""
        gpus = sorted({entry.device for entry in entries if entry.device is not None})
        on_devices = [(gpu, huge_pages.total(_ranges(entries, gpu))) for gpu in gpus]
        ranges = _ranges(entries, None)
        entries = [entry for entry in entries if entry.device is None]
        stretches = huge_pages.whole_pages(ranges, huge_pages.page_size())
        whole = huge_pages.total(stretches)
        advices = [entry.advice for entry in entries if entry.advice]
        usage = huge_pages.usage(stretches) or Usage(whole, sum(advice.huge for advice in advices))
        facts = cls(
            tensors=sum(len(entry.addrs) for entry in entries),
            size=huge_pages.total(ranges),
            whole=whole,
            resident=usage.resident,
            huge=usage.huge,
            seconds=sum(advice.seconds for advice in advices),
            causes=(),
            on_devices=tuple(on_devices),
        )
        outcomes = {advice.outcome for advice in advices}
        return replace(facts, causes=tuple(_causes(facts, outcomes, wanted=wanted)))

    def __str__(self) -> str:
        share = self.huge / self.size if self.size else 0.0
        head = f"memory of caches: {self.tensors} tensors, {_bytes(self.size)}, {share:.0%} in huge pages"
        lines = [f"{head}, which took {self.seconds:.2f} s"]
        lines += [f"  - {cause.reason} [{cause.hint}]" for cause in self.causes]
        lines += [f"{_bytes(size)} more in {memory_name(device)}" for device, size in self.on_devices]
        return "\n".join(lines)


def _ranges(entries: Sequence[CacheEntry], device: int | None) -> list[tuple[int, int]]:
    """The memory of caches there, joined."""
    return huge_pages.join(
        (int(addr), int(addr) + entry.geometry.tensor_size)
        for entry in entries
        if entry.device == device
        for addr in entry.addrs
    )


def _causes(facts: MemoryReport, outcomes: set[Outcome], *, wanted: bool) -> Iterator[Cause]:
    rest = _REST * facts.size
    if facts.size - facts.huge <= rest:
        return
    if not wanted:
        yield _OFF
        return
    if facts.size - facts.whole > rest:
        yield _SMALL
    unused, refused = facts.whole - facts.resident > rest, facts.resident - facts.huge > rest
    if (unused or refused) and huge_pages.switched_off():
        yield _SWITCHED_OFF
    elif unused and outcomes <= {Outcome.DONE, Outcome.REFUSED}:
        yield _UNUSED
    if not refused:  # then it was refused because it was not in use
        outcomes = outcomes - {Outcome.REFUSED}
    yield from (cause for outcome, cause in _OUTCOMES.items() if outcome in outcomes)


def _bytes(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 1 << 30 else f"{count / 2**20:.1f} MiB"
