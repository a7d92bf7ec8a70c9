"""The command ``route`` in pull mode: one leg after the other, and P's first token for the client.

The engines are stand-ins, as in ``test_cli_route``; ``route_model`` is what a single vLLM would answer.
"""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from cli_kit import line_with
from llm_datadist.cli.route.first_token import FirstToken, first_token, wishes
from route_kit import PROMPT, WAIT_S, routing
from route_model import LEASE, PROMPT_IDS, decoded, encoded, events, prefills, whole
from route_pull_kit import ASKED, BEHIND, CHAT, STREAM, TAKE, next_leg, pulling
from until import until

if TYPE_CHECKING:
    from route_kit import Engines, Leg

# ---------------------------------------------------------------- P's first token


def test_the_first_token_comes_before_d_answers(engines: Engines) -> None:
    """And D is asked only when the client can have it."""
    with pulling(engines) as (route, _, [decode]):
        seen, answer = engines.gate(), decode.behave

        async def behave(leg: Leg) -> web.StreamResponse:
            await seen.passed()
            return await answer(leg)

        decode.behave = behave
        with contextlib.closing(route.begin(STREAM)) as client:
            response = client.getresponse()
            assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            first = json.loads(response.readline().removeprefix(b"data: "))
            assert first["choices"][0]["text"] == " one"
            seen.open()
            assert response.read().endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"return_token_ids": True},
        {"stream_options": {"include_usage": True}},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}, "return_token_ids": True},
        {"prompt": PROMPT_IDS, "stop": ["fish", "bone"], "min_tokens": 2, "n": 1, "echo": False, "logprobs": None},
        {"temperature": 0.7, "top_k": 1, "repetition_penalty": 1.1},
        {"max_tokens": 2, "presence_penalty": 0.0, "best_of": 1, "response_format": {"type": "text"}, "seed": None},
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_answers_are_those_of_a_single_engine(engines: Engines, more: dict[str, Any], stream: bool) -> None:
    body = {**ASKED, **more, "stream": stream}
    if not stream:
        body.pop("stream_options", None)
    with pulling(engines) as (route, prefill, [decode]):
        reply = route.post(body)
        assert route.metric("first_tokens_total") == {f'role="prefill",engine="{prefill.url}"': 1}
    if stream:
        assert decoded(reply.body) == events(body, created=5)
    else:
        assert reply.json == whole(body, created=9)
    first = next_leg(prefill).body
    assert first["return_token_ids"] is True
    assert first.get("min_tokens") == (1 if "min_tokens" in body else None)
    left = {"max_tokens": body["max_tokens"] - 1}
    left |= {"min_tokens": 1} if "min_tokens" in body else {}
    assert next_leg(decode).body == {**body, **left, "prompt": BEHIND, "kv_transfer_params": TAKE}


def test_tokens_when_none_are_asked_for(engines: Engines) -> None:
    """The 16 that vLLM takes are one less for D."""
    with pulling(engines) as (route, _, [decode]):
        route.post({"model": "m", "prompt": "long ago", "temperature": 0})
    assert next_leg(decode).body["max_tokens"] == 15


def test_other_values_are_passed_on_byte_for_byte(engines: Engines) -> None:
    odd = b'{"model": "m", "prompt": "a", "max_tokens": 3, "temperature": 0.0e0, "user": "\\ud83d\\ude00"}'
    raw: list[bytes] = []
    with pulling(engines) as (route, prefill, [decode]):
        for engine in (prefill, decode):

            async def behave(leg: Leg, answer: Any = engine.behave) -> web.StreamResponse:
                raw.append(await leg.request.read())
                response: web.StreamResponse = await answer(leg)
                return response

            engine.behave = behave
        assert route.post(odd).status == 200
    for leg in raw:
        assert b'"temperature":0.0e0' in leg
        assert b'"\\ud83d\\ude00"' in leg


# ---------------------------------------------------------------- D's first token


@pytest.mark.parametrize(
    "more",
    [
        {"max_tokens": 1},
        {"max_tokens": 0},
        {"max_tokens": "4"},
        {"max_tokens": 62},
        {"temperature": None},
        {"temperature": 0.7, "top_k": 2},
        {"min_tokens": 5},
        {"min_tokens": None},
        {"n": 2},
        {"n": 0},
        {"n": None},
        {"use_beam_search": None},
        {"logprobs": 0},
        {"prompt_logprobs": 0},
        {"suffix": ""},
        {"echo": True},
        {"seed": 0},
        {"stop": " one"},
        {"stop": ["fish", "e two"]},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a"}},
        {"truncate_prompt_tokens": 0},
        {"spaces_between_special_tokens": False},
        {"stream_options": {"include_usage": 3}},
        {"unheard_of": 1},
    ],
)
def test_requests_whose_first_token_is_d_s(engines: Engines, more: dict[str, Any]) -> None:
    """D gets what the client has sent."""
    with pulling(engines) as (route, _, [decode]):

        async def behave(leg: Leg) -> web.StreamResponse:
            return await decode.answer(leg)

        decode.behave = behave
        assert route.post({**STREAM, **more}).status == 200
        assert next_leg(decode).body == {**STREAM, **more, "kv_transfer_params": TAKE}
        assert set(route.metric("first_tokens_total").values()) == {0}


