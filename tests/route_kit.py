"""Stand-ins for vLLM engines, and the router in front of them, each with real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web

from cli_kit import line_with, running

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence

    from aiohttp.typedefs import Handler
    from multidict import CIMultiDictProxy

WAIT_S = 30
CONNECTOR = {"engine": "p", "address": "127.0.0.1:26000", "deep": [1, {"a": None}]}
"""A description; nobody but its P and D read it."""


class Gate:
    """Opened by anybody, waited for by handlers of engines."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._event = loop, asyncio.Event()

    def open(self) -> None:
        self._loop.call_soon_threadsafe(self._event.set)

    async def passed(self) -> None:
        await asyncio.wait_for(self._event.wait(), WAIT_S)


@dataclass
class Leg:
    """One request that an engine has got."""

    request: web.Request
    body: dict[str, Any]

    @property
    def headers(self) -> CIMultiDictProxy[str]:
        return self.request.headers

    @property
    def params(self) -> dict[str, Any]:
        params: dict[str, Any] = self.body["kv_transfer_params"]
        return params

    async def stream(self, kind: str = "text/event-stream") -> web.StreamResponse:
        """The begin of an answer of unknown length."""
        response = web.StreamResponse(headers={"Content-Type": kind})
        await response.prepare(self.request)
        return response

    def reset(self) -> None:
        """Break the connection."""
        assert self.request.transport
        self.request.transport.abort()


