"""One request: engines are tried until one pair answers it."""

from __future__ import annotations

import time
from collections import Counter
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from llm_datadist.cli.route.calls import Call, Outcome, error_response, whole_response
from llm_datadist.cli.route.engines import EngineError, RefusedError
from llm_datadist.cli.route.messages import REQUEST_ID, parse_fields, request_headers
from llm_datadist.utils import log

if TYPE_CHECKING:
    from aiohttp import web

    from llm_datadist.cli.route.calls import Legs
    from llm_datadist.cli.route.engines import Engine, Pool

COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"


class Router:
    """Sends every request to an engine of each pool."""

    def __init__(self, prefill: Pool, decode: Pool, legs: Legs) -> None:
        self.prefill: Pool = prefill
        self.decode: Pool = decode
        self.outcomes: Counter[Outcome] = Counter()
        self._legs = legs

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Answer a completion or a chat completion."""
        body = await request.read()
        try:
            fields = parse_fields(body)
        except ValueError as error:
            self.outcomes[Outcome.REFUSED] += 1
            return error_response(HTTPStatus.BAD_REQUEST, str(error))
        headers = request_headers(request.headers, fields)
        call = Call(
            request=request,
            body=body,
            id=headers[REQUEST_ID],
            chat=request.path == CHAT,
            headers=headers,
            fields=fields,
            prefill=self.prefill.choose(),
            decode=self.decode.choose(),
        )
        try:
            return await self._answer(call)
        except ConnectionError:  # the client's: what engines do is an EngineError
            if call.reply is None:
                raise
            return call.reply.response
        finally:
            self._conclude(call)

    async def close(self) -> None:
        """End what still runs."""
        await self._legs.close()

    async def _answer(self, call: Call) -> web.StreamResponse:
        """Try engines until an answer begins, each that fails at most once."""
        failed: set[Engine] = set()
        while True:
            try:
                return await self._legs.attempt(call)
            except RefusedError as error:
                if call.reply:
                    return await call.break_off(call.reply, call.prefill.failed(error.answer))
                call.end(error.answer.status)
                return whole_response(error.answer)
            except EngineError as error:
                error.engine.forget()
                failed.add(error.engine)
                if not (error.elsewhere and self.prefill.left(failed) and self.decode.left(failed)):
                    if call.reply:
                        return await call.break_off(call.reply, error)
                    call.problem = error
                    call.end(error.status)
                    return error_response(error.status, str(error))
                call.prefill, call.decode = self.prefill.choose(failed), self.decode.choose(failed)
                again = f"tried again with {call.prefill.url} and {call.decode.url}"
                log.error("request %s: %s; %s", call.id, error, again)

    def _conclude(self, call: Call) -> None:
        self.outcomes[call.outcome] += 1
        text = "request %s: prefill %s, decode %s: %s, status %s, %.3f s"
        values = (call.id, call.prefill.url, call.decode.url, call.outcome.value, call.status)
        seconds = time.monotonic() - call.since
        if call.problem:
            log.error(f"{text}: %s", *values, seconds, call.problem)
        else:
            log.info(text, *values, seconds)
