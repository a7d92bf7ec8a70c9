#!/usr/bin/env python3
"""Prefill and decode apart with vLLM: what it adds to the time to first token, and how long KV takes to move.

A single engine, a pair with this library and a pair with a tuned NixlConnector live at a time. Every prompt goes to
each of them in turns; each round has new prompts, so that no prefix cache helps. Pulls go through
``llm-datadist route``, which gives the client the prefill engine's first token; the pair with NixlConnector is asked
directly, without a router's time. Engines that were started alike differ in computing a long prompt by more than what
is added, so all but computing it, by the metrics of the engine that does, is told by itself; ``--thin`` has little to
compute; and ``--same N`` asks instead each pair and its own prefill engine alone in turns, N times, each with a new
prompt of 1,500 tokens, so that one engine computes both. Moving KV is timed often once more, by itself, with prompts
that the prefill engines have computed.

Run it with the Python of docs/vllm.md, with NIXL added, on a machine that does nothing else:

    .venv-vllm/bin/pip install -q --no-deps nixl==1.5.1 nixl-cu12==1.5.1
    .venv-vllm/bin/python benchmarks/serving/run.py
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import re
import statistics
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

_HERE: Final = Path(__file__).resolve().parent
sys.path.insert(0, str(_HERE.parents[1] / "examples" / "vllm_pd"))

from client import Client
from engines import Engine, free_port, ours, stop_on_signals
from model import prepare
from prompts import LONG, SHORT, prompts
from routers import Router, our_router
from thin_model import thin

if TYPE_CHECKING:
    from collections.abc import Iterable

    from client import Answer

SINGLE, AGAIN = "single", "single, same prompt again"
PULL, PUSH, NIXL = "pull", "push", "nixl"
TOKENS: Final = 8
KINDS: Final = {SHORT: "5 to 16 tokens", LONG: "1,500 tokens"}
SECONDS: Final = {
    PULL: "vllm:llm_datadist_transfer_seconds",
    PUSH: "vllm:llm_datadist_transfer_seconds",
    NIXL: "vllm:nixl_xfer_time_seconds",
}
_IDLE_S: Final = 10.0
_TICKS: Final = os.sysconf("SC_CLK_TCK")


@dataclasses.dataclass
class Contestant:
    """Who answers prompts: one engine, or a prefill and a decode engine."""

    name: str
    engines: list[Engine]
    remote: Any = None
    """For pushes: what the prefill engine tells about itself."""
    router: Router | None = None
    """For pulls."""

    def start(self, logs: Path, dtype: str, *, tcp: bool) -> None:
        """Start the engines, one by one, and what is in front of them."""
        for engine in self.engines:
            environment = _environment(tcp=tcp) if self.name == NIXL else {}
            # A decode engine that had a prompt in its prefix cache would not ask for its KV again.
            flags = ["--no-enable-prefix-caching"] if engine is not self.engines[0] else []
            engine.start("--dtype", dtype, *flags, environment=environment).wait()
        if self.name == PULL:
            self.router = our_router([self.engines[0].url], [self.engines[1].url], logs, PULL)

    def stop(self) -> None:
        """Stop them."""
        if self.router is not None:
            self.router.stop()
        for engine in self.engines:
            engine.stop()

    async def complete(self, client: Client, text: str, *, alone: bool = False) -> Answer:
        """Answer a prompt; ``alone`` with the first engine only."""
        if alone:
            return await client.complete(self.engines[0].url, text, TOKENS)
        prefill, decode = self.engines[0].url, self.engines[-1].url
        if self.name == PUSH:
            self.remote = self.remote or await client.describe(prefill)
            return await client.push(decode, prefill, self.remote, text, TOKENS)
        if self.router is not None:
            return await client.complete(self.router.url, text, TOKENS)
        return await client.complete(decode, text, TOKENS, "" if self.name == SINGLE else prefill)

    def moved(self) -> tuple[float, float]:
        """Seconds and number of all transfers, as vLLM's metrics tell."""
        if self.name not in SECONDS:
            return 0.0, 0.0
        return _observed(self.engines[-1], SECONDS[self.name])

    def computed(self) -> float:
        """Seconds to the first tokens of all prompts, as the engine that computes them tells."""
        return _observed(self.engines[0], "vllm:time_to_first_token_seconds")[0]


