"""Processes of one host that may not look into each other: every reason, before the link and in the middle of it.

Whatever the reason, data is right, the report of the link and exactly one warning tell it and what would help.
"""

from __future__ import annotations

import errno
import functools
import os
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from confine_kit import (
    BOTH,
    SYSTEM_CALLS,
    become,
    drop_capabilities,
    enter_user_namespace,
    filter_now,
    in_turn,
    join_user_namespace,
    logged,
    mount,
    observed,
    private_mounts,
    refuse_calls,
    set_dumpable,
)
from llm_datadist import LLMStatusCode
from peers import TIMEOUT_S, Node, Peer
from short_kit import METHODS, attempt, blocks_of, moved, same, sides_of, wipe, with_caches
from test_links import explain
from test_mapped_faults import enter_pid_namespace
from test_observe_engine import read

if TYPE_CHECKING:
    from collections.abc import Callable

    from peers import Peers

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may become others")
needs_filters = pytest.mark.skipif(not SYSTEM_CALLS, reason="the numbers of system calls are not known here")

OK = LLMStatusCode.LLM_SUCCESS
POOL = '{"memory_size": 4194304, "page_shift": 12}'
USER, OTHER = 61_001, 61_002
SRC, DST = [3, 9, 5, 60], [60, 3, 4, 0]
MANY_SRC = list(range(64))
MANY_DST = MANY_SRC[::-1]

plain = drop_capabilities
"""Root without privileges: one of several processes of one user."""
hidden = in_turn(drop_capabilities, functools.partial(set_dumpable, False))
user = functools.partial(become, USER)
other_user = functools.partial(become, OTHER)


class Case(NamedTuple):
    """Two processes and what keeps each one out of the other; None: nothing does."""

    server: Callable[[], object] | None
    client: Callable[[], object] | None
    client_denied: str | None
    server_denied: str | None
    remedy: str


CAP = "--cap-add SYS_PTRACE"
CASES = {
    "one user": Case(user, user, None, None, ""),
    "one user without privileges, root": Case(plain, plain, None, None, ""),
    "two users": Case(user, other_user, f"another user: {USER}", f"another user: {OTHER}", CAP),
    "root and a user": Case(None, user, "another user: 0, this process as 61001", None, CAP),
    "not dumpable": Case(hidden, plain, "not dumpable", None, CAP),
    "not dumpable, no root": Case(
        functools.partial(become, USER, dumpable=False), user, "not dumpable", None, "prctl(PR_SET_DUMPABLE, 1)"
    ),
    "more privileges": Case(None, plain, "capabilities that this process has not", None, CAP),
    "client in a user namespace": Case(None, enter_user_namespace, "another user namespace", None, "--userns=host"),
    "server in a user namespace": Case(
        in_turn(user, enter_user_namespace), other_user, "another user namespace", "another user namespace", "--userns"
    ),
    "each in its user namespace": Case(
        enter_user_namespace, enter_user_namespace, "another user namespace", "another user namespace", "--userns=host"
    ),
    "own mounts": Case(private_mounts, private_mounts, None, None, ""),
    "client in a pid namespace": Case(
        None, enter_pid_namespace, "another pid namespace", "another pid namespace", "--pid=container"
    ),
    "each in its pid namespace": Case(
        enter_pid_namespace, enter_pid_namespace, "another pid namespace", "another pid namespace", "shareProcess"
    ),
    "without /proc": Case(
        functools.partial(mount, "tmpfs", "/proc"),
        None,
        "the peer cannot tell on which host it is",
        "this process cannot tell on which host it is",
        "mount /proc",
    ),
    "other processes hidden": Case(
        user,
        in_turn(functools.partial(mount, "proc", "/proc", "hidepid=2"), other_user),
        "hidden from this process",
        f"another user: {OTHER}",
        "hidepid",
    ),
}
if SYSTEM_CALLS:
    for name, calls in (("read", BOTH[:1]), ("write", BOTH[1:]), ("copy", BOTH)):
        for code in (errno.EPERM, errno.ENOSYS):
            filtered = functools.partial(refuse_calls, code, calls)
            reason = f"a seccomp filter of this process refuses {calls[0]} ({os.strerror(code)})"
            what = f"may not {name}, {errno.errorcode[code]}"
            CASES[f"client {what}"] = Case(None, filtered, reason, None, "seccomp profile")
            CASES[f"server {what}"] = Case(filtered, None, None, reason, "seccomp profile")
    filtered = functools.partial(refuse_calls, errno.EPERM)
    CASES["neither may copy"] = Case(
        filtered, filtered, "a seccomp filter", "a seccomp filter", "--security-opt seccomp="
    )
    no_pidfd = functools.partial(refuse_calls, errno.ENOSYS, ["pidfd_open"])
    CASES["no pidfd"] = Case(None, no_pidfd, "Function not implemented", None, "5.3")


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a process without other threads may enter a user namespace, and numpy's libraries start some."""
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")


