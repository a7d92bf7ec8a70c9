"""One leg after the other: D pulls the KV when P has computed the prompt, and P's first token is the client's."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from llm_datadist.cli.route.calls import EVENTS, decode
from llm_datadist.cli.route.engines import EngineError
from llm_datadist.cli.route.first_token import first_token, wishes
from llm_datadist.cli.route.messages import (
    description_in,
    is_for_decode_alone,
    is_leased,
    params_in,
    prefill_body,
    pull_body,
)
from llm_datadist.utils import log

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiohttp import web

    from llm_datadist.cli.route.calls import Call
    from llm_datadist.cli.route.engines import Answer
    from llm_datadist.cli.route.messages import Fields


class PullLegs:
    """Runs one leg of requests after the other."""

    async def attempt(self, call: Call) -> web.StreamResponse:
        """Run both; D's answer goes to the client. See :class:`~llm_datadist.cli.route.calls.Legs`."""
        with call.decode.busy():  # already now: else all that come while P computes would choose the same D
            context = await call.decode.context(call.headers)  # before P computes for a D that cannot be reached
            if is_for_decode_alone(call.fields):
                params: Fields = {}
            elif call.first:  # D has failed behind it: what is left is a new request, as the KV may have been freed
                params = _params_in(call, await _ask(call, {}))
            else:
                params = await _prefill(call, context)
            return await decode(call, pull_body(call.fields, params))

    async def close(self) -> None:
        """Nothing runs beside the handlers of requests."""


async def _prefill(call: Call, context: int) -> Fields:
    """The first leg: what P tells D, after its first token has gone to the client where that is possible.

    ``context`` is how many tokens D takes for one request.
    """
    wanted = "it is a chat" if call.chat else wishes(call.body, call.fields)
    if isinstance(wanted, str):
        _tell(call, wanted)
        return _params_in(call, await _ask(call, {}))
    answer = await _ask(call, {"return_token_ids": True, **({"min_tokens": 1} if wanted.min_tokens else {})})
    params = _params_in(call, answer)
    found = first_token(call.fields, wanted, answer.body, context)
    if isinstance(found, str):
        _tell(call, found)
        return params
    call.first, call.fields = found, found.fields
    call.prefill.first_tokens += 1
    if wanted.stream:
        headers = answer.headers.copy()
        headers.popall("Content-Length", None)
        headers["Content-Type"] = f"{EVENTS}; charset=utf-8"
        reply = await call.begin(HTTPStatus.OK, None, headers)
        await reply.write(found.event())
    return params


async def _ask(call: Call, more: Mapping[str, Any]) -> Answer:
    with call.prefill.busy():
        body = prefill_body(call.fields, chat=call.chat, more=more)
        return await call.prefill.fetch("POST", call.path, call.headers, body)


def _tell(call: Call, reason: str) -> None:
    log.info("request %s: the first token is the decode engine's: %s", call.id, reason)


def _params_in(call: Call, answer: Answer) -> Fields:
    params = params_in(answer.body)
    description = description_in(params)
    if description is None:
        url = call.prefill.url
        log.warn_rarely(url, "prefill engine %s hands over no KV of request %s: D computes it itself", url, call.id)
    elif not is_leased(description):
        reason = 'runs LLMDataDistConnector in push mode: start it with "mode": "pull", or the router with --mode push'
        raise EngineError(call.prefill, reason, HTTPStatus.BAD_GATEWAY)
    return params
