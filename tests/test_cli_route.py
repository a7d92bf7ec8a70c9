"""The command ``route``: what its two legs are, and what clients and operators see of it.

The engines are stand-ins: real HTTP servers that answer as vLLM does. vLLM itself, with the connector, is exercised by
the prefill/decode example.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from cli_kit import line_with, run
from route_kit import CONNECTOR, PROMPT, WAIT_S, routing
from until import until

if TYPE_CHECKING:
    from route_kit import Engines, Leg

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_completion_tokens": 9}


# ---------------------------------------------------------------- the two legs


def test_both_legs_run_at_once(engines: Engines) -> None:
    """Neither engine answers before the other has got its leg."""
    prefill, decode = engines.prefill(), engines.decode()
    at_prefill, at_decode = engines.gate(), engines.gate()

    async def behave_prefill(leg: Leg) -> web.StreamResponse:
        at_prefill.open()
        await at_decode.passed()
        return await prefill.answer(leg)

    async def behave_decode(leg: Leg) -> web.StreamResponse:
        at_decode.open()
        await at_prefill.passed()
        return await decode.answer(leg)

    prefill.behave, decode.behave = behave_prefill, behave_decode
    with routing([prefill], [decode]) as route:
        for _ in range(2):  # with and without the description at hand
            assert route.post().json["choices"][0]["text"] == " word"


@pytest.mark.parametrize(
    ("path", "body", "changed"),
    [
        ("/v1/completions", PROMPT, {"stream": False, "max_tokens": 1}),
        (
            "/v1/completions",
            {**PROMPT, "stream": True, "stream_options": {"include_usage": True}, "n": 2, "min_tokens": 4, "seed": 7},
            {"stream": False, "stream_options": None, "n": 1, "min_tokens": None, "max_tokens": 1},
        ),
        ("/v1/completions", {**PROMPT, "use_beam_search": False}, {"stream": False, "max_tokens": 1}),
        *(
            ("/v1/completions", {**PROMPT, "prompt": prompt}, {"stream": False, "max_tokens": 1, "prompt": first})
            for prompt, first in (
                (["one", "two"], ["one"]),
                ([[1, 2], [3]], [[1, 2]]),
                ([1, 2, 3], [1, 2, 3]),
                ("[[1]]", "[[1]]"),
                ([], []),
            )
        ),
        (
            "/v1/completions",
            {"prompt_embeds": ["AA==", "BB=="]},
            {"stream": False, "max_tokens": 1, "prompt_embeds": ["AA=="]},
        ),
        ("/v1/chat/completions", CHAT, {"stream": False, "max_tokens": 1, "max_completion_tokens": 1}),
        (
            "/v1/chat/completions",
            {**CHAT, "max_tokens": 5, "tools": [{"type": "function"}], "kv_transfer_params": {"of": "the client"}},
            {"stream": False, "max_tokens": 1, "max_completion_tokens": 1},
        ),
    ],
)
def test_what_each_leg_is_told(engines: Engines, path: str, body: dict[str, Any], changed: dict[str, Any]) -> None:
    prefill, decode = engines.prefill(), engines.decode()
    with routing([prefill], [decode]) as route:
        assert route.post(body, path).status == 200
    first, second = prefill.legs.get(timeout=WAIT_S), decode.legs.get(timeout=WAIT_S)
    assert first.request.path == second.request.path == path
    transfer = first.params["transfer_id"]
    assert len(transfer) == 32
    push = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer}
    expected = {**body, **changed, "kv_transfer_params": push}
    assert first.body == {name: value for name, value in expected.items() if value is not None}
    take = {"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": transfer, "llm_datadist": CONNECTOR}
    assert second.body == {**body, "kv_transfer_params": take}


@pytest.mark.parametrize(
    ("own", "given"), [("mine", True), ("", False), ("two\nlines", False), (3, False), (None, False)]
)
def test_a_request_may_have_its_own_id(engines: Engines, own: object, given: bool) -> None:
    """As with one engine: its answers have the id of the body where there is none in the headers."""
    prefill, decode = engines.prefill(), engines.decode()
    with routing([prefill], [decode]) as route:
        route.post({**PROMPT, "request_id": own})
        route.post({**PROMPT, "request_id": own}, headers={"X-Request-Id": "of the header"})
    for engine in (prefill, decode):
        first, second = (engine.legs.get(timeout=WAIT_S).request.headers["X-Request-Id"] for _ in range(2))
        assert (first == own) == given
        assert second == "of the header"


def test_transfer_ids_differ(engines: Engines) -> None:
    prefill, decode = engines.prefill(), engines.decode()
    with routing([prefill], [decode]) as route:
        for _ in range(3):
            route.post()
    assert len({decode.legs.get(timeout=WAIT_S).params["transfer_id"] for _ in range(3)}) == 3


def test_values_are_passed_on_byte_for_byte(engines: Engines) -> None:
    """Also those that a parser would change."""
    odd = b'{"prompt": "\\ud83d\\ude00 \xc3\xa9", "x": 1.10e2, "i": 123456789012345678901, "a": [1,  2]}'
    prefill, decode = engines.prefill(), engines.decode()
    raw: list[bytes] = []

    async def behave(leg: Leg) -> web.StreamResponse:
        raw.append(await leg.request.read())
        return await prefill.answer(leg)

    prefill.behave = decode.behave = behave
    with routing([prefill], [decode]) as route:
        assert route.post(odd).status == 200
    for leg in raw:
        for part in (b'"\\ud83d\\ude00 \xc3\xa9"', b"1.10e2", b"123456789012345678901", b"[1,  2]"):
            assert part in leg


@pytest.mark.parametrize("given", ["my-request", None])
def test_headers(engines: Engines, given: str | None) -> None:
    """End-to-end ones reach both engines, those of the connection none; answers have D's."""
    prefill, decode = engines.prefill(), engines.decode()
    prefill.host = decode.host = "localhost"  # a name: cookies of addresses are mostly not kept anyway

    async def behave(leg: Leg) -> web.StreamResponse:
        headers = {"X-Of-D": "yes", "Set-Cookie": "taste=sweet", "Keep-Alive": "timeout=5"}
        return web.json_response({}, status=200, headers=headers)

    decode.behave = behave
    own = {"Authorization": "Bearer key", "X-Tenant": "blue", "Accept-Encoding": "gzip", "User-Agent": "me"}
    own |= {"Connection": "close, X-Hop", "X-Hop": "secret", "Proxy-Authorization": "Basic eDp5"}
    own |= {"X-Request-Id": given} if given else {}
    with routing([prefill], [decode]) as route:
        replies = [route.post(headers=own) for _ in range(2)]
    for reply in replies:
        assert reply.headers["X-Of-D"] == "yes"
        assert reply.headers["Content-Type"].startswith("application/json")
        assert reply.headers["Keep-Alive"] is None
    ids = set()
    for leg in (engine.legs.get(timeout=WAIT_S) for engine in (prefill, decode)):
        assert leg.headers.getall("Authorization") == ["Bearer key"]
        assert leg.headers["X-Tenant"] == "blue"
        assert leg.headers.getall("User-Agent") == ["me"]
        assert leg.headers.getall("Content-Type") == ["application/json"]
        assert not {"X-Hop", "Proxy-Authorization", "Cookie"} & set(leg.headers)
        assert leg.headers["Host"] in {f"localhost:{engine.port}" for engine in (prefill, decode)}
        ids.update(leg.headers.getall("X-Request-Id"))
    assert ids == {given} if given else len(ids) == 1
    assert "Cookie" not in decode.legs.get(timeout=WAIT_S).headers  # that of another client's answer


