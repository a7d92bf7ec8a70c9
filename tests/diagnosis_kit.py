"""Things broken on purpose, and the first screen of what tells of it: for tests, and for docs/diagnosis.md.

``python tests/diagnosis_kit.py`` records all of them into the page.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import mmap
import os
import re
import shutil
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from cli_kit import run
from llm_datadist import BlocksCacheKey, CacheDesc, DataType
from llm_datadist.cli.top.command import Watch, look_after
from llm_datadist.cli.top.scrape import url_of
from llm_datadist.net.address import text
from peers import TIMEOUT_S, Peers
from security_kit import SECRET
from short_kit import make_pair
from stopping import go_on, stop
from test_cli_ping import OTHER_SECRET, old_version
from test_cli_top import fail_once, keep_pulling, serve_metrics, stop_pulling
from until import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from peers import Node, Peer

PAGE = Path(__file__).parent.parent / "docs" / "diagnosis.md"
_DRAWING = PAGE.parent / "drawings" / "top.svg"
SCREEN = 25
"""Lines of a first screen."""
_CACHE_BYTES = 64 << 20
_KERNEL = re.compile(r"(Linux \d+\.\d+\.\d+)[^,\s]*")
"""What follows names a build of one machine."""
_TESTS = str(Path(__file__).parent)
_FENCE = "<!-- recorded: {} -->\n\n```text\n"


@dataclass(frozen=True)
class Situation:
    """One thing that is broken, and the words that must stand in the first screen."""

    name: str
    show: Callable[[Peers], str]
    cause: str
    remedy: str


def _refused() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return run("ping", f"127.0.0.1:{port}").stdout


def _dropped() -> str:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        with socket.create_connection(full.getsockname(), TIMEOUT_S):  # the backlog is full: the kernel drops the next
            return run("ping", text(full.getsockname()), "--timeout", "1").stdout


def _ping(peer: Peer, **variables: str) -> str:
    return run("ping", text(peer.address), "--timeout", "2", **variables).stdout


def _wrong_secret(peers: Peers) -> str:
    return _ping(peers.make(1, secret=SECRET), LLM_DATADIST_SECRET=OTHER_SECRET)


def _no_secret(peers: Peers) -> str:
    return _ping(peers.make(1, secret=SECRET))


def _old_version(peers: Peers) -> str:
    return _ping(peers.make(1, process=peers.process(old_version)))


def _crippled(*arguments: str) -> str:
    """The command line where a seccomp filter refuses process_vm."""
    code = (
        f"import sys; sys.path.insert(0, {_TESTS!r}); from seccomp_kit import refuse_process_vm; refuse_process_vm();"
        "from llm_datadist.cli import main; main()"
    )
    return run(*arguments, command=(sys.executable, "-c", code)).stdout


def _denied(peers: Peers) -> str:
    return _crippled("ping", text(peers.make(1).address))


@contextlib.contextmanager
def stopped(peer: Peer) -> Iterator[None]:
    """A peer whose process is stopped."""
    stop(peer.process.pid)
    try:
        yield
    finally:
        go_on(peer.process.pid)


def _stalled(peers: Peers) -> str:
    peer = peers.make(1)
    with stopped(peer):
        return _ping(peer)


def explain(node: Node, cluster_id: int) -> str:
    """In the child: what is told of a link."""
    return str(node.datadist.explain_link(cluster_id))


def _stalled_link(peers: Peers) -> str:
    """The heartbeat is faster than by default, to have it soon."""
    server, client = peers.make(1), peers.make(2, heartbeat_interval_ms=200)
    client.link(server)

    def told() -> str:
        text: str = client.call(explain, 1)
        return text if "no sign of life" in text else ""

    with stopped(server):
        return until(told, what=lambda: client.call(explain, 1))


def explain_small_pages(node: Node) -> str:
    """In the child: what is told of a cache whose memory was in small pages when it was registered."""
    memory = mmap.mmap(-1, _CACHE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    memory.write(b"\1" * _CACHE_BYTES)
    memory.madvise(mmap.MADV_HUGEPAGE)
    node.extra["memory"] = memory  # it must outlive the cache
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    desc = CacheDesc(1, [_CACHE_BYTES >> 20, 1 << 20], DataType.DT_UINT8)
    node.manager.register_blocks_cache(desc, [address], BlocksCacheKey(1, 0))
    return str(node.datadist.explain_memory())


def _no_huge_pages(peers: Peers) -> str:
    return str(peers.make(1, huge_pages=False).call(explain_small_pages))


def _one_core(_peers: Peers) -> str:
    core = min(os.sched_getaffinity(0))
    return run("doctor", command=("taskset", "-c", str(core), sys.executable, "-m", "llm_datadist.cli")).stdout


def _well(peers: Peers) -> str:
    return _ping(peers.make(1, mem_pool_cfg='{"memory_size": 16777216}'))


@contextlib.contextmanager
def busy(peers: Peers) -> Iterator[list[str]]:
    """Two processes that are at work over TCP, one of which has failed once; their endpoints."""
    client, server = make_pair(peers, "tcp", metrics=True)
    endpoints = [each.call(serve_metrics) for each in (client, server)]
    client.call(fail_once, 2)
    client.begin(keep_pulling, 2, "stop")
    try:
        yield endpoints
    finally:
        client.call(stop_pulling, "stop")


def _top(peers: Peers) -> str:
    with busy(peers) as endpoints:
        return run("top", "--once", "--interval", "1", *endpoints).stdout


def draw(peers: Peers) -> str:
    """What top shows on a terminal, as a drawing."""
    console = Console(record=True, width=126, force_terminal=True, file=io.StringIO())
    with busy(peers) as endpoints:
        watch = Watch([url_of(endpoint) for endpoint in endpoints])
        watch.look()
        console.print(look_after(watch, 1.0)[0])
        watch.close()
    drawn = console.export_svg(title="llm-datadist top", unique_id="top")
    drawn = re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL)  # nothing is fetched from elsewhere
    return drawn.replace("Fira Code, monospace", "monospace")


SITUATIONS = (
    Situation("port refused", lambda _peers: _refused(), "Connection refused", "check ip and port"),
    Situation("port dropped", lambda _peers: _dropped(), "timed out", "whether a firewall drops packets"),
    Situation(
        "secret wrong", _wrong_secret, "not proved that it knows the secret", "set the same secret on both sides"
    ),
    Situation("secret missing", _no_secret, "the connecting side has shown none", "set the same secret on both sides"),
    Situation(
        "version too old", _old_version, "protocol versions 1 to 1 and 0 to 0", "upgrade the side with the older"
    ),
    Situation("ptrace denied", _denied, "a seccomp filter of this process refuses", "seccomp profile"),
    Situation("ptrace denied, doctor", lambda _peers: _crippled("doctor"), "could not read its parent", "SYS_PTRACE"),
    Situation("peer stalled", _stalled, "no reply to", "kill -CONT PID"),
    Situation("peer stalled, link", _stalled_link, "its process is stopped", "given up after"),
    Situation("huge pages off", _no_huge_pages, ", 0% in huge pages", "LLMConfig.huge_pages"),
    Situation("one core", _one_core, "1 core", "taskset -pc"),
)


WELL = (
    Situation("all well", _well, "works, a link would use process_vm", "mapped"),
    Situation("top", _top, "2 of 2 endpoints", "LLM_PARAM_INVALID"),
)
"""Also on the page: nothing is broken, ``cause`` and ``remedy`` are just what is to be seen."""


def missing(situation: Situation) -> str | None:
    """Why a situation cannot be brought about here; None if it can."""
    if situation.name == "one core" and shutil.which("taskset") is None:
        return "there is no taskset command"
    return None


def screen(output: str) -> str:
    """Its first lines, without blanks at their ends."""
    return "\n".join(line.rstrip() for line in output.splitlines()[:SCREEN]).rstrip()


def recorded(page: str, name: str) -> str:
    """What the page shows for a situation."""
    start = page.index(_FENCE.format(name)) + len(_FENCE.format(name))
    return page[start : page.index("\n```", start)]


def record() -> None:
    """Bring about all situations, and put what they show into the page."""
    page = PAGE.read_text(encoding="utf-8")
    for situation in (*WELL, *SITUATIONS):
        peers = Peers()
        try:
            shown = _KERNEL.sub(r"\1", screen(situation.show(peers)))
        finally:
            peers.close()
        fence = _FENCE.format(situation.name)
        pattern = re.compile(re.escape(fence) + r".*?\n```", re.DOTALL)
        page, count = pattern.subn(lambda _found, text=f"{fence}{shown}\n```": text, page)
        assert count == 1, situation.name
    PAGE.write_text(page, encoding="utf-8")
    peers = Peers()
    try:
        _DRAWING.write_text(draw(peers), encoding="utf-8")
    finally:
        peers.close()


if __name__ == "__main__":
    record()
