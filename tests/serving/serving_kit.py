"""A prefill and a decode engine of vLLM for tests, and what their metrics and processes tell."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

from client import PREFILL, Client
from engines import Engine, ours

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import Any, TypeVar

    from client import Answer

    T = TypeVar("T")

LEASE_S = 4.0
DECODES = 8
"""Requests that the decode engine has in hand at a time."""
TEST_S = 300.0


def run(work: Callable[[Client], Awaitable[T]]) -> T:
    """Do something with a client, in bounded time."""

    async def bounded() -> T:
        client = Client()
        try:
            return await asyncio.wait_for(work(client), TEST_S)
        finally:
            await client.close()

    return asyncio.run(bounded())


class Pair:
    """One prefill and one decode engine."""

    def __init__(self, model: Path, logs: Path, mode: str) -> None:
        self.mode = mode
        extra = {"mode": mode, "lease_seconds": LEASE_S}
        self.prefill = Engine(f"{mode}-prefill", model, logs, ours("kv_producer", **extra))
        self.decode = Engine(f"{mode}-decode", model, logs, ours("kv_consumer", policy="recompute", **extra))
        self._remote: Any = None

    def start(self) -> None:
        """Start both."""
        for engine in (self.prefill, self.decode):
            self.start_one(engine)

    def start_one(self, engine: Engine, *options: str) -> None:
        """Start one of them, again if it was killed."""
        most = ("--max-num-seqs", str(DECODES)) if engine is self.decode else ()
        engine.start("--dtype", "float32", *most, *options).wait()
        self._remote = None

    def stop(self) -> None:
        """Stop both."""
        for engine in (self.decode, self.prefill):
            engine.stop()

    async def complete(self, client: Client, prompt: str, count: int = 4) -> Answer:
        """Take a prompt through both engines."""
        if self.mode == "pull":
            return await client.complete(self.decode.url, prompt, count, self.prefill.url)
        self._remote = self._remote or await client.describe(self.prefill.url)
        return await client.push(self.decode.url, self.prefill.url, self._remote, prompt, count)


async def begin(client: Client, prefill: Engine, prompt: str) -> dict[str, Any]:
    """The first leg of a pull: what it tells the decode engine."""
    body = {"model": "model", "prompt": prompt, "max_tokens": 1, "temperature": 0, "kv_transfer_params": PREFILL}
    answer = await client.post(prefill.url, body)
    found: dict[str, Any] = answer["kv_transfer_params"]
    return found


def metric(engine: Engine, name: str) -> float:
    """The sum of a metric over its labels."""
    with urllib.request.urlopen(f"{engine.url}/metrics", timeout=20) as answer:
        text = answer.read().decode()
    return sum(float(value) for value in re.findall(rf"^vllm:{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))


def resources(engine: Engine) -> tuple[int, int]:
    """File descriptors and threads of an engine's processes."""
    descriptors = threads = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getsid(int(process.name)) == engine.pid:
                descriptors += len(list((process / "fd").iterdir()))
                threads += len(list((process / "task").iterdir()))
    return descriptors, threads