class Engine:
    """One engine: notes what it gets, and answers as ``behave`` says."""

    def __init__(self, loop: asyncio.AbstractEventLoop, description: dict[str, Any] | None) -> None:
        self._loop = loop
        self.description = description
        self.described = 0
        """How often it was asked for its description."""
        self.legs: queue.Queue[Leg] = queue.Queue()
        """Requests that have come."""
        self.gone: queue.Queue[Leg] = queue.Queue()
        """Those whose connection was closed before they were answered."""
        self.behave: Callable[[Leg], Awaitable[web.StreamResponse]] = self.answer
        models = [{"id": "first-model", "max_model_len": 64}, {"id": "lora", "max_model_len": None}]
        self.models: tuple[int, dict[str, Any]] = (200, {"object": "list", "data": models})
        """Status and content of its ``/v1/models``."""
        self.asked_for_models = 0
        self.refusal: tuple[int, str] | None = None
        """Status and body of the answer to whatever is asked."""
        self.host, self.port = "127.0.0.1", 0
        self._runner: web.AppRunner | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def start(self) -> None:
        """Serve, at the same port as before."""
        _wait(self._loop, self._start())

    async def _start(self) -> None:
        app = web.Application(client_max_size=1 << 30, middlewares=[self._refuse])
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._complete)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()
        self.port = self._runner.addresses[0][1]

    def stop(self) -> None:
        """Die: all connections are broken, new ones refused."""
        _wait(self._loop, self._stop())

    async def _stop(self) -> None:
        runner, self._runner = self._runner, None
        if runner:
            for site in list(runner.sites):
                await site.stop()
            for connection in runner.server.connections if runner.server else ():
                if connection.transport:
                    connection.transport.abort()
            await runner.cleanup()

    @property
    def connections(self) -> int:
        """Open ones."""
        return len(self._runner.server.connections) if self._runner and self._runner.server else 0

    async def answer(self, leg: Leg) -> web.StreamResponse:
        """As vLLM with the connector does, at once."""
        answer: dict[str, Any] = {"id": "cmpl-1", "choices": [{"index": 0, "text": " word"}]}
        if self.description is not None:
            answer["kv_transfer_params"] = {"llm_datadist": self.description}
        return web.json_response(answer)

    async def hold(self, leg: Leg) -> web.StreamResponse:
        """Never answer: the router is to close the connection."""
        await asyncio.wait_for(asyncio.Event().wait(), WAIT_S)
        raise AssertionError

    @web.middleware
    async def _refuse(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self.refusal is None:
            return await handler(request)
        status, text = self.refusal
        return web.Response(status=status, text=text)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        try:
            body = await request.json()
        except (ValueError, RecursionError):
            body = {}  # the test looks at the bytes
        leg = Leg(request, body)
        if body.get("kv_transfer_params", {}).get("describe"):
            assert body["max_tokens"] == 1
            assert (body["model"], body["prompt"]) == ("first-model", [1])
            self.described += 1
            return await self.answer(leg)
        self.legs.put(leg)
        try:
            return await self.behave(leg)
        except asyncio.CancelledError:
            self.gone.put(leg)
            raise

    async def _models(self, request: web.Request) -> web.Response:
        self.asked_for_models += 1
        status, content = self.models
        return web.json_response(content, status=status)

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()


def _wait(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run_coroutine_threadsafe(work, loop).result(WAIT_S)


class Engines:
    """Makes engines, which serve from one thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self._made: list[Engine] = []

    def prefill(self, description: dict[str, Any] | None = CONNECTOR) -> Engine:
        self._made.append(Engine(self.loop, description))
        return self._made[-1]

    def decode(self) -> Engine:
        return self.prefill(None)

    def gate(self) -> Gate:
        return Gate(self.loop)

    def wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run it in the thread, to its end."""
        return _wait(self.loop, work)

    def close(self) -> None:
        try:
            for engine in self._made:
                engine.stop()
        finally:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(WAIT_S)
            self.loop.close()


@dataclass
class Reply:
    """What a client has got."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        """The message of an error in OpenAI's form."""
        error = self.json["error"]
        assert set(error) == {"message", "type", "code"}
        assert error["code"] == self.status
        assert isinstance(error["type"], str)
        message: str = error["message"]
        return message


PROMPT = {"model": "m", "prompt": "long ago", "max_tokens": 32}


@dataclass
class Route:
    """A router that serves."""

    port: int
    process: subprocess.Popen[str] | None = None
    clients: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(32))

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)

    def begin(
        self, body: object = PROMPT, path: str = "/v1/completions", headers: dict[str, str] | None = None
    ) -> http.client.HTTPConnection:
        """Send a request, and do not wait."""
        connection = self.connect()
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("POST", path, content, {"Content-Type": "application/json", **(headers or {})})
        return connection

    def post(
        self, body: object = PROMPT, path: str = "/v1/completions", headers: dict[str, str] | None = None
    ) -> Reply:
        with contextlib.closing(self.begin(body, path, headers)) as connection:
            return _reply(connection)

    def get(self, path: str) -> Reply:
        with contextlib.closing(self.connect()) as connection:
            connection.request("GET", path)
            return _reply(connection)

    def metric(self, name: str) -> dict[str, float]:
        """Its samples by their labels."""
        lines = self.get("/metrics").body.decode().splitlines()
        full = f"llm_datadist_route_{name}{{"
        samples = [line.removeprefix(full).split("} ") for line in lines if line.startswith(full)]
        return {labels: float(value) for labels, value in samples}

    def descriptors(self) -> int:
        assert self.process
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))


def _reply(connection: http.client.HTTPConnection) -> Reply:
    with connection.getresponse() as response:
        return Reply(response.status, response.headers, response.read())


@contextlib.contextmanager
def routing(prefill: Sequence[Engine], decode: Sequence[Engine], *options: str) -> Generator[Route, None, None]:
    """The command, in front of these engines."""
    urls = [part for engine in prefill for part in ("--prefill", engine.url)]
    urls += [part for engine in decode for part in ("--decode", engine.url)]
    with running("route", *urls, "--port", "0", *options) as process:
        port = line_with(process, "listening on http://127.0.0.1:").rpartition(":")[2]
        route = Route(int(port), process)
        try:
            yield route
        finally:
            route.clients.shutdown(wait=False, cancel_futures=True)
