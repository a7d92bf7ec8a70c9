"""The parent's hold on one process of a soak: orders with answers to wait for, signals, and what it uses."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from llm_datadist.cli.soak.orders import Numbered
from llm_datadist.cli.soak.worker import serve

if TYPE_CHECKING:
    from multiprocessing.context import SpawnProcess

    from llm_datadist.cli.soak.orders import Answer, Order

T = TypeVar("T")
PATIENCE_S: Final = 120.0
"""For any answer; every call of the library has a shorter deadline, so whoever needs longer hangs."""
_STOP_S: Final = 20.0


class SoakError(Exception):
    """Something is wrong that a soak must not survive; the message says what."""


class GoneError(Exception):
    """The process has ended before it answered."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process uses."""

    descriptors: int
    threads: int
    private_bytes: int
    """Resident memory without what is shared: pools are filled little by little, here and as peers map them."""


def _start(process: SpawnProcess) -> None:
    """Start it with Ctrl-C blocked from its first instruction on: the parent alone decides when it ends."""
    resource_tracker.ensure_running()  # or it would start now, and unblock signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class SoakProcess:
    """One process."""

    def __init__(self, number: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs,), name=f"soak-{number}", daemon=True)
        _start(self._process)
        theirs.close()
        self.number = number
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[Answer]] = {}
        self._gone = False
        threading.Thread(target=self._receive, name=f"soak-{number}", daemon=True).start()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid or 0

    def begin(self, order: Order) -> Future[Answer]:
        """Give an order; what comes of it is GoneError, SoakError or an answer."""
        future: Future[Answer] = Future()
        with self._lock:
            if self._gone:
                future.set_exception(GoneError())
                return future
            number = next(self._numbers)
            self._waiting[number] = future
            with contextlib.suppress(OSError):  # then it has ended, and the receiver says so
                self._pipe.send(Numbered(number, order))
        return future

    def ask(self, order: Order, answer: type[T]) -> T:
        """Give an order and wait for an answer of this type.

        Raises:
            SoakError: anything else happens.
        """
        return expected(self.begin(order), answer, f"process {self.number}: {type(order).__name__}")

    def _receive(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                numbered = self._pipe.recv()
                with self._lock:
                    future = self._waiting.pop(numbered.number)
                if numbered.crash is not None:
                    future.set_exception(SoakError(f"process {self.number}: {numbered.crash}"))
                else:
                    future.set_result(numbered.content)
        with self._lock:
            self._gone = True
            waiting = list(self._waiting.values())
        for future in waiting:
            future.set_exception(GoneError())

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill -9, and wait until it is gone. Idempotent."""
        self._process.kill()
        self._process.join(_STOP_S)
        self._pipe.close()

    def stop(self) -> str | None:
        """Let it finalize and end; what is wrong with how it did, if anything."""
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self._process.join(_STOP_S)
        code = self._process.exitcode
        self.kill()
        if code is None:
            return f"process {self.number} did not end within {_STOP_S:g} s"
        return f"process {self.number} ended with exit code {code}" if code else None

    def usage(self) -> Usage:
        """What it uses now."""
        status = dict(
            line.split(":", 1) for line in Path(f"/proc/{self.pid}/status").read_text(encoding="ascii").splitlines()
        )
        return Usage(
            descriptors=len(os.listdir(f"/proc/{self.pid}/fd")),  # noqa: PTH208 - names are not needed
            threads=int(status["Threads"]),
            private_bytes=int(status["RssAnon"].split()[0]) << 10,
        )


def expected(future: Future[Answer], answer: type[T], what: str) -> T:
    """The answer, if it is of this type.

    Raises:
        SoakError: anything else happened.
    """
    try:
        found = future.result(PATIENCE_S)
    except GoneError as error:
        message = f"{what}: the process has ended"
        raise SoakError(message) from error
    except TimeoutError as error:
        message = f"{what}: no answer within {PATIENCE_S:g} s"
        raise SoakError(message) from error
    if not isinstance(found, answer):
        message = f"{what}: {found}"
        raise SoakError(message)
    return found
