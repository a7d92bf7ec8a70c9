"""Peers that die, stop or fall silent: noticed, told, and nothing of theirs lands afterwards."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from expect import expect
from llm_datadist import LLMException, LLMStatusCode
from llm_datadist.engine.link import LinkState
from llm_datadist.engine.liveness import Watch
from llm_datadist.utils.process import OtherProcess, start_time
from llm_datadist.wire.messages import Identity, Ping
from net_helpers import logged
from peers import TIMEOUT_S, Node
from stopping import go_on, stop
from test_faults import big_cache, settled
from test_links import explain, pull_one, with_caches
from test_stalls import held_push, let_fail, unregister_mine, untouched
from until import until

if TYPE_CHECKING:
    from collections.abc import Callable

    from peers import Peers

OK = LLMStatusCode.LLM_SUCCESS
NOT_LINKED = LLMStatusCode.LLM_NOT_YET_LINK
SOON = {"heartbeat_interval_ms": 100, "heartbeat_timeout_ms": 400}
"""Given up after half a second; for a peer that will surely not answer."""
NEVER = {"heartbeat_interval_ms": 0}
PATIENT = {"heartbeat_interval_ms": 100, "heartbeat_timeout_ms": 120_000}


def why_not_linked(node: Node, cluster_id: int) -> str:
    """In the child: pull until there is no link; why."""
    end = time.monotonic() + TIMEOUT_S
    while time.monotonic() < end:
        try:
            pull_one(node, cluster_id)
        except LLMException as error:
            if error.status_code == NOT_LINKED:
                return str(error)
    return "still linked"


@pytest.mark.parametrize("paths", ["process_vm", "tcp"])
def test_a_stopped_peer_is_given_up_in_the_end(peers: Peers, paths: str) -> None:
    """Both sides are told why; when it goes on it links again, and nobody had to be restarted."""
    server = peers.make(1, paths=paths, **NEVER)
    client = peers.make(2, paths=paths, listen=False, sync_kv_timeout=200, **SOON)
    with_caches(server, client)
    assert client.link(server) == OK
    client.call(pull_one, 1)
    stop(server.process.pid)
    try:
        until(lambda: not client.call(is_linked, 1))
        reason = client.call(why_not_linked, 1)
        assert "no sign of life" in reason
        assert "its process is stopped" in reason
    finally:
        go_on(server.process.pid)
    assert "the peer closed the connection" in server.call(why_not_linked, 2)
    assert client.link(server) == OK
    server.call(pull_one, 2)


def is_linked(node: Node, cluster_id: int) -> bool:
    """In the child."""
    return node.datadist._engine._core.table.get(cluster_id) is not None


def test_a_stalled_peer_is_told_and_kept(peers: Peers) -> None:
    """Until the time is over; on the same host its memory can still be read. Then it is as if nothing had been."""
    server, client = peers.make(1, **NEVER), peers.make(2, listen=False, **PATIENT)
    with_caches(server, client)
    assert client.link(server) == OK
    assert client.call(explain, 1).stalled is None
    stop(server.process.pid)
    try:
        until(lambda: client.call(explain, 1).stalled)
        report = client.call(explain, 1)
        assert "(its process is stopped)" in report.stalled
        assert report.stalled in str(report)
        client.call(pull_one, 1)
    finally:
        go_on(server.process.pid)
    until(lambda: client.call(explain, 1).stalled is None)
    client.call(pull_one, 1)
    server.call(pull_one, 2)


def hold_the_interpreter(node: Node, seconds: float) -> None:
    """In the child: as a C extension that does not let go."""
    del node
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def test_a_held_interpreter_is_not_dead(peers: Peers) -> None:
    """An extension that keeps the interpreter to itself for a second, with a heartbeat of a tenth."""
    server = peers.make(1, **NEVER)
    client = peers.make(2, listen=False, heartbeat_interval_ms=100, heartbeat_timeout_ms=20_000)
    with_caches(server, client)
    assert client.link(server) == OK
    held = server.begin(hold_the_interpreter, 1.0)
    while not held.done():
        client.call(pull_one, 1)
    client.call(pull_one, 1)
    assert client.call(explain, 1).state.name == "LINKED"


def fork_that_keeps_all(node: Node) -> int:
    """In the child: a grandchild that Python does not know of, so that it keeps every descriptor; its pid."""
    del node
    child = int(ctypes.PyDLL(None).fork())
    if child == 0:
        while True:
            signal.pause()
    return child


@pytest.mark.parametrize("paths", ["process_vm", "tcp"])
def test_the_end_of_a_process_whose_connections_live_on(peers: Peers, paths: str) -> None:
    """A child that it has forked keeps them; the process itself is dead, and that is seen at once."""
    server, client = peers.make(1, paths=paths), peers.make(2, paths=paths, listen=False)
    with_caches(server, client)
    assert client.link(server) == OK
    client.call(pull_one, 1)
    keeper = server.call(fork_that_keeps_all)
    try:
        os.kill(server.process.pid, signal.SIGKILL)
        until(lambda: not client.call(is_linked, 1))
        assert f"process {server.process.pid} has ended" in client.call(why_not_linked, 1)
    finally:
        os.kill(keeper, signal.SIGKILL)


def is_reached_by(node: Node, cluster_id: int) -> bool:
    """In the child."""
    return node.datadist.is_reached_by(cluster_id)


def test_a_writer_that_was_given_up_keeps_the_memory_busy(peers: Peers) -> None:
    """A writer is stopped on the way into the system call; memory is taken back only when it cannot write any more."""
    owner = peers.make(1, sync_kv_timeout=100, **SOON)
    writer = peers.make(2, listen=False, **NEVER)
    owner.call(big_cache, "mine", 0)
    pushing = held_push(writer, owner)
    stop(writer.process.pid)
    try:
        until(lambda: not owner.call(is_linked, 2))
        assert owner.call(is_reached_by, 2)
        assert owner.call(unregister_mine) == LLMStatusCode.LLM_LINK_BUSY
    finally:
        go_on(writer.process.pid)
    writer.call(is_linked, 1)  # it is awake, and still on its way
    assert owner.call(unregister_mine) == LLMStatusCode.LLM_LINK_BUSY
    let_fail(writer, pushing)
    until(lambda: not owner.call(is_reached_by, 2))
    assert owner.call(unregister_mine) == OK
    assert owner.call(untouched)


def test_a_writer_that_was_given_up_and_dies_frees_the_memory(peers: Peers) -> None:
    """No descriptor of it is left then."""
    owner = peers.make(1, sync_kv_timeout=100, **SOON)
    owner.call(big_cache, "mine", 0)
    first = settled(owner, lambda _values: True)
    writer = peers.make(2, listen=False, **NEVER)
    held_push(writer, owner)
    stop(writer.process.pid)
    until(lambda: not owner.call(is_linked, 2))
    writer.process.kill()
    until(lambda: owner.call(unregister_mine) == OK)
    until(lambda: settled(owner, lambda values: values[0] <= first[0])[0] <= first[0])


def test_a_writer_that_is_finalized_while_it_writes(peers: Peers) -> None:
    """Its connection ends only when its last write has."""
    owner, writer = peers.make(1, sync_kv_timeout=100), peers.make(2, listen=False)
    owner.call(big_cache, "mine", 0)
    pushing = held_push(writer, owner)
    writer.call("finalize")
    assert owner.call(unregister_mine) == LLMStatusCode.LLM_LINK_BUSY
    let_fail(writer, pushing)
    until(lambda: owner.call(unregister_mine) == OK)
    assert owner.call(untouched)


def test_a_writer_that_unlinks_by_force_while_it_writes(peers: Peers) -> None:
    """It says goodbye although a write of its own is stuck: the owner waits for the end of the connection."""
    owner, writer = peers.make(1, sync_kv_timeout=100), peers.make(2, listen=False)
    owner.call(big_cache, "mine", 0)
    pushing = held_push(writer, owner)
    assert writer.call("unlink", 1, force=True, timeout=100) == OK
    until(lambda: not owner.call(is_linked, 2))
    assert owner.call(unregister_mine) == LLMStatusCode.LLM_LINK_BUSY
    let_fail(writer, pushing)
    until(lambda: owner.call(unregister_mine) == OK)
    assert owner.call(untouched)


# ---------------------------------------------------------------- the counting, by hand


@dataclass
class FakeLoop:
    """Timers that the test lets run out."""

    callbacks: list[Callable[[], object]] = field(default_factory=list)

    def call_soon(self, callback: Callable[[], object]) -> None:
        callback()

    def call_later(self, _seconds: float, callback: Callable[[], object]) -> Any:
        self.callbacks.append(callback)
        return self

    def cancel(self) -> None:
        self.callbacks.clear()

    def pass_interval(self) -> None:
        due, self.callbacks = self.callbacks, []
        for callback in due:
            callback()


class FakeLink:
    """A link whose peer answers when the test says so, and its channel in one."""

    def __init__(self) -> None:
        self.channel = self
        self.cluster_id, self.address, self.token = 7, "nowhere", b"t" * 16
        self.peer = self
        self.identity = Identity(cluster_id=7, incarnation=b"i" * 16, boot_id="", pid_namespace=0, pid=1, start_time=0)
        self.heard_at = 0.0
        self.closed: str | None = None
        self.over = False
        self.stalled: str | None = None
        self.state = LinkState.LINKED
        self.pings = 0

    def close(self, reason: str) -> None:
        self.closed = reason

    def notify(self, body: object, *, answered: bool) -> None:
        assert isinstance(body, Ping)
        assert answered
        self.pings += 1


def watched() -> tuple[FakeLink, FakeLoop]:
    link, loop = FakeLink(), FakeLoop()
    Watch(link, loop, link.identity, 10.0, 60.0).start()  # type: ignore[arg-type]
    return link, loop


def test_silence_is_counted_in_intervals() -> None:
    """Ping after one, a warning after two, the end after the timeout; by default 10 s and 60 s."""
    link, loop = watched()
    with logged() as records:
        for count in range(1, 7):
            loop.pass_interval()
            assert (link.pings, link.closed) == (count, None)
            assert (link.stalled is None) == (count == 1)
        loop.pass_interval()
    assert link.closed == "no sign of life for 70 s (stalled or unreachable)"
    assert [record.getMessage() for record in records] == [
        "cluster 7 (nowhere): no sign of life for 20 s (stalled or unreachable); given up in 50 s"
    ]
    assert loop.callbacks == []


def test_any_sign_of_life_starts_anew() -> None:
    """Also the last one before the end; a peer that talks is not asked."""
    link, loop = watched()
    for _ in range(6):
        loop.pass_interval()
    for now in (1.0, 2.0):
        link.heard_at = now
        with logged() as records:
            loop.pass_interval()
        assert link.stalled is None
        assert len(records) == (now == 1.0)
    assert link.pings == 6
    for _ in range(6):
        loop.pass_interval()
    assert link.closed is None


def test_handshakes_are_left_alone() -> None:
    """They have a deadline of their own."""
    link, loop = watched()
    link.state = LinkState.CONNECTING
    for _ in range(20):
        loop.pass_interval()
    assert (link.pings, link.stalled, link.closed) == (0, None, None)
    link.state = LinkState.LINKED
    loop.pass_interval()
    assert link.pings == 1


# ---------------------------------------------------------------- processes


def test_another_process_is_told_from_a_later_one() -> None:
    """By its start time; gone is gone."""
    with pytest.raises(ProcessLookupError, match="another time"):
        OtherProcess(os.getpid(), start_time(os.getpid()) + 1)
    child = os.posix_spawn("/bin/sleep", ["sleep", "60"], {})
    process = OtherProcess(child, start_time(child))
    try:
        assert not process.stopped()
        stop(child)
        assert process.stopped()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert not process.stopped()
    process.close()
    process.close()
    assert process.fileno() == -1
    with pytest.raises(OSError, match="No such process"):
        OtherProcess(child, 0)


def test_options_are_checked() -> None:
    """In the configuration and at init."""
    from llm_datadist import LLMConfig  # noqa: PLC0415
    from llm_datadist.engine import EngineOptions  # noqa: PLC0415

    for name, bad in (("heartbeat_interval_ms", -1), ("heartbeat_timeout_ms", 0)):
        error = expect(LLMStatusCode.LLM_PARAM_INVALID, lambda name=name, bad=bad: setattr(LLMConfig(), name, bad))
        assert name in str(error)
    for key in ("llm.HeartbeatIntervalMs", "llm.HeartbeatTimeoutMs"):
        options = {"llm.Role": "Mix", key: "soon"}
        error = expect(LLMStatusCode.LLM_PARAM_INVALID, lambda options=options: EngineOptions.parse(options))
        assert key in str(error)
