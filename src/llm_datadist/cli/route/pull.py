"""One leg after the other: D pulls the KV when P has computed the prompt, and P's first token is the client's."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from llm_datadist.cli.route.calls import EVENTS, DecodeLeg
from llm_datadist.cli.route.engines import EngineError
from llm_datadist.cli.route.first_token import first_token, wishes
from llm_datadist.cli.route.messages import description_in, is_leased, params_in, prefill_body, pull_body
from llm_datadist.utils import log

if TYPE_CHECKING:
    from aiohttp import web

    from llm_datadist.cli.route.calls import Call
    from llm_datadist.cli.route.engines import Answer

_HEADERS: Final = {"Content-Type": f"{EVENTS}; charset=utf-8"}


class PullLegs:
    """Runs one leg of requests after the other."""

    async def attempt(self, call: Call) -> web.StreamResponse:
        """Run both; D's answer goes to the client. See :class:`~llm_datadist.cli.route.calls.Legs`."""
        params = await self._prefill(call)
        leg = DecodeLeg(call.decode)
        with call.decode.busy():
            try:
                answer = await leg.open(call, pull_body(call.fields, params))
                if call.reply and answer.status != HTTPStatus.OK:  # it cannot be told any more
                    raise call.decode.failed(await call.decode.read(answer))
                return await leg.relay(call, answer)
            finally:
                leg.close()

    async def close(self) -> None:
        """Nothing runs beside the handlers of requests."""

    async def _prefill(self, call: Call) -> bytes | None:
        """The first leg: what P tells D, after its first token has gone to the client where that is possible."""
        wanted = "it is a chat" if call.chat else wishes(call.body, call.fields)
        if call.first is not None:
            wanted = "the client has it"
        asked = not isinstance(wanted, str)
        context = await call.decode.context(call.headers) if asked else None
        body = prefill_body(call.fields, chat=call.chat, return_token_ids=asked)
        with call.prefill.busy():
            answer = await call.prefill.fetch("POST", call.path, call.headers, body)
        params = _params_in(call, answer)
        found = wanted if isinstance(wanted, str) else first_token(call.fields, wanted, answer.body, context)
        if isinstance(found, str):
            log.info("request %s: the first token is the decode engine's: %s", call.id, found)
            return params
        call.first, call.fields = found, found.fields
        call.prefill.first_tokens += 1
        if found.wishes.stream:
            reply = await call.begin(HTTPStatus.OK, None, _HEADERS)
            await reply.write(found.event())
        return params


def _params_in(call: Call, answer: Answer) -> bytes | None:
    description = description_in(answer.body)
    if description is None:
        log.info("request %s: prefill engine %s hands over no KV", call.id, call.prefill.url)
    elif not is_leased(description):
        reason = 'runs LLMDataDistConnector in push mode: start it with "mode": "pull", or the router with --mode push'
        raise EngineError(call.prefill, reason, HTTPStatus.BAD_GATEWAY)
    return params_in(answer.body)
