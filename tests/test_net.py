"""The loop and addresses: order, timers, isolation of errors, ends."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from llm_datadist.net.address import resolve, text
from llm_datadist.net.channel import set_timeouts
from llm_datadist.net.loop import READ, WRITE, Loop
from net_helpers import WAIT_S, logged, running_loop, settle, tcp_pair

if TYPE_CHECKING:
    from collections.abc import Iterator


FDS = Path("/proc/self/fd")


@pytest.fixture
def loop() -> Iterator[Loop]:
    with running_loop() as made:
        yield made


# Calls


def test_calls_run_in_order_on_the_thread_of_the_loop(loop: Loop) -> None:
    seen: list[int] = []
    inside: set[bool] = set()
    for number in range(200):
        loop.call_soon(lambda number=number: (seen.append(number), inside.add(loop.in_loop())))
    settle(loop)
    assert seen == list(range(200))
    assert inside == {True}
    assert not loop.in_loop()


def test_a_call_from_a_call_runs_after_those_that_waited_already(loop: Loop) -> None:
    seen: list[str] = []
    ready = threading.Event()

    def first() -> None:
        ready.wait(WAIT_S)
        loop.call_soon(lambda: seen.append("nested"))
        seen.append("first")

    loop.call_soon(first)
    loop.call_soon(lambda: seen.append("second"))
    ready.set()
    settle(loop)
    settle(loop)
    assert seen == ["first", "second", "nested"]


def test_calls_of_many_threads_keep_the_order_of_each(loop: Loop) -> None:
    seen: list[tuple[int, int]] = []

    def call(thread: int) -> None:
        for number in range(200):
            loop.call_soon(lambda number=number: seen.append((thread, number)))

    threads = [threading.Thread(target=call, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    settle(loop)
    for n in range(4):
        assert [number for thread, number in seen if thread == n] == list(range(200))


def test_an_idle_loop_does_not_spin(loop: Loop) -> None:
    settle(loop)
    loop.call_later(WAIT_S, lambda: None)
    settle(loop)
    wakes = [0]
    select = loop._selector.select

    def counted(timeout: float | None = None) -> object:
        wakes[0] += 1
        return select(timeout)

    loop._selector.select = counted  # type: ignore[method-assign, assignment]
    settle(loop)
    wakes[0] = 0
    time.sleep(0.1)
    assert wakes[0] <= 3  # the wake-up of settle itself


# Timers


def test_timers_fire_in_the_order_of_their_time_and_never_early(loop: Loop) -> None:
    fired: list[tuple[float, float]] = []
    done = threading.Event()
    start = time.monotonic()
    for delay in (0.06, 0.02, 0.04, 0.0):
        loop.call_later(delay, lambda delay=delay: fired.append((delay, time.monotonic() - start)))
    loop.call_later(0.08, done.set)
    assert done.wait(WAIT_S)
    assert [delay for delay, _ in fired] == [0.0, 0.02, 0.04, 0.06]
    assert all(elapsed >= delay for delay, elapsed in fired)


def test_timers_that_are_due_fire_in_the_order_they_were_set(loop: Loop) -> None:
    seen: list[int] = []
    done = threading.Event()

    def set_all() -> None:
        for number in range(20):
            loop.call_later(-1.0 + number * 1e-9, lambda number=number: seen.append(number))
        loop.call_later(0, done.set)

    loop.call_soon(set_all)
    assert done.wait(WAIT_S)
    assert seen == list(range(20))


def test_a_timer_that_is_set_while_the_loop_waits_longer_is_not_late(loop: Loop) -> None:
    done = threading.Event()
    loop.call_later(1000, lambda: None)
    settle(loop)
    loop.call_later(0.01, done.set)
    assert done.wait(WAIT_S)


def test_a_cancelled_timer_does_not_fire(loop: Loop) -> None:
    seen: list[str] = []
    done = threading.Event()
    timer = loop.call_later(0.01, lambda: seen.append("cancelled"))
    timer.cancel()
    timer.cancel()
    loop.call_later(0.02, done.set)
    assert done.wait(WAIT_S)
    assert seen == []


def test_a_timer_can_cancel_another_that_is_due(loop: Loop) -> None:
    seen: list[str] = []
    done = threading.Event()

    def set_both() -> None:
        loop.call_later(0, lambda: (seen.append("first"), second.cancel()))
        second = loop.call_later(0, lambda: seen.append("second"))
        loop.call_later(0, done.set)

    loop.call_soon(set_both)
    assert done.wait(WAIT_S)
    assert seen == ["first"]


# Sockets


def test_watch_change_and_unwatch(loop: Loop) -> None:
    left, right = socket.socketpair()
    with left, right:
        events: list[int] = []
        ready = threading.Event()

        def on_read(event: int) -> None:
            events.append(event)
            left.recv(100)
            ready.set()

        loop.call_soon(lambda: loop.watch(left, READ, on_read))
        right.sendall(b"x")
        assert ready.wait(WAIT_S)
        assert events == [READ]

        def on_write(event: int) -> None:
            events.append(event)
            loop.unwatch(left)
            ready.set()

        ready.clear()
        loop.call_soon(lambda: loop.watch(left, WRITE, on_write))
        assert ready.wait(WAIT_S)
        loop.call_soon(lambda: (loop.unwatch(left), loop.unwatch(right)))
        right.sendall(b"y")
        settle(loop)
        settle(loop)
        assert events == [READ, WRITE]


def test_unwatch_of_a_closed_socket_is_nothing(loop: Loop) -> None:
    left, right = socket.socketpair()
    right.close()
    left.close()
    with logged() as records:
        loop.call_soon(lambda: loop.unwatch(left))
        settle(loop)
    assert records == []


# Errors


def test_errors_of_callbacks_are_logged_and_stop_nothing(loop: Loop) -> None:
    left, right = socket.socketpair()
    done = threading.Event()

    def fail(*_: object) -> None:
        loop.unwatch(left)
        message = "injected"
        raise RuntimeError(message)

    with left, right, logged() as records:
        loop.call_soon(fail)
        settle(loop)
        loop.call_later(0, fail)
        loop.call_later(0, done.set)
        assert done.wait(WAIT_S)
        loop.call_soon(lambda: loop.watch(left, READ, fail))
        right.sendall(b"x")
        settle(loop)
        settle(loop)
    assert [record.getMessage() for record in records] == ["unexpected error in the background thread"] * 3
    assert all("injected" in str(record.exc_info) for record in records)


# The end


def test_close_runs_what_was_queued_and_is_idempotent() -> None:
    with running_loop() as loop:
        fd = loop._wake_fd
        seen: list[str] = []
        gate = threading.Event()
        loop.call_soon(lambda: gate.wait(WAIT_S))
        loop.call_soon(lambda: (seen.append("queued"), loop.call_soon(lambda: seen.append("nested"))))
        loop.call_later(1000, lambda: seen.append("timer"))
        closer = threading.Thread(target=loop.close)
        closer.start()
        gate.set()
        closer.join(WAIT_S)
        loop.close()
        assert not loop._thread.is_alive()
        assert seen == ["queued", "nested"]
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
        loop.call_later(0, lambda: seen.append("too late")).cancel()
        loop.call_soon(lambda: seen.append("at once"))  # what is to be closed must be closed
        assert seen == ["queued", "nested", "at once"]


def test_what_comes_after_the_end_is_done_by_the_caller() -> None:
    with running_loop() as loop:
        pass
    seen: list[object] = []
    loop.call_soon(lambda: seen.append(threading.get_ident()))
    assert seen == [threading.get_ident()]
    left, right = tcp_pair()
    with left, right:
        assert not loop.watch(left, READ, lambda _events: None)
        loop.unwatch(left)


def test_close_from_a_callback_does_not_wait_for_itself() -> None:
    with running_loop() as loop:
        loop.call_soon(loop.close)
        loop._thread.join(WAIT_S)
        assert not loop._thread.is_alive()


def test_loops_come_and_go_without_a_trace() -> None:
    fds = len(list(FDS.iterdir()))
    for _ in range(20):
        with running_loop("test-come-and-go") as loop:
            settle(loop)
    assert len(list(FDS.iterdir())) == fds
    assert [thread for thread in threading.enumerate() if thread.name == "test-come-and-go"] == []


# Addresses


@pytest.mark.parametrize(
    ("host", "family", "sockaddr"),
    [
        ("127.0.0.1", socket.AF_INET, ("127.0.0.1", 26000)),
        ("0.0.0.0", socket.AF_INET, ("0.0.0.0", 26000)),
        ("::1", socket.AF_INET6, ("::1", 26000, 0, 0)),
        ("2001:db8::5", socket.AF_INET6, ("2001:db8::5", 26000, 0, 0)),
        ("::ffff:127.0.0.1", socket.AF_INET6, ("::ffff:127.0.0.1", 26000, 0, 0)),
        ("fe80::1%lo", socket.AF_INET6, ("fe80::1", 26000, 0, socket.if_nametoindex("lo"))),
        ("fe80::1%7", socket.AF_INET6, ("fe80::1", 26000, 0, 7)),
    ],
)
def test_resolve(host: str, family: socket.AddressFamily, sockaddr: tuple[object, ...]) -> None:
    assert resolve((host, 26000)) == (family, sockaddr)


@pytest.mark.parametrize(
    "host",
    ["localhost", "", "1.2.3", "1.2.3.4.5", "256.1.1.1", "[::1]", "::1 ", "::1::", "fe80::1%", "127.0.0.1%lo", "a\0b"],
)
def test_resolve_takes_ip_literals_only(host: str) -> None:
    with pytest.raises(ValueError, match="is not an IPv4 or IPv6 address"):
        resolve((host, 1))


def test_resolve_names_an_interface_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match="names the network interface 'nosuch0', which does not exist"):
        resolve(("fe80::1%nosuch0", 1))


@pytest.mark.parametrize("scope", [str(2**32), "99999999999999999999", "²"])
def test_resolve_refuses_a_scope_that_is_no_interface_number(scope: str) -> None:
    with pytest.raises(ValueError, match="fe80::1"):
        resolve((f"fe80::1%{scope}", 1))


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        (("10.0.0.1", 5), "10.0.0.1:5"),
        (("::1", 26000), "[::1]:26000"),
        (("fe80::1%lo", 1), "[fe80::1%lo]:1"),
        (("::1", 1, 0, 0), "[::1]:1"),
    ],
)
def test_text(address: tuple[str, int], shown: str) -> None:
    assert text(address) == shown


# Timeouts in the kernel


@pytest.mark.parametrize("seconds", [0.03, 0.0, -1.0])
def test_set_timeouts_ends_blocking_calls(seconds: float) -> None:
    left, right = tcp_pair()
    with left, right:
        left.settimeout(None)
        set_timeouts(left, seconds)
        start = time.monotonic()
        with pytest.raises(BlockingIOError):
            left.recv(1)
        assert time.monotonic() - start >= seconds * 0.9
        with pytest.raises(BlockingIOError):
            left.sendall(bytes(64 << 20))