@pytest.mark.parametrize(
    "answer",
    [
        {"finish_reason": "stop"},
        {"text": ""},
        {"text": "\N{REPLACEMENT CHARACTER}"},
        {"token_ids": []},
        {"token_ids": [21, 22]},
        {"prompt_token_ids": None},
        {"tokens": 2},
    ],
)
def test_answers_of_p_whose_token_is_not_used(engines: Engines, answer: dict[str, Any]) -> None:
    """It may end the answer, is half a character, or its KV is that of fewer tokens, as with a sliding window."""
    with pulling(engines) as (route, prefill, [decode]):
        prefills(prefill, **answer)
        assert decoded(route.post(STREAM).body) == events(STREAM, created=9)
        assert next_leg(decode).body["prompt"] == PROMPT["prompt"]


@pytest.mark.parametrize("more", [b'"foo": "\xff"', b'"stop": "\xff"', b'"presence_penalty": 1e999'])
def test_what_cannot_be_read_is_left_to_the_engines(engines: Engines, more: bytes) -> None:
    with pulling(engines) as (route, prefill, [decode]):

        async def behave(leg: Leg) -> web.StreamResponse:
            return web.json_response({"read": len(await leg.request.read())})

        prefill.behave = decode.behave = behave
        reply = route.post(b'{"prompt": "a", ' + more + b"}")
        assert reply.status == 200
        assert reply.json["read"] > len(more)


@pytest.mark.parametrize("status", [200, 404])
def test_a_d_that_does_not_tell_how_many_tokens_it_takes(engines: Engines, status: int) -> None:
    """It is asked once."""
    with pulling(engines) as (route, _, [decode]):
        decode.models = status, {"data": [{"id": "m"}]}
        for _ in range(2):
            assert decoded(route.post(STREAM).body) == events(STREAM, created=9)
        assert decode.asked_for_models == 1


def test_chats(engines: Engines) -> None:
    """D gets the chat, and P's parameters as they are."""
    with pulling(engines) as (route, prefill, [decode]):

        async def behave(leg: Leg) -> web.StreamResponse:
            return await decode.answer(leg)

        async def chat(leg: Leg) -> web.StreamResponse:
            leg.body["prompt"] = PROMPT_IDS
            return await answer(leg)

        answer, prefill.behave, decode.behave = prefill.behave, chat, behave
        assert route.post(CHAT, "/v1/chat/completions").status == 200
        assert "return_token_ids" not in next_leg(prefill).body
        assert next_leg(decode).body == {**CHAT, "kv_transfer_params": TAKE}


