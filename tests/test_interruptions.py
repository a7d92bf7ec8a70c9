"""What comes in the middle of a transfer: Ctrl-C, signal handlers that transfer or change lists, storms of signals.

Python looks for signals when a function begins and after calls of C. ``at_step`` does something at exactly one such
step, so that tests can try all of them, in any thread, and need no luck. Steps of the module ``threading`` are left
out: its own locks do not survive Ctrl-C.
"""

from __future__ import annotations

import contextlib
import gc
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from expect import expect
from llm_datadist import BlocksCacheKey, LLMException, LLMStatusCode
from llm_datadist.paths import one_sided, tcp
from peers import GUARD, POISON, Node, Peers
from short_kit import (
    BLOCKS,
    METHODS,
    MODELS,
    OK,
    PATHS,
    SOURCE,
    TARGET,
    TENSORS,
    blocks_of,
    make_pair,
    moved,
    same,
    sides_of,
)
from stopping import go_on, stop

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

STEPS = 5_000
"""More than any call here has."""
BIG_BLOCKS = 64
both_methods = pytest.mark.parametrize("method", METHODS)


def at_step(number: int, action: Callable[[], object], call: Callable[[], object]) -> bool:
    """Call; ``action`` runs at one of its steps in this thread, the first being 1. Whether there was such a step."""
    left = number

    def look(frame: FrameType, event: str, _arg: object) -> None:
        nonlocal left
        left -= event in ("call", "c_return") and frame.f_globals is not vars(threading)
        if not left:
            sys.setprofile(None)
            action()

    collecting = gc.isenabled()
    gc.disable()  # callbacks of weak references that it calls are no steps of this call, and lose exceptions
    try:
        sys.setprofile(look)
        call()
    finally:
        sys.setprofile(None)
        if collecting:
            gc.enable()
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
        "used connections": sum(len(pool.used) for pool in pools),
    }


def interrupt_at_all_steps(node: Node, method: str, cluster_id: int, *args: Any, **kwargs: Any) -> int:
    """In the child: one transfer for each step that it has, interrupted there; how many. None may leave anything."""
    call = call_of(node, method, cluster_id, *args, **kwargs)

    def interrupt() -> None:
        raise KeyboardInterrupt

    for step in range(1, STEPS):
        with contextlib.suppress(KeyboardInterrupt):
            if not at_step(step, interrupt, call):
                return step - 1
        left = left_behind(node, cluster_id)
        assert not any(left.values()), f"after an interruption at step {step}: {left}"
    return STEPS


