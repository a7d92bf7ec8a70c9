"""Both legs at once: P pushes each layer's KV to D when it has computed the layer."""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING, Any, Final

from llm_datadist.cli.route.calls import DecodeLeg, Outcome, decode
from llm_datadist.cli.route.engines import EngineError
from llm_datadist.cli.route.messages import decode_body, is_for_decode_alone, prefill_body, pull_body
from llm_datadist.utils import log

if TYPE_CHECKING:
    import aiohttp
    from aiohttp import web

    from llm_datadist.cli.route.calls import Call
    from llm_datadist.cli.route.engines import Engine

_LEFT_ALONE_S: Final = 10.0
"""How long P may still answer when D's answer has ended: both end at about the same time."""


class PushLegs:
    """Runs both legs of requests at once."""

    def __init__(self) -> None:
        self._prefill_legs: set[asyncio.Task[None]] = set()

    async def attempt(self, call: Call) -> web.StreamResponse:
        """Run both; D's answer goes to the client. See :class:`~llm_datadist.cli.route.calls.Legs`."""
        if is_for_decode_alone(call.fields):
            with call.decode.busy():
                return await decode(call, pull_body(call.fields, {}))
        transfer_id = uuid.uuid4().hex
        leg = DecodeLeg(call.decode)
        with call.decode.busy():
            prefilling = self._start_prefill(call, transfer_id)
            opening = asyncio.create_task(_open(call, leg, transfer_id))
            try:
                await asyncio.wait({prefilling, opening}, return_when=asyncio.FIRST_COMPLETED)
                if not opening.done():
                    prefilling.result()  # raises why it failed, if it did
                response = await leg.relay(call, await opening)
            except BaseException:
                await _end(prefilling, opening)
                raise
            finally:
                leg.close()
        if call.outcome is not Outcome.FINISHED:
            prefilling.cancel()
        elif not prefilling.done():
            asyncio.get_running_loop().call_later(_LEFT_ALONE_S, prefilling.cancel)
        return response

    async def close(self) -> None:
        """End what still runs."""
        await _end(*self._prefill_legs)

    def _start_prefill(self, call: Call, transfer_id: str) -> asyncio.Task[None]:
        engine = call.prefill
        engine.in_flight += 1
        leg = asyncio.create_task(_prefill(call, engine, transfer_id))
        self._prefill_legs.add(leg)

        def over(_: asyncio.Task[None]) -> None:
            engine.in_flight -= 1
            self._prefill_legs.discard(leg)
            error = None if leg.cancelled() else leg.exception()
            if error and call.reply:
                log.error("request %s: %s; D's answer goes on", call.id, error)

        leg.add_done_callback(over)
        return leg


async def _open(call: Call, leg: DecodeLeg, transfer_id: str) -> aiohttp.ClientResponse:
    description = await call.prefill.describe(call.headers)
    return await leg.open(call, decode_body(call.fields, transfer_id, description))


async def _prefill(call: Call, engine: Engine, transfer_id: str) -> None:
    try:
        await engine.describe(call.headers)  # D needs it: without it this leg would be in vain
        body = prefill_body(call.fields, transfer_id, chat=call.chat)
        engine.learn(await engine.fetch("POST", call.path, call.headers, body))
    except EngineError:
        engine.forget()
        raise


async def _end(*legs: asyncio.Task[Any]) -> None:
    for leg in legs:
        leg.cancel()
    await asyncio.gather(*legs, return_exceptions=True)
