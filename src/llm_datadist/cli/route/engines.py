"""The engines behind the router: how they are asked, chosen and passed over."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
import ssl
import time
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

import aiohttp

from llm_datadist.cli.route.messages import (
    REQUEST_ID,
    describe_body,
    description_in,
    end_to_end,
    error_message,
    first_model,
    is_leased,
    longest_context,
    params_in,
)
from llm_datadist.utils import log

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from multidict import CIMultiDict

CONNECT_S: Final = 5.0
_KEEP_ALIVE_S: Final = 2.0
"""Less than the 5 s after which vLLM closes an idle connection: a request must not meet that moment."""
_HEALTH_S: Final = 5.0
_REST_S: Final = 0.5
"""How long an engine that refused a connection is passed over; each further time twice as long."""
_MOST_REST_S: Final = 30.0
_NOT_LET_IN: Final = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
_AUTOMATIC: Final = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
"""Headers that aiohttp would add: those of the client are passed on instead."""


class Role(enum.Enum):
    """What an engine is for."""

    PREFILL = "prefill"
    DECODE = "decode"


class EngineError(Exception):
    """An engine has failed a request; the text says which and why."""

    def __init__(self, engine: Engine, reason: str, status: HTTPStatus, *, elsewhere: bool = True) -> None:
        super().__init__(f"{engine.role.value} engine {engine.url} {reason}")
        self.engine: Engine = engine
        self.reason: str = reason
        self.status: int = status.value  # whose text is the number in Python 3.10, too
        self.elsewhere: bool = elsewhere
        """Whether another engine may do better."""

    def again(self) -> EngineError:
        """The same for another request, without what a raised one holds: the frames of its request."""
        return EngineError(self.engine, self.reason, HTTPStatus(self.status), elsewhere=self.elsewhere)


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer."""

    status: int
    headers: CIMultiDict[str]
    """Without those of the connection."""
    body: bytes


class RefusedError(Exception):
    """An engine has refused a request as the client's fault (HTTP 4xx); the text says which and why."""

    def __init__(self, engine: Engine, answer: Answer) -> None:
        super().__init__(str(engine.failed(answer)))
        self.answer = answer