def test_description_is_asked_for_once(engines: Engines) -> None:
    """Also when many requests want it at once."""
    prefill, decode = engines.prefill(), engines.decode()
    with routing([prefill], [decode]) as route:
        replies = list(route.clients.map(lambda _: route.post(), range(12)))
    assert [reply.status for reply in replies] == [200] * 12
    assert prefill.described == 1
    assert all(decode.legs.get(timeout=WAIT_S).params["llm_datadist"] == CONNECTOR for _ in range(12))


def test_description_of_a_restarted_engine(engines: Engines) -> None:
    """A new one in P's answer replaces the old one; it is asked for again after a refused connection."""
    prefill, decode = engines.prefill({"life": 1}), engines.decode()

    def life() -> object:
        return decode.legs.get(timeout=WAIT_S).params["llm_datadist"]

    with routing([prefill], [decode]) as route:
        assert (route.post().status, life()) == (200, {"life": 1})
        prefill.description = {"life": 2}
        route.post()
        life()
        assert (route.post().status, life(), prefill.described) == (200, {"life": 2}, 1)
        prefill.stop()
        decode.behave = decode.hold  # else its answer may begin before P's failure is known
        assert route.post().status == 503
        prefill.description = {"life": 3}
        prefill.start()
        decode.behave = decode.answer
        while not decode.legs.empty():
            life()
        assert (route.post().status, life(), prefill.described) == (200, {"life": 3}, 2)


def test_description_is_asked_for_again_after_a_failure(engines: Engines) -> None:
    prefill, decode = engines.prefill(), engines.decode()
    with routing([prefill], [decode]) as route:
        assert route.post().status == 200

        async def fail(leg: Leg) -> web.StreamResponse:
            return web.Response(status=500)

        prefill.behave, decode.behave = fail, decode.hold
        assert route.post().status == 502
        prefill.behave, decode.behave = prefill.answer, decode.answer
        assert route.post().status == 200
    assert prefill.described == 2


