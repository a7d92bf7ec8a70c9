"""Faults between a real prefill and a real decode engine of vLLM."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import TYPE_CHECKING

import pytest
from serving_kit import DECODES, LEASE_S, Pair, begin, metric, resources, run

from until import until

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from client import Answer, Client

TOGETHER = 4
MOST_HUNDREDS = 5
READS = pytest.mark.parametrize("pair", ["pull"], indirect=True)
"""In push mode nothing is read."""


def texts(model: Path, seed: int) -> dict[str, list[str]]:
    from prompts import prompts  # noqa: PLC0415 - of the example, which needs vLLM's environment

    return prompts(model, seed)


def idle(pair: Pair) -> bool:
    return metric(pair.prefill, "kv_cache_usage_perc") == 0 == metric(pair.decode, "kv_cache_usage_perc")


async def many(pair: Pair, client: Client, prompts: Sequence[str], cancelled: float, seed: int) -> list[Answer]:
    """Send them, some at a time; a part of them is given up at random moments."""
    random_ = random.Random(seed)
    places = asyncio.Semaphore(TOGETHER)
    delays = [random_.uniform(0.0, 0.3) if random_.random() < cancelled else None for _ in prompts]

    async def one(prompt: str, delay: float | None) -> Answer | None:
        async with places:
            with contextlib.suppress(asyncio.TimeoutError):
                return await asyncio.wait_for(pair.complete(client, prompt), delay)
        return None

    found = await asyncio.gather(*(one(prompt, delay) for prompt, delay in zip(prompts, delays, strict=True)))
    answers = [each for each in found if each is not None]
    assert len(answers) >= delays.count(None)
    return answers


def test_cancelled_requests_leave_nothing_behind(pair: Pair, model: Path) -> None:
    """What is lost is lost with every hundred; pools of threads grow as they are needed, and are full at some time."""
    several = [text for seed in range(8) for text in texts(model, seed)["short"]]
    several += [text for seed in range(2) for text in texts(model, seed)["middle"][1:5]]
    seen: list[dict[str, tuple[int, int]]] = []
    while not (len(seen) > 1 and _no_more(*seen[-2:])):
        assert len(seen) < MOST_HUNDREDS, seen
        answers = run(lambda client: many(pair, client, several[:100], 0.2, len(seen)))
        assert all(len(each.tokens) == TOGETHER for each in answers)
        until(lambda: idle(pair), 2 * LEASE_S + 20)
        seen.append({engine.name: resources(engine) for engine in (pair.prefill, pair.decode)})


def _no_more(before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]]) -> bool:
    """Whether no engine has more than two more descriptors, or threads, than before."""
    return all(now <= then + 2 for name in before for then, now in zip(before[name], after[name], strict=True))


def test_a_killed_prefill_engine_is_replaced(pair: Pair, model: Path) -> None:
    prompts = texts(model, 21)["middle"][:6]
    right = run(lambda client: many_plain(client, pair.decode.url, prompts))

    async def with_a_kill(client: Client) -> list[Answer | BaseException]:
        tasks = [asyncio.ensure_future(pair.complete(client, f"{n} {prompt}")) for n, prompt in enumerate(prompts)]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        pair.prefill.kill()
        return await asyncio.gather(*tasks, return_exceptions=True)

    found = run(with_a_kill)
    assert all(isinstance(each, (BaseException,)) or len(each.tokens) == TOGETHER for each in found)
    until(lambda: metric(pair.decode, "kv_cache_usage_perc") == 0, 60)
    pair.start_one(pair.prefill)
    before = metric(pair.decode, "llm_datadist_transfer_seconds_count")
    again = run(lambda client: many(pair, client, [f"again {each}" for each in prompts], 0.0, 0))
    expected = run(lambda client: many_plain(client, pair.prefill.url, [f"again {each}" for each in prompts]))
    assert [each.tokens for each in again] == expected
    until(lambda: metric(pair.decode, "llm_datadist_transfer_seconds_count") > before, 30)
    assert run(lambda client: many_plain(client, pair.decode.url, prompts)) == right


async def many_plain(client: Client, url: str, prompts: Sequence[str]) -> list[list[int]]:
    """The tokens of an engine that has computed everything itself."""
    return [(await client.complete(url, prompt, TOGETHER)).tokens for prompt in prompts]


def test_a_killed_decode_engine_costs_no_blocks(pair: Pair, model: Path) -> None:
    prompts = [f"killed {text}" for text in texts(model, 22)["middle"][:6]]

    async def with_a_kill(client: Client) -> None:
        tasks = [asyncio.ensure_future(pair.complete(client, prompt, 200)) for prompt in prompts]
        await asyncio.wait(tasks, timeout=1.0)
        pair.decode.kill()
        await asyncio.gather(*tasks, return_exceptions=True)

    run(with_a_kill)
    until(lambda: metric(pair.prefill, "kv_cache_usage_perc") == 0, 4 * LEASE_S + 30)
    pair.start_one(pair.decode)
    answers = run(lambda client: many(pair, client, [f"after {each}" for each in prompts], 0.0, 0))
    expected = run(lambda client: many_plain(client, pair.prefill.url, [f"after {each}" for each in prompts]))
    assert [each.tokens for each in answers] == expected


def test_a_busy_decode_engine_keeps_what_it_waits_for(pair: Pair, model: Path) -> None:
    """A request waits there for longer than a lease lasts, before it has blocks to load into."""
    prompt = f"kept {texts(model, 25)['middle'][2]}"
    counters = ((pair.prefill, "llm_datadist_expired_leases_total"), (pair.decode, "llm_datadist_failed_loads_total"))
    before = [metric(*each) for each in counters]
    loads = metric(pair.decode, "llm_datadist_transfer_seconds_count")

    async def behind_others(client: Client) -> Answer:
        others = [asyncio.ensure_future(client.complete(pair.decode.url, f"{n} goes on", 1500)) for n in range(DECODES)]
        try:
            await asyncio.to_thread(until, lambda: metric(pair.decode, "num_requests_running") == DECODES, 60)
            waiting = asyncio.ensure_future(pair.complete(client, prompt))
            await asyncio.sleep(3 * LEASE_S)
            assert metric(pair.decode, "num_requests_running") == DECODES
            assert not waiting.done()
        finally:
            for each in others:
                each.cancel()
            await asyncio.gather(*others, return_exceptions=True)
        return await waiting

    answer = run(behind_others)
    (expected,) = run(lambda client: many_plain(client, pair.prefill.url, [prompt]))
    assert answer.tokens == expected
    until(lambda: metric(pair.decode, "llm_datadist_transfer_seconds_count") == loads + 1, 30)
    assert [metric(*each) for each in counters] == before
    until(lambda: idle(pair), 30)


@READS
def test_a_refused_request_gives_the_blocks_back(pair: Pair, model: Path) -> None:
    """The decode engine's server refuses it, after the prefill; no lease has to end for its blocks to be free."""
    prompt = f"refused {texts(model, 26)['middle'][2]}"
    expired = metric(pair.prefill, "llm_datadist_expired_leases_total")
    with pytest.raises(RuntimeError, match="HTTP 400"):
        run(lambda client: pair.complete(client, prompt, 1_000_000))
    until(lambda: metric(pair.prefill, "kv_cache_usage_perc") == 0, 30)
    assert metric(pair.prefill, "llm_datadist_expired_leases_total") == expired