def open_session(timeout_s: float) -> aiohttp.ClientSession:
    """What connections to all engines come from; ``timeout_s`` bounds each request from begin to end."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
        timeout=aiohttp.ClientTimeout(total=timeout_s, connect=CONNECT_S),
        cookie_jar=aiohttp.DummyCookieJar(),  # cookies are between the client and the engine
        skip_auto_headers=_AUTOMATIC,
        auto_decompress=False,
    )


class Engine:
    """One vLLM server."""

    def __init__(self, role: Role, url: str, session: aiohttp.ClientSession) -> None:
        self.role: Role = role
        self.url: str = url
        self.in_flight: int = 0
        """Legs that run; of a D also those that wait for P."""
        self.first_tokens: int = 0
        """How many it has computed that were clients' first ones."""
        self._session = session
        self._refusals, self._rests_until = 0, 0.0
        self._context: int | None = None
        self._description: bytes | None = None
        self._describing = asyncio.Lock()
        self._no_description: EngineError | None = None
        """Why the last attempt to get it has failed."""

    @property
    def resting(self) -> bool:
        """Whether it refused a connection lately."""
        return time.monotonic() < self._rests_until

    @property
    def timeout_s(self) -> float:
        """What bounds each request to it, from its begin to the end of the answer."""
        return self._session.timeout.total or 0

    @property
    def refuses(self) -> bool:
        """Whether it refused the last connection."""
        return self._refusals > 0

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Count a leg."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    async def open(
        self, method: str, path: str, headers: CIMultiDict[str] | None = None, body: bytes | None = None
    ) -> aiohttp.ClientResponse:
        """Ask, and wait for the begin of the answer, whatever it is. It is to be closed.

        Raises:
            EngineError: there is none.
        """
        with self._blamed():
            response = await self._session.request(
                method, self.url + path, headers=headers, data=body, allow_redirects=False
            )
        self._refusals, self._rests_until = 0, 0.0
        return response

    async def next_chunk(self, response: aiohttp.ClientResponse) -> bytes:
        """What has come of the body, as soon as it comes; empty at its end.

        Raises:
            EngineError: it ends too early.
        """
        with self._blamed():
            return await response.content.readany()

    async def read(self, response: aiohttp.ClientResponse) -> Answer:
        """The whole answer.

        Raises:
            EngineError: it ends too early.
        """
        with self._blamed():
            return Answer(response.status, end_to_end(response.headers), await response.read())

    async def fetch(
        self, method: str, path: str, headers: CIMultiDict[str] | None = None, body: bytes | None = None
    ) -> Answer:
        """Ask for a whole answer.

        Raises:
            EngineError: there is none, or the engine has failed (HTTP 5xx).
            RefusedError: the client is at fault (HTTP 4xx).
        """
        with contextlib.closing(await self.open(method, path, headers, body)) as response:
            answer = await self.read(response)
        if HTTPStatus.BAD_REQUEST <= answer.status < HTTPStatus.INTERNAL_SERVER_ERROR:
            raise RefusedError(self, answer)
        if answer.status >= HTTPStatus.MULTIPLE_CHOICES:
            raise self.failed(answer)
        return answer

    def failed(self, answer: Answer) -> EngineError:
        """What such an answer means, unless it is the client's fault."""
        reason = f"answers HTTP {answer.status}: {error_message(answer.body)}"
        return EngineError(self, reason, HTTPStatus.BAD_GATEWAY)

    async def check(self) -> str | None:
        """What is wrong with its health; None if nothing is."""
        try:
            await asyncio.wait_for(self.fetch("GET", "/health"), _HEALTH_S)
        except EngineError as error:
            return error.reason
        except RefusedError as error:
            return f"answers HTTP {error.answer.status}"
        except asyncio.TimeoutError:
            return f"does not answer within {_HEALTH_S:g} s"
        return None

    async def context(self, headers: CIMultiDict[str]) -> int:
        """How many tokens it takes for one request, asked for once; 0 if it does not tell.

        Raises:
            EngineError: it fails.
            RefusedError: it does not let the client in.
        """
        if self._context is None:
            headers = headers.copy()
            headers[REQUEST_ID] += "-models"
            try:
                self._context = longest_context((await self.fetch("GET", "/v1/models", headers)).body)
            except RefusedError as error:
                if error.answer.status in _NOT_LET_IN:
                    raise
                self._context = 0
        return self._context

    async def describe(self, headers: CIMultiDict[str]) -> bytes:
        """What D must know of this P, asked for once; ``headers`` are those of the client.

        Raises:
            EngineError: P fails, or has no description.
            RefusedError: P does not let the client in.
        """
        before = self._no_description
        async with self._describing:
            if self._description is None:
                if self._no_description is not before and self._no_description:
                    raise self._no_description.again()  # it has failed while this request waited for the same
                try:
                    self._description = await self._ask_for_description(headers)
                except EngineError as error:
                    self._no_description = error.again()
                    raise
            return self._description

    async def _ask_for_description(self, headers: CIMultiDict[str]) -> bytes:
        headers = headers.copy()
        headers["Content-Type"] = "application/json"
        headers[REQUEST_ID] += "-describe"
        try:
            model = first_model((await self.fetch("GET", "/v1/models", headers)).body)
            if model is None:
                raise EngineError(self, "names no model in its /v1/models", HTTPStatus.BAD_GATEWAY)
            answer = await self.fetch("POST", "/v1/completions", headers, describe_body(model))
        except RefusedError as error:
            if error.answer.status in _NOT_LET_IN:
                raise
            raise self.failed(error.answer) from error
        return self._description_in(answer)

    def learn(self, answer: Answer) -> None:
        """Keep the description that this answer of a leg has.

        Raises:
            EngineError: it has none.
        """
        description = self._description_in(answer)
        if self._description not in {None, description}:
            log.info("prefill engine %s has a new description: it was restarted", self.url)
        self._description = description

    def forget(self) -> None:
        """Ask again what it is, before that is used."""
        self._description = self._context = None

    def _description_in(self, answer: Answer) -> bytes:
        description = description_in(params_in(answer.body))
        if description is None:
            reason = (
                "does not run LLMDataDistConnector in push mode: its answer has no"
                ' kv_transfer_params["llm_datadist"]; see its --kv-transfer-config'
            )
            raise EngineError(self, reason, HTTPStatus.BAD_GATEWAY)
        if is_leased(description):
            reason = (
                'runs LLMDataDistConnector in pull mode: start it with "mode": "push", or the router with --mode pull'
            )
            raise EngineError(self, reason, HTTPStatus.BAD_GATEWAY)
        return description

    @contextlib.contextmanager
    def _blamed(self) -> Iterator[None]:
        """Failures in here are the engine's."""
        try:
            yield
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            raise self._failure(error) from error

    def _failure(self, error: aiohttp.ClientError | asyncio.TimeoutError) -> EngineError:
        if isinstance(error, aiohttp.ServerTimeoutError):  # of connecting: no other one is set
            self._rest()
            reason = f"cannot be reached: no connection within {CONNECT_S:g} s"
            return EngineError(self, reason, HTTPStatus.SERVICE_UNAVAILABLE)
        if isinstance(error, aiohttp.ClientConnectorError):
            self._rest()
            return EngineError(self, f"cannot be reached: {cause_of(error.os_error)}", HTTPStatus.SERVICE_UNAVAILABLE)
        if isinstance(error, asyncio.TimeoutError):
            reason = f"has not ended its answer within {self.timeout_s:g} s (--timeout)"
            return EngineError(self, reason, HTTPStatus.GATEWAY_TIMEOUT, elsewhere=False)
        reason = f"has broken off: {str(error) or type(error).__name__}"
        return EngineError(self, reason, HTTPStatus.BAD_GATEWAY)

    def _rest(self) -> None:
        if self.resting:  # another connection that was tried at the same time
            return
        self._rests_until = time.monotonic() + min(_REST_S * 2**self._refusals, _MOST_REST_S)
        self._refusals = min(self._refusals + 1, 16)


def cause_of(error: OSError) -> str:
    """The system's own words: asyncio puts others around them."""
    if error.errno and error.errno > 0 and not isinstance(error, ssl.SSLError):  # whose numbers are its own
        return os.strerror(error.errno)
    return error.strerror or str(error)


class Pool:
    """The engines of one role."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = engines
        self._turn = 0

    def left(self, failed: Collection[Engine]) -> bool:
        """Whether there is one that has not failed."""
        return any(engine not in failed for engine in self.engines)

    def choose(self, failed: Collection[Engine] = ()) -> Engine:
        """Of those that are left the one with the fewest legs, in turn; one that rests only if all do."""
        in_turn = [*self.engines[self._turn :], *self.engines[: self._turn]]
        candidates = [engine for engine in in_turn if engine not in failed]
        chosen = min(candidates, key=lambda engine: (engine.resting, engine.in_flight))
        self._turn = (self.engines.index(chosen) + 1) % len(self.engines)
        return chosen

    async def check(self) -> list[dict[str, object]]:
        """The health of each, in words for operators."""
        problems = await asyncio.gather(*(engine.check() for engine in self.engines))
        return [
            {"url": engine.url, "ok": problem is None, "reason": problem}
            for engine, problem in zip(self.engines, problems, strict=True)
        ]
