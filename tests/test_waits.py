"""Waiting for users that take no lock: whoever waits misses none of them, and is woken by the last one.

Users come and go in threads while memory is freed again and again. A user that was let in must find everything in place
until it leaves.
"""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llm_datadist.engine.catalogue import CacheEntry, Catalogue
from llm_datadist.engine.link import Link, LinkState, LinkTerms
from llm_datadist.engine.options import EngineOptions
from llm_datadist.engine.requests import CacheKind, CacheSpec
from llm_datadist.memory.regions import RegionTable, UnknownRegionError
from llm_datadist.net.channel import ChannelClosedError
from llm_datadist.utils.deadline import Deadline
from net_helpers import WAIT_S, soon

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

THREADS = 3
ROUNDS = 300


@pytest.fixture(autouse=True)
def restless() -> Iterator[None]:
    """Threads take turns every few instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def table() -> Iterator[RegionTable]:
    made = RegionTable()
    yield made
    made.close()


class Crowd:
    """Threads that do the same over and over; what they raise is raised by ``end``."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act = act
        self._stop = threading.Event()
        self._errors: list[BaseException] = []
        self._threads = [threading.Thread(target=self._run) for _ in range(THREADS)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._act()
        except BaseException as error:  # noqa: BLE001 - raised by ``end``
            self._errors.append(error)

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()
        for error in self._errors:
            raise error


class Place:
    """Something that is in use or has been freed, never both."""

    def __init__(self) -> None:
        self.freed = False
        self.uses = 0

    def use(self) -> None:
        """For a few turns of the other threads."""
        for _ in range(20):
            assert not self.freed
        self.uses += 1


def woken(wait: Callable[[Deadline], bool], let_go: Callable[[], object]) -> None:
    """A wait is false as long as somebody is there, and ends well, and soon, when the last one leaves."""
    assert not wait(Deadline.after(0))
    assert not wait(Deadline.after(0.01))
    results: list[bool] = []
    waiting = threading.Thread(target=lambda: results.append(wait(Deadline.after(10 * WAIT_S))))
    waiting.start()
    let_go()
    waiting.join(WAIT_S)
    assert results == [True]
    assert wait(Deadline.after(0))


class Turns(set[Any]):
    """The users of something: another thread gets its turn just before one enters, or leaves."""

    def __init__(self, *, entering: Callable[[], object] | None = None, leaving: Callable[[], object] | None = None):
        super().__init__()
        self._entering, self._leaving = entering, leaving

    def add(self, item: object) -> None:
        if self._entering is not None:
            self._entering()
        super().add(item)

    def discard(self, item: object) -> None:
        if self._leaving is not None and item in self:
            self._leaving()
        super().discard(item)


class Leases(dict[Any, Any]):
    """As ``Turns``, for a region table."""

    def __init__(self, *, entering: Callable[[], object] | None = None, leaving: Callable[[], object] | None = None):
        super().__init__()
        self._entering, self._leaving = entering, leaving

    def __setitem__(self, lease: object, regions: object) -> None:
        if self._entering is not None:
            self._entering()
        super().__setitem__(lease, regions)

    def __delitem__(self, lease: object) -> None:
        if self._leaving is not None:
            self._leaving()
        super().__delitem__(lease)


class Waiter:
    """A thread that waits for the last user; ``start`` returns when it does so."""

    def __init__(self, wait: Callable[[Deadline], bool], lock: threading.Condition) -> None:
        self._lock = lock
        self._asleep = threading.Event()
        self._results: list[bool] = []
        self._thread = threading.Thread(target=lambda: self._results.append(wait(Deadline.after(10 * WAIT_S))))

    def start(self) -> None:
        real = self._lock.wait

        def wait(timeout: float | None = None) -> bool:
            self._asleep.set()
            return real(timeout)

        self._lock.wait = wait  # type: ignore[method-assign]
        self._thread.start()
        assert self._asleep.wait(WAIT_S)
        with self._lock:  # it has let go of it, so that it is waiting
            pass

    def check(self) -> None:
        """It has been woken."""
        self._thread.join(WAIT_S)
        assert self._results == [True]


# Regions


def test_a_region_that_goes_while_a_lease_begins(table: RegionTable) -> None:
    """Who removes it has been told that nobody uses it: then the lease must not be given."""
    region = table.add(4096, 64)

    def go() -> None:
        table.remove([region])
        assert table.wait_unused([region], Deadline.after(0))

    table._leases = Leases(entering=go)
    with pytest.raises(UnknownRegionError), table.lease([region]):
        pytest.fail("it was given")
    assert table.wait_idle(Deadline.after(0))


@pytest.mark.parametrize("everything", [False, True])
def test_a_wait_that_begins_while_a_lease_ends(table: RegionTable, everything: bool) -> None:
    region = table.add(4096, 64)
    waiter = Waiter(
        table.wait_idle if everything else lambda deadline: table.wait_unused([region], deadline), table._changed
    )
    table._leases = Leases(leaving=waiter.start)
    with table.lease([region]):
        pass
    waiter.check()


def test_regions_are_unused_when_that_is_said(table: RegionTable) -> None:
    places: dict[int, Place] = {}
    region = table.add(4096, 64)
    places[region] = Place()
    current = [region]

    def use() -> None:
        at = current[0]
        try:
            with table.lease([table.probe_region, at]):
                places[at].use()
        except UnknownRegionError:
            pass

    crowd = Crowd(use)
    for _ in range(ROUNDS):
        old = current[0]
        new = table.add(4096, 64)
        places[new] = Place()
        current[0] = new
        table.remove([old])
        assert table.wait_unused([old], soon())
        places[old].freed = True
    crowd.end()
    assert table.wait_idle(soon())
    assert sum(place.uses for place in places.values())


def test_the_end_of_a_lease_wakes_all_who_wait(table: RegionTable) -> None:
    one, other = table.add(4096, 64), table.add(8192, 64)
    for wait in (lambda deadline: table.wait_unused([one], deadline), table.wait_idle):
        lease = table.lease([one, one])
        lease.__enter__()
        assert table.wait_unused([other], Deadline.after(0))
        woken(wait, lambda lease=lease: lease.__exit__(None, None, None))


def test_leases_of_many_threads_all_end(table: RegionTable) -> None:
    """Waits that begin while leases come and go are never forgotten."""
    region = table.add(4096, 64)

    def use() -> None:
        with table.lease([region]):
            pass

    crowd = Crowd(use)
    results: list[bool] = []
    waiters = [threading.Thread(target=lambda: results.append(table.wait_idle(soon()))) for _ in range(20)]
    for waiter in waiters:
        waiter.start()
    crowd.end()
    for waiter in waiters:
        waiter.join(WAIT_S)
    assert results == [True] * len(waiters)


# Caches


def add(catalogue: Catalogue) -> CacheEntry:
    spec = CacheSpec(1, (4, 8), 1, "uint8", on_device=True, kind=CacheKind.BLOCKS)
    return catalogue.add(
        catalogue.next_id(), spec, np.array([4096], dtype=np.uint64), [None], accessible=True, owned=False
    )


def test_caches_are_unused_when_that_is_said(table: RegionTable) -> None:
    """Held without a lock by small transfers, and pinned by others."""
    catalogue = Catalogue(table)
    entry = add(catalogue)
    places = {entry.cache_id: Place()}
    current = [entry]

    def use() -> None:
        held, ticket = current[0], object()
        if catalogue.hold(held, ticket):
            try:
                places[held.cache_id].use()
            finally:
                catalogue.let_go(held, ticket)
        pinned = catalogue.pin(current[0].cache_id)
        if pinned is not None:
            try:
                places[pinned.cache_id].use()
            finally:
                catalogue.unpin(pinned)

    crowd = Crowd(use)
    for _ in range(ROUNDS):
        old = current[0]
        new = add(catalogue)
        places[new.cache_id] = Place()
        current[0] = new
        assert catalogue.wait_unpinned_after_hiding(old, soon())
        places[old.cache_id].freed = True
        assert not catalogue.hold(old, object())
        assert not old.holders
        assert catalogue.forget(old)
    crowd.end()
    assert sum(place.uses for place in places.values())


def test_a_cache_that_goes_while_it_is_taken_hold_of(table: RegionTable) -> None:
    """Who takes it back has been told that nobody uses it: then nobody may."""
    catalogue = Catalogue(table)
    entry = add(catalogue)

    def go() -> None:
        assert catalogue.wait_unpinned_after_hiding(entry, Deadline.after(0))

    entry.holders = Turns(entering=go)
    assert not catalogue.hold(entry, object())
    assert not entry.holders


def test_a_cache_that_goes_while_it_is_let_go(table: RegionTable) -> None:
    catalogue = Catalogue(table)
    entry = add(catalogue)
    waiter = Waiter(lambda deadline: catalogue.wait_unpinned_after_hiding(entry, deadline), catalogue._changed)
    entry.holders = Turns(leaving=waiter.start)
    ticket = object()
    assert catalogue.hold(entry, ticket)
    catalogue.let_go(entry, ticket)
    waiter.check()


def test_the_last_user_of_a_cache_wakes_who_waits(table: RegionTable) -> None:
    catalogue = Catalogue(table)
    entry = add(catalogue)
    assert catalogue.pin(entry.cache_id) is entry
    tickets = [object(), object()]
    assert all(catalogue.hold(entry, ticket) for ticket in tickets)

    def let_go() -> None:
        catalogue.let_go(entry, tickets[0])
        catalogue.unpin(entry)
        catalogue.let_go(entry, tickets[1])

    woken(lambda deadline: catalogue.wait_unpinned_after_hiding(entry, deadline), let_go)
    assert not catalogue.hold(entry, tickets[0])
    assert catalogue.pin(entry.cache_id) is None


# Links


@pytest.fixture
def link() -> Link:
    peer: Any = SimpleNamespace(identity=SimpleNamespace(cluster_id=7), offer=SimpleNamespace(digest=None))
    channel: Any = SimpleNamespace(closed=False)
    terms = LinkTerms.of(EngineOptions(), 1, secret=False)
    made = Link(peer, channel, b"t" * 16, "nowhere", terms)
    assert made.advance(LinkState.LINKED)
    return made


class Ticket:
    """A transfer; it may be over a little before the link hears of it."""

    over = False


def test_a_link_is_idle_when_that_is_said(link: Link) -> None:
    place = Place()

    def use() -> None:
        ticket = object()
        try:
            link.begin(ticket)
            place.use()
        except ChannelClosedError:
            pass
        finally:
            link.end(ticket)

    crowd = Crowd(use)
    for _ in range(ROUNDS):
        assert link.advance(LinkState.CLOSING)
        assert link.wait_idle(soon())
        place.freed = True
        with pytest.raises(ChannelClosedError):
            link.begin(object())
        place.freed = False
        link.resume()
    crowd.end()
    assert place.uses
    assert link.wait_idle(Deadline.after(0))


def test_when_idle_waits_for_those_that_run_and_for_no_others(link: Link) -> None:
    """Called exactly once each, though new transfers begin all the time."""

    def use() -> None:
        ticket = Ticket()
        link.begin(ticket)
        for _ in range(5):
            assert not ticket.over
        ticket.over = True
        link.end(ticket)

    crowd = Crowd(use)
    early: list[int] = []
    called: list[int] = []
    done = threading.Semaphore(0)
    for number in range(ROUNDS):
        running = set(link.running)

        def then(number: int = number, running: set[Any] = running) -> None:
            if not all(ticket.over for ticket in running):
                early.append(number)
            called.append(number)
            done.release()

        link.when_idle(then)
    for _ in range(ROUNDS):
        assert done.acquire(timeout=WAIT_S)
    crowd.end()
    assert early == []
    assert sorted(called) == list(range(ROUNDS))
    assert link._waiting == []


def test_a_link_that_ends_while_a_transfer_begins(link: Link) -> None:
    """Who ends it has been told that no transfer runs: then none may begin."""
    called: list[int] = []

    def go() -> None:
        assert link.advance(LinkState.CLOSING)
        assert link.wait_idle(Deadline.after(0))
        link.when_idle(lambda: called.append(1))
        assert called == [1]

    link.running = Turns(entering=go)
    with pytest.raises(ChannelClosedError):
        link.begin(object())
    assert link.wait_idle(Deadline.after(0))


def test_a_wait_that_begins_while_a_transfer_ends(link: Link) -> None:
    called = threading.Event()
    waiter = Waiter(link.wait_idle, link._changed)

    def go() -> None:
        waiter.start()
        link.when_idle(called.set)
        assert not called.is_set()

    link.running = Turns(leaving=go)
    ticket = object()
    link.begin(ticket)
    link.end(ticket)
    waiter.check()
    assert called.is_set()


def test_when_idle_of_an_idle_link_is_at_once(link: Link) -> None:
    called: list[int] = []
    link.when_idle(lambda: called.append(1))
    assert called == [1]
    ticket = object()
    link.begin(ticket)
    link.when_idle(lambda: called.append(2))
    other = object()
    link.begin(other)
    link.end(ticket)
    assert called == [1, 2]
    link.end(ticket)
    link.end(object())
    woken(link.wait_idle, lambda: link.end(other))


def test_a_transfer_that_begins_too_late_leaves_no_trace(link: Link) -> None:
    """And wakes those who wait for the link to become idle."""
    assert link.advance(LinkState.CLOSING)
    called: list[int] = []
    link.when_idle(lambda: called.append(1))
    with pytest.raises(ChannelClosedError, match="the link is closing"):
        link.begin(object())
    assert called == [1]
    assert link.wait_idle(Deadline.after(0))
