"""One request: its two legs at once, and what becomes of one when the other fails."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web

from llm_datadist.cli.route.engines import EngineError, RefusedError
from llm_datadist.cli.route.messages import (
    REQUEST_ID,
    decode_body,
    end_to_end,
    error_body,
    parse_fields,
    prefill_body,
    request_headers,
)
from llm_datadist.utils import log

if TYPE_CHECKING:
    import aiohttp
    from multidict import CIMultiDict

    from llm_datadist.cli.route.engines import Answer, Engine, Pool
    from llm_datadist.cli.route.messages import Fields

COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"
_EVENTS: Final = "text/event-stream"
_LEFT_ALONE_S: Final = 10.0
"""How long P may still answer when D's answer has ended: both end at about the same time."""


class Outcome(enum.Enum):
    """What became of a request."""

    FINISHED = "finished"
    REFUSED = "refused"
    """The client was told that it is at fault (HTTP 4xx)."""
    FAILED = "failed"
    CANCELLED = "cancelled"
    """The client has gone, or the router was stopped."""


@dataclass(slots=True)
class _Call:
    """A request of a client, and how far it has got."""

    id: str
    path: str
    chat: bool
    headers: CIMultiDict[str]
    fields: Fields
    prefill: Engine
    """The one that is tried, or was last."""
    decode: Engine
    since: float = field(default_factory=time.monotonic)
    begun: bool = False
    """Whether D's answer has begun."""
    problem: EngineError | None = None
    """What has failed in the end."""
    outcome: Outcome = Outcome.CANCELLED
    status: int | None = None

    def end(self, status: int) -> None:
        """The client has its answer, as far as there is one."""
        self.status = status
        self.outcome = Outcome.REFUSED if status >= HTTPStatus.BAD_REQUEST else Outcome.FINISHED
        if self.problem:
            self.outcome = Outcome.FAILED


class _DecodeLeg:
    """D's answer, from its first byte on."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.first = b""
        self.response: aiohttp.ClientResponse | None = None

    async def open(self, call: _Call, transfer_id: str) -> aiohttp.ClientResponse:
        """Wait for the first byte of the body.

        Raises:
            EngineError: D has failed before, or P has no description.
            RefusedError: P does not let the client in.
        """
        description = await call.prefill.describe(call.headers)
        body = decode_body(call.fields, transfer_id, description)
        self.response = await self.engine.open("POST", call.path, call.headers, body)
        if self.response.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise self.engine.failed(await self.engine.read(self.response))
        self.first = await self.engine.next_chunk(self.response)
        return self.response

    def close(self) -> None:
        """End it: the connection is closed unless the answer has ended."""
        if self.response:
            self.response.close()


class Router:
    """Sends every request to an engine of each pool."""

    def __init__(self, prefill: Pool, decode: Pool) -> None:
        self.prefill: Pool = prefill
        self.decode: Pool = decode
        self.outcomes: Counter[Outcome] = Counter()
        self._prefill_legs: set[asyncio.Task[None]] = set()

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Answer a completion or a chat completion."""
        try:
            fields = parse_fields(await request.read())
        except ValueError as error:
            self.outcomes[Outcome.REFUSED] += 1
            return error_response(HTTPStatus.BAD_REQUEST, str(error))
        headers = request_headers(request.headers)
        call = _Call(
            id=headers[REQUEST_ID],
            path=request.path_qs,
            chat=request.path == CHAT,
            headers=headers,
            fields=fields,
            prefill=self.prefill.choose(),
            decode=self.decode.choose(),
        )
        try:
            return await self._answer(call, request)
        finally:
            self._conclude(call)

    async def close(self) -> None:
        """End what still runs."""
        await _end(*self._prefill_legs)

    async def _answer(self, call: _Call, request: web.Request) -> web.StreamResponse:
        """Try engines until an answer begins, each that fails at most once."""
        failed: set[Engine] = set()
        while True:
            try:
                return await self._attempt(call, request)
            except RefusedError as error:
                call.end(error.answer.status)
                return whole_response(error.answer)
            except EngineError as error:
                failed.add(error.engine)
                if not (error.elsewhere and self.prefill.left(failed) and self.decode.left(failed)):
                    call.problem = error
                    call.end(error.status)
                    return error_response(error.status, str(error))
                call.prefill, call.decode = self.prefill.choose(failed), self.decode.choose(failed)
                again = f"tried again with {call.prefill.url} and {call.decode.url}"
                log.error("request %s: %s; %s", call.id, error, again)

    async def _attempt(self, call: _Call, request: web.Request) -> web.StreamResponse:
        """Both legs; the answer is passed on.

        Raises:
            EngineError: one has failed before the answer began; neither runs any more.
            RefusedError: the client is at fault; neither runs any more.
        """
        transfer_id = uuid.uuid4().hex
        decode_leg = _DecodeLeg(call.decode)
        with call.decode.busy():
            prefilling = self._start_prefill(call, transfer_id)
            opening = asyncio.create_task(decode_leg.open(call, transfer_id))
            try:
                await asyncio.wait({prefilling, opening}, return_when=asyncio.FIRST_COMPLETED)
                if not opening.done():
                    prefilling.result()  # raises why it failed, if it did
                answer = await opening
                call.begun = True
                response = await _relay(call, request, decode_leg, answer)
            except BaseException:
                await _end(prefilling, opening)
                raise
            finally:
                decode_leg.close()
        if call.outcome is not Outcome.FINISHED:
            prefilling.cancel()
        elif not prefilling.done():
            asyncio.get_running_loop().call_later(_LEFT_ALONE_S, prefilling.cancel)
        return response

    def _start_prefill(self, call: _Call, transfer_id: str) -> asyncio.Task[None]:
        engine = call.prefill
        engine.in_flight += 1
        leg = asyncio.create_task(_prefill(call, engine, transfer_id))
        self._prefill_legs.add(leg)

        def over(_: asyncio.Task[None]) -> None:
            engine.in_flight -= 1
            self._prefill_legs.discard(leg)
            error = None if leg.cancelled() else leg.exception()
            if error and call.begun:
                log.error("request %s: %s; D's answer goes on", call.id, error)

        leg.add_done_callback(over)
        return leg

    def _conclude(self, call: _Call) -> None:
        self.outcomes[call.outcome] += 1
        text = "request %s: prefill %s, decode %s: %s, status %s, %.3f s"
        values = (call.id, call.prefill.url, call.decode.url, call.outcome.value, call.status)
        seconds = time.monotonic() - call.since
        if call.problem:
            log.error(f"{text}: %s", *values, seconds, call.problem)
        else:
            log.info(text, *values, seconds)


