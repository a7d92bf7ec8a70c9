"""The command ``route``: what becomes of one leg, and of the client, when the other leg or the client fails.

The engines are stand-ins: real HTTP servers that answer as vLLM does. vLLM itself, with the connector, is exercised by
the prefill/decode example.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import time
from typing import TYPE_CHECKING

import pytest
from aiohttp import web

from cli_kit import line_with
from route_kit import PROMPT, WAIT_S, routing
from until import until

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from route_kit import Engine, Engines, Gate, Leg

    Behave = Callable[[Leg], Awaitable[web.StreamResponse]]

STREAM = {**PROMPT, "stream": True}
AT_ONCE_S = 5
"""Less than a P is left alone when D's answer has ended."""
FIRST = b'data: {"text": "a"}\n\n'


def failing(status: int, text: str = '{"error": {"message": "out of luck"}}', after: Gate | None = None) -> Behave:
    """Answer with an error."""

    async def behave(leg: Leg) -> web.StreamResponse:
        if after:
            await after.passed()
        return web.Response(status=status, text=text, headers={"X-Of": "engine"}, content_type="application/json")

    return behave


def resetting(after: Gate) -> Behave:
    """Break the connection before the answer."""

    async def behave(leg: Leg) -> web.StreamResponse:
        await after.passed()
        leg.reset()
        raise ConnectionResetError

    return behave


def marking(gate: Gate, then: Behave) -> Behave:
    """Open the gate when the leg has come."""

    async def behave(leg: Leg) -> web.StreamResponse:
        gate.open()
        return await then(leg)

    return behave


# ---------------------------------------------------------------- P fails


def test_a_refusal_of_p_is_passed_on(engines: Engines) -> None:
    """As it is; D's leg is cancelled, no other P is tried."""
    prefill, other, decode = engines.prefill(), engines.prefill(), engines.decode()
    there = engines.gate()
    prefill.behave = other.behave = failing(422, '{"error": {"message": "too long"}}', there)
    decode.behave = marking(there, decode.hold)
    with routing([prefill, other], [decode]) as route:
        reply = route.post()
        assert (reply.status, reply.body) == (422, b'{"error": {"message": "too long"}}')
        assert reply.headers["X-Of"] == "engine"
        assert route.metric("requests_total")['outcome="refused"'] == 1
        decode.gone.get(timeout=WAIT_S)
    assert prefill.legs.qsize() + other.legs.qsize() == decode.legs.qsize() == 1


@pytest.mark.parametrize("how", ["answer", "reset"])
def test_p_fails_and_there_is_no_other(engines: Engines, how: str) -> None:
    """D's leg is cancelled, the client told which engine it was and why; the log, too."""
    prefill, decode = engines.prefill(), engines.decode()
    there = engines.gate()
    prefill.behave = failing(500, after=there) if how == "answer" else resetting(there)
    decode.behave = marking(there, decode.hold)
    reason = "answers HTTP 500: out of luck" if how == "answer" else "has broken off"
    with routing([prefill], [decode]) as route:
        reply = route.post(headers={"X-Request-Id": "mine"})
        assert reply.status == 502
        assert f"prefill engine {prefill.url} {reason}" in reply.error
        decode.gone.get(timeout=WAIT_S)
        assert route.process
        line = line_with(route.process, "[ERROR]")
        assert f"request mine: prefill {prefill.url}, decode {decode.url}: failed, status 502, " in line
        assert reason in line
        assert route.metric("requests_total")['outcome="failed"'] == 1


@pytest.mark.parametrize("how", ["answer", "reset"])
def test_p_fails_and_another_does_not(engines: Engines, how: str) -> None:
    """The request is tried again as a whole."""
    prefill, other, decode = engines.prefill(), engines.prefill({"engine": "other"}), engines.decode()
    there = engines.gate()
    prefill.behave = failing(500, after=there) if how == "answer" else resetting(there)

    async def behave(leg: Leg) -> web.StreamResponse:
        there.open()
        if leg.params["llm_datadist"] != {"engine": "other"}:
            await decode.hold(leg)
        return await decode.answer(leg)

    decode.behave = behave
    with routing([prefill, other], [decode]) as route:
        assert route.post().status == 200
        assert decode.gone.get(timeout=WAIT_S).params["transfer_id"] == prefill.legs.get().params["transfer_id"]
        first, second = decode.legs.get(), decode.legs.get()
        assert first.headers["X-Request-Id"] == second.headers["X-Request-Id"]
        assert first.params["transfer_id"] != second.params["transfer_id"] == other.legs.get().params["transfer_id"]


