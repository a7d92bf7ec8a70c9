"""What a process has of the system, and ways to let it run out."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from confine_kit import set_limit
from llm_datadist import LLMException, LLMStatusCode
from until import until

if TYPE_CHECKING:
    from collections.abc import Callable

    from peers import Node, Peer

LIMIT = 256
"""Descriptors of a starved process."""
OK = LLMStatusCode.LLM_SUCCESS
POOL = '{"memory_size": 4194304, "page_shift": 12}'

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may become others")


class Held(NamedTuple):
    """What a process has of the system."""

    descriptors: int
    threads: int
    mappings: int
    """Of shared memory of this library."""


def held(node: Node | None = None) -> Held:
    """In the child."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    return Held(len(list(Path("/proc/self/fd").iterdir())), threading.active_count(), maps.count("memfd:llm-datadist"))


def steady(peer: Peer) -> Held:
    """The counters once they stay as they are: some things close on the background thread."""
    found: list[Held] = []

    def stays() -> bool:
        found.append(peer.call(held))
        return len(found) >= 5 and len(set(found[-5:])) == 1

    until(stays, what=lambda: found[-5:])
    return found[-1]


def check_nothing_left(peer: Peer, before: Held) -> None:
    """No more descriptors and mappings than then, at least after a while; threads may stay for later work."""

    def nothing_left() -> bool:
        now = peer.call(held)
        return now.descriptors <= before.descriptors and now.mappings <= before.mappings

    until(nothing_left, what=lambda: f"{before} before, {peer.call(held)} now")


def starve(node: Node, spare: int) -> None:
    """In the child: take all descriptors but a few."""
    set_limit("RLIMIT_NOFILE", LIMIT)
    taken = node.extra.setdefault("taken", [])
    with contextlib.suppress(OSError):
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY))
    for _ in range(spare):
        os.close(taken.pop())


def feed(node: Node) -> None:
    """In the child: undo ``starve``."""
    for fd in node.extra.pop("taken"):
        os.close(fd)
    set_limit("RLIMIT_NOFILE", LIMIT * 2)


def names_descriptors(text: str) -> bool:
    """Whether it names the limit, its value and the remedy."""
    return f"this process may have {LIMIT} descriptors, RLIMIT_NOFILE" in text and "raise it with ulimit -n" in text


class Start(NamedTuple):
    """What became of ``init``."""

    status: LLMStatusCode
    text: str
    left: Held
    """More than before."""


def try_to_start(node: Node, prepare: Callable[[], object], repair: Callable[[], object], **properties: Any) -> Start:
    """In the child: ``init`` between ``prepare`` and ``repair``."""
    before = held()
    status, text = OK, ""
    prepare()
    try:
        node.init(1, **properties)
    except LLMException as error:
        status, text = error.status_code, str(error)
    finally:
        repair()
    if status == OK:
        node.finalize()
    return Start(status, text, Held(*(now - then for now, then in zip(held(), before, strict=True))))