@READS
def test_what_is_read_too_late_is_computed_again(pair: Pair, model: Path) -> None:
    prompt, *others = (f"late {text}" for text in texts(model, 23)["middle"])
    expired = metric(pair.prefill, "llm_datadist_expired_leases_total")
    failed = metric(pair.decode, "llm_datadist_failed_loads_total")
    params = run(lambda client: begin(client, pair.prefill, prompt))
    until(lambda: metric(pair.prefill, "llm_datadist_expired_leases_total") > expired, 4 * LEASE_S + 30)
    run(lambda client: many_plain(client, pair.prefill.url, others))  # its blocks may be theirs now
    answer = run(lambda client: client.complete(pair.decode.url, prompt, TOGETHER, kv_transfer_params=params))
    (expected,) = run(lambda client: many_plain(client, pair.prefill.url, [prompt]))
    assert answer.tokens == expected
    until(lambda: metric(pair.decode, "llm_datadist_failed_loads_total") == failed + 1, 30)


@READS
def test_other_blocks_are_refused_and_computed_again(pair: Pair, model: Path, tmp_path: Path) -> None:
    prompt = f"blocks {texts(model, 24)['middle'][3]}"
    failed = metric(pair.decode, "llm_datadist_failed_loads_total")
    other = Pair(model, tmp_path, "pull")
    try:
        other.start_one(other.prefill, "--block-size", "64")
        params = run(lambda client: begin(client, other.prefill, prompt))
        answer = run(lambda client: client.complete(pair.decode.url, prompt, TOGETHER, kv_transfer_params=params))
    finally:
        other.prefill.stop()
    (expected,) = run(lambda client: many_plain(client, pair.prefill.url, [prompt]))
    assert answer.tokens == expected
    until(lambda: metric(pair.decode, "llm_datadist_failed_loads_total") == failed + 1, 30)
    assert "the engines do not fit together" in pair.decode.log.read_text()
