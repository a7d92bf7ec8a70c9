"""Signal handlers that transfer in the middle of a transfer, where locks, connections and threads are involved."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from llm_datadist.net.workers import Workers
from llm_datadist.paths.parallel import Checkpoint, run
from net_helpers import soon
from short_kit import SOURCE, blocks_of, make_pair
from test_interruptions import STEPS, at_step, pull_within_pulls, split_from

if TYPE_CHECKING:
    from collections.abc import Callable

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


def test_no_part_of_a_transfer_goes_on_after_ctrl_c_at_any_step() -> None:
    """Also if it comes when the parts are just to be waited for."""
    workers = Workers("test-ctrl-c", 1)
    pause = threading.Event()

    def interrupt() -> None:
        raise KeyboardInterrupt

    for step in range(1, STEPS):
        begun, ended = threading.Event(), threading.Event()

        def slow(begun: threading.Event = begun, ended: threading.Event = ended) -> None:
            try:
                begun.set()
                pause.wait(0.01)
            finally:
                ended.set()

        def call(slow: Callable[[], None] = slow, begun: threading.Event = begun) -> None:
            run([lambda: begun.wait(0.1), slow], workers, Checkpoint(soon()))

        try:
            if not at_step(step, interrupt, call):
                break
        except KeyboardInterrupt:
            pass
        assert ended.is_set() or not begun.is_set(), f"after an interruption at step {step}"
    assert step > 10
    workers.close()
