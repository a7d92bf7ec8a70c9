"""Pulls under leases and layer-wise pushes between workers of the vLLM connector."""

from __future__ import annotations

import threading
import types
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from llm_datadist import LLMClusterInfo
from llm_datadist.integrations.vllm import pushes
from llm_datadist.integrations.vllm.loads import LoadError
from llm_datadist.integrations.vllm.orders import Hold, Load, Open, Part
from llm_datadist.paths import inprocess
from net_helpers import WAIT_S
from until import until
from vllm_kit import BLOCKS, LAYERS, LEASE, OURS, THEIRS, TOKENS, Rank, two_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def pair() -> Iterator[tuple[Rank, Rank]]:
    """A prefill and a decode worker."""
    with two_ranks() as made:
        yield made


def same(prefill: Rank, decode: Rank, count: int = 3) -> bool:
    return bool((decode.memory[:, list(OURS[3 - count :])] == prefill.memory[:, list(THEIRS[3 - count :])]).all())


def untouched(decode: Rank, before: object, but: tuple[int, ...] = OURS) -> bool:
    rest = [block for block in range(BLOCKS) if block not in but]
    return bool((decode.memory[:, rest] == before[:, rest]).all())  # type: ignore[index]


# ------------------------------------------------------------ pull


def held(prefill: Rank) -> None:
    prefill.leases.open([Open("r", LEASE.slot, LEASE.value)])
    prefill.leases.hold([Hold("r", 30.0)])


def test_a_pull_brings_what_is_missing_and_releases_the_lease(pair: tuple[Rank, Rank]) -> None:
    prefill, decode = pair
    held(prefill)
    before = decode.memory.copy()
    remote = prefill.remote(list(THEIRS), LEASE)
    load = Load("d", remote, TOKENS, 3 * TOKENS, ((0, *OURS[1:]),))
    assert decode.puller.pull(load) == 2 * decode.memory[:, 0].nbytes
    assert same(prefill, decode, 2)
    assert untouched(decode, before, OURS[1:])
    assert prefill.leases.over() == set()
    decode.puller.release(remote)
    until(lambda: prefill.leases.over() == {"r"})


def test_a_lease_that_is_over_is_an_error(pair: tuple[Rank, Rank]) -> None:
    prefill, decode = pair
    held(prefill)
    prefill.leases.release("r", 1)
    load = Load("d", prefill.remote(list(THEIRS), LEASE), 0, 3 * TOKENS, (OURS,))
    with pytest.raises(LoadError, match="freed before they were read: the lease of 30 s is over"):
        decode.puller.pull(load)


def test_blocks_that_are_not_there_are_an_error(pair: tuple[Rank, Rank]) -> None:
    prefill, decode = pair
    held(prefill)
    load = Load("d", prefill.remote(list(THEIRS[:2]), LEASE), 0, 3 * TOKENS, (OURS,))
    with pytest.raises(LoadError, match="has only 2 of their blocks"):
        decode.puller.pull(load)


def test_engines_that_do_not_fit_give_the_blocks_back(pair: tuple[Rank, Rank]) -> None:
    """Whatever does not fit, also if there is no way to say who would read what."""
    prefill, decode = pair
    held(prefill)
    remote = prefill.remote(list(THEIRS), LEASE)
    decode.puller.release(msgspec.structs.replace(remote, facts=msgspec.structs.replace(remote.facts, caches=())))
    until(lambda: prefill.leases.over() == {"r"})


def test_a_prefill_engine_that_has_gone_is_an_error(pair: tuple[Rank, Rank]) -> None:
    prefill, decode = pair
    held(prefill)
    remote = prefill.remote(list(THEIRS), LEASE)
    load = Load("d", remote, 0, 3 * TOKENS, (OURS,))
    decode.puller.pull(load)
    prefill.close()
    with pytest.raises(LoadError):
        decode.puller.pull(load)
    with pytest.raises(LoadError, match="cannot connect"):
        decode.puller.pull(load)
    decode.puller.release(remote)


# ------------------------------------------------------------ push


def expected(prefill: Rank, decode: Rank, blocks: tuple[int, ...] = OURS, first: int = 0) -> None:
    load = Load("d", prefill.remote(), first, 3 * TOKENS, (blocks,), transfer="t")
    decode.arrivals.note(load)
    decode.arrivals.expect(load)


