"""What comes in the middle of a transfer: Ctrl-C, signal handlers that transfer or change lists, storms of signals.

Python looks for signals when a function begins and after a call of C. ``at_step`` does something at exactly one such
step, so that tests can try all of them, in any thread, and need no luck.
"""

from __future__ import annotations

import itertools
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

from few_kit import (
    BLOCK_BYTES,
    BLOCKS,
    METHODS,
    MODELS,
    OK,
    PATHS,
    SOURCE,
    TARGET,
    TENSORS,
    attempt,
    blocks_of,
    make_pair,
    moved,
    same,
    sides_of,
    warm,
)
from llm_datadist import BlocksCacheKey, LLMException, LLMStatusCode
from peers import GUARD, POISON, TIMEOUT_S, Node, Peer, Peers
from test_faults import go_on, stop

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = 5_000
"""More than any call here has."""
both_methods = pytest.mark.parametrize("method", METHODS)


def at_step(number: int, action: Callable[[], object], call: Callable[[], object]) -> bool:
    """Call; ``action`` runs at one of its steps in this thread, the first being 1. Whether there was such a step."""
    left = number

    def look(_frame: object, event: str, _arg: object) -> None:
        nonlocal left
        left -= event in ("call", "c_return")
        if not left:
            sys.setprofile(None)
            action()

    try:
        sys.setprofile(look)
        call()
    finally:
        sys.setprofile(None)
    return left <= 0


def call_of(node: Node, method: str, cluster_id: int, *args: Any, **kwargs: Any) -> Callable[[], object]:
    """In the child: a transfer between the caches that are meant for it."""
    theirs, ours = sides_of(method)
    key, cache = BlocksCacheKey(cluster_id, MODELS[theirs]), node.caches[ours]
    return lambda: getattr(node.manager, method)(key, cache, *args, **kwargs)


# Ctrl-C


def left_behind(node: Node, cluster_id: int) -> dict[str, int]:
    """In the child: what a transfer that has ended must not leave."""
    core = node.manager._engine._core
    path = core.table.get(cluster_id)._route.path
    pools = (path._large, path._small) if path.name == "tcp" else ()
    return {
        "tickets": len(core.table.get(cluster_id).running),
        "holds": sum(len(entry.holders) for entry in core.catalogue.all()),
        "pins": sum(entry.pins for entry in core.catalogue.all()),
        "leases": len(core.regions._leases),
        "used connections": sum(len(pool._used) for pool in pools),
    }


def interrupt_at_all_steps(node: Node, method: str, cluster_id: int, stride: int, *args: Any, **kwargs: Any) -> Any:
    """In the child: one transfer for each step that it has, interrupted there; how many, and what any of them left."""
    call = call_of(node, method, cluster_id, *args, **kwargs)
    wrong = []
    before = left_behind(node, cluster_id)

    def interrupt() -> None:
        raise KeyboardInterrupt

    for step in range(1, STEPS, stride):
        try:
            if not at_step(step, interrupt, call):
                return step, wrong
            wrong.append((step, "went on"))
        except KeyboardInterrupt as e:
            import traceback

            tb = traceback.extract_tb(e.__traceback__)
        except LLMException as e:
            wrong.append((step, str(e)))
        after = left_behind(node, cluster_id)
        if after != before:
            wrong.append((step, after, "".join(traceback.format_list(tb[-8:-2]))))
            before = after
    return STEPS, wrong
