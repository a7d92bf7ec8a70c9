"""Transfers between memory here and memory of an owner, with every byte looked at, for the conformance checks."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NoReturn

import numpy as np

from llm_datadist.layout.spans import Runs, Spans
from llm_datadist.memory.regions import RegionError
from llm_datadist.paths.base import PathError
from llm_datadist.testing.owner import GUARD, POISON, WAIT_S, pattern
from llm_datadist.utils.deadline import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from llm_datadist.paths.base import Path
    from llm_datadist.testing.ends import PathEnds
    from llm_datadist.testing.owner import MemoryOwner

    U8 = NDArray[np.uint8]
    Run = tuple[int, int, int]

_PAGE: Final = 4096
OLD, NEW = 1, 2
"""Seeds of what a destination holds before, and of its source."""


class ConformanceError(AssertionError):
    """A path does not keep a promise of ``paths/base.py``; the text says which one."""


class Op(enum.Enum):
    """Direction, seen from this side."""

    READ = "read"
    WRITE = "write"


class Here:
    """Memory of this process: ``size`` bytes, ``shift`` bytes after a page boundary, between two guards."""

    def __init__(self, ends: PathEnds, size: int, shift: int) -> None:
        self._room = np.zeros(size + 2 * GUARD + 2 * _PAGE, dtype=np.uint8)
        begin = -self._room.ctypes.data % _PAGE + _PAGE - GUARD + shift
        self.whole: U8 = self._room[begin : begin + size + 2 * GUARD]
        self.whole[:] = POISON
        self.content: U8 = self.whole[GUARD:-GUARD]
        self.base: int = self.content.ctypes.data
        ends.register_here(self.base, size)


class Field:
    """As many tensors here as at the owner, of equal size, one to one."""

    def __init__(self, ends: PathEnds, tensors: int, size: int, shifts: tuple[int, int] = (0, 0)) -> None:
        self.owner: MemoryOwner = ends.owner
        self.size = size
        self.here: list[Here] = [Here(ends, size, shifts[0]) for _ in range(tensors)]
        self.there: list[int] = [self.owner.register(size, shifts[1]) for _ in range(tensors)]

    def prepare(self, op: Op) -> None:
        """New bytes into the source, old ones into the destination; they differ from tensor to tensor."""
        ours, theirs = (OLD, NEW) if op is Op.READ else (NEW, OLD)
        for at, (here, region) in enumerate(zip(self.here, self.there, strict=True)):
            here.content[:] = pattern(10 * at + ours, self.size)
            self.owner.fill(region, 10 * at + theirs)

    def spans(self, runs: Sequence[Run], regions: Sequence[int] | None = None, starts: Sequence[int] = ()) -> Spans:
        """The same runs (offset here, offset there, length) in all tensors."""
        local, remote, lengths = np.array(runs, dtype=np.int64).reshape(-1, 3).T.copy()
        return Spans(
            bases=np.array([here.base for here in self.here], dtype=np.uint64),
            regions=np.array(self.there if regions is None else regions, dtype=np.uint64),
            starts=np.array(starts or [0] * len(self.there), dtype=np.int64),
            runs=Runs(local, remote, lengths),
        )

    def destination(self, op: Op) -> list[U8]:
        """What the destination holds now, guards included."""
        if op is Op.READ:
            return [here.whole.copy() for here in self.here]
        return [np.frombuffer(self.owner.memory(region), dtype=np.uint8) for region in self.there]

    def expected(self, op: Op, runs: Sequence[Run], starts: Sequence[int] = ()) -> list[U8]:
        """What it has to hold when these runs have been moved after ``prepare``."""
        result = []
        for at, start in enumerate(starts or [0] * len(self.there)):
            whole = np.full(self.size + 2 * GUARD, POISON, dtype=np.uint8)
            content, source = whole[GUARD:-GUARD], pattern(10 * at + NEW, self.size)
            content[:] = pattern(10 * at + OLD, self.size)
            for local, offset, length in runs:
                remote = start + offset
                to, origin = (local, remote) if op is Op.READ else (remote, local)
                content[to : to + length] = source[origin : origin + length]
            result.append(whole)
        return result

    def mark(self, op: Op) -> None:
        """Put something else into the destination: what comes late would be seen."""
        for at, (here, region) in enumerate(zip(self.here, self.there, strict=True)):
            if op is Op.READ:
                here.content[:] = pattern(10 * at + 3, self.size)
            else:
                self.owner.fill(region, 10 * at + 3)

    def check_marked(self, op: Op, when: str) -> None:
        """Nothing has changed since ``mark``.

        Raises:
            ConformanceError: something has.
        """
        for at, found in enumerate(self.destination(op)):
            if not (found[GUARD:-GUARD] == pattern(10 * at + 3, self.size)).all():
                fail(f"bytes of the destination changed {when}, after the {op.value} had returned")

    def check(self, op: Op, wanted: list[U8], what: str) -> None:
        """The destination holds exactly what is wanted.

        Raises:
            ConformanceError: it does not.
        """
        for at, (found, right) in enumerate(zip(self.destination(op), wanted, strict=True)):
            wrong = np.flatnonzero(found != right)
            if len(wrong):
                first = int(wrong[0]) - GUARD
                fail(f"{what}: {len(wrong)} bytes of tensor {at} are wrong, the first at offset {first} of {self.size}")

    def check_partial(self, op: Op, runs: Sequence[Run], what: str) -> None:
        """Every byte of the destination is as before, or, where it was to be moved, as at the source.

        Raises:
            ConformanceError: it is not.
        """
        olds, news = self.expected(op, []), self.expected(op, runs)
        for found, old, new in zip(self.destination(op), olds, news, strict=True):
            if not ((found == old) | (found == new)).all():
                fail(f"{what}: the destination holds bytes that are neither its old ones nor those of the source")


@dataclass(frozen=True)
class Mover:
    """Moves over one path, and takes only the documented errors for answers."""

    path: Path

    def attempt(self, op: Op, spans: Spans, deadline: Deadline | None = None, epoch: int = 0) -> Exception | None:
        """One transfer; the error that it raised.

        Raises:
            ConformanceError: the error is none of the documented ones.
        """
        move = self.path.read if op is Op.READ else self.path.write
        return documented(lambda: move(spans, deadline or soon(), epoch))

    def exchange(self, field: Field, op: Op, runs: Sequence[Run], what: str, starts: Sequence[int] = ()) -> None:
        """A transfer that has to succeed, byte by byte.

        Raises:
            ConformanceError: it failed, or a byte is wrong.
        """
        field.prepare(op)
        spans = field.spans(runs, starts=starts)
        error = self.attempt(op, spans)
        if error is not None:
            fail(f"{what}: a {op.value} of {len(spans)} spans failed: {error!r}")
        field.check(op, field.expected(op, runs, starts), f"{op.value} of {what}")

    def refuses(
        self, field: Field, op: Op, spans: Spans, kind: type[Exception] | tuple[type[Exception], ...], what: str
    ) -> None:
        """A transfer that has to be refused before any byte moves.

        Raises:
            ConformanceError: it was not.
        """
        field.prepare(op)
        error = self.attempt(op, spans)
        if not isinstance(error, kind):
            fail(f"a {op.value} with {what}: {error!r} instead of {kind}")
        field.check(op, field.expected(op, []), f"a {op.value} with {what} was refused, but moved something")

    def works(self, field: Field, after: str) -> None:
        """Small and large transfers in both directions still succeed.

        Raises:
            ConformanceError: they do not.
        """
        for op in Op:
            for size in (min(field.size, 64), field.size):
                self.exchange(field, op, [(0, 0, size)], f"{size} bytes after {after}")


def documented(call: Callable[[], object]) -> Exception | None:
    """Call; the error that it raised.

    Raises:
        ConformanceError: the error is none of the documented ones.
    """
    try:
        call()
    except (PathError, RegionError) as error:
        return error
    except Exception as error:
        message = f"it raised {error!r}: paths raise PathError, RegionError and what derives from them"
        raise ConformanceError(message) from error
    return None


def soon() -> Deadline:
    """A deadline that only a failure reaches."""
    return Deadline.after(WAIT_S)


def fail(message: str) -> NoReturn:
    """Raise a ConformanceError."""
    raise ConformanceError(message)