def transfer_all(here: Peer, there: Peer) -> None:
    """Pulls and pushes of few and of many blocks, each one verified at both ends, the guards, too."""
    for method in METHODS:
        theirs, ours = sides_of(method)
        for src, dst in ((MANY_SRC, MANY_DST), (SRC, DST), (SRC, DST)):
            verified(here, there, method, theirs, ours, src, dst)


def verified(here: Peer, there: Peer, method: str, theirs: str, ours: str, src: list[int], dst: list[int]) -> None:
    """One transfer, and what it has changed."""
    pull = method == "pull_blocks"
    (source, from_), (target, to) = ((there, theirs), (here, ours)) if pull else ((here, ours), (there, theirs))
    target.call(wipe, to)
    expected = moved(blocks_of(source, from_), blocks_of(target, to), src, dst)
    assert here.call(attempt, method, there.cluster_id, src, dst).failure == (None, None, "")
    assert same(blocks_of(target, to), expected)


def reason_against(peer: Peer, cluster_id: int, path: str) -> str:
    """Why a path is not used, and what would help, as explain_link tells."""
    attempts = peer.call(explain, cluster_id).attempts
    return next(str(attempt) for attempt in attempts if attempt.name == path and not attempt.chosen)


def check_side(here: Peer, there: Peer, denied: str | None, remedy: str) -> None:
    """The path it has, and what it says about it."""
    report, warnings = here.call(explain, there.cluster_id), here.call(logged)
    if denied is None:
        assert report.path == "process_vm"
        assert warnings == []
        return
    assert report.path == "tcp"
    against = reason_against(here, there.cluster_id, "process_vm")
    assert denied in against
    assert len(warnings) == 1, warnings
    assert f"cluster {there.cluster_id} is reached over tcp only: process_vm: " in warnings[0]
    for text in (against, warnings[0]):
        assert denied in text


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_denied_before_the_link(peers: Peers, case: Case) -> None:
    """Each side takes the best path that it has; both move every byte."""
    server = observed(peers, 1, peers.process(case.server))
    client = observed(peers, 2, peers.process(case.client), listen_ip_info=None)
    with_caches(server, client)
    assert client.link(server) == OK
    said = "".join(str(here.call(explain, there)) for here, there in ((client, 1), (server, 2)))
    check_side(client, server, case.client_denied, case.remedy)
    check_side(server, client, case.server_denied, case.remedy)
    assert case.remedy in said
    for here, there in ((client, server), (server, client)):
        transfer_all(here, there)
        assert here.call(logged) == []


def test_one_user_namespace_is_enough(peers: Peers) -> None:
    """Both within the same one, where both are root."""
    server = observed(peers, 1, peers.process(enter_user_namespace))
    client = observed(peers, 2, peers.process(functools.partial(join_user_namespace, server.process.pid)))
    with_caches(server, client)
    assert client.link(server) == OK
    for here, there in ((client, server), (server, client)):
        check_side(here, there, None, "")
        transfer_all(here, there)


def move_and_verify(node: Node, method: str, cluster_id: int) -> int:
    """In the child: transfers until ``node.extra["stop"]``; how many. Pulled bytes are compared each time."""
    count = 0
    node.extra["moves"] = 0
    while not node.extra.get("stop"):
        src, dst = ((MANY_SRC, MANY_DST), (SRC, DST))[count % 2]
        if method == "pull_blocks":
            wipe(node, sides_of(method)[1])
        outcome = attempt(node, method, cluster_id, src, dst)
        assert outcome.error is None, outcome
        if method == "pull_blocks":
            check_pulled(node, src, dst)
        count += 1
        node.extra["moves"] = count
    return count


def check_pulled(node: Node, src: list[int], dst: list[int]) -> None:
    """In the child: what was pulled is what is known of the source."""
    for mine, theirs in zip(node.arenas["target"].memory, node.extra["expected"], strict=True):
        body = mine[4096:-4096].reshape(len(theirs), -1)
        assert (body[dst] == theirs[src]).all()


def expect_source(node: Node, blocks: Any) -> None:
    """In the child."""
    node.extra["expected"] = blocks


def moves(node: Node) -> int:
    """In the child."""
    return int(node.extra.get("moves", 0))


def stop_moving(node: Node) -> None:
    """In the child."""
    node.extra["stop"] = True


def wait_for_moves(peer: Peer, count: int, running: Any) -> None:
    """Return when so many more transfers have succeeded."""
    target, until = peer.call(moves) + count, time.monotonic() + TIMEOUT_S
    while peer.call(moves) < target:
        assert not running.done(), running.result()
        assert time.monotonic() < until


