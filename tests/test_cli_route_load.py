"""The command ``route``: how requests are spread over engines, and that none leaves anything behind.

The engines are stand-ins: real HTTP servers that answer as vLLM does. vLLM itself, with the connector, is exercised by
the prefill/decode example.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
import weakref
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from aiohttp import web
from multidict import CIMultiDict

from llm_datadist.cli.route import engines as behind
from llm_datadist.cli.route.engines import Engine as Behind
from llm_datadist.cli.route.engines import EngineError, Pool, Role, open_session
from llm_datadist.cli.route.push import PushLegs
from llm_datadist.cli.route.router import Router
from llm_datadist.cli.route.server import application
from route_kit import PROMPT, WAIT_S, Route, routing
from until import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from route_kit import Engine, Engines, Leg

STREAM = {**PROMPT, "stream": True}


def test_engines_share_the_load(engines: Engines) -> None:
    """Requests at once go to those with the fewest, one after the other to each in turn."""
    prefills, decodes = [engines.prefill() for _ in range(3)], [engines.decode() for _ in range(2)]
    gate = engines.gate()

    async def hold(leg: Leg) -> web.StreamResponse:
        await gate.passed()
        return await prefills[0].answer(leg)

    for engine in (*prefills, *decodes):
        engine.behave = hold
    with routing(prefills, decodes) as route:
        pending = [route.clients.submit(route.post) for _ in range(12)]
        until(lambda: sum(engine.legs.qsize() for engine in (*prefills, *decodes)) == 24)
        assert [engine.legs.qsize() for engine in prefills] == [4, 4, 4]
        assert [engine.legs.qsize() for engine in decodes] == [6, 6]
        gate.open()
        assert [each.result(WAIT_S).status for each in pending] == [200] * 12
        for _ in range(6):
            until(lambda: set(route.metric("legs_in_flight").values()) == {0})
            assert route.post().status == 200
        assert [engine.legs.qsize() for engine in prefills] == [6, 6, 6]
        assert [engine.legs.qsize() for engine in decodes] == [9, 9]


def test_a_busy_engine_gets_fewer(engines: Engines) -> None:
    prefill, busy, free = engines.prefill(), engines.decode(), engines.decode()
    gate = engines.gate()

    async def hold(leg: Leg) -> web.StreamResponse:
        await gate.passed()
        return await busy.answer(leg)

    busy.behave = hold
    with routing([prefill], [busy, free]) as route:
        pending = route.clients.submit(route.post)
        busy.legs.get(timeout=WAIT_S)
        for count in range(1, 6):
            assert route.post().status == 200
            until(lambda: set(route.metric("legs_in_flight").values()) == {0, 1})
            assert (busy.legs.qsize(), free.legs.qsize()) == (0, count)
        gate.open()
        assert pending.result(WAIT_S).status == 200


def test_an_engine_that_comes_back_is_used_again(engines: Engines) -> None:
    """While it is away the others get all; requests never fail for it."""
    prefills, decodes = [engines.prefill(), engines.prefill()], [engines.decode(), engines.decode()]
    with routing(prefills, decodes) as route:
        for away in (prefills[1], decodes[1]):
            away.stop()
        for _ in range(10):
            assert route.post().status == 200
        assert [engine.legs.qsize() for engine in (prefills[1], *decodes)] == [0, 10, 0]
        for back in (prefills[1], decodes[1]):
            back.start()

        def used() -> bool:
            assert route.post().status == 200
            return not prefills[1].legs.empty() and not decodes[1].legs.empty()

        until(used)


def test_an_engine_that_refuses_is_passed_over(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a while, which takes no longer than it should; unless there is no other."""
    monkeypatch.setattr(behind, "_REST_S", 1000.0)  # in place of half a second: nothing here waits for the end of it
    decodes = [engines.decode(), engines.decode()]
    decodes[1].stop()

    async def look() -> None:
        async with open_session(WAIT_S) as session:
            pool = Pool([Behind(Role.DECODE, decode.url, session) for decode in decodes])
            good, away = pool.engines
            assert {pool.choose() for _ in range(2)} == {good, away}
            assert await away.check() == "cannot be reached: Connection refused"
            assert [pool.choose() for _ in range(4)] == [good] * 4
            assert pool.choose({good}) is away
            monkeypatch.setattr(behind, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 31))
            assert {pool.choose() for _ in range(2)} == {good, away}

    asyncio.run(look())


