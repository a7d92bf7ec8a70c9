"""A router in pull mode in front of stand-ins, what its tests send, and what the decode engine then gets."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from route_kit import PROMPT, WAIT_S, routing
from route_model import LEASE, PROMPT_IDS, decodes, prefills

if TYPE_CHECKING:
    from collections.abc import Generator

    from route_kit import Engine, Engines, Leg, Route

ASKED = {**PROMPT, "max_tokens": 4, "temperature": 0}
STREAM = {**ASKED, "stream": True}
BEHIND = [*PROMPT_IDS, 21]
"""The prompt, and the first token behind it."""
TAKE = {"remote": "p", "llm_datadist": {"engine": "p", "tokens": 3, "blocks": [[1, 2]], "lease": LEASE}}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "stream": True}


@contextlib.contextmanager
def pulling(engines: Engines, *, decode_count: int = 1) -> Generator[tuple[Route, Engine, list[Engine]], None, None]:
    """A router in front of one P and some D."""
    prefill, several = engines.prefill(), [engines.decode() for _ in range(decode_count)]
    prefills(prefill)
    for each in several:
        decodes(each)
    with routing([prefill], several, "--mode", "pull") as route:
        yield route, prefill, several


def next_leg(engine: Engine) -> Leg:
    return engine.legs.get(timeout=WAIT_S)