# ---------------------------------------------------------------- answers


def test_streams_are_passed_on_as_they_come(engines: Engines) -> None:
    """The client reads each chunk while D still holds back the rest."""
    prefill, decode = engines.prefill(), engines.decode()
    gates = [engines.gate() for _ in range(3)]
    chunks = [b'data: {"text": "a"}\n\n', b'data: {"te', b'xt": "b"}\n\ndata: [DONE]\n\n']

    async def behave(leg: Leg) -> web.StreamResponse:
        response = await leg.stream()
        for gate, chunk in zip(gates, chunks, strict=True):
            await gate.passed()
            await response.write(chunk)
        return response

    decode.behave = behave
    with routing([prefill], [decode]) as route, contextlib.closing(route.begin({**PROMPT, "stream": True})) as client:
        gates[0].open()
        response = client.getresponse()
        assert response.headers["Content-Type"] == "text/event-stream"
        seen = response.read1()
        for gate, chunk in zip(gates[1:], chunks[1:], strict=True):
            gate.open()
            seen += response.read(len(chunk))
        assert (seen, response.read()) == (b"".join(chunks), b"")


def test_large_bodies(engines: Engines) -> None:
    prefill, decode = engines.prefill(), engines.decode()

    async def behave(leg: Leg) -> web.StreamResponse:
        return web.Response(body=leg.body["prompt"].encode())

    decode.behave = behave
    prompt = "x" * 5_000_000
    with routing([prefill], [decode]) as route:
        reply = route.post({**PROMPT, "prompt": prompt})
    assert reply.body == prompt.encode()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"no json",
        b"[1]",
        b'{"prompt": ',
        b'{"a": ' + b"[" * 200_000,
        b'{"\xff": 1}',
        b"1",
        b'{"n": 1e999}',
        b'{"request_id": "\xff"}',
    ],
)
def test_bodies_that_are_no_object(engines: Engines, body: bytes) -> None:
    prefill, decode = engines.prefill(), engines.decode()
    with routing([prefill], [decode]) as route:
        reply = route.post(body)
        assert (reply.status, route.metric("requests_total")['outcome="refused"']) == (400, 1)
    assert reply.error.startswith("the body is no JSON object: ")
    assert reply.json["error"]["type"] == "BadRequestError"
    assert decode.legs.empty()


def test_what_is_not_served(engines: Engines) -> None:
    with routing([engines.prefill()], [engines.decode()]) as route:
        assert route.post(path="/v1/embeddings").error == "POST /v1/embeddings: Not Found"
        reply = route.get("/v1/completions")
        assert (reply.status, reply.error) == (405, "GET /v1/completions: Method Not Allowed")


# ---------------------------------------------------------------- operators


def test_models_are_those_of_a_decode_engine(engines: Engines) -> None:
    prefill, dead, decode = engines.prefill(), engines.decode(), engines.decode()
    dead.stop()
    prefill.refusal = 500, ""
    with routing([prefill], [dead, decode]) as route:
        assert [model["id"] for model in route.get("/v1/models").json["data"]] == ["first-model", "lora"]
        decode.refusal = 401, "who are you?"
        reply = route.get("/v1/models")
        assert (reply.status, reply.body) == (401, b"who are you?")
        decode.stop()
        assert route.get("/v1/models").status == 503


def test_health(engines: Engines) -> None:
    """One engine of each kind is enough; the answer says which does not work, and why."""
    prefill, decode, dead = engines.prefill(), engines.decode(), engines.decode()
    dead.stop()
    with routing([prefill], [decode, dead]) as route:
        reply = route.get("/health")
        refused = {"url": dead.url, "ok": False, "reason": "cannot be reached: Connection refused"}
        assert reply.status == 200
        assert reply.json["decode"] == [{"url": decode.url, "ok": True, "reason": None}, refused]
        prefill.refusal = 503, "dead engine"
        reply = route.get("/health")
        assert reply.status == 503
        assert reply.json["prefill"] == [{"url": prefill.url, "ok": False, "reason": "answers HTTP 503: dead engine"}]
        prefill.refusal = None
        dead.start()
        assert route.get("/health").status == 200
        assert set(route.metric("engine_reachable").values()) == {1}
        for engine in (decode, dead):
            engine.stop()
        assert route.get("/health").status == 503


