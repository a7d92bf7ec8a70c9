"""What all contestants have in common; a contestant derives from ``Owner`` and ``Contestant`` and calls ``serve``.

A contestant is a program of two processes in a process group of its own: the one that the driver starts and that makes
the calls, and the owner of the remote memory, which it starts itself. Needs numpy and msgspec only.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import sys
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Final

from llm_datadist.cli.bench import cases
from llm_datadist.cli.bench.protocol import (
    Check,
    Child,
    Done,
    Failed,
    Fill,
    Hello,
    Lines,
    Message,
    Offer,
    Poison,
    Prepare,
    Ran,
    Run,
    Stop,
    Time,
    Timed,
    Verified,
    Verify,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm_datadist.cli.bench.results import Case

_PATIENCE_S: Final = 100.0
"""For the owner to answer; the driver gives up later."""
_FOREVER_S: Final = 1e6
"""For the next order: the end of the one who gives them ends this process anyway."""
_STOP_S: Final = 5.0
_WARM_CALLS: Final = 20
_SPIN: Final = 1_000_000
"""Turns of the pure Python loop of a busy owner between two looks for orders: some 20 ms."""
_PR_SET_PDEATHSIG: Final = 1


class Owner(ABC):
    """The process that owns the remote memory."""

    def __init__(self, options: argparse.Namespace, case: Case, seed: int, tensors: cases.Tensors) -> None:
        self.options = options
        self.case = case
        self.selection: cases.Selection = cases.Selection.of(case, seed)
        self.tensors = tensors

    @abstractmethod
    def open(self) -> dict[str, Any]:
        """Make the memory available; what the other process must know, as plain JSON values."""


class Contestant(ABC):
    """The process that makes the calls."""

    def __init__(self, options: argparse.Namespace, case: Case, seed: int, tensors: cases.Tensors) -> None:
        self.options = options
        self.case = case
        self.selection: cases.Selection = cases.Selection.of(case, seed)
        self.tensors = tensors

    @property
    def receives(self) -> bool:
        """Whether the bytes arrive in this process; else at the owner."""
        return cases.pulls(self.case)

    @abstractmethod
    def open(self, offer: Offer) -> None:
        """Connect to the owner; prepare everything that a user would prepare once."""

    def fill(self, seed: int) -> None:
        """Write the pattern to the source, if that lies in this process."""
        if not self.receives:
            self.tensors.fill(seed)

    @abstractmethod
    def move(self) -> None:
        """Move the whole case once; all bytes are in place when it returns. By the clock."""

    def release(self) -> None:  # noqa: B027 - most moves leave nothing
        """Give back what a move has left. Not by the clock."""


def serve(
    owner: type[Owner],
    contestant: type[Contestant],
    add_options: Callable[[argparse.ArgumentParser], None] | None = None,
) -> None:
    """Main function of a contestant's program, in both processes; returns when told to stop.

    Standard output is the driver's: whatever else is printed goes to standard error.
    """
    parser = argparse.ArgumentParser(description="A contestant of llm-datadist bench; started by its driver.")
    parser.add_argument("--owner", action="store_true", help="be the owner of the remote memory")
    parser.add_argument("--busy-owner", action="store_true", help="keep the owner's main thread in a Python loop")
    parser.add_argument("--apart", action="store_true", help="give the owner one core, and the caller the others")
    if add_options is not None:
        add_options(parser)
    options = parser.parse_args()
    lines = _take_standard_streams()
    # Stopped or not, the process must not outlive the one that started it.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if not options.owner:
        os.setpgid(0, 0)
    with contextlib.suppress(EOFError, BrokenPipeError):  # nobody is left to tell
        lines.send(Hello())
        if options.owner:
            _keep_apart(options)
            _OwnerLoop(owner, options, lines).run()
        else:
            loop = _ContestantLoop(
                contestant, options, lines
            )  # starts the owner, which may still choose among all cores
            _keep_apart(options)
            loop.run()


def _keep_apart(options: argparse.Namespace) -> None:
    first, *others = sorted(os.sched_getaffinity(0))
    if options.apart and others:
        os.sched_setaffinity(0, [first] if options.owner else others)


def _take_standard_streams() -> Lines:
    """Standard input and output for messages only; libraries get /dev/null and standard error."""
    lines = Lines(os.dup(0), os.dup(1))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return lines


class _OwnerLoop:
    def __init__(self, kind: type[Owner], options: argparse.Namespace, lines: Lines) -> None:
        self._kind = kind
        self._options = options
        self._lines = lines
        self._owner: Owner | None = None

    def run(self) -> None:
        while True:
            if self._options.busy_owner and self._owner is not None:
                while not self._lines.ready(0):
                    for _ in range(_SPIN):
                        pass
            order = self._lines.receive(_FOREVER_S)
            if isinstance(order, Stop):
                return
            self._lines.send(_guarded(self._carry_out, order))

    def _carry_out(self, order: Message) -> Message:
        if isinstance(order, Prepare):
            self._owner = self._kind(self._options, order.case, order.seed, cases.Tensors(order.case))
            return Offer(os.getpid(), self._owner.tensors.addresses, self._owner.open())
        owner = self._owner
        if owner is None:
            message = f"{order} before Prepare"
            raise RuntimeError(message)
        if isinstance(order, Fill):
            owner.tensors.fill(order.seed)
            return Done()
        if isinstance(order, Poison):
            owner.tensors.poison()
            return Done()
        if isinstance(order, Check):
            ids = owner.selection
            return Verified(owner.case.total_bytes, owner.tensors.wrong(ids.local, ids.remote, order.seed))
        message = f"{order} is not for an owner"
        raise TypeError(message)


class _ContestantLoop:
    def __init__(self, kind: type[Contestant], options: argparse.Namespace, lines: Lines) -> None:
        self._kind = kind
        self._options = options
        self._lines = lines
        self._owner = Child("owner", [sys.executable, *sys.orig_argv[1:], "--owner"])
        self._owner.hear(Hello, _PATIENCE_S)
        self._contestant: Contestant | None = None

    def run(self) -> None:
        try:
            while not isinstance(order := self._lines.receive(_FOREVER_S), Stop):
                self._lines.send(_guarded(self._carry_out, order))
            self._owner.stop(_STOP_S)
        finally:
            self._owner.kill()

    def _carry_out(self, order: Message) -> Message:
        if isinstance(order, Prepare):
            return self._prepare(order)
        contestant = self._contestant
        if contestant is None:
            message = f"{order} before Prepare"
            raise RuntimeError(message)
        if isinstance(order, Run):
            _move(contestant)
            return self._run(contestant)
        if isinstance(order, Time):
            for _ in range(_WARM_CALLS):
                _move(contestant)
            return Timed([_move(contestant) for _ in range(order.calls)])
        if isinstance(order, Verify):
            return self._verify(contestant, order.seed)
        message = f"{order} is not for a contestant"
        raise TypeError(message)

    def _prepare(self, order: Prepare) -> Message:
        cases.check(order.case)
        offer = self._owner.ask(order, Offer, _PATIENCE_S)
        contestant = self._kind(self._options, order.case, order.seed, cases.Tensors(order.case))
        contestant.open(offer)
        self._contestant = contestant
        return Done()

    def _run(self, contestant: Contestant) -> Message:
        before = self._cpu_seconds()
        seconds = _move(contestant)
        return Ran(seconds, self._cpu_seconds() - before)

    def _cpu_seconds(self) -> float:
        # The kernel's clock id of another process's CPU time, see clock_getcpuclockid(3).
        return time.process_time() + time.clock_gettime(~self._owner.pid << 3 | 2)

    def _verify(self, contestant: Contestant, seed: int) -> Message:
        own, owner = contestant.tensors, self._owner
        contestant.fill(seed)
        if not contestant.receives:
            owner.ask(Poison(), Done, _PATIENCE_S)
            _move(contestant)
            return owner.ask(Check(seed), Verified, _PATIENCE_S)
        owner.ask(Fill(seed), Done, _PATIENCE_S)
        own.poison()
        _move(contestant)
        ids = contestant.selection
        return Verified(contestant.case.total_bytes, own.wrong(ids.remote, ids.local, seed))


def _move(contestant: Contestant) -> float:
    start = time.perf_counter()
    contestant.move()
    seconds = time.perf_counter() - start
    contestant.release()
    return seconds


def _guarded(carry_out: Callable[[Message], Message], order: Message) -> Message:
    try:
        return carry_out(order)
    except Exception as error:  # noqa: BLE001 - whatever it is, the one who gave the order must learn of it
        return Failed(f"{type(error).__name__}: {error}")
