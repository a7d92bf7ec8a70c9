"""The connections on which a peer is asked: what becomes of them when the link ends under running transfers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llm_datadist.paths.tcp_asker import Asker, AskerPool
from net_helpers import ended, soon, tcp_pair

if TYPE_CHECKING:
    import socket


class Hasty(Asker):
    """Its transfer, and that of another one, end at the very moment that it is shut down."""

    pool: AskerPool

    def shut_down(self) -> None:
        self.pool.used.clear()
        super().shut_down()


def test_transfers_that_end_while_all_are_aborted() -> None:
    """Tickets are taken out without the lock; the others are shut down all the same."""
    pairs = [tcp_pair() for _ in range(3)]
    pool = AskerPool(3, lambda _count, _deadline: [])
    for number, (sock, _) in enumerate(pairs):
        hasty = Hasty(number, sock)
        hasty.pool = pool
        pool.adopt(hasty)
    askers = [pool.take(ticket, soon()) for ticket in ("one", "two", "three")]
    pool.abort()
    others: list[socket.socket] = [theirs for _, theirs in pairs]
    assert all(map(ended, others))
    for asker in askers:
        pool.give_back(asker)
    for other in others:
        other.close()
    assert len(pool) == 0
