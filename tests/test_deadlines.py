"""One deadline a call, queueing included: who waits for others waits no longer than until its own."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from concurrent.futures import CancelledError
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from llm_datadist import LLMConfig, LLMDataDist, LLMException, LLMRole, LLMStatusCode
from llm_datadist.engine.requests import BlocksKey, PullRequest
from llm_datadist.net.workers import Workers
from llm_datadist.paths import ladder
from llm_datadist.paths.base import PathTimeoutError, PeerGoneError
from llm_datadist.paths.ladder import Route
from llm_datadist.utils.deadline import Deadline
from llm_datadist.utils.turn import Turn
from net_helpers import WAIT_S, soon
from peers import TIMEOUT_S, Node
from stopping import go_on, stop

if TYPE_CHECKING:
    from collections.abc import Iterator

    from peers import Peers

SHORT_S = 0.2
LONG_S = 50.0
BUSY = 65
"""Clusters of one call that take all threads of an engine that link."""


# A turn


def test_a_turn_is_one_threads_at_a_time() -> None:
    turn, inside, most = Turn(), [0], [0]

    def work() -> None:
        for _ in range(200):
            ticket = object()
            assert turn.take(ticket, soon())
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            inside[0] -= 1
            turn.taken.discard(ticket)
            turn.leave()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert most == [1]
    assert not turn.taken


def test_a_turn_is_waited_for_until_the_deadline() -> None:
    turn = Turn()
    assert turn.take("one", Deadline.after(0))
    assert turn.take("one", Deadline.after(0))
    assert not turn.take("other", Deadline.after(0))
    assert not turn.take("other", Deadline.after(0.01))
    assert turn.taken == {"one"}


def test_who_could_not_say_that_it_has_left_keeps_nobody() -> None:
    """Ctrl-C came right after the ticket had been taken out."""
    turn, asleep, waited = Turn(), threading.Event(), list[bool]()
    assert turn.take("one", soon())
    real = turn._changed.wait

    def wait(timeout: float | None = None) -> bool:
        asleep.set()
        return real(timeout)

    turn._changed.wait = wait  # type: ignore[method-assign]
    waiter = threading.Thread(target=lambda: waited.append(turn.take("other", soon())))
    waiter.start()
    assert asleep.wait(WAIT_S)
    with turn._changed:  # it has let go of it, so that it is waiting
        turn.taken.discard("one")
    waiter.join(WAIT_S)
    assert waited == [True]


# The peer's catalogue


def tell_requests(node: Node, cluster_id: int) -> None:
    """In the child: from now on it is known when the peer has been asked for something."""
    link: Any = node.datadist._engine._core.table.get(cluster_id)  # type: ignore[union-attr]
    asked, real = threading.Event(), link.request

    def request(body: object, deadline: Deadline) -> object:
        asked.set()
        return real(body, deadline)

    link.request, node.extra["asked"] = request, asked


def wait_asked(node: Node) -> bool:
    """In the child."""
    return bool(node.extra["asked"].wait(TIMEOUT_S))


def pull_within(node: Node, cluster_id: int, seconds: float) -> tuple[LLMStatusCode, float]:
    """In the child: pull from a cache that does not exist, for which the catalogue is fetched; status and seconds."""
    engine = node.datadist._engine
    assert engine is not None
    cache_id = node.caches["mine"].cache_id
    request = PullRequest("pull_blocks", cluster_id, BlocksKey(99), cache_id, src_blocks=[0], dst_blocks=[0])
    begin = time.monotonic()
    with pytest.raises(LLMException) as caught:
        engine.pull(request, Deadline.after(seconds))
    return caught.value.status_code, time.monotonic() - begin


def test_a_pull_does_not_wait_for_the_catalogue_that_another_asks_for(peers: Peers) -> None:
    owner, client = peers.make(1), peers.make(2, listen=False)
    client.call("register_blocks", "mine", 1, 4, 64)
    assert client.link(owner) == LLMStatusCode.LLM_SUCCESS
    client.call(tell_requests, 1)
    stop(owner.process.pid)
    os.waitid(os.P_PID, owner.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)  # all its threads have stopped
    try:
        first = client.begin(pull_within, 1, LONG_S)
        assert client.call(wait_asked)
        status, seconds = client.call(pull_within, 1, SHORT_S)
    finally:
        go_on(owner.process.pid)
    assert status == LLMStatusCode.LLM_TIMEOUT
    assert seconds < LONG_S / 2
    assert first.result(TIMEOUT_S)[0] == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST


# Threads of an engine


@pytest.fixture
def datadist() -> Iterator[LLMDataDist]:
    config = LLMConfig()
    config.device_id = 0
    config.enable_cache_manager = True
    config.allow_multiple_instances = True
    made = LLMDataDist(LLMRole.MIX, 1)
    made.init(config.generate_options())
    yield made
    made.finalize()


def test_clusters_are_linked_in_time_though_another_call_has_all_threads(datadist: LLMDataDist) -> None:
    late = LLMStatusCode.LLM_TIMEOUT
    with contextlib.ExitStack() as stack:
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=BUSY + 8))
        silent.settimeout(WAIT_S)
        peers = [Node().cluster(cluster_id, silent.getsockname()) for cluster_id in range(2, BUSY + 4)]
        first = threading.Thread(target=datadist.link_clusters, args=(peers[2:], int(LONG_S * 1000)))
        first.start()
        for _ in range(BUSY):
            stack.enter_context(silent.accept()[0])
        begin = time.monotonic()
        assert datadist.link_clusters(peers[:2], int(SHORT_S * 1000)) == (late, [late, late])
        assert time.monotonic() - begin < LONG_S / 2
        assert first.is_alive()
    first.join(WAIT_S)
    assert not first.is_alive()


@contextlib.contextmanager
def busy_workers() -> Iterator[Workers]:
    """One worker, which is busy all the time; then it does what was left to it."""
    workers = Workers("test-each", 1)
    gate, begun = threading.Event(), threading.Event()

    def stay() -> bool:
        begun.set()
        return gate.wait(WAIT_S)

    busy = workers.submit(stay)
    assert begun.wait(WAIT_S)
    yield workers
    assert not busy.done()
    gate.set()
    assert busy.result(WAIT_S)
    with contextlib.suppress(CancelledError):  # it has been closed
        workers.submit(lambda: None).result(WAIT_S)
    workers.close()


def test_results_of_many_come_in_order() -> None:
    workers = Workers("test-each", 2)
    assert workers.each([lambda n=n: n for n in range(50)]) == list(range(50))
    assert workers.each([]) == []
    workers.close()


def test_what_no_worker_has_begun_is_done_by_who_waits() -> None:
    with busy_workers() as workers:
        assert workers.each([threading.get_ident] * 3) == [threading.get_ident()] * 3


def test_a_failure_of_one_leaves_nothing_to_begin() -> None:
    ran = threading.Event()

    def fail() -> None:
        raise KeyError

    with busy_workers() as workers, pytest.raises(KeyError):
        workers.each([fail, ran.set])
    assert not ran.is_set()


def test_closed_workers_do_not_begin() -> None:
    with busy_workers() as workers:
        ran = threading.Event()
        with pytest.raises(CancelledError):
            workers.each([workers.close, ran.set])
        with pytest.raises(CancelledError):
            workers.each([lambda: None, ran.set])
    assert not ran.is_set()


# Paths


class FoundPath:
    """What a route needs of a path."""

    reaches_all = True

    def __init__(self, name: str) -> None:
        self.name = name
        self.closed = False

    def describe(self) -> str:
        return "it works"

    def close(self) -> None:
        self.closed = True


class Search:
    """Every path but the first is found when the gate opens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.gate = threading.Event(), threading.Event()
        monkeypatch.setattr(ladder, "attempt", self._attempt)
        peer: Any = SimpleNamespace(identity=SimpleNamespace(cluster_id=2))
        self.route = Route(["first", "second"], peer, None)  # type: ignore[arg-type]
        self.first = self.route.connect(soon())
        self.found: list[Any] = []
        self._thread = threading.Thread(target=self._search)
        self._thread.start()
        assert self.begun.wait(WAIT_S)

    def _attempt(self, name: str, *_: object) -> FoundPath:
        if name != "first":
            self.begun.set()
            self.gate.wait(WAIT_S)
        return FoundPath(name)

    def _search(self) -> None:
        try:
            self.found.append(self.route.connect(soon(), self.first))
        except PeerGoneError as error:
            self.found.append(error)

    def end(self) -> Any:
        """What the search that was under way has come to."""
        assert self._thread.is_alive(), "somebody has waited for it"
        self.gate.set()
        self._thread.join(WAIT_S)
        return self.found[0]


def test_nobody_waits_for_a_path_that_another_seeks(monkeypatch: pytest.MonkeyPatch) -> None:
    search = Search(monkeypatch)
    route = search.route
    assert [str(each) for each in route.attempts() if each.chosen] == ["first: it works"]
    with pytest.raises(PathTimeoutError, match="another transfer was trying"):
        route.connect(Deadline.after(0.01), search.first)
    assert route.connect(Deadline.after(0)) is search.first
    route.demote(search.first, "not permitted", None)
    assert not route.uses(search.first)
    second = search.end()
    assert second.name == "second"
    assert route.path is second
    assert route.connect(Deadline.after(0)) is second
    assert [str(each) for each in route.attempts() if each.name == "first"] == ["first: stopped working: not permitted"]
    route.close()
    assert second.closed
    assert search.first.closed  # type: ignore[attr-defined]


def test_a_path_that_is_found_after_the_end_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    search = Search(monkeypatch)
    search.route.close()
    assert search.first.closed  # type: ignore[attr-defined]
    assert isinstance(search.end(), PeerGoneError)
    assert search.route.path is None
    with pytest.raises(PeerGoneError):
        search.route.connect(soon())
