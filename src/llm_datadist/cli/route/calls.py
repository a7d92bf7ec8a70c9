"""A request of a client: how far it has got, and how engines' answers reach the client."""

from __future__ import annotations

import asyncio
import enum
import time
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, Protocol

from aiohttp import web

from llm_datadist.cli.route.engines import Answer, EngineError
from llm_datadist.cli.route.messages import end_to_end, error_body, failure_in

if TYPE_CHECKING:
    from collections.abc import Mapping

    import aiohttp
    from multidict import CIMultiDict

    from llm_datadist.cli.route.engines import Engine
    from llm_datadist.cli.route.first_token import FirstToken, Rest
    from llm_datadist.cli.route.messages import Fields

EVENTS: Final = "text/event-stream"
_END_OF_EVENT: Final = b"\n\n"
_UNREAD_S: Final = 1.0
"""How long after ``--timeout`` a client may take to read what is there."""


class Outcome(enum.Enum):
    """What became of a request."""

    FINISHED = "finished"
    REFUSED = "refused"
    """The client was told that it is at fault (HTTP 4xx)."""
    FAILED = "failed"
    CANCELLED = "cancelled"
    """The client has gone, or the router was stopped."""


class Reply:
    """An answer that the client has the begin of. Its methods raise ``ConnectionError`` when the client has gone."""

    def __init__(self, request: web.Request, response: web.StreamResponse) -> None:
        self.response: web.StreamResponse = response
        self._request = request
        self._last = _END_OF_EVENT

    async def write(self, chunk: bytes) -> None:
        """Go on with it."""
        if chunk:
            await self.response.write(chunk)
            self._last = (self._last + chunk)[-2:]

    async def break_off(self, error: EngineError) -> None:
        """End it with an event if it is a stream, and without the end that HTTP wants."""
        try:
            if self.response.content_type == EVENTS:
                event = b"data: " + error_body(error.status, str(error)) + _END_OF_EVENT
                await self.write(event if self._last == _END_OF_EVENT else _END_OF_EVENT + event)
        finally:
            if self._request.transport:
                self._request.transport.close()

    def abort(self) -> None:
        """Break the connection: the client does not read."""
        if self._request.transport:
            self._request.transport.abort()


@dataclass(slots=True)
class Call:
    """A request of a client, and how far it has got."""

    request: web.Request
    body: bytes
    id: str
    chat: bool
    headers: CIMultiDict[str]
    fields: Fields
    """What is still to be done: at first the client's body."""
    prefill: Engine
    """The one that is tried, or was last."""
    decode: Engine
    since: float = field(default_factory=time.monotonic)
    first: FirstToken | None = None
    """That of the prefill engine, where the decode engine goes on behind it."""
    reply: Reply | None = None
    problem: EngineError | None = None
    """What has failed in the end."""
    outcome: Outcome = Outcome.CANCELLED
    status: int | None = None

    @property
    def path(self) -> str:
        """With the query."""
        return self.request.path_qs

    async def begin(self, status: int, reason: str | None, headers: Mapping[str, str]) -> Reply:
        """Begin the client's answer.

        Raises:
            ConnectionError: the client has gone.
        """
        response = web.StreamResponse(status=status, reason=reason, headers=headers)
        self.reply = Reply(self.request, response)
        await response.prepare(self.request)
        return self.reply

    def end(self, status: int) -> None:
        """The client has its answer, as far as there is one."""
        self.status = status
        self.outcome = Outcome.REFUSED if status >= HTTPStatus.BAD_REQUEST else Outcome.FINISHED
        if self.problem:
            self.outcome = Outcome.FAILED

    async def break_off(self, reply: Reply, error: EngineError) -> web.StreamResponse:
        """End an answer that has begun, and cannot be ended well.

        Raises:
            ConnectionError: the client has gone.
        """
        self.problem = error
        self.end(reply.response.status)
        await reply.break_off(error)
        return reply.response


