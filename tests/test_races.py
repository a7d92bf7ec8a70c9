"""Races that simulation has found, each at the very moment."""

from __future__ import annotations

import queue
from concurrent.futures import CancelledError, Future

import pytest

from llm_datadist.net.workers import Workers
from llm_datadist.paths.tcp_asker import Asker, AskerPool
from net_helpers import ended, tcp_pair


def test_an_abort_while_a_transfer_ends() -> None:
    pool = AskerPool(2, lambda _count, _deadline: [])
    tickets = [object(), object()]
    sockets = []

    class Ending(Asker):
        def shut_down(self) -> None:
            pool.used.pop(tickets[0], None)  # as a transfer does when it ends: without the lock
            super().shut_down()

    for number, ticket in enumerate(tickets):
        ours, theirs = tcp_pair()
        sockets += [theirs, ours]
        pool.used[ticket] = Ending(number, ours)
    pool.abort()
    assert [ended(theirs) for theirs in sockets[::2]] == [True, True]
    for sock in sockets:
        sock.close()


def test_workers_that_are_closed_while_one_takes_the_last_task() -> None:
    class Emptied(queue.SimpleQueue):  # type: ignore[type-arg]
        def empty(self) -> bool:
            return False  # what was seen there has been taken meanwhile

    workers = Workers("test-closed", 1)
    workers._tasks = Emptied()
    waiting: Future[object] = Future()
    workers._tasks.put((waiting, lambda: None))
    workers.close()
    workers.close()
    assert waiting.cancelled()
    with pytest.raises(CancelledError):
        workers.submit(lambda: None)
