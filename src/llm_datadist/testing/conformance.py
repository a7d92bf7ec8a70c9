"""The promises of ``paths/base.py`` as checks that every path has to pass, ours and those of others."""

from __future__ import annotations

import contextlib
import mmap
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from llm_datadist.layout.spans import Runs, Spans
from llm_datadist.memory.regions import RegionError, StaleEpochError, UnknownRegionError
from llm_datadist.paths.base import PathError, PathTimeoutError, TensorPairs
from llm_datadist.testing.moves import ConformanceError, Field, Mover, Op, documented, fail, soon
from llm_datadist.testing.owner import GUARD, WAIT_S
from llm_datadist.utils.deadline import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from llm_datadist.testing.ends import PathEnds
    from llm_datadist.testing.moves import Run

_LARGE: Final = 16 << 20
_SMALL: Final = 3000
_SHIFTS: Final = ((0, 0), (1, 0), (0, 1), (7, 63), (63, 7))
_MANY: Final = 8193
"""Spans: one more than a request over TCP takes."""
_THREADS: Final = 6
_ROUNDS: Final = 8
_HALVINGS: Final = 10


@contextlib.contextmanager
def _connected(ends: PathEnds) -> Iterator[Mover]:
    path = ends.connect()
    try:
        yield Mover(path)
    finally:
        path.close()


def _check_introduces_itself(ends: PathEnds) -> None:
    """It has a name, and one line for ``explain_link``."""
    with _connected(ends) as mover:
        name, line = mover.path.name, mover.path.describe()
        if not isinstance(name, str) or not name:
            fail(f"its name is {name!r}")
        if not isinstance(line, str) or not line or "\n" in line:
            fail(f"describe() gives {line!r}, not one line of text")


def _shapes(size: int) -> Iterator[tuple[str, list[Run]]]:
    """Runs (offset here, offset there, length) within ``size`` bytes."""
    yield "one byte", [(size - 1, 0, 1)]
    yield "one span", [(5, 9, size - 11)]
    yield "all", [(0, 0, size)]
    piece = size // 8
    yield "adjacent on both sides", [(at * piece, at * piece, piece) for at in range(8)]
    yield "adjacent there only", [((7 - at) * piece, at * piece, piece) for at in range(8)]
    yield "adjacent here only", [(at * piece, (7 - at) * piece, piece) for at in range(8)]
    rng = np.random.default_rng(size)
    cuts = np.sort(rng.choice(np.arange(1, size), 40, replace=False)).tolist()
    yield "unequal lengths", [(begin, begin, end - begin) for begin, end in zip(cuts[::2], cuts[1::2], strict=True)]


def _check_moves_every_byte(ends: PathEnds) -> None:
    """Spans of many shapes, at any address, in both directions: exactly those bytes, and no neighbour."""
    with _connected(ends) as mover:
        for shifts in _SHIFTS:
            field = Field(ends, 3, _SMALL, shifts)
            for what, runs in _shapes(_SMALL):
                for op in Op:
                    mover.exchange(field, op, runs, f"{what}, addresses +{shifts[0]} here, +{shifts[1]} there")


