"""What the scheduler's half of the vLLM connector orders."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

import pytest

import vllm_stand_in
from llm_datadist.integrations.vllm.options import Options
from llm_datadist.integrations.vllm.params import KEY, VERSION, CacheFacts, Facts, Lease, Remote, Worker, digest, encode
from vllm_stand_in import RequestStatus, SlidingWindowSpec, Spec

if TYPE_CHECKING:
    from collections.abc import Sequence

SIZE = 16
FACTS = Facts("1", "m", "d", "c", "f", 1, (CacheFacts(0, "full", 1, 1, 1, 8, SIZE, SIZE, 1),))
PUSH = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "t"}


class Cache:
    """A KV cache configuration, and the manager of its blocks: each request has those that a test gives it."""

    def __init__(self, *specs: Spec) -> None:
        self.transfer_groups = [types.SimpleNamespace(kv_cache_spec=spec) for spec in specs or (Spec(SIZE),)]
        self.blocks: list[int] = []

    def select_transfer_block_ids(self, block_ids: Sequence[list[int]]) -> tuple[list[int], ...]:
        return tuple(block_ids)

    def get_block_ids(self, request: str = "") -> tuple[list[int], ...]:
        return tuple(list(self.blocks) for _ in self.transfer_groups)


class Half:
    """The scheduler's half."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, mode: str, *specs: Spec, **steps: bool) -> None:
        module = vllm_stand_in.load("scheduler", monkeypatch)
        self.cache = Cache(*specs)
        self.made = module.Scheduler(Options(mode=mode), "engine", self.cache, **steps)
        address = vllm_stand_in.load("metadata", monkeypatch).Address
        module.Address = address
        self.made.set_workers({0: address(Worker("b", "127.0.0.1", 1), FACTS)})

    def arrive(self, name: str, params: dict[str, Any], prompt: int = 4 * SIZE, *, refused: bool = False) -> Any:
        tokens = list(range(prompt))
        request = types.SimpleNamespace(
            request_id=name,
            kv_transfer_params=dict(params),
            num_prompt_tokens=prompt,
            prompt_token_ids=tokens,
            _all_token_ids=list(tokens),
            max_tokens=9,
            num_computed_tokens=0,
            status=RequestStatus.RUNNING,
            abort_immediately=refused,
        )
        self.made.arrived(request)
        return request

    def allocate(self, request: Any, blocks: list[int]) -> int:
        self.cache.blocks = blocks
        external = int(self.made.matched(request, 0))
        self.made.allocated(request, self.cache, external)
        return external

    def step(self, new: dict[str, int], again: dict[str, int], scheduled: int, resumed: Sequence[str] = ()) -> Any:
        """One step: from which token on each request is computed."""
        return self.made.orders(
            types.SimpleNamespace(
                total_num_scheduled_tokens=scheduled,
                scheduled_new_reqs=[types.SimpleNamespace(req_id=k, num_computed_tokens=v) for k, v in new.items()],
                scheduled_cached_reqs=types.SimpleNamespace(
                    req_ids=list(again), num_computed_tokens=list(again.values()), resumed_req_ids=set(resumed)
                ),
                num_scheduled_tokens=dict.fromkeys({*new, *again}, scheduled),
            ),
            self.cache,
        )


def remote(
    lease: str = "", engine: str = "P", tokens: int = 0, prompt: Sequence[int] = (), seconds: float = 0.0
) -> dict[str, Any]:
    made = Lease(lease, 1, "ab", 30.0) if lease else None
    where, blocks = (Worker("a", "127.0.0.1", 1),), ((1, 2, 3, 4),)
    of = digest(prompt) if prompt else ""
    return encode(Remote(VERSION, engine, FACTS, where, tokens, blocks, made, of, seconds))


def test_a_request_that_loads_and_hands_over_at_once_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait for ever for a load that nobody has ordered."""
    half = Half(monkeypatch, "pull")
    request = half.arrive("r", {"do_remote_decode": True, "do_remote_prefill": True, KEY: remote("x")})
    assert half.allocate(request, [1, 2, 3, 4]) == 0
    orders = half.step({"r": 0}, {}, 64)
    assert (orders.loads, orders.renewals, orders.links) == ([], [], [])
    assert [each.request for each in orders.opened] == ["r"]


def test_what_was_sent_before_a_preemption_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks went to others, and what the prefix cache has of it since may be in other ones."""
    half = Half(monkeypatch, "push")
    request = half.arrive("r", PUSH)
    half.allocate(request, [1, 2])
    (part,) = half.step({"r": 0}, {}, 2 * SIZE).parts
    assert (part.first, part.tokens, part.last) == (0, 2 * SIZE, False)
    half.cache.blocks = [7, 8, 9, 10]
    (part,) = half.step({}, {"r": 2 * SIZE}, 2 * SIZE, resumed=["r"]).parts
    assert (part.first, part.tokens, part.last, part.blocks) == (0, 4 * SIZE, True, ((7, 8, 9, 10),))