class Legs(Protocol):
    """How the two legs of a request are run."""

    async def attempt(self, call: Call) -> web.StreamResponse:
        """Run both; the decode engine's answer goes to the client.

        Raises:
            EngineError: an engine has failed before the decode engine's answer began; neither leg runs any more.
            RefusedError: the client is at fault; neither leg runs any more.
            ConnectionError: the client has gone; neither leg runs any more.
        """

    async def close(self) -> None:
        """End what still runs."""


async def decode(call: Call, body: bytes) -> web.StreamResponse:
    """Run D's leg alone. See :class:`Legs`."""
    leg = DecodeLeg(call.decode)
    try:
        return await leg.relay(call, await leg.open(call, body))
    finally:
        leg.close()


class DecodeLeg:
    """D's answer, from its first byte on."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.first: bytes = b""
        self.response: aiohttp.ClientResponse | None = None
        self._until = asyncio.get_running_loop().time() + engine.timeout_s + _UNREAD_S

    async def open(self, call: Call, body: bytes) -> aiohttp.ClientResponse:
        """Wait for the first byte of the answer's body.

        Raises:
            EngineError: D has failed before, or refuses to go on with an answer that the client has the begin of.
        """
        self.response = await self.engine.open("POST", call.path, call.headers, body)
        status = self.response.status
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR or (call.reply and status != HTTPStatus.OK):
            raise self.engine.failed(await self.engine.read(self.response))
        self.first = await self.engine.next_chunk(self.response)
        if error := self._failure_in(self.first):
            raise error
        return self.response

    def _failure_in(self, chunk: bytes) -> EngineError | None:
        """What D says of its own failure in a stream, whose HTTP status is 200 all the same."""
        if self.response is None or self.response.content_type != EVENTS:
            return None
        reason = failure_in(chunk)
        return EngineError(self.engine, f"has failed: {reason}", HTTPStatus.BAD_GATEWAY) if reason else None

    async def relay(self, call: Call, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        """Pass it on as it comes; if it breaks off, the client's does, too.

        Raises:
            EngineError: it is needed as a whole, and breaks off or is no completion.
            ConnectionError: the client has gone.
        """
        rest: Rest | None = None
        if call.first is not None and answer.status == HTTPStatus.OK:
            if call.reply is None:
                return await self._relay_whole(call, answer, call.first)
            rest = call.first.rest()
        reply = call.reply or await call.begin(answer.status, answer.reason, end_to_end(answer.headers))
        unread = asyncio.get_running_loop().call_at(self._until, reply.abort)
        try:
            return await self._relay(call, answer, reply, rest)
        finally:
            unread.cancel()

    async def _relay(
        self, call: Call, answer: aiohttp.ClientResponse, reply: Reply, rest: Rest | None
    ) -> web.StreamResponse:
        chunk = self.first
        while chunk:
            await reply.write(rest.feed(chunk) if rest else chunk)
            try:
                chunk = await self.engine.next_chunk(answer)
            except EngineError as error:
                return await call.break_off(reply, error)
            call.problem = call.problem or self._failure_in(chunk)
        if rest:
            await reply.write(rest.end())
        await reply.response.write_eof()
        call.end(answer.status)
        return reply.response

    async def _relay_whole(self, call: Call, answer: aiohttp.ClientResponse, first: FirstToken) -> web.StreamResponse:
        body = self.first
        while chunk := await self.engine.next_chunk(answer):
            body += chunk
        try:
            body = first.before(body)
        except ValueError as error:
            raise EngineError(self.engine, f"answers no completion: {error}", HTTPStatus.BAD_GATEWAY) from error
        headers = end_to_end(answer.headers)
        headers.popall("Content-Length", None)
        call.end(answer.status)
        return whole_response(Answer(answer.status, headers, body))

    def close(self) -> None:
        """End it: the connection is closed unless the answer has ended."""
        if self.response:
            self.response.close()


def error_response(status: int, message: str) -> web.Response:
    """An error in OpenAI's form."""
    return web.Response(status=status, body=error_body(status, message), content_type="application/json")


def whole_response(answer: Answer) -> web.Response:
    """An engine's answer as it is."""
    return web.Response(status=answer.status, headers=answer.headers, body=answer.body)
