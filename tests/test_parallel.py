"""Parts of one transfer: they start together, stop together, and end before the caller hears of it. And deadlines."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING

import pytest

from llm_datadist.net.workers import Workers
from llm_datadist.paths import parallel
from llm_datadist.paths.base import PathTimeoutError, PeerGoneError
from llm_datadist.paths.parallel import Checkpoint, StoppedError, run
from llm_datadist.utils.deadline import Deadline
from llm_datadist.utils.process import boot_id, pid_namespace, start_time
from net_helpers import WAIT_S, logged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class PartError(Exception):
    """What a part of a test transfer fails with."""


@pytest.fixture
def workers() -> Iterator[Workers]:
    made = Workers("test-parallel", 4)
    yield made
    made.close()


@pytest.fixture
def checkpoint() -> Checkpoint:
    return Checkpoint(Deadline.after(WAIT_S))


def until_stopped(checkpoint: Checkpoint, ended: list[str], name: str, started: threading.Event | None = None) -> None:
    """A part that goes on until its checkpoint ends it."""
    try:
        if started is not None:
            started.set()
        while True:
            checkpoint()
            time.sleep(0.001)
    finally:
        ended.append(name)


# run


@pytest.mark.parametrize("count", [1, 2, 4, 9])
def test_all_parts_run_and_have_ended(workers: Workers, checkpoint: Checkpoint, count: int) -> None:
    done: list[int] = []
    run([lambda n=n: done.append(n) for n in range(count)], workers, checkpoint)
    assert sorted(done) == list(range(count))
    checkpoint()  # nothing was stopped


def test_the_first_part_runs_on_the_calling_thread_and_the_others_beside_it(
    workers: Workers, checkpoint: Checkpoint
) -> None:
    meeting = threading.Barrier(3)
    threads: dict[int, int] = {}

    def part(number: int) -> None:
        threads[number] = threading.get_ident()
        meeting.wait(WAIT_S)

    run([lambda n=n: part(n) for n in range(3)], workers, checkpoint)
    assert threads[0] == threading.get_ident()
    assert len(set(threads.values())) == 3


@pytest.mark.parametrize("failing", range(3))
def test_an_error_of_one_part_stops_the_others_and_is_raised_after_they_have_ended(
    workers: Workers, checkpoint: Checkpoint, failing: int
) -> None:
    ended: list[str] = []
    others = [threading.Event() for _ in range(2)]
    failure = PartError("injected")

    def fail() -> None:
        for event in others:
            assert event.wait(WAIT_S)
        raise failure

    parts: list[Callable[[], object]] = [
        lambda event=event: until_stopped(checkpoint, ended, "other", event) for event in others
    ]
    parts.insert(failing, fail)
    with pytest.raises(PartError) as caught:
        run(parts, workers, checkpoint)
    assert caught.value is failure
    assert ended == ["other", "other"]


def test_the_error_comes_after_a_part_that_does_not_look(workers: Workers, checkpoint: Checkpoint) -> None:
    """A part in the middle of a system call ends when the call does; until then the destination may change."""
    gate, started = threading.Event(), threading.Event()
    ended: list[str] = []

    def busy() -> None:
        started.set()
        assert gate.wait(WAIT_S)
        ended.append("busy")

    def fail() -> None:
        assert started.wait(WAIT_S)
        timer = threading.Timer(0.05, gate.set)
        timer.start()
        message = "injected"
        raise PartError(message)

    with pytest.raises(PartError):
        run([fail, busy], workers, checkpoint)
    assert ended == ["busy"]


def test_of_several_errors_the_own_thread_s_counts(workers: Workers, checkpoint: Checkpoint) -> None:
    def fail(name: str) -> None:
        raise PartError(name)

    with pytest.raises(PartError, match="first"):
        run([lambda: fail("first"), lambda: fail("second")], workers, checkpoint)


def test_a_part_that_was_stopped_never_hides_the_reason(workers: Workers, checkpoint: Checkpoint) -> None:
    """The calling thread sees StoppedError first; the error of the other part is the one to raise."""
    ended: list[str] = []
    started = threading.Event()

    def fail() -> None:
        assert started.wait(WAIT_S)
        message = "the reason"
        raise PartError(message)

    with pytest.raises(PartError, match="the reason"):
        run([lambda: until_stopped(checkpoint, ended, "own", started), fail], workers, checkpoint)
    assert ended == ["own"]


def test_the_deadline_ends_all_parts(workers: Workers) -> None:
    checkpoint = Checkpoint(Deadline.after(0.05))
    ended: list[str] = []
    parts = [lambda n=n: until_stopped(checkpoint, ended, str(n)) for n in range(3)]
    with pytest.raises(PathTimeoutError, match="the deadline passed"):
        run(parts, workers, checkpoint)
    assert sorted(ended) == ["0", "1", "2"]


def test_errors_that_are_no_exceptions_stop_the_others_too(workers: Workers, checkpoint: Checkpoint) -> None:
    ended: list[str] = []
    started = threading.Event()

    def interrupt() -> None:
        assert started.wait(WAIT_S)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run([interrupt, lambda: until_stopped(checkpoint, ended, "other", started)], workers, checkpoint)
    assert ended == ["other"]


def test_closed_workers_are_a_finalized_engine(checkpoint: Checkpoint) -> None:
    workers = Workers("test-closed", 2)
    workers.close()
    done: list[str] = []
    run([lambda: done.append("alone")], workers, checkpoint)
    assert done == ["alone"]
    with pytest.raises(PeerGoneError, match="finalized during the transfer") as caught:
        run([lambda: None, lambda: done.append("never")], workers, checkpoint)
    assert isinstance(caught.value.__cause__, CancelledError)
    assert done == ["alone"]


def test_parts_that_no_worker_takes_are_done_by_the_caller(checkpoint: Checkpoint) -> None:
    """Because all are busy, or the pool has been closed: nobody waits for strangers, and no part is left out."""
    workers = Workers("test-closing", 1)
    running, gate = threading.Event(), threading.Event()
    ended: list[str] = []

    def busy() -> None:
        running.set()
        assert gate.wait(WAIT_S)
        ended.append("busy")

    def own() -> None:
        assert running.wait(WAIT_S)
        workers.close()
        gate.set()

    run([own, busy, lambda: ended.append("waiting")], workers, checkpoint)
    assert sorted(ended) == ["busy", "waiting"]


class InterruptedFuture(Future[object]):
    """A future that has begun, as it says, and whose waiter is interrupted by Ctrl-C twice before it ends."""

    interrupts = 2

    def cancel(self) -> bool:
        return False

    def exception(self, timeout: float | None = None) -> BaseException | None:
        del timeout
        if self.interrupts:
            self.interrupts -= 1
            raise KeyboardInterrupt
        return super().exception(WAIT_S)


def test_ctrl_c_while_waiting_is_raised_after_all_parts_have_ended(
    workers: Workers, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []
    monkeypatch.setattr(parallel, "Future", InterruptedFuture)
    parts: list[Callable[[], object]] = [
        lambda: None,
        lambda: until_stopped(checkpoint, ended, "a"),
        lambda: until_stopped(checkpoint, ended, "b"),
    ]
    with pytest.raises(KeyboardInterrupt):
        run(parts, workers, checkpoint)
    assert sorted(ended) == ["a", "b"]
    with pytest.raises(StoppedError):
        checkpoint()


# Checkpoint


def test_a_checkpoint_raises_once_it_must() -> None:
    checkpoint = Checkpoint(Deadline.after(WAIT_S))
    checkpoint()
    checkpoint.stop()
    checkpoint.stop()
    with pytest.raises(StoppedError):
        checkpoint()
    late = Checkpoint(Deadline.after(0))
    with pytest.raises(PathTimeoutError):
        late()
    late.stop()
    with pytest.raises(StoppedError):
        late()


# Workers


def test_workers_log_what_nobody_waits_for(workers: Workers) -> None:
    done = threading.Event()

    def fail() -> None:
        message = "injected"
        raise PartError(message)

    with logged() as records:
        workers.run(fail)
        for _ in range(4):
            workers.run(done.set)
        assert done.wait(WAIT_S)
        workers.submit(lambda: None).result(WAIT_S)
        workers.close()
        deadline = Deadline.after(WAIT_S)
        while not records and not deadline.expired():
            time.sleep(0.001)
    assert [record.getMessage() for record in records] == ["unexpected error in a worker thread"]
    dropped: list[str] = []
    workers.run(fail, lambda: dropped.append("dropped"))
    assert dropped == ["dropped"]
    with pytest.raises(CancelledError):
        workers.submit(lambda: None)
    workers.close()


def test_workers_hand_results_and_errors_to_those_who_wait(workers: Workers) -> None:
    def fail() -> None:
        message = "injected"
        raise PartError(message)

    assert workers.submit(lambda: 7).result(WAIT_S) == 7
    with pytest.raises(PartError):
        workers.submit(fail).result(WAIT_S)


# Deadline


def test_a_deadline_counts_down_to_zero_and_not_below(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    deadline = Deadline.after(5)
    seen = []
    for now[0] in (100.0, 104.0, 104.999, 105.0, 1000.0):
        seen.append((round(deadline.remaining(), 3), deadline.expired()))
    assert seen == [(5.0, False), (1.0, False), (0.001, False), (0.0, True), (0.0, True)]


@pytest.mark.parametrize(("seconds", "remaining"), [(2, 2), (5, 5), (9, 5), (0, 0), (-1, 0)])
def test_at_most_is_never_later(monkeypatch: pytest.MonkeyPatch, seconds: float, remaining: float) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    assert Deadline.after(5).at_most(seconds).remaining() == remaining


def test_the_clock_is_monotonic(monkeypatch: pytest.MonkeyPatch) -> None:
    deadline = Deadline.after(100)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert 90 < deadline.remaining() <= 100


# Processes


def test_the_start_time_identifies_a_life_of_a_pid() -> None:
    mine = start_time(os.getpid())
    assert mine == start_time(os.getpid()) > 0
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        theirs = start_time(child.pid)
        assert theirs >= mine
    finally:
        child.communicate(b"\n", timeout=60)
    with pytest.raises(OSError, match="No such file"):
        start_time(child.pid)


def test_a_start_time_with_any_command_name() -> None:
    """The command is in parentheses in /proc/PID/stat, and may itself look like the fields after it."""
    code = (
        "import ctypes, os\n"
        "from llm_datadist.utils.process import start_time\n"
        "before = start_time(os.getpid())\n"
        "ctypes.CDLL(None).prctl(15, b') R 1 (2\\xff 3', 0, 0, 0)\n"
        "print(before == start_time(os.getpid()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "True", done.stderr


def test_the_kernel_and_the_namespace_are_the_same_for_a_child() -> None:
    code = "from llm_datadist.utils.process import *; print(boot_id(), pid_namespace())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == [boot_id(), str(pid_namespace())], done.stderr
    assert len(boot_id()) == 36
    assert pid_namespace() > 0