def test_chunks_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    half = Half(monkeypatch, "push")
    half.allocate(half.arrive("r", PUSH), [1, 2])
    half.step({"r": SIZE}, {}, SIZE)
    (part,) = half.step({}, {"r": 2 * SIZE}, 2 * SIZE).parts
    assert (part.first, part.tokens, part.last) == (2 * SIZE, 4 * SIZE, True)


def test_a_push_ends_with_its_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Half(monkeypatch, "push").arrive("r", PUSH).max_tokens == 1
    assert Half(monkeypatch, "pull").arrive("r", PUSH).max_tokens == 9


def test_a_push_whose_prefill_never_began_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    half = Half(monkeypatch, "push")
    request = half.arrive("r", PUSH)
    request.status = RequestStatus.FINISHED_ABORTED
    assert half.made.finished(request, ([],)) == (False, None)
    assert half.step({}, {}, 0).dropped == [("t", "the prefill ended with FINISHED_ABORTED")]


def test_a_push_that_nobody_can_ask_for_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router that knows only pulls gives it no id; the decode engine, and ours, see by the answer what is wrong."""
    half = Half(monkeypatch, "push")
    request = half.arrive("r", {"do_remote_decode": True})
    half.allocate(request, [1, 2, 3, 4])
    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    kept, answer = half.made.finished(request, ([1, 2, 3, 4],))
    assert not kept
    assert answer[KEY]["facts"]
    assert "lease" not in answer[KEY]


def test_one_request_gets_the_kv_of_a_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers know a push by its id alone, whoever pushes."""
    half = Half(monkeypatch, "push")
    params = {"do_remote_prefill": True, "transfer_id": "t"}
    first = half.arrive("r1", {**params, KEY: remote(engine="P")})
    second = half.arrive("r2", {**params, KEY: remote(engine="Q")})
    assert (half.made.matched(first, 0), half.made.matched(second, 0)) == (4 * SIZE, 0)