def test_metrics(engines: Engines) -> None:
    prefill, decode, dead = engines.prefill(), engines.decode(), engines.decode()
    dead.stop()
    gate = engines.gate()

    async def behave(leg: Leg) -> web.StreamResponse:
        await gate.passed()
        return await decode.answer(leg)

    decode.behave = behave
    with routing([prefill], [decode, dead]) as route:
        labels = {engine: f'role="decode",engine="{engine.url}"' for engine in (decode, dead)}
        pending = [route.clients.submit(route.post) for _ in range(2)]
        for _ in pending:
            decode.legs.get(timeout=WAIT_S)
        assert route.metric("legs_in_flight")[labels[decode]] == 2
        assert route.metric("engine_reachable") == {
            f'role="prefill",engine="{prefill.url}"': 1,
            labels[decode]: 1,
            labels[dead]: 0,
        }
        gate.open()
        assert [each.result(WAIT_S).status for each in pending] == [200, 200]
        until(lambda: set(route.metric("legs_in_flight").values()) == {0})
        outcomes = {'outcome="finished"': 2, 'outcome="refused"': 0, 'outcome="failed"': 0, 'outcome="cancelled"': 0}
        assert route.metric("requests_total") == outcomes


def test_log(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line a request at the level INFO."""
    monkeypatch.setenv("ASCEND_GLOBAL_LOG_LEVEL", "1")
    prefill, decode = engines.prefill(), engines.decode()
    with routing([prefill], [decode]) as route:
        route.post(headers={"X-Request-Id": "mine"})
        assert route.process
        line = line_with(route.process, "[INFO] LLM_DATADIST")
    assert f"request mine: prefill {prefill.url}, decode {decode.url}: finished, status 200, " in line


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
@pytest.mark.parametrize("busy", [False, True])
def test_signals(engines: Engines, signum: signal.Signals, code: int, busy: bool) -> None:
    """What runs is cancelled within seconds; by default nothing but the address is printed."""
    prefill, decode = engines.prefill(), engines.decode()

    with routing([prefill], [decode]) as route:
        assert route.process
        assert route.post().status == 200
        if busy:
            decode.behave = decode.hold
            decode.legs.get(timeout=WAIT_S)
            client = route.begin()
            decode.legs.get(timeout=WAIT_S)
        route.process.send_signal(signum)
        out, err = route.process.communicate(timeout=WAIT_S)
        assert (route.process.returncode, out) == (code, "")
        assert err == ("llm-datadist route: interrupted\n" if code else "")
        if busy:
            decode.gone.get(timeout=WAIT_S)
            client.close()


# ---------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "Missing option '--prefill'"),
        (["--prefill", "http://a:1"], "Missing option '--decode'"),
        (["--prefill", "a:1", "--decode", "http://b"], "'a:1' is no URL of an engine"),
        (["--prefill", "http://a:1", "--decode", "http://b:x"], "'http://b:x' is no URL of an engine"),
        (["--prefill", "http://a:1", "--decode", "http://[b"], "'http://[b' is no URL of an engine"),
        (["--prefill", "http://", "--decode", "http://b"], "'http://' is no URL of an engine"),
        (["--prefill", "ftp://a", "--decode", "http://b"], "'ftp://a' is no URL of an engine"),
        (["--prefill", "http://a?x=1", "--decode", "http://b"], "'http://a?x=1' is no URL of an engine"),
        (["--prefill", "http://a/v1/", "--decode", "http://b"], "'http://a/v1/' has the /v1 of vLLM's API at its end"),
        (["--prefill", "http://u:p@a", "--decode", "http://b"], "'http://u:p@a' is no URL of an engine"),
        (["--prefill", "http://a", "--decode", "http://b", "--port", "65536"], "--port"),
        (["--prefill", "http://a", "--decode", "http://b", "--timeout", "0"], "--timeout"),
        (["--prefill", "http://a", "--decode", "http://b", "--timeout", "inf"], "--timeout"),
    ],
)
def test_bad_options(options: list[str], words: str) -> None:
    done = run("route", *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in " ".join(done.stderr.replace("│", " ").split())
    assert "Traceback" not in done.stderr


def test_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = run("route", "--prefill", "http://a", "--decode", "http://b", "--port", port)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use; give another" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_the_extra() -> None:
    code = "import sys; sys.modules['aiohttp'] = None; from llm_datadist.cli import main; main()"
    options = ["--prefill", "http://a", "--decode", "http://b"]
    done = run("route", *options, command=(sys.executable, "-c", code))
    assert done.returncode == 2
    assert done.stderr == "llm-datadist needs the package aiohttp: run pip install 'llm-datadist[route]'\n"


def test_other_commands_do_without_it() -> None:
    code = "import sys, llm_datadist.cli.app; print('aiohttp' in sys.modules)"
    assert run(command=(sys.executable, "-c", code)).stdout == "False\n"