def test_each_p_is_tried_once(engines: Engines) -> None:
    prefills, decode = [engines.prefill() for _ in range(3)], engines.decode()
    for prefill in prefills:
        prefill.behave = failing(503)
    decode.behave = decode.hold
    with routing(prefills, [decode]) as route:
        assert route.post().status == 502
    assert [prefill.legs.qsize() for prefill in prefills] == [1, 1, 1]


def test_p_refuses_connections(engines: Engines) -> None:
    prefill, decode = engines.prefill(), engines.decode()
    prefill.stop()
    with routing([prefill], [decode]) as route:
        reply = route.post()
    assert (reply.status, reply.json["error"]["type"]) == (503, "ServiceUnavailableError")
    assert reply.error == f"prefill engine {prefill.url} cannot be reached: Connection refused"


@pytest.mark.parametrize("description", [None, "text"])
def test_p_runs_no_connector(engines: Engines, description: str | None) -> None:
    prefill, decode = engines.prefill(description), engines.decode()  # type: ignore[arg-type]
    with routing([prefill], [decode]) as route:
        reply = route.post()
    assert reply.status == 502
    assert f"engine {prefill.url} does not run LLMDataDistConnector in push mode" in reply.error
    assert decode.legs.empty()


def test_p_runs_the_connector_no_more(engines: Engines) -> None:
    """It was restarted without, which its next answer shows."""
    prefill, decode = engines.prefill(), engines.decode()
    with routing([prefill], [decode]) as route:
        assert route.post().status == 200
        prefill.description = None
        decode.behave = decode.hold
        reply = route.post()
    assert reply.status == 502
    assert "does not run LLMDataDistConnector in push mode" in reply.error


@pytest.mark.parametrize(("status", "passed"), [(401, 401), (403, 403), (400, 502), (500, 502)])
def test_p_refuses_to_describe_itself(engines: Engines, status: int, passed: int) -> None:
    """A client without access is told so, and does not spoil it for others."""
    prefill, decode = engines.prefill(), engines.decode()
    prefill.refusal = status, "no entry"
    with routing([prefill], [decode]) as route:
        reply = route.post()
        assert reply.status == passed
        if passed == status:
            assert reply.body == b"no entry"
        else:
            assert f"prefill engine {prefill.url} answers HTTP {status}: no entry" in reply.error
        prefill.refusal = None
        assert route.post().status == 200


def test_p_fails_when_d_has_begun(engines: Engines) -> None:
    """D's answer goes on."""
    prefill, decode = engines.prefill(), engines.decode()
    begun, failed = engines.gate(), engines.gate()
    prefill.behave = failing(500, after=begun)

    async def behave(leg: Leg) -> web.StreamResponse:
        response = await leg.stream()
        await response.write(FIRST)
        await failed.passed()
        await response.write(b"rest")
        return response

    decode.behave = behave
    with routing([prefill], [decode]) as route, contextlib.closing(route.begin(STREAM)) as client:
        response = client.getresponse()
        seen = response.read(len(FIRST))
        begun.open()
        assert route.process
        assert f"prefill engine {prefill.url} answers HTTP 500: out of luck; D's" in line_with(route.process, "[ERROR]")
        failed.open()
        assert seen + response.read() == FIRST + b"rest"
        assert route.metric("requests_total")['outcome="finished"'] == 1


def test_p_does_not_end(engines: Engines) -> None:
    """Some time after D's answer its leg is cancelled."""
    prefill, decode = engines.prefill(), engines.decode()
    prefill.behave = prefill.hold
    with routing([prefill], [decode]) as route:
        assert route.post().status == 200
        prefill.gone.get(timeout=WAIT_S)
        until(lambda: set(route.metric("legs_in_flight").values()) == {0})


# ---------------------------------------------------------------- D fails


def test_a_refusal_of_d_is_passed_on(engines: Engines) -> None:
    """As it is; P's leg is cancelled, no other D is tried."""
    prefill, decode, other = engines.prefill(), engines.decode(), engines.decode()
    there = engines.gate()
    prefill.behave = marking(there, prefill.hold)
    decode.behave = other.behave = failing(400, '{"error": {"message": "too long"}}', there)
    with routing([prefill], [decode, other]) as route:
        reply = route.post()
        assert (reply.status, reply.body) == (400, b'{"error": {"message": "too long"}}')
        prefill.gone.get(timeout=AT_ONCE_S)
    assert prefill.legs.qsize() == decode.legs.qsize() + other.legs.qsize() == 1


