"""Leases: blocks are kept until all readers have done, or time is over, and a reader can see it."""

from __future__ import annotations

import time

from llm_datadist.integrations.vllm.orders import Hold, Open
from llm_datadist.integrations.vllm.worker_leases import Leases
from net_helpers import WAIT_S
from until import until


def opened(seconds: float = WAIT_S) -> Leases:
    leases = Leases()
    leases.open([Open("a", 5, 77)])
    assert leases.generations[5] == 77
    leases.hold([Hold("a", seconds)])
    return leases


def test_all_readers_must_have_done() -> None:
    leases = opened()
    assert leases.release("a", 2)
    assert leases.over() == set()
    assert leases.generations[5] == 77
    assert leases.release("a", 2)
    assert leases.generations[5] == 0
    assert leases.over() == {"a"}
    assert leases.over() == set()
    assert not leases.release("a", 2)


def test_a_reader_may_have_done_before_the_blocks_are_held() -> None:
    leases = Leases()
    leases.open([Open("a", 5, 77)])
    assert leases.release("a", 1)
    assert leases.over() == set()
    leases.hold([Hold("a", WAIT_S)])
    assert leases.over() == {"a"}


def test_time_ends_a_lease_and_renewal_puts_it_off() -> None:
    leases = opened(0.0)
    assert leases.expire() == ["a"]
    assert leases.over() == {"a"}
    assert leases.generations[5] == 0
    leases = opened(0.05)
    begin = time.monotonic()
    leases.renew(["a", "unknown"])
    until(lambda: leases.expire() == ["a"])
    assert time.monotonic() - begin >= 0.05
    leases.renew(["a"])


def test_a_request_that_still_runs_does_not_expire() -> None:
    leases = Leases()
    leases.open([Open("a", 5, 77)])
    assert leases.expire() == []
    leases.close(["a", "unknown"])
    assert leases.generations[5] == 0
    assert leases.over() == set()