def _observed(engine: Engine, metric: str) -> tuple[float, float]:
    """Sum and number of what a histogram of vLLM has seen."""
    with urllib.request.urlopen(f"{engine.url}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found = {"sum": 0.0, "count": 0.0}
    for name, value in re.findall(rf"^{metric}_(sum|count){{.*}} (\S+)$", text, re.MULTILINE):
        found[name] += float(value)
    return found["sum"], found["count"]


Samples = dict[tuple[str, str], list[float]]


@dataclasses.dataclass
class Results:
    """Seconds, by kind of prompt and contestant."""

    first: Samples = dataclasses.field(default_factory=dict)
    """From the request to the first token."""
    beside: Samples = dataclasses.field(default_factory=dict)
    """The same, without what the engine that computes the prompt says it takes."""
    second: Samples = dataclasses.field(default_factory=dict)
    """From the request to the second token."""
    moved: Samples = dataclasses.field(default_factory=dict)
    """Of transfers."""
    again: Samples = dataclasses.field(default_factory=dict)
    """Of more transfers, of prompts that the prefill engine has in its prefix cache."""


@dataclasses.dataclass
class Turn:
    """A prompt for a pair and one for its prefill engine alone, in seconds."""

    first: float
    """What the pair took longer to the first token."""
    beside: float
    """The same, without what the prefill engine says it takes to compute the prompt."""
    moved: float
    """What moving the KV took, as vLLM logs it; 0 if nothing was moved."""


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--again", type=int, default=20, help="how often long prompts are then moved once more")
    parser.add_argument("--same", type=int, metavar="N", help="compare each pair with its own prefill engine, N times")
    parser.add_argument("--tcp", action="store_true", help="all transfers over TCP on loopback")
    parser.add_argument("--with", dest="names", nargs="+", choices=(PULL, PUSH, NIXL), default=(PULL, NIXL))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--thin", action="store_true", help="a model of the same KV cache, and little to compute")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "llm-datadist-vllm-pd")
    options = parser.parse_args()
    if options.same is not None and options.same <= 1:
        parser.error(f"--same {options.same}: a scatter needs two turns or more")
    stop_on_signals()
    model = prepare(options.folder / "model")
    if options.thin:
        model = thin(model)
    logs = options.folder / "serving"
    logs.mkdir(parents=True, exist_ok=True)
    names = options.names if options.same else (SINGLE, *options.names)
    contestants = [_contestant(name, model, logs, tcp=options.tcp) for name in names]
    try:
        for each in contestants:
            each.start(logs, options.dtype, tcp=options.tcp)
        if options.same:
            _report_same(asyncio.run(_measure_same(contestants, model, options.same)))
        else:
            _report(asyncio.run(_measure(contestants, model, options.rounds, options.again)), options.names)
        _report_idle(contestants)
    finally:
        for each in contestants:
            each.stop()
    return 0


def _contestant(name: str, model: Path, logs: Path, *, tcp: bool) -> Contestant:
    if name == SINGLE:
        return Contestant(name, [Engine(name, model, logs)])
    roles = ("kv_producer", "kv_consumer")
    if name == NIXL:
        transfer = {"kv_connector": "TunedNixlConnector", "kv_connector_module_path": "tuned_nixl"}
        return Contestant(
            name, [Engine(f"{name}-{each}", model, logs, {**transfer, "kv_role": each}) for each in roles]
        )
    extra = {"mode": name, **({"config": {"paths": "tcp"}} if tcp else {})}
    return Contestant(name, [Engine(f"{name}-{role}", model, logs, ours(role, **extra)) for role in roles])


def _environment(*, tcp: bool) -> dict[str, str]:
    found = {"PYTHONPATH": str(_HERE), "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
    return {**found, "UCX_TLS": "tcp"} if tcp else found


async def _measure(contestants: list[Contestant], model: Path, rounds: int, again: int) -> Results:
    client = Client()
    found = Results()
    try:
        for turn in range(rounds + 1):  # the first one warms up
            texts = prompts(model, seed=turn)
            for kind, several in ((SHORT, texts[SHORT]), (LONG, texts[LONG][-2:])):
                for at, text in enumerate(several):
                    first = at % len(contestants)
                    for each in contestants[first:] + contestants[:first]:
                        before, computed = each.moved(), each.computed()
                        answer = await each.complete(client, text)
                        _note(found.beside, turn, kind, each.name, answer.ttft - each.computed() + computed)
                        _note(found.first, turn, kind, each.name, answer.ttft)
                        _note(found.second, turn, kind, each.name, answer.second)
                        _note(found.moved, turn, kind, each.name, await _grown(each, before))
                    _note(found.first, turn, kind, AGAIN, (await contestants[0].complete(client, text)).ttft)
            sys.stderr.write(f"\rround {turn} of {rounds}")
        sys.stderr.write("\n")
        for turn in range(again + 1):
            for text in texts[LONG][-2:]:
                for each in contestants[1:]:
                    before = each.moved()
                    await each.complete(client, text)
                    _note(found.again, turn, LONG, each.name, await _grown(each, before))
    finally:
        await client.close()
    return found


async def _measure_same(contestants: list[Contestant], model: Path, times: int) -> dict[str, list[Turn]]:
    client = Client()
    found: dict[str, list[Turn]] = {each.name: [] for each in contestants}
    try:
        for turn in range(-1, times):  # the first one warms up
            texts = [prompts(model, seed=2 * turn + each)[LONG][-1] for each in (2, 3)]
            for each in contestants:
                took = {}
                moved = each.moved()
                for alone in (True, False) if turn % 2 else (False, True):
                    computed = each.computed()
                    ttft = (await each.complete(client, texts[alone], alone=alone)).ttft
                    took[alone] = ttft, ttft - each.computed() + computed
                if turn >= 0:
                    first, beside = (a - b for a, b in zip(took[False], took[True], strict=True))
                    found[each.name].append(Turn(first, beside, await _grown(each, moved)))
            sys.stderr.write(f"\rturn {turn + 1} of {times}")
        sys.stderr.write("\n")
    finally:
        await client.close()
    return found


def _note(samples: Samples, turn: int, kind: str, name: str, value: float) -> None:
    if turn and value:
        samples.setdefault((kind, name), []).append(value)


async def _grown(contestant: Contestant, before: tuple[float, float]) -> float:
    """Seconds of the transfer since ``before``; 0 if there was none."""
    for _ in range(20 if contestant.name in SECONDS else 0):
        seconds, count = contestant.moved()
        if count > before[1]:
            return (seconds - before[0]) / (count - before[1])
        await asyncio.sleep(0.05)
    return 0.0


def _report(found: Results, names: Iterable[str]) -> None:
    for kind, what in KINDS.items():
        alone = found.first[kind, SINGLE]
        print(f"TTFT, {what}: single {_shown(alone)} ms, n={len(alone)}")
        print(f"  {AGAIN}: {_shown(found.first[kind, AGAIN])} ms")
        print(f"  {SINGLE}, all but computing the prompt: {_shown(found.beside[kind, SINGLE])} ms")
        for name in names:
            first, second = (_added(each, kind, name) for each in (found.first, found.second))
            moved = _shown(found.moved[kind, name])
            print(f"  {name} adds {_shown(first)} ms, to the second token {_shown(second)} ms; moving KV {moved} ms")
            print(f"  {name}, all but computing the prompt: {_shown(found.beside[kind, name])} ms")
    for (_, name), moved in found.again.items():
        print(f"Moving KV of 1,500 tokens that are computed already, {name}: {_shown(moved)} ms, n={len(moved)}")


def _report_same(found: dict[str, list[Turn]]) -> None:
    for name, turns in found.items():
        print(f"TTFT, {KINDS[LONG]}, {name} adds to its prefill engine alone, n={len(turns)}:")
        parts = {"all": [turn.first for turn in turns], "all but computing it": [turn.beside for turn in turns]}
        for what, seconds in parts.items():
            mean, error = statistics.fmean(seconds), statistics.stdev(seconds) / len(seconds) ** 0.5
            print(f"  {what}: {_shown(seconds)} ms; mean {1e3 * mean:.1f}, standard error {1e3 * error:.1f}")
        moved = [turn.moved for turn in turns if turn.moved]
        print(f"  moving KV: {_shown(moved)} ms, n={len(moved)}")


def _added(samples: Samples, kind: str, name: str) -> list[float]:
    """What the same prompts took longer than with a single engine."""
    return [a - b for a, b in zip(samples[kind, name], samples[kind, SINGLE], strict=True)]


def _shown(seconds: list[float]) -> str:
    low, middle, high = statistics.quantiles([1e3 * each for each in seconds], n=4)
    return f"{middle:.2f} ({low:.2f}..{high:.2f})"


def _report_idle(contestants: Iterable[Contestant]) -> None:
    print(f"CPU of the busiest thread of idle engines, in {_IDLE_S:g} s:")
    for each in contestants:
        before = _threads(each.engines)
        time.sleep(_IDLE_S)
        after = _threads(each.engines)
        used = {name: 100 * (ticks - before.get(name, 0)) / _TICKS / _IDLE_S for name, ticks in after.items()}
        name = max(used, key=lambda key: used[key])
        print(f"  {each.name}: {used[name]:.1f} % ({name}), {len(after)} threads")


def _threads(engines: Iterable[Engine]) -> dict[str, int]:
    """Ticks of every thread of the engines' processes."""
    sessions = {str(engine.pid) for engine in engines}
    found = {}
    for path in Path("/proc").glob("[0-9]*/task/[0-9]*/stat"):
        try:
            text = path.read_text()
        except OSError:  # it has ended
            continue
        fields = text[text.rindex(")") + 2 :].split()
        if fields[3] in sessions:
            found[f"{path.parts[4]} {text[text.index('(') + 1 : text.rindex(')')]}"] = int(fields[11]) + int(fields[12])
    return found


if __name__ == "__main__":
    raise SystemExit(main())
