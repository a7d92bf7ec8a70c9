"""Links between workers of the vLLM connector that end, and what must neither come of it nor be lost by it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llm_datadist import LLMClusterInfo
from llm_datadist.integrations.vllm import pushes
from llm_datadist.integrations.vllm.messages import Renew
from llm_datadist.integrations.vllm.orders import Hold, Load, Open, Part, Renewal
from llm_datadist.integrations.vllm.params import Lease
from llm_datadist.status import LLMTimeoutError
from until import until
from vllm_kit import LAYERS, LEASE, OURS, THEIRS, TOKENS, Rank, two_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from llm_datadist.integrations.vllm.messages import Message


@pytest.fixture
def pair() -> Iterator[tuple[Rank, Rank]]:
    """A prefill and a decode worker."""
    with two_ranks() as made:
        yield made


def cut(prefill: Rank, decode: Rank) -> None:
    """End the link."""
    info = LLMClusterInfo()
    info.remote_cluster_id = prefill.cluster_id
    decode.dist.unlink_clusters([info], 5000, force=True)
    until(lambda: not prefill.peers.is_linked(decode.cluster_id))


def expected(prefill: Rank, decode: Rank, transfer: str = "t", blocks: tuple[int, ...] = OURS) -> None:
    load = Load(transfer, prefill.remote(), 0, len(blocks) * TOKENS, (blocks,), transfer=transfer)
    decode.arrivals.note(load)
    decode.arrivals.expect(load)


def computed(prefill: Rank, first: int, tokens: int, *, last: bool, transfer: str = "t") -> None:
    prefill.pusher.begin([Part("p", transfer, first, tokens, last, (THEIRS[: -(-tokens // TOKENS)],))])
    prefill.pusher.step_done()


def same(prefill: Rank, decode: Rank) -> bool:
    return np.array_equal(decode.memory[:, list(OURS)], prefill.memory[:, list(THEIRS)])


def test_a_pull_over_a_link_that_has_ended_is_made_over_a_new_one(pair: tuple[Rank, Rank]) -> None:
    prefill, decode = pair
    prefill.leases.open([Open("r", LEASE.slot, LEASE.value)])
    prefill.leases.hold([Hold("r", 30.0)])
    load = Load("d", prefill.remote(list(THEIRS), LEASE), 0, 3 * TOKENS, (OURS,))
    decode.puller.pull(load)
    cut(prefill, decode)
    decode.memory[:] = 0
    assert decode.puller.pull(load) == 3 * decode.memory[:, 0].nbytes
    assert same(prefill, decode)


def test_a_link_that_ended_while_nothing_was_expected_is_made_again(pair: tuple[Rank, Rank]) -> None:
    prefill, decode = pair
    for transfer in ("t", "u"):
        decode.memory[:] = 0
        expected(prefill, decode, transfer)
        computed(prefill, 0, 3 * TOKENS, last=True, transfer=transfer)
        assert decode.end_of(transfer) == ""
        assert same(prefill, decode)
        cut(prefill, decode)


def test_a_prefill_worker_that_links_again_goes_on_with_no_push_that_was_given_up(pair: tuple[Rank, Rank]) -> None:
    """It does so when it loads from the decode worker, as kv_both allows."""
    prefill, decode = pair
    expected(prefill, decode)
    computed(prefill, 0, TOKENS, last=False)
    until(lambda: np.array_equal(decode.memory[:, OURS[0]], prefill.memory[:, THEIRS[0]]))
    cut(prefill, decode)

    def over() -> bool:
        decode.arrivals.watch()
        return "t" in decode.ends

    until(over)
    prefill.peers.link(decode.remote().workers[0])
    before = decode.memory.copy()
    computed(prefill, TOKENS, 3 * TOKENS, last=True)
    prefill.pusher.hold([Hold("p", 30.0, "t")])
    until(lambda: prefill.pusher.freed() == {"p"})
    assert np.array_equal(decode.memory, before)


def test_linking_what_is_linked_ends_no_push(pair: tuple[Rank, Rank]) -> None:
    prefill, decode = pair
    expected(prefill, decode)
    computed(prefill, 0, TOKENS, last=False)
    prefill.peers.link(decode.remote().workers[0])
    computed(prefill, TOKENS, 3 * TOKENS, last=True)
    assert decode.end_of("t") == ""
    assert same(prefill, decode)


def test_a_message_that_is_refused_says_nothing_of_the_link(pair: tuple[Rank, Rank]) -> None:
    """One that is too long."""
    prefill, decode = pair
    expected(prefill, decode, "long", tuple(range(1000, 41000)))
    assert decode.end_of("long").startswith("the prefill worker cannot be told: ")
    expected(prefill, decode)
    computed(prefill, 0, 3 * TOKENS, last=True)
    assert decode.end_of("t") == ""


def test_a_push_that_is_aborted_while_it_is_asked_for_is_cancelled(pair: tuple[Rank, Rank]) -> None:
    """Otherwise the prefill engine would keep its blocks until the lease ends."""
    prefill, decode = pair
    load = Load("d", prefill.remote(), 0, 3 * TOKENS, (OURS,), transfer="t")
    decode.arrivals.note(load)
    link = decode.peers.link

    def slow(worker: object) -> int:
        decode.arrivals.cancel("d")
        return link(worker)  # type: ignore[arg-type]

    decode.peers.link = slow  # type: ignore[method-assign, assignment]
    decode.arrivals.expect(load)
    assert decode.end_of("d") == "the request was aborted"
    computed(prefill, 0, 3 * TOKENS, last=True)
    prefill.pusher.hold([Hold("p", 30.0, "t")])
    until(lambda: prefill.pusher.freed() == {"p"})


def test_nothing_is_kept_of_a_push_that_both_sides_have_given_up(pair: tuple[Rank, Rank]) -> None:
    prefill, decode = pair
    expected(prefill, decode)
    decode.arrivals.cancel("t")
    assert decode.end_of("t") == "the request was aborted"
    until(lambda: all(each.told for each in prefill.pusher._transfers["t"].targets.values()))
    prefill.pusher.drop([("t", "it was aborted")])
    assert prefill.pusher._transfers == {}


@pytest.mark.parametrize(("count", "given"), [(3000, 32), (300, 250), (20, 8000), (3, 40_000), (20, 2)])
def test_many_leases_are_renewed_in_messages_that_fit(pair: tuple[Rank, Rank], count: int, given: int) -> None:
    """However long the ids are that clients give their requests."""
    prefill, decode = pair
    got: list[str] = []

    def note(_: int, message: Message) -> None:
        assert isinstance(message, Renew)
        got.extend(message.requests)

    prefill.got = note  # type: ignore[method-assign]
    names = [f"cmpl-{str(n) * given:.{given}}-0-{n:08x}" for n in range(count)]
    waiting = [Renewal(prefill.remote([], Lease(name, 1, "a", 30.0)), name, 30.0) for name in names]
    ((worker, asked),) = decode.puller.renewals(waiting).items()
    decode.puller.renew(worker, asked)
    until(lambda: got == names)


def test_a_worker_that_does_not_answer_is_asked_once_a_round(
    pair: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = pair
    asked: list[int] = []

    def lost(cluster_id: int, _: Message) -> None:
        asked.append(cluster_id)
        raise LLMTimeoutError("late", peer=cluster_id)

    monkeypatch.setattr(decode.peers, "send", lost)
    decode.puller.renew(prefill.remote().workers[0], [str(n) for n in range(3000)])
    assert asked == [prefill.cluster_id]


@pytest.mark.parametrize("late", [False, True])
def test_nothing_is_pushed_to_a_request_with_another_prompt(pair: tuple[Rank, Rank], late: bool) -> None:
    prefill, decode = pair
    before = decode.memory.copy()

    def prefilled() -> None:
        prefill.pusher.begin([Part("p", "t", 0, 3 * TOKENS, True, (THEIRS,), "prompt 1")])
        prefill.pusher.step_done()

    if late:
        prefilled()
    load = Load("d", prefill.remote(), 0, 3 * TOKENS, (OURS,), transfer="t", digest="prompt 2")
    decode.arrivals.note(load)
    decode.arrivals.expect(load)
    if not late:
        prefilled()
    assert decode.end_of("d").endswith("has not pushed all of it: it is of another prompt")
    assert np.array_equal(decode.memory, before)


def test_a_part_is_planned_once_for_all_layers(pair: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode = pair
    planned: list[range] = []
    real = pushes.pieces

    def counted(*args: Any) -> Any:
        planned.append(args[3])
        return real(*args)

    monkeypatch.setattr(pushes, "pieces", counted)
    expected(prefill, decode)
    until(lambda: "t" in prefill.pusher._transfers)
    for first, tokens in ((0, TOKENS), (TOKENS, 3 * TOKENS)):
        prefill.pusher.begin([Part("p", "t", first, tokens, tokens == 3 * TOKENS, (THEIRS,))])
        for layer in range(LAYERS):
            prefill.pusher.layer_done(f"layer{layer}")
            until(lambda: not prefill.pusher._transfers["t"].targets[decode.cluster_id].active)
        prefill.pusher.step_done()
    assert decode.end_of("t") == ""
    assert same(prefill, decode)
    assert planned == [range(TOKENS), range(TOKENS, 3 * TOKENS)]


def test_a_push_that_never_comes_is_not_waited_for(pair: tuple[Rank, Rank]) -> None:
    """The prefill engine is in the other mode."""
    prefill, decode = pair
    prefill.pusher.refusal = "it works in mode 'pull', and a push was expected"
    expected(prefill, decode)
    assert decode.end_of("t").endswith(f"has not pushed all of it: {prefill.pusher.refusal}")
