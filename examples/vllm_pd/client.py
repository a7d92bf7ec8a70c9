"""A client that takes requests through prefill and decode, as a router would, and measures the time to first token."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
import uuid
from typing import TYPE_CHECKING, Any

import aiohttp

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

KEEP_ALIVE_S = 2.0
"""Less than the 5 s after which vLLM closes an idle connection: a request must not meet that moment."""
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


@dataclasses.dataclass
class Answer:
    """What came back."""

    tokens: list[int]
    text: str
    ttft: float
    """Seconds from the request to the first token."""
    second: float
    """The same to the second token, 0 if there is none."""
    seconds: float


class Client:
    """Keeps its connections."""

    def __init__(self) -> None:
        connector = aiohttp.TCPConnector(keepalive_timeout=KEEP_ALIVE_S)
        self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=120))

    async def close(self) -> None:
        """Close them."""
        await self._session.close()

    async def post(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        """One answer, complete."""
        async with self._session.post(f"{url}/v1/completions", json=body) as response:
            if response.status != 200:
                raise RuntimeError(f"{url}: HTTP {response.status}: {await response.text()}")
            answer: dict[str, Any] = await response.json()
            return answer

    async def stream(self, url: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The events of a streamed answer."""
        async with self._session.post(f"{url}/v1/completions", json={**body, "stream": True}) as response:
            if response.status != 200:
                raise RuntimeError(f"{url}: HTTP {response.status}: {await response.text()}")
            async for line in response.content:
                if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                    yield json.loads(line[6:])

    async def complete(self, url: str, prompt: Any, count: int, prefill: str = "", **more: Any) -> Answer:
        """Complete a prompt greedily, after a prefill elsewhere if told."""
        body = {"model": "model", "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True, **more}
        body["return_token_ids"] = True
        begin = time.perf_counter()
        if prefill:
            first = await self.post(prefill, {**body, "max_tokens": 1, "kv_transfer_params": dict(PREFILL)})
            body["kv_transfer_params"] = first["kv_transfer_params"]
        return await self._collect(url, body, begin)

    async def push(self, decode: str, prefill: str, remote: Any, prompt: Any, count: int) -> Answer:
        """Run both legs at once, for a push from ``prefill``, which has described itself as ``remote``."""
        transfer = uuid.uuid4().hex
        body = {"model": "model", "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
        body["return_token_ids"] = True
        leg = {**body, "max_tokens": 1, "kv_transfer_params": {**PREFILL, "transfer_id": transfer}}
        begin = time.perf_counter()
        task = asyncio.ensure_future(self.post(prefill, leg))
        params = {"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": transfer, "llm_datadist": remote}
        answer = await self._collect(decode, {**body, "kv_transfer_params": params}, begin)
        await task
        return answer

    async def describe(self, prefill: str) -> Any:
        """What a prefill engine tells about itself."""
        params = {**PREFILL, "describe": True}
        answer = await self.post(
            prefill, {"model": "model", "prompt": [1], "max_tokens": 1, "kv_transfer_params": params}
        )
        return answer["kv_transfer_params"]["llm_datadist"]

    async def _collect(self, url: str, body: dict[str, Any], begin: float) -> Answer:
        ttft = second = 0.0
        tokens: list[int] = []
        text = ""
        async for event in self.stream(url, body):
            if "error" in event:
                raise RuntimeError(str(event))
            for choice in event["choices"]:
                if not ttft:
                    ttft = time.perf_counter() - begin
                tokens += choice.get("token_ids") or []
                text += choice["text"]
                if not second and len(tokens) > 1:
                    second = time.perf_counter() - begin
        return Answer(tokens, text, ttft, second, time.perf_counter() - begin)