async def _prefill(call: _Call, engine: Engine, transfer_id: str) -> None:
    try:
        await engine.describe(call.headers)  # D needs it: without it this leg would be in vain
        body = prefill_body(call.fields, transfer_id, chat=call.chat)
        engine.learn(await engine.fetch("POST", call.path, call.headers, body))
    except EngineError:
        engine.forget()
        raise


async def _relay(
    call: _Call, request: web.Request, leg: _DecodeLeg, answer: aiohttp.ClientResponse
) -> web.StreamResponse:
    """Pass on D's answer as it comes; if it breaks off, the client's does, too."""
    response = web.StreamResponse(status=answer.status, reason=answer.reason, headers=end_to_end(answer.headers))
    last = b"\n\n"
    try:
        await response.prepare(request)
        chunk = leg.first
        while chunk:
            await response.write(chunk)
            last = (last + chunk)[-2:]
            chunk = await leg.engine.next_chunk(answer)
        await response.write_eof()
        call.end(answer.status)
    except EngineError as error:
        call.problem = error
        call.end(answer.status)
        if answer.content_type == _EVENTS:
            event = b"data: " + error_body(error.status, str(error)) + b"\n\n"
            with contextlib.suppress(ConnectionError):
                await response.write(event if last == b"\n\n" else b"\n\n" + event)
        if request.transport:
            request.transport.close()  # without the end that HTTP wants
    except ConnectionError:  # the client's: what engines do is an EngineError
        pass
    return response


async def _end(*legs: asyncio.Task[Any]) -> None:
    for leg in legs:
        leg.cancel()
    await asyncio.gather(*legs, return_exceptions=True)


def error_response(status: int, message: str) -> web.Response:
    """An error in OpenAI's form."""
    return web.Response(status=status, body=error_body(status, message), content_type="application/json")


def whole_response(answer: Answer) -> web.Response:
    """An engine's answer as it is."""
    return web.Response(status=answer.status, headers=answer.headers, body=answer.body)
