"""The conformance kit finds what is wrong: paths that break one promise each, and what it says about them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from llm_datadist.layout.spans import Runs, Spans
from llm_datadist.memory.regions import RegionError
from llm_datadist.paths import registry
from llm_datadist.paths.base import Path, PathError, Transport
from llm_datadist.testing import (
    ConformanceError,
    Fault,
    FaultKind,
    Faults,
    FaultyPath,
    FaultyTransport,
    check_path,
    ends_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm_datadist.paths.base import Context, Peer
    from llm_datadist.utils.deadline import Deadline


class Broken(Path):
    """Leaves everything to another path; what derives from it breaks one thing."""

    name = "broken"

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, spans: Spans, deadline: Deadline, epoch: int = 0) -> None:
        self.path.read(spans, deadline, epoch)

    def write(self, spans: Spans, deadline: Deadline, epoch: int = 0) -> None:
        self.path.write(spans, deadline, epoch)

    def close(self) -> None:
        self.path.close()

    def abort(self) -> None:
        self.path.abort()

    def describe(self) -> str:
        return "broken"


class ForgetsTheLast(Broken):
    def write(self, spans: Spans, deadline: Deadline, epoch: int = 0) -> None:
        self.path.write(spans[slice(None), slice(0, max(1, len(spans.runs) - 1))], deadline, epoch)


class OneTooMany(Broken):
    """Reads a byte more than it was told to, where there is one."""

    def read(self, spans: Spans, deadline: Deadline, epoch: int = 0) -> None:
        runs = Runs(spans.runs.local, spans.runs.remote, spans.runs.lengths + 1)
        try:
            self.path.read(Spans(spans.bases, spans.regions, spans.starts, runs), deadline, epoch)
        except RegionError:
            self.path.read(spans, deadline, epoch)


class RaisesWhatItLikes(Broken):
    def read(self, spans: Spans, deadline: Deadline, epoch: int = 0) -> None:
        try:
            self.path.read(spans, deadline, epoch)
        except RegionError as error:
            message = "somewhere in a library"
            raise OSError(message) from error


class ChecksTooLate(Broken):
    """Moves tensor by tensor, and finds out then that one of them is not there."""

    def write(self, spans: Spans, deadline: Deadline, epoch: int = 0) -> None:
        for at in range(len(spans.bases)):
            self.path.write(spans[slice(at, at + 1), slice(None)], deadline, epoch)


class IgnoresEpochs(Broken):
    def read(self, spans: Spans, deadline: Deadline, epoch: int = 0) -> None:
        self.path.read(spans, deadline)


class IgnoresDeadlines(Broken):
    def read(self, spans: Spans, deadline: Deadline, epoch: int = 0) -> None:
        self.path.read(spans, type(deadline).after(60), epoch)


class WritesLater(Broken):
    """Says that it is too late, but goes on behind the caller's back."""

    late: tuple[Spans, Deadline] | None = None

    def read(self, spans: Spans, deadline: Deadline, epoch: int = 0) -> None:
        late, self.late = self.late, None
        if late is not None:
            self.path.read(*late)
        try:
            self.path.read(spans, deadline, epoch)
        except PathError:
            self.late = spans, type(deadline).after(60)
            raise


class KeepsDescriptors(Broken):
    def close(self) -> None:
        """Nothing is given back."""


class TwoLines(Broken):
    def describe(self) -> str:
        return "how it works\nand why"


class Stuck(Broken):
    """Is poisoned by the first failure."""

    failed = False

    def write(self, spans: Spans, deadline: Deadline, epoch: int = 0) -> None:
        if self.failed:
            message = "something went wrong before"
            raise PathError(message)
        try:
            self.path.write(spans, deadline, epoch)
        except (PathError, RegionError):
            self.failed = True
            raise


class Breaks(Transport):
    def __init__(self, wrap: Callable[[Path], Path], name: str = "process_vm") -> None:
        self.name = name
        self._wrap = wrap

    def connect(self, peer: Peer, context: Context, deadline: Deadline) -> Path:
        return self._wrap(registry.get(self.name).connect(peer, context, deadline))


@pytest.mark.parametrize(
    ("wrap", "check", "text"),
    [
        (ForgetsTheLast, "moves many spans", r"write of 8193 spans: 3 bytes of tensor 0 are wrong"),
        (OneTooMany, "moves every byte", r"read of .* bytes of tensor 0 are wrong"),
        (RaisesWhatItLikes, "out of range", r"it raised OSError\('somewhere in a library'\)"),
        (ChecksTooLate, "unknown regions", r"was refused, but moved something"),
        (IgnoresEpochs, "stale epoch", r"a read with an old epoch: None instead of a StaleEpochError"),
        (IgnoresDeadlines, "expired deadline", r"None instead of a PathTimeoutError"),
        (WritesLater, "deadline in the middle", r"bytes of the destination changed after"),
        (KeepsDescriptors, "close", r"descriptors open"),
        (TwoLines, "introduces itself", r"not one line of text"),
        (Stuck, "expired deadline", r"after a deadline in the past: a write of 2 spans failed"),
    ],
)
def test_broken_promises_are_found(wrap: Callable[[Path], Path], check: str, text: str) -> None:
    with pytest.raises(ConformanceError, match=f"^{check}: .*{text}"):
        check_path(lambda: ends_of(Breaks(wrap)), [check])


@pytest.mark.parametrize("kind", [FaultKind.DROP, FaultKind.CORRUPT, FaultKind.CUT])
def test_faulty_paths_are_found(kind: FaultKind) -> None:
    faults = Faults()
    faults.storm(seed=5, rate=1.0, kinds=[kind])
    with pytest.raises(ConformanceError, match=r"^moves every byte: "):
        check_path(lambda: ends_of(Breaks(lambda path: FaultyPath(path, faults))), ["moves every byte"])


def test_a_faulty_path_without_faults_keeps_all_promises() -> None:
    check_path(lambda: ends_of(FaultyTransport(registry.get("tcp"), Faults())))


def test_an_owner_that_ends_is_told_from_a_path_that_fails() -> None:
    with ends_of(registry.get("process_vm")) as ends:
        ends.stop_owner()
        with pytest.raises(EOFError, match="the owner's process has ended with -9 during register"):
            ends.owner.register(1, 0)


def test_patterns_differ() -> None:
    faults = [Fault(FaultKind.CORRUPT, seed=seed).changer()(bytes(64)) for seed in (1, 1, 2)]
    assert faults[0] == faults[1] != faults[2]
    assert 0 not in faults[0]
    assert np.frombuffer(faults[0], np.uint8).any()
