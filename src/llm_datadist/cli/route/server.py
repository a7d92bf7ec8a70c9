"""What the router serves: vLLM's API, and what operators ask."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

import msgspec
from aiohttp import web

from llm_datadist.cli.route.calls import Outcome, error_response, whole_response
from llm_datadist.cli.route.engines import Engine, EngineError, RefusedError
from llm_datadist.cli.route.messages import request_headers
from llm_datadist.cli.route.router import CHAT, COMPLETIONS
from llm_datadist.observe.metrics import PREFIX

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from aiohttp.typedefs import Handler

    from llm_datadist.cli.route.router import Router

_MOST_BYTES: Final = 256 << 20
"""Of a request: images in a chat make it large."""
_EXPOSITION: Final = "text/plain; version=0.0.4; charset=utf-8"


def application(router: Router) -> web.Application:
    """The router as a web application."""
    app = web.Application(middlewares=[_errors_in_openai_s_form], client_max_size=_MOST_BYTES)
    operators = _Operators(router)
    app.add_routes(
        [
            web.post(COMPLETIONS, router.complete),
            web.post(CHAT, router.complete),
            web.get("/v1/models", operators.models),
            web.get("/health", operators.health),
            web.get("/metrics", operators.metrics),
        ]
    )
    return app


@web.middleware
async def _errors_in_openai_s_form(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPError as error:
        return error_response(error.status, f"{request.method} {request.path}: {error.reason}")


class _Operators:
    """Everything but requests."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def models(self, request: web.Request) -> web.Response:
        """What a decode engine says."""
        decode = self._router.decode
        failed: set[Engine] = set()
        while True:
            engine = decode.choose(failed)
            try:
                return whole_response(await engine.fetch("GET", request.path_qs, request_headers(request.headers)))
            except RefusedError as error:
                return whole_response(error.answer)
            except EngineError as error:
                failed.add(engine)
                if not decode.left(failed):
                    return error_response(error.status, str(error))

    async def health(self, _: web.Request) -> web.Response:
        """Whether requests can be served, and the state of every engine."""
        prefill, decode = await asyncio.gather(self._router.prefill.check(), self._router.decode.check())
        ok = all(any(engine["ok"] for engine in pool) for pool in (prefill, decode))
        return web.Response(
            status=HTTPStatus.OK if ok else HTTPStatus.SERVICE_UNAVAILABLE,
            body=msgspec.json.encode({"prefill": prefill, "decode": decode}),
            content_type="application/json",
        )

    async def metrics(self, _: web.Request) -> web.Response:
        """Counters in Prometheus' text format."""
        prefill = self._router.prefill.engines
        engines = (*prefill, *self._router.decode.engines)
        labels = [f'role="{engine.role.value}",engine="{engine.url}"' for engine in engines]
        legs = [engine.in_flight for engine in engines]
        reachable = [int(not engine.refuses) for engine in engines]
        outcomes = [f'outcome="{outcome.value}"' for outcome in Outcome]
        requests = [self._router.outcomes[outcome] for outcome in Outcome]
        lines = [
            *_family("requests_total", "counter", outcomes, requests),
            *_family("legs_in_flight", "gauge", labels, legs),
            *_family("engine_reachable", "gauge", labels, reachable),
            *_family("first_tokens_total", "counter", labels[: len(prefill)], [each.first_tokens for each in prefill]),
        ]
        return web.Response(text="".join(lines), headers={"Content-Type": _EXPOSITION})


def _family(name: str, kind: str, labels: Iterable[str], values: Iterable[int]) -> Iterator[str]:
    full = f"{PREFIX}route_{name}"
    yield f"# TYPE {full} {kind}\n"
    for label, value in zip(labels, values, strict=True):
        yield f"{full}{{{label}}} {value}\n"