def test_p_hands_over_nothing(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """D computes the prompt: it is not told of any KV. The operator is told that there is none."""
    monkeypatch.setenv("ASCEND_GLOBAL_LOG_LEVEL", "2")
    with pulling(engines) as (route, prefill, [decode]):
        prefill.behave = prefill.answer
        prefill.description = None
        assert decoded(route.post({**STREAM, "kv_transfer_params": {"a": 1}}).body) == events(STREAM, created=9)
        assert next_leg(decode).body == STREAM
        assert route.process
        assert f"prefill engine {prefill.url} hands over no KV of request " in line_with(route.process, "[WARNING]")


def test_requests_that_wait_for_p_are_spread_over_d(engines: Engines) -> None:
    """Each counts at its D from the begin: else all that come while P computes would go to the same one."""
    with pulling(engines, decode_count=2) as (route, prefill, several):
        answer, gate = prefill.behave, engines.gate()

        async def behave(leg: Leg) -> web.StreamResponse:
            await gate.passed()
            return await answer(leg)

        async def hold(leg: Leg) -> web.StreamResponse:
            await gate.passed()
            return await several[0].answer(leg)

        busy = several[0]
        busy.behave = hold
        first = route.clients.submit(route.post, {**STREAM, "use_beam_search": True})  # D's alone
        next_leg(busy)
        prefill.behave = behave
        pending = [route.clients.submit(route.post, STREAM) for _ in range(7)]
        until(lambda: prefill.legs.qsize() == 7)
        gate.open()
        assert [each.result(WAIT_S).status for each in (first, *pending)] == [200] * 8
        assert [each.legs.qsize() for each in several] == [3, 4]


@pytest.mark.parametrize("prompt", [["a", "b"], [[1, 2], [3]], ["a", "a", "a"]])
def test_several_prompts(engines: Engines, prompt: list[Any]) -> None:
    """P has an answer for each that it gets, which is the first; D gets them all."""
    with pulling(engines) as (route, prefill, [decode]):
        answer = prefill.behave
        got = []

        async def behave(leg: Leg) -> web.StreamResponse:
            got.append(leg.body["prompt"])
            leg.body["prompt"] = PROMPT_IDS
            found = await answer(leg)
            text = json.loads(found.text)  # type: ignore[attr-defined]
            text["choices"] *= len(got[-1])
            found.text = json.dumps(text)  # type: ignore[attr-defined]
            return found

        async def whatever(leg: Leg) -> web.StreamResponse:
            return await decode.answer(leg)

        prefill.behave, decode.behave = behave, whatever
        assert route.post({**STREAM, "prompt": prompt}).status == 200
        assert got == [prompt[:1]]
        assert next_leg(decode).body["prompt"] == prompt


def test_the_reason_is_logged(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_GLOBAL_LOG_LEVEL", "1")
    with pulling(engines) as (route, _, _):
        route.post({**STREAM, "seed": 7}, headers={"X-Request-Id": "mine"})
        assert route.process
        line = line_with(route.process, "[INFO] LLM_DATADIST")
    assert "request mine: the first token is the decode engine's: it has seed" in line


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_beam_search_is_d_s_alone(engines: Engines, mode: str) -> None:
    """VLLM loads no KV for it."""
    prefill, decode = engines.prefill(), engines.decode()
    with routing([prefill], [decode], "--mode", mode) as route:
        for body in ({**ASKED, "use_beam_search": True, "n": 2}, {**CHAT, "use_beam_search": True}):
            path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
            assert route.post(body, path).status == 200
            assert next_leg(decode).body == body
    assert prefill.legs.empty()


@pytest.mark.parametrize(
    "more",
    [
        {"stream": False, "stream_options": {"include_usage": True}},
        {"n": None},
        {"min_tokens": None},
    ],
)
def test_p_is_shown_what_d_would_refuse(engines: Engines, more: dict[str, Any]) -> None:
    with pulling(engines) as (route, prefill, [decode]):

        async def behave(_: Leg) -> web.StreamResponse:
            return web.json_response({"no": "such"}, status=400)

        prefill.behave = behave
        assert route.post({**ASKED, **more}).status == 400
    body = next_leg(prefill).body
    assert {name: body[name] for name in more} == more
    assert decode.legs.empty()


# ---------------------------------------------------------------- arithmetic


def handed(body: dict[str, Any], **choice: Any) -> FirstToken | str:
    """What becomes of P's answer to a completion."""
    raw = json.dumps(body).encode()
    fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    wanted = wishes(raw, fields)
    if isinstance(wanted, str):
        return wanted
    answer = whole({**body, "max_tokens": 1, "return_token_ids": True}, created=5, **choice)
    description = {"tokens": len(PROMPT_IDS), "lease": LEASE}
    answer["kv_transfer_params"] = {"llm_datadist": description}
    return first_token(fields, wanted, json.dumps(answer).encode(), context=64)


def test_what_is_nested_deeply_is_left_to_the_engines() -> None:
    assert "recursion" in str(wishes(b"{}", {"foo": msgspec.Raw(b"[" * 10_000 + b"]" * 10_000)}))


@given(cuts=st.lists(st.integers(0, 2000), max_size=8))
def test_streams_may_come_in_any_parts(cuts: list[int]) -> None:
    body = {**STREAM, "return_token_ids": True, "stream_options": {"include_usage": True}}
    first = handed(body)
    assert isinstance(first, FirstToken)
    stream = encoded(events({**body, "prompt": BEHIND, "max_tokens": 3}, created=9))
    rest, found, begin = first.rest(), first.event(), 0
    for end in [*sorted(cuts), len(stream)]:
        found += rest.feed(stream[begin:end])
        begin = max(begin, end)
    assert decoded(found + rest.end()) == events(body, created=5)


@given(text=st.text("ab", min_size=1, max_size=6), more=st.text("ab", max_size=6), stop=st.text("ab", min_size=1))
def test_no_text_that_ends_the_answer_is_missed(text: str, more: str, stop: str) -> None:
    """If it begins within the first token, D alone must see it."""
    if -1 < (text + more).find(stop) < len(text):
        assert isinstance(handed({**STREAM, "stop": stop}, text=text), str)


@pytest.mark.parametrize("event", [b": still here", b"data: {", b'data: {"error": {"message": "lost"}}', b"data: [1]"])
def test_events_without_tokens_are_passed_on(event: bytes) -> None:
    first = handed(STREAM)
    assert isinstance(first, FirstToken)
    assert first.rest().feed(event + b"\n\n") == event + b"\n\n"