@pytest.mark.parametrize("how", ["answer", "reset", "headers only"])
def test_d_fails_and_there_is_no_other(engines: Engines, how: str) -> None:
    prefill, decode = engines.prefill(), engines.decode()
    there = engines.gate()
    prefill.behave = marking(there, prefill.hold)

    async def begin(leg: Leg) -> web.StreamResponse:
        await there.passed()
        await leg.stream()
        leg.reset()
        raise ConnectionResetError

    decode.behave = {"answer": failing(500, "oh no", there), "reset": resetting(there), "headers only": begin}[how]
    with routing([prefill], [decode]) as route:
        reply = route.post(STREAM)
        reason = "answers HTTP 500: oh no" if how == "answer" else "has broken off"
        assert reply.status == 502
        assert f"decode engine {decode.url} {reason}" in reply.error
        prefill.gone.get(timeout=WAIT_S)


@pytest.mark.parametrize("how", ["answer", "reset"])
def test_d_fails_and_another_does_not(engines: Engines, how: str) -> None:
    """With a new transfer, and a new leg of P."""
    prefill, decode, other = engines.prefill(), engines.decode(), engines.decode()
    there = engines.gate()
    legs = []

    async def behave(leg: Leg) -> web.StreamResponse:
        legs.append(leg)
        there.open()
        if len(legs) == 1:
            await prefill.hold(leg)
        return await prefill.answer(leg)

    prefill.behave = behave
    decode.behave = failing(500, after=there) if how == "answer" else resetting(there)
    with routing([prefill], [decode, other]) as route:
        assert route.post().status == 200
        ended = prefill.gone.get(timeout=WAIT_S)
    first, second = legs
    assert ended.params == first.params
    assert decode.legs.get().params["transfer_id"] == first.params["transfer_id"]
    assert other.legs.get().params["transfer_id"] == second.params["transfer_id"] != first.params["transfer_id"]


def test_d_refuses_connections(engines: Engines) -> None:
    prefill, decode, other = engines.prefill(), engines.decode(), engines.decode()
    decode.stop()
    with routing([prefill], [decode, other]) as route:
        assert [route.post().status for _ in range(3)] == [200] * 3
        other.stop()
        reply = route.post()
    assert reply.status == 503
    assert "cannot be reached: Connection refused" in reply.error


@pytest.mark.parametrize("rest", [b"", b'data: {"te'])
def test_d_breaks_off_a_stream(engines: Engines, rest: bytes) -> None:
    """The client gets what has come, an event that says why there is no more, and no end."""
    prefill, decode = engines.prefill(), engines.decode()
    seen = engines.gate()
    prefill.behave = prefill.hold

    async def behave(leg: Leg) -> web.StreamResponse:
        response = await leg.stream()
        await response.write(FIRST + rest)
        await seen.passed()
        leg.reset()
        raise ConnectionResetError

    decode.behave = behave
    with routing([prefill], [decode]) as route, contextlib.closing(route.begin(STREAM)) as client:
        response = client.getresponse()
        assert response.status == 200
        assert response.read(len(FIRST + rest)) == FIRST + rest
        seen.open()
        with pytest.raises(http.client.IncompleteRead) as broken:
            response.read()
        before, _, event = broken.value.partial.partition(b"data: ")
        assert before == (b"\n\n" if rest else b"")
        error = json.loads(event)["error"]
        assert f"decode engine {decode.url} has broken off" in error["message"]
        assert (error["code"], event[-2:]) == (502, b"\n\n")
        prefill.gone.get(timeout=AT_ONCE_S)
        assert route.metric("requests_total")['outcome="failed"'] == 1


@pytest.mark.parametrize("length", ["known", "unknown"])
def test_d_breaks_off_another_answer(engines: Engines, length: str) -> None:
    """The client does not take it for whole."""
    prefill, decode = engines.prefill(), engines.decode()
    seen = engines.gate()

    async def behave(leg: Leg) -> web.StreamResponse:
        headers = {"Content-Type": "application/json"} | ({"Content-Length": "100"} if length == "known" else {})
        response = web.StreamResponse(headers=headers)
        await response.prepare(leg.request)
        await response.write(b'{"choices')
        await seen.passed()
        leg.reset()
        raise ConnectionResetError

    decode.behave = behave
    with routing([prefill], [decode]) as route, contextlib.closing(route.begin()) as client:
        response = client.getresponse()
        begun = response.read(1)
        seen.open()
        with pytest.raises(http.client.IncompleteRead) as broken:
            response.read()
    assert begun + broken.value.partial == b'{"choices'


# ---------------------------------------------------------------- time, and clients that go