@both_methods
@pytest.mark.parametrize(
    ("path", "size"),
    [
        ("process_vm", "small"),
        ("process_vm", "some layers"),
        ("process_vm", "large"),
        ("process_vm", "large, long way"),
        ("tcp", "small"),
        ("tcp", "some layers"),
        ("tcp", "large"),
        ("tcp", "large, long way"),
    ],
)
def test_ctrl_c_at_any_step_leaves_nothing_behind(peers: Peers, path: str, method: str, size: str) -> None:
    """Neither here nor there; the next transfers succeed, and both sides can take their memory back."""
    client, server = make_pair(peers, path)
    large = size.startswith("large")
    client.call(split_from, 1 if large else None)
    chosen = {"some layers": range(1), "large, long way": range(TENSORS // 2)}.get(size)
    layers = {} if chosen is None else {"src_layer_range": chosen, "dst_layer_range": chosen}
    blocks = list(range(BLOCKS))[::-1] if large else [3]
    assert 1 < client.call(interrupt_at_all_steps, method, 2, blocks, blocks[::-1], **layers) < STEPS
    sender, receiver = (server, client) if method == "pull_blocks" else (client, server)
    client.call(call_now, method, 2, list(range(BLOCKS)), list(range(BLOCKS)))
    assert same(blocks_of(receiver, TARGET), blocks_of(sender, SOURCE))
    assert client.call("path", 2) == path
    for peer in (client, server):
        for name in MODELS:
            peer.call("unregister", name)
    assert client.call("unlink", 2, server.address) == OK


def split_from(node: Node, size: int | None) -> None:
    """In the child: transfers of so many bytes are large ones, which several threads move."""
    for module in (tcp, one_sided):
        if size is not None:
            module.PARALLEL_BYTES = size


def call_now(node: Node, method: str, cluster_id: int, *args: Any) -> None:
    """In the child."""
    call_of(node, method, cluster_id, *args)()


# Signal handlers


def pull_within_pulls(node: Node, cluster_id: int, source: list[np.ndarray]) -> tuple[int, list[int]]:
    """In the child: a small pull for each step that one has, with another one in the middle of it.

    How many, and at which steps bytes of one of the two were wrong.
    """
    outer = call_of(node, "pull_blocks", cluster_id, [1, 2], [3, 4])
    inner = call_of(node, "pull_blocks", cluster_id, [5, 6], [7, 8])
    target = [tensor[GUARD:-GUARD].reshape(BLOCKS, -1) for tensor in node.arenas[TARGET].memory]
    wiped = [np.full_like(tensor, POISON) for tensor in target]
    expected = moved(source, wiped, [1, 2, 5, 6], [3, 4, 7, 8])
    wrong = []
    for step in range(1, STEPS):
        for tensor in target:
            tensor[:] = POISON
        if not at_step(step, inner, outer):
            return step - 1, wrong
        if not same(target, expected):
            wrong.append(step)
    return STEPS, wrong


@pytest.mark.parametrize("path", ["inprocess", "process_vm"])
def test_a_signal_handler_may_pull_in_the_middle_of_a_pull(peers: Peers, path: str) -> None:
    client, server = make_pair(peers, path)
    steps, wrong = client.call(pull_within_pulls, 2, blocks_of(server, SOURCE))
    assert 1 < steps < STEPS
    assert wrong == []


def change_lists(node: Node, method: str, cluster_id: int, layers: dict[str, range]) -> tuple[int, set[str]]:
    """In the child: one transfer for each of its steps, whose lists change there; how many, and what they raised."""
    here, there = [1], [2]
    call = call_of(node, method, cluster_id, here, there, **layers)
    raised = set()

    def change() -> None:
        here[:], there[:] = [BLOCKS, BLOCKS + 1], [BLOCKS]

    for step in range(1, STEPS):
        here[:], there[:] = [1], [2]
        try:
            if not at_step(step, change, call):
                return step - 1, raised
        except LLMException as error:
            raised.add(error.status_code.name)
    return STEPS, raised


@pytest.mark.parametrize(
    "layers", [{}, {"src_layer_range": range(1), "dst_layer_range": range(1)}], ids=["all", "some"]
)
@both_methods
@pytest.mark.parametrize("path", PATHS)
def test_lists_that_change_meanwhile_lead_nowhere_else(
    peers: Peers, path: str, method: str, layers: dict[str, range]
) -> None:
    """What was checked is what is used; ``blocks_of`` looks at the memory around the tensors."""
    client, server = make_pair(peers, path)
    before = {peer: {name: blocks_of(peer, name) for name in MODELS} for peer in (client, server)}
    steps, raised = client.call(change_lists, method, 2, layers)
    assert 1 < steps < STEPS
    assert raised <= {"LLM_PARAM_INVALID"}
    sender, receiver = (server, client) if method == "pull_blocks" else (client, server)
    tensors = 2 if layers else TENSORS
    expected = before[receiver][TARGET]
    expected[:tensors] = moved(before[sender][SOURCE][:tensors], expected[:tensors], [1], [2])
    assert same(blocks_of(receiver, TARGET), expected)
    assert same(blocks_of(sender, SOURCE), before[sender][SOURCE])


@pytest.mark.parametrize("blocks", [1, BIG_BLOCKS], ids=["small", "large"])
@both_methods
def test_signals_do_not_put_off_a_deadline(peers: Peers, method: str, blocks: int) -> None:
    """The peer is stopped, and a timer fires ten times before the deadline: none may begin the wait anew."""
    server = peers.make(2, paths="tcp")
    node = Node()
    node.init(1, paths="tcp", sync_kv_timeout=1000)
    before = signal.signal(signal.SIGALRM, lambda _number, _frame: None)
    released = threading.Event()

    def release() -> None:
        released.set()
        go_on(server.process.pid)

    try:
        for each in (server.call, lambda name, *args, **kwargs: getattr(node, name)(*args, **kwargs)):
            for name, model_id in MODELS.items():
                each("register_blocks", name, 2, BIG_BLOCKS, 256 << 10, model_id=model_id)
        assert server.address is not None
        assert node.link(2, server.address) == OK
        call_now(node, method, 2, [0], [0])
        ids = list(range(blocks))
        stop(server.process.pid)
        watchdog = threading.Timer(5, release)
        watchdog.start()
        signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
        error = expect(LLMStatusCode.LLM_TIMEOUT, lambda: call_now(node, method, 2, ids[::-1], ids))
        assert not released.is_set(), error
        watchdog.cancel()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        go_on(server.process.pid)
        node.finalize()