def part(first: int, tokens: int, *, last: bool) -> Part:
    return Part("p", "t", first, tokens, last, (THEIRS[: -(-tokens // TOKENS)],))


def computed(prefill: Rank, step: Part) -> None:
    """One step: each layer becomes final, the last one without a word."""
    prefill.pusher.begin([step])
    for number in range(LAYERS - 1):
        prefill.pusher.layer_done(f"layer{number}")
    prefill.pusher.step_done()


@pytest.mark.parametrize("late", [False, True])
def test_layers_are_pushed_in_parts(pair: tuple[Rank, Rank], late: bool) -> None:
    """The second part rewrites the block that the first one has left half full."""
    prefill, decode = pair
    before = decode.memory.copy()
    if not late:
        expected(prefill, decode)
    final = prefill.memory.copy()
    prefill.memory[:, THEIRS[1]] = 0
    computed(prefill, part(0, TOKENS + 3, last=False))
    if not late:
        until(lambda: np.array_equal(decode.memory[:, OURS[0]], final[:, THEIRS[0]]))
        assert "d" not in decode.ends
    prefill.memory[:] = final
    computed(prefill, part(TOKENS + 3, 3 * TOKENS, last=True))
    prefill.pusher.hold([Hold("p", 30.0, "t")])
    if late:
        assert prefill.pusher.freed() == set()
        expected(prefill, decode)
    assert decode.end_of("d") == ""
    assert same(prefill, decode)
    assert untouched(decode, before)
    until(lambda: prefill.pusher.freed() == {"p"})


def test_what_is_there_already_is_not_pushed(pair: tuple[Rank, Rank]) -> None:
    prefill, decode = pair
    before = decode.memory.copy()
    expected(prefill, decode, (0, *OURS[1:]), TOKENS)
    computed(prefill, part(0, 3 * TOKENS, last=True))
    assert decode.end_of("d") == ""
    assert same(prefill, decode, 2)
    assert untouched(decode, before, OURS[1:])


def test_a_cancelled_push_ends_once_nobody_writes(pair: tuple[Rank, Rank]) -> None:
    prefill, decode = pair
    expected(prefill, decode)
    computed(prefill, part(0, TOKENS, last=False))
    decode.arrivals.cancel("d")
    assert decode.end_of("d") == "the request was aborted"
    before = decode.memory.copy()
    computed(prefill, part(TOKENS, 3 * TOKENS, last=True))
    prefill.pusher.hold([Hold("p", 30.0, "t")])
    until(lambda: prefill.pusher.freed() == {"p"})
    assert (decode.memory == before).all()


def test_a_prefill_that_ends_otherwise_is_told(pair: tuple[Rank, Rank]) -> None:
    prefill, decode = pair
    expected(prefill, decode)
    prefill.pusher.drop([("t", "the prefill ended with FINISHED_ABORTED")])
    assert decode.end_of("d").endswith("has not pushed all of it: the prefill ended with FINISHED_ABORTED")


def test_a_prefill_that_has_ended_otherwise_is_told_later(pair: tuple[Rank, Rank]) -> None:
    prefill, decode = pair
    prefill.pusher.drop([("t", "it was aborted")])
    expected(prefill, decode)
    assert decode.end_of("d").endswith("it was aborted")


def test_nobody_registers_in_time(pair: tuple[Rank, Rank]) -> None:
    prefill, decode = pair
    computed(prefill, part(0, 3 * TOKENS, last=True))
    prefill.pusher.hold([Hold("p", 0.0, "t")])
    assert prefill.pusher.expire(30.0) == ["p"]
    assert prefill.pusher.freed() == {"p"}
    expected(prefill, decode)
    assert decode.end_of("d").endswith("the other half of the request has not come in time")


def test_a_push_that_is_asked_for_again_is_kept(pair: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    """The decode engine is busy, and asks again; once it does not, the blocks are freed, and stay so."""
    prefill, _ = pair
    clock = types.SimpleNamespace(now=1000.0)
    monkeypatch.setattr(pushes, "time", types.SimpleNamespace(monotonic=lambda: clock.now))
    computed(prefill, part(0, 3 * TOKENS, last=True))
    prefill.pusher.hold([Hold("p", 30.0, "t")])
    for _ in range(3):
        clock.now += 29
        prefill.pusher.renew(["t", "unknown"])
        assert prefill.pusher.expire(600.0) == []
    clock.now += 31
    assert prefill.pusher.expire(600.0) == ["p"]
    clock.now += 599
    prefill.pusher.renew(["t", "unknown"])
    assert len(prefill.pusher._transfers) == 1
    clock.now += 2
    assert prefill.pusher.expire(600.0) == []
    assert prefill.pusher._transfers == {}


def test_a_prefill_engine_that_goes_ends_the_wait(pair: tuple[Rank, Rank]) -> None:
    prefill, decode = pair
    expected(prefill, decode)
    decode.arrivals.watch()
    assert "d" not in decode.ends
    prefill.close()

    def over() -> bool:
        decode.arrivals.watch()
        return "d" in decode.ends

    until(over)
    assert decode.end_of("d") == "the link to the prefill worker has ended"


def test_a_prefill_engine_that_is_not_there_is_an_error(pair: tuple[Rank, Rank]) -> None:
    prefill, decode = pair
    remote = prefill.remote()
    prefill.close()
    load = Load("d", remote, 0, 3 * TOKENS, (OURS,), transfer="t")
    decode.arrivals.note(load)
    decode.arrivals.expect(load)
    assert decode.end_of("d").startswith("the prefill worker cannot be told: ")


def test_a_push_that_is_cancelled_before_anybody_knows_of_it_is_not_asked_for(pair: tuple[Rank, Rank]) -> None:
    prefill, decode = pair
    before = decode.memory.copy()
    load = Load("d", prefill.remote(), 0, 3 * TOKENS, (OURS,), transfer="t")
    decode.arrivals.note(load)
    decode.arrivals.cancel("d")
    assert decode.end_of("d") == "the request was aborted"
    decode.arrivals.expect(load)  # the order was on its way already
    computed(prefill, part(0, 3 * TOKENS, last=True))
    prefill.pusher.hold([Hold("p", 30.0, "t")])
    until(lambda: prefill.pusher.freed() == {"p"})
    assert (decode.memory == before).all()


def test_a_push_that_makes_no_sense_ends(pair: tuple[Rank, Rank]) -> None:
    """It names no blocks for the KV group."""
    prefill, decode = pair
    load = Load("d", prefill.remote(), 0, 3 * TOKENS, (), transfer="t")
    decode.arrivals.note(load)
    decode.arrivals.expect(load)
    computed(prefill, part(0, 3 * TOKENS, last=True))
    assert decode.end_of("d").startswith("the prefill engine has not pushed all of it: ")


def watched(decode: Rank, request: str) -> str:
    """Look as often as the connector does, and oftener; why the load has failed."""

    def over() -> bool:
        decode.arrivals.watch()
        return request in decode.ends

    until(over)
    return decode.end_of(request)


def test_a_write_that_outlives_its_link_is_waited_for(pair: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a load may have another use as soon as it has ended."""
    prefill, decode = pair
    expected(prefill, decode)
    entered, gate = threading.Event(), threading.Event()
    real = inprocess.copy

    def held(*args: Any) -> None:
        entered.set()
        assert gate.wait(WAIT_S)
        real(*args)

    monkeypatch.setattr(inprocess, "copy", held)
    computed(prefill, part(0, 3 * TOKENS, last=True))
    assert entered.wait(WAIT_S)
    info = LLMClusterInfo()
    info.remote_cluster_id = prefill.cluster_id
    decode.dist.unlink_clusters([info], 5000, force=True)
    decode.arrivals.watch()
    assert decode.ends == {}
    gate.set()
    assert watched(decode, "d") in {"", "the link to the prefill worker has ended"}  # it may just manage to say so
    before = decode.memory.copy()
    prefill.pool.shutdown()  # whatever was begun has ended
    assert (decode.memory == before).all()


def test_no_new_link_brings_a_push_that_was_given_up(pair: tuple[Rank, Rank]) -> None:
    """The prefill worker still computes, and knows where to write."""
    prefill, decode = pair
    expected(prefill, decode)
    computed(prefill, part(0, TOKENS, last=False))
    until(lambda: np.array_equal(decode.memory[:, OURS[0]], prefill.memory[:, THEIRS[0]]))
    info = LLMClusterInfo()
    info.remote_cluster_id = prefill.cluster_id
    decode.dist.unlink_clusters([info], 5000, force=True)
    assert watched(decode, "d") == "the link to the prefill worker has ended"
    before = decode.memory.copy()
    again = Load("e", prefill.remote(), 0, 3 * TOKENS, ((4, 6, 8),), transfer="u")
    decode.arrivals.note(again)
    decode.arrivals.expect(again)
    assert "its link has ended while it could write" in decode.end_of("e")
    computed(prefill, part(TOKENS, 3 * TOKENS, last=True))
    assert (decode.memory == before).all()