@pytest.mark.parametrize("slow", ["prefill", "decode"])
def test_timeout_of_a_leg(engines: Engines, slow: str) -> None:
    """The engine is named, the other leg cancelled, and nothing tried again."""
    prefill, decode, other = engines.prefill(), engines.decode(), engines.decode()
    if slow == "prefill":
        prefill.behave = prefill.hold
    decode.behave, other.behave = decode.hold, other.hold
    with routing([prefill], [decode, other], "--timeout", "1") as route:
        reply = route.post()
        assert (reply.status, reply.json["error"]["type"]) == (504, "GatewayTimeoutError")
        assert "has not ended its answer within 1 s (--timeout)" in reply.error
    assert decode.legs.qsize() + other.legs.qsize() == 1


def test_a_client_that_does_not_read(engines: Engines) -> None:
    """It does not keep the decode engine's connection for longer than a leg may take."""
    prefill, decode = engines.prefill(), engines.decode()

    async def behave(leg: Leg) -> web.StreamResponse:
        response = await leg.stream()
        while True:
            await response.write(bytes(1 << 20))

    decode.behave = behave
    with (
        routing([prefill], [decode], "--timeout", "1") as route,
        contextlib.closing(route.begin(STREAM)),
    ):
        decode.legs.get(timeout=WAIT_S)
        decode.gone.get(timeout=WAIT_S)
        until(lambda: route.metric("requests_total")['outcome="cancelled"'] == 1)
        assert set(route.metric("legs_in_flight").values()) == {0}


@contextlib.contextmanager
def dropping(engine: Engine) -> Iterator[None]:
    """In place of the engine one whose backlog is full: the kernel drops what comes, as a firewall does."""
    engine.stop()
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        engine.port = full.getsockname()[1]
        with socket.create_connection(full.getsockname(), WAIT_S):
            yield


def test_a_d_that_does_not_take_connections(engines: Engines) -> None:
    """Another one is used soon."""
    prefill, decode, lost = engines.prefill(), engines.decode(), engines.decode()
    with dropping(lost), routing([prefill], [lost, decode]) as route:
        begun = time.monotonic()
        assert route.post().status == 200
        assert 4 < time.monotonic() - begun < 20


def test_a_p_that_does_not_take_connections(engines: Engines) -> None:
    """Requests that come together do not wait one after the other."""
    lost, decode = engines.prefill(), engines.decode()
    with dropping(lost), routing([lost], [decode]) as route:
        begun = time.monotonic()
        replies = list(route.clients.map(lambda _: route.post(), range(8)))
        assert time.monotonic() - begun < 20  # 40 s otherwise
    assert {reply.status for reply in replies} == {503}
    assert {reply.error for reply in replies} == {
        f"prefill engine {lost.url} cannot be reached: no connection within 5 s"
    }


@pytest.mark.parametrize("moment", ["before", "within"])
def test_client_goes(engines: Engines, moment: str) -> None:
    """Both legs are cancelled, before the first byte and in the middle."""
    prefill, decode = engines.prefill(), engines.decode()
    prefill.behave = prefill.hold

    async def behave(leg: Leg) -> web.StreamResponse:
        if moment == "within":
            response = await leg.stream()
            await response.write(FIRST)
        return await decode.hold(leg)

    decode.behave = behave
    with routing([prefill], [decode]) as route:
        client = route.begin(STREAM)
        for engine in (prefill, decode):
            engine.legs.get(timeout=WAIT_S)
        if moment == "within":
            response = client.getresponse()
            assert response.read(len(FIRST)) == FIRST
            response.close()
        client.close()
        for engine in (prefill, decode):
            engine.gone.get(timeout=WAIT_S)
        until(lambda: route.metric("requests_total")['outcome="cancelled"'] == 1)
        assert set(route.metric("legs_in_flight").values()) == {0}


def test_client_goes_while_p_describes_itself(engines: Engines) -> None:
    """The next one gets the description all the same."""
    prefill, decode = engines.prefill(), engines.decode()
    answer, asked = prefill.answer, engines.gate()
    hold = engines.gate()

    async def slow(leg: Leg) -> web.StreamResponse:
        asked.open()
        if prefill.described == 1:
            await hold.passed()
        return await answer(leg)

    prefill.answer = slow  # type: ignore[method-assign]
    prefill.behave = answer
    with routing([prefill], [decode]) as route:
        client = route.begin()
        engines.wait(asked.passed())
        waiting = route.clients.submit(route.post)
        client.close()
        assert waiting.result(WAIT_S).status == 200
    assert prefill.described == 2