def _check_moves_many_spans(ends: PathEnds) -> None:
    """8193 spans of one tensor, and more than that over many tensors."""
    with _connected(ends) as mover:
        scattered = [(5 * at, 5 * (_MANY - 1 - at), 3) for at in range(_MANY)]
        field = Field(ends, 1, 5 * _MANY)
        wide = Field(ends, 40, _SMALL, (3, 5))
        for op in Op:
            mover.exchange(field, op, scattered, f"{_MANY} spans")
            mover.exchange(wide, op, [(12 * at, 12 * at + 1, 7) for at in range(_SMALL // 12 - 1)], "40 tensors")


def _check_moves_large_spans(ends: PathEnds) -> None:
    """One span of 16 MiB, unaligned, and as many bytes in blocks out of order."""
    with _connected(ends) as mover:
        field = Field(ends, 1, _LARGE, (1, 7))
        block = 64 << 10
        count = _LARGE // block
        for op in Op:
            mover.exchange(field, op, [(3, 0, _LARGE - 3)], "one large span")
            mover.exchange(field, op, [(at * block, (count - 1 - at) * block, block) for at in range(count)], "blocks")


def _check_source_may_repeat(ends: PathEnds) -> None:
    """The same bytes of a source go to several destinations."""
    with _connected(ends) as mover:
        field = Field(ends, 2, _SMALL)
        for op in Op:
            pairs = [(100 * at, 7) for at in range(10)]
            runs = [(there, here, 50) if op is Op.WRITE else (here, there, 50) for here, there in pairs]
            mover.exchange(field, op, runs, "one source span for ten destinations")


def _check_starts_within_regions(ends: PathEnds) -> None:
    """Tensors begin in the middle of regions, several of them in the same one."""
    with _connected(ends) as mover:
        field = Field(ends, 3, _SMALL, (7, 1))
        for op in Op:
            mover.exchange(field, op, [(0, 0, 100), (300, 200, 50)], "starts", starts=[0, 1001, _SMALL - 250])
        one, other = field.there[0], field.there[1]
        field.prepare(Op.READ)
        spans = field.spans([(0, 0, 500)], [one, one, other], [0, 700, 3])
        error = mover.attempt(Op.READ, spans)
        source = [
            np.frombuffer(ends.owner.memory(region), dtype=np.uint8)[GUARD:-GUARD] for region in (one, one, other)
        ]
        for here, there, start in zip(field.here, source, (0, 700, 3), strict=True):
            if error is not None or not (here.content[:500] == there[start : start + 500]).all():
                fail(f"two tensors in one region are not read as they should be ({error!r})")


def _check_shortcut(ends: PathEnds) -> None:
    """The short way of small transfers moves the same bytes and refuses the same things."""
    size, count = 100, _SMALL // 100
    here, there = [4, 0, 9], [count - 1, 3, 2]
    with _connected(ends) as mover:
        field = Field(ends, 4, _SMALL, (1, 7))
        pairs = TensorPairs([each.base for each in field.here], field.there, ends.owner.epoch())
        shortcut = mover.path.shortcut(pairs)
        runs = [(size * one, size * other, size) for one, other in zip(here, there, strict=True)]
        for op in Op:
            move = shortcut.read if op is Op.READ else shortcut.write
            field.prepare(op)
            error = documented(lambda move=move: move(size, here, there, soon()))  # type: ignore[misc]
            if error is not None:
                fail(f"a {op.value} over the shortcut failed: {error!r}")
            field.check(op, field.expected(op, runs), f"{op.value} over the shortcut")
            field.prepare(op)
            error = documented(lambda move=move: move(size, here, [0, count, 1], soon()))  # type: ignore[misc]
            if not isinstance(error, RegionError):
                fail(f"a {op.value} over the shortcut beyond the region: {error!r} instead of a RegionError")
            error = documented(lambda move=move: move(size, here, there, Deadline.after(0)))  # type: ignore[misc]
            if not isinstance(error, PathTimeoutError):
                fail(f"a late {op.value} over the shortcut: {error!r} instead of a PathTimeoutError")
            field.check(op, field.expected(op, []), f"{op.value} over the shortcut that was refused")
        ends.owner.invalidate()
        field.prepare(Op.READ)
        error = documented(lambda: shortcut.read(size, here, there, soon()))
        if not isinstance(error, StaleEpochError):
            fail(f"a read over a shortcut of an old epoch: {error!r} instead of a StaleEpochError")
        field.check(Op.READ, field.expected(Op.READ, []), "a read over a shortcut of an old epoch")


def _check_expired_deadline(ends: PathEnds) -> None:
    """When the deadline has passed already, nothing moves."""
    with _connected(ends) as mover:
        field = Field(ends, 2, _SMALL)
        for op in Op:
            field.prepare(op)
            error = mover.attempt(op, field.spans([(0, 0, _SMALL)]), Deadline.after(0))
            if not isinstance(error, PathTimeoutError):
                fail(f"a {op.value} with a deadline in the past: {error!r} instead of a PathTimeoutError")
            field.check(op, field.expected(op, []), f"a {op.value} with a deadline in the past moved something")
        mover.works(field, "a deadline in the past")


def _check_deadline_in_the_middle(ends: PathEnds) -> None:
    """A transfer ends complete or with ``PathTimeoutError``; after that no byte changes, and the path still works."""
    with _connected(ends) as mover:
        field, small = Field(ends, 1, _LARGE), Field(ends, 1, _SMALL)
        runs = [(0, 0, _LARGE)]
        for op in Op:
            mover.exchange(field, op, runs, "a large span")
            begin = time.monotonic()
            mover.attempt(op, field.spans(runs))
            whole = time.monotonic() - begin
            for halving in range(1, _HALVINGS):
                field.prepare(op)
                error = mover.attempt(op, field.spans(runs), Deadline.after(whole / 2**halving))
                if error is None:
                    field.check(op, field.expected(op, runs), f"{op.value} by its deadline")
                    continue
                if not isinstance(error, PathTimeoutError):
                    fail(f"a {op.value} that comes too late: {error!r} instead of a PathTimeoutError")
                field.check_partial(op, runs, f"{op.value} that came too late")
                _check_quiet(mover, field, small, op, error, "a deadline in the middle")


def _check_quiet(mover: Mover, field: Field, other: Field, op: Op, error: Exception | None, after: str) -> None:
    """Nothing changes any more while the path moves something else, which works."""
    quiescent = getattr(error, "quiescent", True)
    if quiescent:
        field.mark(op)
    mover.works(other, after)
    if quiescent:
        field.check_marked(op, f"after {after}")


def _check_out_of_range(ends: PathEnds) -> None:
    """Spans that reach outside their region are refused before any byte moves, also if only the last one does."""
    with _connected(ends) as mover:
        field = Field(ends, 2, _SMALL)
        good: list[Run] = [(at, at, 10) for at in range(0, 500, 20)]
        for op in Op:
            for what, bad in {
                "a last span one byte too long": (1000, _SMALL - 9, 10),
                "a last span behind the end": (1000, _SMALL, 1),
                "a last span far behind the end": (1000, 1 << 40, 8),
            }.items():
                mover.refuses(field, op, field.spans([*good, bad]), RegionError, what)
            last = field.spans(good, starts=[0, _SMALL - 400])
            mover.refuses(field, op, last, RegionError, "a start that leads outside, of the last tensor")
        mover.works(field, "spans out of range")


def _check_unknown_regions(ends: PathEnds) -> None:
    """Regions that were never there, or are not any more, are refused before any byte moves."""
    with _connected(ends) as mover:
        field, gone = Field(ends, 2, _SMALL), Field(ends, 1, _SMALL)
        ends.owner.unregister(gone.there[0])
        good = field.there[0]
        for op in Op:
            for what, region in {
                "a region that is gone": gone.there[0],
                "a region that never was": good + (1 << 40),
                "region 0": 0,
            }.items():
                spans = field.spans([(0, 0, 100)], [good, region])
                mover.refuses(field, op, spans, UnknownRegionError, what)
        mover.works(field, "unknown regions")


def _check_stale_epoch(ends: PathEnds) -> None:
    """What was planned with an older table is refused before any byte moves; epoch 0 is not checked."""
    with _connected(ends) as mover:
        field = Field(ends, 2, _SMALL)
        for op in Op:
            old = ends.owner.epoch()
            new = ends.owner.invalidate()
            spans = field.spans([(0, 0, _SMALL)])
            field.prepare(op)
            error = mover.attempt(op, spans, epoch=old)
            if not isinstance(error, StaleEpochError):
                fail(f"a {op.value} with an old epoch: {error!r} instead of a StaleEpochError")
            field.check(op, field.expected(op, []), f"a {op.value} with an old epoch moved something")
            for epoch in (new, 0):
                error = mover.attempt(op, spans, epoch=epoch)
                if error is not None:
                    fail(f"a {op.value} with the epoch {epoch} failed: {error!r}")


class _Again(threading.Thread):
    """Moves the same again and again until it fails or is told to stop."""

    def __init__(self, mover: Mover, op: Op, spans: Spans) -> None:
        super().__init__(name="conformance-again", daemon=True)
        self.moved = threading.Event()
        self.stop = threading.Event()
        self.error: Exception | None = None
        self.undocumented: ConformanceError | None = None
        self._move: Callable[[], Exception | None] = lambda: mover.attempt(op, spans)

    def run(self) -> None:
        """See ``threading.Thread``."""
        try:
            while self.error is None and not self.stop.is_set():
                self.error = self._move()
                self.moved.set()
        except ConformanceError as error:
            self.undocumented = error
            self.moved.set()

    def ended(self, after: str) -> Exception | None:
        """Wait for its end; the error."""
        self.join(WAIT_S)
        if self.is_alive():
            fail(f"a transfer still runs {WAIT_S} s after {after}")
        if self.undocumented is not None:
            raise self.undocumented
        return self.error


def _check_region_goes_meanwhile(ends: PathEnds) -> None:
    """A region that is taken out while transfers run: they end with ``RegionError``, and nothing touches it later."""
    with _connected(ends) as mover:
        other = Field(ends, 1, _SMALL)
        for op in Op:
            field = Field(ends, 1, _LARGE // 4)
            field.prepare(op)
            again = _Again(mover, op, field.spans([(0, 0, field.size)]))
            again.start()
            if not again.moved.wait(WAIT_S):
                fail(f"a {op.value} does not end")
            ends.owner.unregister(field.there[0])
            error = again.ended("its region was taken out")
            if not isinstance(error, RegionError):
                fail(f"a {op.value} whose region goes meanwhile: {error!r} instead of a RegionError")
            _check_quiet(mover, field, other, op, error, "a region was taken out")


def _check_abort(ends: PathEnds) -> None:
    """``abort`` ends running transfers soon; after that no byte changes, and a new path works."""
    for op in Op:
        field, other = Field(ends, 1, _LARGE), Field(ends, 1, _SMALL)
        field.prepare(op)
        with _connected(ends) as mover, _connected(ends) as fresh:
            again = _Again(mover, op, field.spans([(0, 0, field.size)]))
            again.start()
            if not again.moved.wait(WAIT_S):
                fail(f"a {op.value} does not end")
            mover.path.abort()
            again.stop.set()  # a path that needs no interruption may go on
            error = again.ended("abort()")
            if isinstance(error, RegionError):
                fail(f"abort() made a {op.value} fail with {error!r} instead of a PathError")
            mover.path.abort()
            _check_quiet(fresh, field, other, op, error, "abort()")


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def _check_close(ends: PathEnds) -> None:
    """``close`` may be called twice, also after ``abort``, and gives all descriptors back."""
    with _connected(ends) as mover:  # what is made only once is there now
        mover.works(Field(ends, 1, _SMALL), "connecting")
    before = _descriptors()
    for aborted in (False, True):
        path = ends.connect()
        Mover(path).works(Field(ends, 1, _SMALL), "connecting")
        if aborted:
            path.abort()
        path.close()
        path.close()
        path.abort()
    left = _descriptors() - before
    if left > 0:
        fail(f"two paths that were closed have left {left} descriptors open")


def _check_many_threads(ends: PathEnds) -> None:
    """Any number of threads use one path at the same time, in both directions."""
    errors: list[BaseException] = []

    def work(mover: Mover, field: Field) -> None:
        try:
            for _ in range(_ROUNDS):
                for op in Op:
                    mover.exchange(field, op, [(0, 0, 1000), (1500, 1200, 700)], "one of many threads")
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    with _connected(ends) as mover:
        fields = [Field(ends, 2, _SMALL) for _ in range(_THREADS)]
        threads = [threading.Thread(target=work, args=(mover, field), daemon=True) for field in fields]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        if any(thread.is_alive() for thread in threads):
            fail(f"{_THREADS} threads do not end within {WAIT_S} s")
        if errors:
            raise errors[0]


def _check_memory_that_is_not_mapped(ends: PathEnds) -> None:
    """An address here at which there is nothing: an error, no crash, and the path still works."""
    with mmap.mmap(-1, mmap.PAGESIZE) as room:
        address = np.frombuffer(room, dtype=np.uint8).ctypes.data  # unmapped by now: the array is gone
    with _connected(ends) as mover:
        field = Field(ends, 1, _SMALL)
        zero = np.zeros(1, dtype=np.int64)
        runs = Runs(zero, zero, np.array([100], dtype=np.int64))
        spans = replace(field.spans([(0, 0, 1)]), bases=np.array([address], dtype=np.uint64), runs=runs)
        for op in Op:
            error = mover.attempt(op, spans)
            if not isinstance(error, PathError):
                fail(f"a {op.value} with memory that is not mapped: {error!r} instead of a PathError")
            mover.works(field, "memory that is not mapped")


def _check_owner_ends(ends: PathEnds) -> None:
    """The owner's end makes transfers fail, those that run and those that follow."""
    with _connected(ends) as mover:
        for op in Op:
            field = Field(ends, 1, _LARGE)
            field.prepare(op)
            again = _Again(mover, op, field.spans([(0, 0, field.size)]))
            again.start()
            if not again.moved.wait(WAIT_S):
                fail(f"a {op.value} does not end")
            if op is Op.READ:
                again.stop.set()
                again.ended("being told to stop")
        ends.stop_owner()
        for op in (Op.WRITE, Op.READ):
            error = again.ended("the owner's end") if op is Op.WRITE else mover.attempt(op, field.spans([(0, 0, 8)]))
            if not isinstance(error, (PathError, UnknownRegionError)):
                fail(f"a {op.value} from an owner that has ended: {error!r} instead of a PathError")
        mover.path.abort()


CHECKS: Final[Mapping[str, Callable[[PathEnds], None]]] = {
    check.__name__.removeprefix("_check_").replace("_", " "): check
    for check in (
        _check_introduces_itself,
        _check_moves_every_byte,
        _check_moves_many_spans,
        _check_moves_large_spans,
        _check_source_may_repeat,
        _check_starts_within_regions,
        _check_shortcut,
        _check_expired_deadline,
        _check_deadline_in_the_middle,
        _check_out_of_range,
        _check_unknown_regions,
        _check_stale_epoch,
        _check_region_goes_meanwhile,
        _check_abort,
        _check_close,
        _check_many_threads,
        _check_memory_that_is_not_mapped,
        _check_owner_ends,
    )
}
"""By name, in the order in which ``check_path`` makes them; the last one ends the owner."""


def check_path(make: Callable[[], AbstractContextManager[PathEnds]], checks: Iterable[str] = tuple(CHECKS)) -> None:
    """Check that a path keeps every promise of ``llm_datadist.paths.base``.

    Takes a few seconds. Memory of this process and of an owner is read and written over the path, and looked at byte by
    byte. Call it in a test of your own::

        def test_my_path():
            check_path(lambda: ends_of(MyTransport()))

    Args:
        make: gives both ends, new ones each time, as a context manager; see ``ends_of`` and ``PathEnds``.
        checks: names of ``CHECKS``, to make only some of them.

    Raises:
        ConformanceError: the path breaks a promise; the text says which one, and what happened.
        KeyError: there is no check of that name.
    """
    chosen = [(name, CHECKS[name]) for name in checks]
    with make() as ends:
        for name, check in chosen:
            try:
                check(ends)
            except ConformanceError as error:
                message = f"{name}: {error}"
                raise ConformanceError(message) from error