@pytest.mark.parametrize("tokens", [0, 4 * SIZE, 4 * SIZE - 1])
def test_behind_a_window_the_last_token_is_not_loaded(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """It is computed again, and the prefill engine may have freed a block that it needs, if it went further."""
    half = Half(monkeypatch, "pull", Spec(SIZE), SlidingWindowSpec(SIZE))
    request = half.arrive("r", {"do_remote_prefill": True, KEY: remote("x", tokens=tokens)})
    assert half.made.matched(request, 0) == 4 * SIZE - 1


def test_what_is_pushed_under_one_id_is_of_one_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client may send several in one request: the router gives all of them the same id."""
    half = Half(monkeypatch, "push")
    first, second = half.arrive("r1", PUSH, 2 * SIZE), half.arrive("r2", PUSH, 3 * SIZE)
    half.allocate(first, [1, 2])
    half.allocate(second, [3, 4, 5])
    parts = half.step({"r1": 0, "r2": 0}, {}, 3 * SIZE).parts
    assert [(each.request, each.digest) for each in parts] == [("r1", digest(range(2 * SIZE)))]
    second.status = first.status = RequestStatus.FINISHED_LENGTH_CAPPED
    kept, answer = half.made.finished(second, ([3, 4, 5],))
    assert (kept, KEY in answer) == (False, True)
    assert half.made.finished(first, ([1, 2],))[0]
    orders = half.step({}, {}, 0)
    assert (orders.dropped, [each.request for each in orders.holds]) == ([], ["r1"])


def test_one_of_several_prompts_that_is_aborted_ends_no_push_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    half = Half(monkeypatch, "push")
    half.allocate(half.arrive("r1", PUSH), [1, 2, 3, 4])
    second = half.arrive("r2", PUSH)
    second.status = RequestStatus.FINISHED_ABORTED
    assert half.made.finished(second, ([],)) == (False, None)
    assert half.step({}, {}, 0).dropped == []


def test_a_push_is_asked_for_with_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    half = Half(monkeypatch, "push", Spec(SIZE), SlidingWindowSpec(SIZE))
    request = half.arrive("r", {"do_remote_prefill": True, "transfer_id": "t", KEY: remote()})
    half.allocate(request, [1, 2, 3, 4])
    (load,) = half.step({}, {}, 0).loads
    other = half.arrive("p", PUSH)
    half.allocate(other, [5, 6, 7, 8])
    (part,) = half.step({"p": 0}, {}, 4 * SIZE).parts
    assert load.digest == part.digest == digest(range(4 * SIZE - 1))


@pytest.mark.parametrize(("tokens", "matched"), [(4 * SIZE, 4 * SIZE), (2 * SIZE, 2 * SIZE), (6 * SIZE, 0)])
def test_kv_is_loaded_for_its_own_prompt(monkeypatch: pytest.MonkeyPatch, tokens: int, matched: int) -> None:
    """Or for what begins with it."""
    half = Half(monkeypatch, "pull")
    mine = {"do_remote_prefill": True, KEY: remote("x", tokens=tokens, prompt=range(tokens))}
    assert half.made.matched(half.arrive("r1", mine), 0) == matched
    theirs = {"do_remote_prefill": True, KEY: remote("y", tokens=tokens, prompt=range(1, tokens + 1))}
    assert half.made.matched(half.arrive("r2", theirs), 0) == 0


def test_a_request_that_the_server_has_refused_gives_the_blocks_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes with another prompt, and is aborted at once."""
    half = Half(monkeypatch, "pull")
    kept = remote("x", tokens=4 * SIZE, prompt=range(4 * SIZE))
    request = half.arrive("r", {"do_remote_prefill": True, KEY: kept}, prompt=1, refused=True)
    request.status = RequestStatus.FINISHED_ABORTED
    assert half.made.finished(request, ([],)) == (False, None)
    (released,) = half.step({}, {}, 0).releases
    assert released.lease.request == "x"


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_what_waits_is_kept(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """The prefill engine is asked again until the KV is there, also while a request has no blocks yet."""
    half = Half(monkeypatch, mode)
    kept = remote("x" if mode == "pull" else "", seconds=30.0 if mode == "push" else 0.0)
    request = half.arrive("r", {"do_remote_prefill": True, "transfer_id": "t", KEY: kept})
    (waits,) = half.step({}, {}, 0).renewals
    assert (waits.name, waits.seconds) == ("x" if mode == "pull" else "t", 30.0)
    assert half.step({}, {}, 0).renewals == []
    half.made._renewed -= 6.0
    half.allocate(request, [1, 2, 3, 4])
    assert len(half.step({"r": 0}, {}, 1).renewals) == 1
    half.made._renewed -= 6.0
    half.made.done(types.SimpleNamespace(finished_recving={"r"}, finished_sending=None))
    assert half.step({}, {"r": 0}, 1).renewals == []


def test_nothing_is_kept_at_an_engine_that_does_not_fit_and_pushes(monkeypatch: pytest.MonkeyPatch) -> None:
    half = Half(monkeypatch, "push")
    other = remote(seconds=30.0)
    other["facts"]["model"] = "another"
    half.arrive("r", {"do_remote_prefill": True, "transfer_id": "t", KEY: other})
    assert half.step({}, {}, 0).renewals == []


def test_a_prefill_engine_that_pushes_says_how_long_it_keeps_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for mode, seconds in (("push", 30.0), ("pull", 0.0)):
        half = Half(monkeypatch, mode)
        _, answer = half.made.finished(half.arrive("r", {**PUSH, "describe": True}), ([],))
        assert answer[KEY].get("seconds", 0.0) == seconds


def test_a_prefill_engine_tells_of_which_prompt_its_kv_is(monkeypatch: pytest.MonkeyPatch) -> None:
    half = Half(monkeypatch, "pull")
    request = half.arrive("r", {"do_remote_decode": True})
    half.allocate(request, [1, 2, 3, 4])
    request.status, request.num_computed_tokens = RequestStatus.FINISHED_LENGTH_CAPPED, 4 * SIZE
    _, answer = half.made.finished(request, ([1, 2, 3, 4],))
    assert answer[KEY]["digest"] == digest(range(4 * SIZE))


@pytest.mark.parametrize(
    ("steps", "waits"),
    [
        ({}, [False, True, True, False, True]),
        ({"overlapping": True}, [False, False, True, False, False]),
        ({"lockstep": True}, [False] * 5),
    ],
)
def test_workers_wait_only_where_nobody_waits_for_them(
    monkeypatch: pytest.MonkeyPatch, steps: dict[str, bool], waits: list[bool]
) -> None:
    """An empty step may begin while another one computes, or other engines may compute in the same one."""
    half = Half(monkeypatch, "pull", **steps)
    scheduled = [64, 0, 0, 1, 0]
    assert [half.step({}, {}, tokens).may_wait for tokens in scheduled] == waits


def test_sequences_that_share_their_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """As within one process: that another one has got blocks does not order the load of the first."""
    half = Half(monkeypatch, "pull")
    first = half.arrive("r1", {"do_remote_prefill": True, KEY: remote("x")})
    second = half.arrive("r2", first.kv_transfer_params)
    second.kv_transfer_params = first.kv_transfer_params
    assert half.allocate(second, [5, 6, 7, 8]) == 0
    assert half.allocate(first, [1, 2, 3, 4]) == 4 * SIZE
    assert [each.request for each in half.step({}, {}, 0).loads] == ["r1"]


def test_a_sequence_that_ends_before_it_has_blocks_gives_them_back(monkeypatch: pytest.MonkeyPatch) -> None:
    half = Half(monkeypatch, "pull")
    first = half.arrive("r1", {"do_remote_prefill": True, KEY: remote("x")})
    first.kv_transfer_params["do_remote_prefill"] = False  # by another sequence
    first.status = RequestStatus.FINISHED_ABORTED
    assert half.made.finished(first, ([],)) == (False, None)
    assert [each.lease.request for each in half.step({}, {}, 0).releases] == ["x"]
