"""Threads that work at the same time get cores of their own, and are bound to none afterwards."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from llm_datadist.net.workers import Workers
from llm_datadist.paths import parallel
from llm_datadist.paths.parallel import Checkpoint
from llm_datadist.paths.tcp import PARALLEL_BYTES, TcpPath
from llm_datadist.utils import cores
from llm_datadist.wire.data import Op
from net_helpers import WAIT_S, soon
from tcp_kit import Both, owner

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable

REFUSED = PermissionError(1, "Operation not permitted")


class System:
    """Stands in for the kernel: all threads run on core 0 until they are moved, each to the lowest core it may use."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, permitted: set[int]) -> None:
        self._permitted = permitted
        self._of = threading.local()
        self.moves: list[set[int]] = []
        self.free = True
        """Whether all threads that were bound may use all cores again."""
        monkeypatch.setattr(cores, "current", lambda: getattr(self._of, "core", 0))
        monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(self._permitted))
        monkeypatch.setattr(os, "sched_setaffinity", self._set)

    def _set(self, pid: int, wanted: set[int]) -> None:
        assert pid == 0
        assert wanted
        self.free = wanted == self._permitted
        if not self.free:
            self.moves.append(wanted)
            self._of.core = min(wanted)


# cores


def test_a_thread_is_bound_only_meanwhile() -> None:
    permitted = os.sched_getaffinity(0)

    def check() -> None:
        for core in permitted:
            with cores.bound(lambda _permitted, core=core: {core}):  # type: ignore[misc]
                assert cores.current() == core
            assert os.sched_getaffinity(0) == permitted
            with pytest.raises(ZeroDivisionError), cores.bound(lambda _permitted, core=core: {core}):  # type: ignore[misc]
                raise ZeroDivisionError
            assert os.sched_getaffinity(0) == permitted

    # In a thread of its own, whose cores nobody else sets.
    with ThreadPoolExecutor(1) as threads:
        threads.submit(check).result(WAIT_S)


@pytest.mark.parametrize("wanted", [set(), {99}])
def test_a_thread_stays_where_no_other_core_is_permitted(monkeypatch: pytest.MonkeyPatch, wanted: set[int]) -> None:
    system = System(monkeypatch, {0, 1})
    with cores.bound(lambda _permitted: wanted):
        assert not system.moves
    assert system.free


def test_a_sandbox_that_permits_nothing_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object) -> None:
        raise REFUSED

    for call in ("sched_setaffinity", "sched_getaffinity"):
        monkeypatch.setattr(os, call, refuse)
        done = False
        with cores.bound(lambda permitted: permitted):
            done = True
        assert done


# parts of a transfer


@pytest.mark.parametrize(
    ("permitted", "moves"),
    [
        ({0, 1, 2, 3}, [{1, 2, 3}, {2, 3}]),
        ({0, 1}, [{1}]),  # the third has none of its own
        ({0}, []),
    ],
)
def test_parts_of_a_transfer_have_cores_of_their_own(
    monkeypatch: pytest.MonkeyPatch, permitted: set[int], moves: list[set[int]]
) -> None:
    system = System(monkeypatch, permitted)
    # All at the same time, or else one worker would do two of them.
    together = threading.Barrier(3)
    workers = Workers("test-cores", 2)
    try:
        parallel.run([lambda: together.wait(WAIT_S)] * 3, workers, Checkpoint(soon()))
    finally:
        workers.close()
    assert sorted(system.moves, key=len, reverse=True) == moves
    assert system.free


# data connections


@pytest.mark.parametrize("op", Op)
@pytest.mark.parametrize(
    ("size", "permitted", "near"),
    [
        (PARALLEL_BYTES, 2, True),
        (PARALLEL_BYTES, 3, True),
        (PARALLEL_BYTES, 4, False),  # enough for each end of both connections
        (PARALLEL_BYTES // 4, 2, False),
    ],
)
def test_large_requests_are_served_on_the_core_of_who_asks(
    monkeypatch: pytest.MonkeyPatch, op: Op, size: int, permitted: int, *, near: bool
) -> None:
    """As far as cores are scarce."""
    picked: list[set[int]] = []
    bound = cores.bound

    def spied(within: Callable[[set[int]], set[int]]) -> contextlib.AbstractContextManager[None]:
        if threading.current_thread().name.startswith("test-serve"):
            picked.append(within(set(range(permitted))))
        return bound(within)

    monkeypatch.setattr(cores, "bound", spied)
    with owner() as made:
        both, path = Both(made, tensors=2, size=size // 2), TcpPath(made.context())
        try:
            path.open(soon())
            both.check_move(path, op, [(0, 0, size // 2)])
        finally:
            path.close()
            both.close()
    existing = set(range(os.cpu_count() or 1))
    if near:
        assert [len(each) for each in picked] == [1, 1]
        assert all(each <= existing for each in picked)
    else:
        assert not any(picked)
