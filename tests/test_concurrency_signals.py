"""Signal handlers that transfer in the middle of a transfer, where locks, connections and threads are involved."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from few_kit import SOURCE, blocks_of, make_pair
from test_interruptions import STEPS, pull_within_pulls, split_from

if TYPE_CHECKING:
    from peers import Peers


@pytest.mark.parametrize("who", ["client", "server"])
@pytest.mark.parametrize(("path", "size"), [("tcp", "small"), ("process_vm", "large")])
def test_a_signal_handler_may_pull_in_the_middle_of_a_pull(peers: Peers, path: str, size: str, who: str) -> None:
    """Over TCP it gets the connection that is not in use, or has it opened, by the peer if that began the link.

    Large ones are moved by several threads, whose locks the handler may find taken by the thread that it interrupts.
    """
    client, server = make_pair(peers, path)
    here, there = (client, server) if who == "client" else (server, client)
    here.call(split_from, 1 if size == "large" else None)
    steps, wrong = here.call(pull_within_pulls, there.cluster_id, blocks_of(there, SOURCE))
    assert 1 < steps < STEPS
    assert wrong == []