def test_connections_that_are_refused_together_count_once(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """A burst of requests does not make the rest of an engine longer; later ones do."""
    monkeypatch.setattr(behind, "time", SimpleNamespace(monotonic=lambda: now))
    now, decode = 100.0, engines.decode()
    decode.stop()

    async def look() -> None:
        nonlocal now
        async with open_session(WAIT_S) as session:
            away = Behind(Role.DECODE, decode.url, session)
            for rest in (0.5, 1.0, 2.0):
                await asyncio.gather(*(away.check() for _ in range(10)))
                now += rest - 0.01
                assert away.resting
                now += 0.02
                assert not away.resting

    asyncio.run(look())


def test_a_failed_description_keeps_no_request(engines: Engines) -> None:
    """Requests that were waiting for it may be large."""
    prefill = engines.prefill()
    prefill.stop()

    async def ask(away: Behind) -> weakref.ref[Request]:
        request = Request()
        with pytest.raises(EngineError, match="Connection refused"):
            await request.describe(away)
        return weakref.ref(request)

    async def look() -> None:
        async with open_session(WAIT_S) as session:
            away = Behind(Role.PREFILL, prefill.url, session)
            asked = await asyncio.gather(*(ask(away) for _ in range(10)))
            gc.collect()
            assert [each() for each in asked] == [None] * 10

    asyncio.run(look())


class Request:
    """One whose frame is among those of the failure."""

    async def describe(self, engine: Behind) -> bytes:
        return await engine.describe(CIMultiDict({"X-Request-Id": "1"}))


def test_tls_failures_are_told(engines: Engines) -> None:
    """OpenSSL's numbers are not those of the system."""
    decode = engines.decode()

    async def look() -> str | None:
        async with open_session(WAIT_S) as session:
            return await Behind(Role.DECODE, decode.url.replace("http:", "https:"), session).check()

    problem = asyncio.run(look())
    assert problem
    assert problem.startswith("cannot be reached: [SSL: ")


def test_one_that_is_alone_is_tried_whenever_there_is_a_request(engines: Engines) -> None:
    prefill, decode = engines.prefill(), engines.decode()
    with routing([prefill], [decode]) as route:
        prefill.stop()
        for _ in range(6):
            assert route.post().status == 503
        prefill.start()
        assert route.post().status == 200


async def _answer_some(engine: Engine, leg: Leg) -> web.StreamResponse:
    """Every second one; the others until they are cancelled."""
    response = await leg.stream()
    await response.write(b"data: 1\n\n")
    if leg.headers["X-Number"] in {"1", "3", "5", "7"}:
        await engine.hold(leg)
    await response.write(b"data: [DONE]\n\n")
    return response


def use(route: Route, number: int) -> None:
    """A client that goes at one of several moments, or stays to the end."""
    with contextlib.closing(route.begin(STREAM, headers={"X-Number": str(number % 8)})) as client:
        if number % 8 in {1, 5}:
            return
        response = client.getresponse()
        assert response.read(9) == b"data: 1\n\n"
        if number % 2 == 0:
            assert response.read() == b"data: [DONE]\n\n"
        response.close()


def test_nothing_is_left_behind(engines: Engines) -> None:
    """No descriptor of the router, no connection to an engine, after 100 requests of which half were cancelled."""
    prefills, decodes = [engines.prefill() for _ in range(2)], [engines.decode() for _ in range(2)]
    for decode in decodes:
        decode.behave = lambda leg, decode=decode: _answer_some(decode, leg)  # type: ignore[misc]
    with routing(prefills, decodes) as route:
        before = route.descriptors()
        list(route.clients.map(lambda number: use(route, number), range(100)))
        everybody = (*prefills, *decodes)
        until(
            lambda: sum(engine.connections for engine in everybody) == 0 and route.descriptors() == before,
            what=lambda: f"{[engine.connections for engine in everybody]} {route.descriptors()}, {before} before",
        )
        assert set(route.metric("legs_in_flight").values()) == {0}
        counted = route.metric("requests_total")
        assert counted['outcome="finished"'] == 50
        assert counted['outcome="cancelled"'] + counted['outcome="failed"'] <= 50
        assert counted['outcome="failed"'] == 0


@contextlib.asynccontextmanager
async def _served(prefill: Engine, decode: Engine) -> AsyncIterator[int]:
    """The router in this loop; its port."""
    async with open_session(WAIT_S) as session:
        router = Router(
            Pool([Behind(Role.PREFILL, prefill.url, session)]),
            Pool([Behind(Role.DECODE, decode.url, session)]),
            PushLegs(),
        )
        runner = web.AppRunner(application(router), handler_cancellation=True)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            yield runner.addresses[0][1]
        finally:
            await runner.cleanup()
            await router.close()


def test_no_task_is_left_behind(engines: Engines) -> None:
    """The same within one process, where tasks can be counted."""
    prefill, decode = engines.prefill(), engines.decode()
    decode.behave = lambda leg: _answer_some(decode, leg)

    async def serve_and_count() -> None:
        loop = asyncio.get_running_loop()
        async with _served(prefill, decode) as port:
            route = Route(port)
            await loop.run_in_executor(route.clients, route.get, "/metrics")
            before = len(asyncio.all_tasks())
            await asyncio.gather(*(loop.run_in_executor(route.clients, use, route, each) for each in range(24)))
            end = loop.time() + WAIT_S
            while len(asyncio.all_tasks()) > before:
                assert loop.time() < end, asyncio.all_tasks()
                await asyncio.sleep(0.02)
            route.clients.shutdown()

    asyncio.run(serve_and_count())
