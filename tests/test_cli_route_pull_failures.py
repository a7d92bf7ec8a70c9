"""The command ``route`` in pull mode: what clients and operators see when an engine fails, or the client goes."""

from __future__ import annotations

import contextlib
import http.client
import json
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from route_kit import CONNECTOR, WAIT_S, routing
from route_model import decoded, decodes, encoded, events, prefills, whole
from route_pull_kit import ASKED, BEHIND, CHAT, STREAM, TAKE, next_leg, pulling
from until import until

if TYPE_CHECKING:
    from route_kit import Engines, Leg


def failure(message: str, code: int) -> bytes:
    """What vLLM sends when it fails in the middle of a stream."""
    return b"data: " + json.dumps({"error": {"message": message, "code": code}}).encode() + b"\n\n"


def failing(message: str, code: int) -> Any:
    """A D that says in its stream that it has failed; its HTTP status is 200 all the same."""

    async def behave(leg: Leg) -> web.StreamResponse:
        response = await leg.stream()
        await response.write(failure(message, code) + b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    return behave


@pytest.mark.parametrize("more", [{}, {"seed": 1}])
def test_d_fails_at_the_begin_of_its_stream(engines: Engines, more: dict[str, Any]) -> None:
    """Another one is tried, as after HTTP 500, also behind P's first token."""
    body = {**STREAM, **more}
    with pulling(engines, decode_count=2) as (route, _, several):
        several[0].behave = failing("no KV", 500)
        assert decoded(route.post(body).body) == events(body, created=9 if more else 5)
        next_leg(several[0])
        next_leg(several[1])


def test_d_fails_at_the_begin_of_its_stream_and_there_is_no_other(engines: Engines) -> None:
    with pulling(engines) as (route, _, [decode]):
        decode.behave = failing("no KV", 500)
        reply = route.post({**STREAM, "seed": 1})
        assert (reply.status, reply.error) == (502, f"decode engine {decode.url} has failed: no KV")
        assert route.metric("requests_total")['outcome="failed"'] == 1


@pytest.mark.parametrize(("code", "outcome"), [(500, "failed"), (400, "finished")])
def test_d_fails_later_in_its_stream(engines: Engines, code: int, outcome: str) -> None:
    """The client has the event; the operator learns of it if it is not the client's fault."""
    body = {**STREAM, "seed": 1}
    begun = encoded(events(body, created=9)[:1])
    with pulling(engines) as (route, _, [decode]):
        seen = engines.gate()

        async def behave(leg: Leg) -> web.StreamResponse:
            response = await leg.stream()
            await response.write(begun)
            await seen.passed()
            await response.write(failure("no KV", code))
            await response.write_eof()
            return response

        decode.behave = behave
        with contextlib.closing(route.begin(body)) as client:
            response = client.getresponse()
            assert response.readline().startswith(b"data: ")
            seen.open()
            assert b'"no KV"' in response.read()
        until(lambda: route.metric("requests_total")[f'outcome="{outcome}"'] == 1)


@pytest.mark.parametrize("chat", [True, False])
def test_nothing_is_computed_for_a_d_that_is_not_there(engines: Engines, chat: bool) -> None:
    """Nor kept."""
    with pulling(engines) as (route, prefill, [decode]):
        decode.stop()
        body, path = (CHAT, "/v1/chat/completions") if chat else ({**ASKED, "seed": 1}, "/v1/completions")
        assert route.post(body, path).status == 503
    assert prefill.legs.empty()


@pytest.mark.parametrize("stream", [True, False])
def test_d_fails_behind_the_first_token_and_another_does_not(engines: Engines, stream: bool) -> None:
    """The client sees nothing of it; P gets the rest as a new request, because its KV may have been read."""
    body = {**ASKED, "stream": stream, "return_token_ids": True}
    with pulling(engines, decode_count=2) as (route, prefill, several):

        async def behave(leg: Leg) -> web.StreamResponse:
            leg.reset()
            raise ConnectionResetError

        several[0].behave = behave
        reply = route.post(body)
    if stream:
        assert decoded(reply.body) == events(body, created=5)
    else:
        assert reply.json == whole(body, created=9)
    next_leg(prefill)
    assert next_leg(prefill).body["prompt"] == BEHIND
    taken = {**TAKE, "llm_datadist": {**TAKE["llm_datadist"], "tokens": 4}}  # type: ignore[dict-item]
    assert next_leg(several[1]).body == {**body, "max_tokens": 3, "prompt": BEHIND, "kv_transfer_params": taken}


def broken_off(response: http.client.HTTPResponse, *before: str) -> dict[str, Any]:
    """The error at the end of a stream without an end; ``before`` are the words that came."""
    with pytest.raises(http.client.IncompleteRead) as broken:
        response.read()
    *parts, last, rest = broken.value.partial.split(b"\n\n")
    assert rest == b""
    assert tuple(json.loads(part.removeprefix(b"data: "))["choices"][0]["text"] for part in parts) == before
    error: dict[str, Any] = json.loads(last.removeprefix(b"data: "))["error"]
    return error


@pytest.mark.parametrize(
    ("status", "reason"),
    [(0, "has broken off: "), (500, "answers HTTP 500: no more"), (400, "answers HTTP 400: no more")],
)
def test_d_fails_behind_the_first_token(engines: Engines, status: int, reason: str) -> None:
    """The client has that token, an event that says why there is no more, and no end."""
    with pulling(engines) as (route, _, [decode]):

        async def behave(leg: Leg) -> web.StreamResponse:
            if status:
                return web.json_response({"error": {"message": "no more"}}, status=status)
            leg.reset()
            raise ConnectionResetError

        decode.behave = behave
        with contextlib.closing(route.begin(STREAM)) as client:
            error = broken_off(client.getresponse(), " one")
        assert error["message"].startswith(f"decode engine {decode.url} {reason}")
        assert error["code"] == 502
        assert route.metric("requests_total")['outcome="failed"'] == 1


def test_d_breaks_off_in_the_middle(engines: Engines) -> None:
    with pulling(engines) as (route, _, [decode]):

        async def behave(leg: Leg) -> web.StreamResponse:
            response = await leg.stream()
            await response.write(encoded(events(leg.body)[:1])[:-20])
            leg.reset()
            raise ConnectionResetError

        decode.behave = behave
        with contextlib.closing(route.begin(STREAM)) as client:
            error = broken_off(client.getresponse(), " one")
        assert error["message"].startswith(f"decode engine {decode.url} has broken off")


def test_p_refuses_the_rest(engines: Engines) -> None:
    """It is too late to pass its refusal on as such."""
    with pulling(engines, decode_count=2) as (route, prefill, several):

        async def behave(leg: Leg) -> web.StreamResponse:
            prefill.refusal = (400, '{"error": {"message": "no more"}}')
            leg.reset()
            raise ConnectionResetError

        several[0].behave = behave
        with contextlib.closing(route.begin(STREAM)) as client:
            error = broken_off(client.getresponse(), " one")
    assert error["message"] == f"prefill engine {prefill.url} answers HTTP 400: no more"


def test_p_fails_and_another_does_not(engines: Engines) -> None:
    lost, decode = engines.prefill(), engines.decode()
    good = engines.prefill()
    lost.refusal = (500, "out of order")
    prefills(good)
    decodes(decode)
    with routing([lost, good], [decode], "--mode", "pull") as route:
        assert decoded(route.post(STREAM).body) == events(STREAM, created=5)


def test_refusals_are_passed_on(engines: Engines) -> None:
    """P's before anything else, D's where nothing has come yet."""
    with pulling(engines) as (route, prefill, [decode]):
        decode.refusal = (401, '{"who": "are you"}')
        assert [route.post(each).status for each in (ASKED, {**ASKED, "seed": 1})] == [401, 401]
        decode.refusal, prefill.refusal = None, (404, '{"no": "such model"}')
        reply = route.post(STREAM)
        assert (reply.status, reply.json) == (404, {"no": "such model"})


def test_a_refusal_of_d_behind_the_first_token(engines: Engines) -> None:
    """Of an answer that is no stream the client has nothing yet, so it gets the refusal."""
    with pulling(engines) as (route, _, [decode]):

        async def behave(leg: Leg) -> web.StreamResponse:
            return web.json_response({"no": "thanks"}, status=422)

        decode.behave = behave
        reply = route.post(ASKED)
        assert (reply.status, reply.json) == (422, {"no": "thanks"})


def test_timeout_behind_the_first_token(engines: Engines) -> None:
    prefill, several = engines.prefill(), [engines.decode() for _ in range(2)]
    prefills(prefill)
    for each in several:
        each.behave = each.hold
    with (
        routing([prefill], several, "--mode", "pull", "--timeout", "0.5") as route,
        contextlib.closing(route.begin(STREAM)) as client,
    ):
        error = broken_off(client.getresponse(), " one")
    assert (error["code"], error["message"][-11:]) == (504, "(--timeout)")


def test_client_goes_behind_the_first_token(engines: Engines) -> None:
    with pulling(engines) as (route, _, [decode]):
        decode.behave = decode.hold
        client = route.begin(STREAM)
        response = client.getresponse()
        assert response.readline().startswith(b"data: ")
        next_leg(decode)
        response.close()
        client.close()
        decode.gone.get(timeout=WAIT_S)
        until(lambda: route.metric("requests_total")['outcome="cancelled"'] == 1)
        assert set(route.metric("legs_in_flight").values()) == {0}


def test_engines_in_the_other_mode(engines: Engines) -> None:
    """Each router says what is wrong, and does not wait for KV that never comes. Only legs of P have a lease."""
    with pulling(engines) as (route, prefill, [decode]):
        prefill.description, prefill.behave = CONNECTOR, prefill.answer
        assert "runs LLMDataDistConnector in push mode: start it with" in route.post(STREAM).error
    prefills(prefill)
    decode.behave = decode.hold
    with routing([prefill], [decode]) as route:
        assert "runs LLMDataDistConnector in pull mode: start it with" in route.post(STREAM).error


@pytest.mark.parametrize(
    "body", [b"", b"[]", b'{"choices": []}', b'{"choices": [{}]}', b'{"error": 1}', b'{"\xff": 1}']
)
def test_whole_answers_that_are_none(engines: Engines, body: bytes) -> None:
    """The client does not take the rest of an answer for all of it."""
    with pulling(engines) as (route, _, [decode]):

        async def behave(leg: Leg) -> web.StreamResponse:
            return web.Response(body=body, content_type="application/json")

        decode.behave = behave
        reply = route.post(ASKED)
    assert reply.status == 502
    assert reply.error.startswith(f"decode engine {decode.url} answers no completion: ")