@needs_filters
@pytest.mark.parametrize(("calls", "pool"), [(BOTH, None), (BOTH, POOL), (BOTH[:1], None), (BOTH[1:], None)])
@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS])
@pytest.mark.parametrize("method", METHODS)
def test_denied_in_the_middle_of_transfers(
    peers: Peers, code: int, calls: tuple[str, ...], method: str, pool: str | None
) -> None:
    """A filter comes while transfers run: none fails, the next path takes over, one warning."""
    server = observed(peers, 1, peers.process(), mem_pool_cfg=pool)
    client = observed(peers, 2, peers.process(), listen_ip_info=None)
    server.call("use_pool", bool(pool))
    with_caches(server, client)
    assert client.link(server) == OK
    assert client.call("path", 1) == "process_vm"
    client.call(expect_source, blocks_of(server, "source"))
    running = client.begin(move_and_verify, method, 1)
    wait_for_moves(client, 5, running)
    client.call(filter_now, code, calls)
    wait_for_moves(client, 20, running)
    client.call(stop_moving)
    assert running.result(TIMEOUT_S) > 20
    used = "pull_blocks" if calls == BOTH[:1] else "push_blocks" if calls == BOTH[1:] else method
    warnings = client.call(logged)
    if used != method:  # what is used is still permitted
        assert client.call("path", 1) == "process_vm"
        assert warnings == []
        transfer_all(client, server)
        warnings = client.call(logged)
    assert client.call("path", 1) == ("mapped" if pool else "tcp")
    assert len(warnings) == 1, warnings
    against = reason_against(client, 1, "process_vm")
    for text in (warnings[0], against):
        assert f"stopped working: a seccomp filter of this process refuses {calls[0]} ({os.strerror(code)})" in text
        assert "[allow process_vm_readv and process_vm_writev in its seccomp profile" in text
    transfer_all(client, server)
    transfer_all(server, client)
    assert client.call(logged) == []
    assert server.call(logged) == []
    assert server.call("path", 2) == "process_vm"


def test_the_peer_closes_itself_off_later(peers: Peers) -> None:
    """It is not dumpable any more, while the link is up: the memory that is mapped stays, the calls are refused."""
    server, client = (observed(peers, number, peers.process(plain), metrics=True) for number in (1, 2))
    with_caches(server, client)
    assert client.link(server) == OK
    transfer_all(client, server)
    assert client.call("path", 1) == "process_vm"
    denied = {"path": "process_vm", "reason": "denied"}
    assert client.call(read, "fallbacks", denied) is None
    server.call(close_self_off)
    transfer_all(client, server)
    assert client.call(read, "fallbacks", denied) == 1
    assert client.call("path", 1) == "tcp"
    (warning,) = client.call(logged)
    assert "process_vm: stopped working: " in warning
    assert server.call("path", 2) == "process_vm"
    transfer_all(server, client)


def close_self_off(node: Node) -> None:
    """In the child."""
    set_dumpable(False)


@pytest.mark.parametrize(
    ("server", "client", "denied", "remedy"),
    [
        (user, other_user, "the peer runs as user 61001, this process as 61002", "as the same user"),
        (functools.partial(become, 0), user, None, ""),
        (user, functools.partial(become, 0), "", ""),
    ],
    ids=["two users", "owner root", "reader root"],
)
def test_mapped_between_users(peers: Peers, server: Any, client: Any, denied: str | None, remedy: str) -> None:
    """Descriptors go to the same user and to root, and are taken from them; otherwise TCP does it."""
    properties = {"paths": "mapped,tcp", "mem_pool_cfg": POOL}
    owner = observed(peers, 1, peers.process(server), **properties)
    reader = observed(peers, 2, peers.process(client), listen_ip_info=None, **properties)
    for peer in (owner, reader):
        peer.call("use_pool")
    with_caches(owner, reader)
    assert reader.link(owner) == OK
    for here, there in ((reader, owner), (owner, reader)):
        transfer_all(here, there)
        path = here.call("path", there.cluster_id)
        warnings = here.call(logged)
        assert path in ("mapped", "tcp")
        if path == "tcp":
            assert "[run both processes as the same user]" in reason_against(here, there.cluster_id, "mapped")
            assert sum("is reached over tcp only: mapped: " in warning for warning in warnings) == 1
    if denied:
        assert denied in reason_against(reader, 1, "mapped")


def try_to_truncate(node: Node) -> list[str]:
    """In the child: cut the pool and the region table under those who have mapped them; what comes of it."""
    outcomes = []
    engine = node.datadist._engine
    for area in (*engine._pools.areas, *engine._core.regions.areas):
        for length in (0, area.length // 2):
            try:
                os.ftruncate(area.fd, length)
            except OSError as error:
                outcomes.append(errno.errorcode[error.errno or 0])
    return outcomes


def test_nobody_can_truncate_what_others_have_mapped(peers: Peers) -> None:
    """Not even its owner; the reader goes on, and gets an error, no signal, when the owner is killed."""
    properties = {"paths": "mapped", "mem_pool_cfg": POOL}
    owner = observed(peers, 1, peers.process(plain), **properties)
    reader = observed(peers, 2, peers.process(plain), listen_ip_info=None, **properties)
    for peer in (owner, reader):
        peer.call("use_pool")
    with_caches(owner, reader)
    assert reader.link(owner) == OK
    assert owner.call(try_to_truncate) == ["EPERM"] * 6
    transfer_all(reader, owner)
    owner.process.kill()
    for src, dst in ((SRC, DST), (MANY_SRC, MANY_DST)):
        assert reader.call(attempt, "pull_blocks", 1, src, dst).status == LLMStatusCode.LLM_NOT_YET_LINK
