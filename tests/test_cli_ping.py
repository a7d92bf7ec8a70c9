"""The command ``ping``: what it tells of running peers, and that they do not notice."""

from __future__ import annotations

import ctypes
import json
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cli_kit import run
from hosts_kit import network, process_in
from llm_datadist import LLMStatusCode
from llm_datadist.cli.ping import command
from llm_datadist.cli.ping.command import parse_target
from llm_datadist.engine.options import EngineOptions
from llm_datadist.memory.regions import NONCE_BYTES, PROBE_BYTES, RegionTable
from llm_datadist.net.address import text
from peers import Peer, close_off
from security_kit import (
    SECRET,
    certificates,
    log_lines,
    open_descriptors,
    protection,
    pull,
    same,
    watch_log,
    whole_log,
    with_caches,
)
from stopping import go_on, stop
from test_links import free_port
from until import until

if TYPE_CHECKING:
    import subprocess

    from llm_datadist.cli.ping.report import Report
    from peers import Node, Peers

POOL = '{"memory_size": 16777216}'
OTHER_SECRET = "fedcba9876543210-secret"
HUNG_S = "1"


def ping(peer: Peer | str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    target = peer if isinstance(peer, str) else text(peer.address)
    return run("ping", target, *arguments, **variables)


def report(peer: Peer | str, *arguments: str, exit_code: int = 0, **variables: str) -> Any:
    """What ``--json`` tells."""
    seen = ping(peer, "--json", *arguments, **variables)
    assert seen.returncode == exit_code, seen.stdout + seen.stderr
    return json.loads(seen.stdout)


def failure(peer: Peer | str, *arguments: str, **variables: str) -> str:
    """Cause and remedy, for a peer with which no link can be made."""
    told = report(peer, *arguments, exit_code=1, **variables)
    assert not told["ok"]
    assert told["peer"] is None
    last = told["tried"][-1]
    return f"{last['status']}: {last['cause']} [{last['fix']}]"


def held(node: Node) -> tuple[int, ...]:
    """In the child: what a link or a handshake would leave behind."""
    core = node.datadist._engine._core  # type: ignore[union-attr]
    served = core.data_server.total()
    return len(core.pending), len(core.sessions), len(core.table.all()), len(core.ender.fading()), served


def test_every_path_is_probed_and_measured(peers: Peers) -> None:
    peer = peers.make(7, mem_pool_cfg=POOL)
    told = report(peer)
    found = told["peer"]
    assert (found["cluster_id"], found["pid"], found["same_host"]) == (7, peer.process.pid, True)
    assert (found["remote_accessible"], found["authenticated"], found["encrypted"]) == (True, False, False)
    assert told["tried"][0]["address"] == text(peer.address)
    paths = {each["name"]: each for each in found["paths"]}
    assert list(paths) == ["inprocess", "process_vm", "mapped", "nixl", "tcp"]
    assert paths["inprocess"]["reason"] == "the peer is another process"
    for name in ("process_vm", "mapped", "tcp"):
        figures = paths[name]["figures"]
        assert paths[name]["works"]
        assert 0 < figures["p50_s"] <= figures["p99_s"]
        assert figures["bytes_per_s"] > 0
        assert figures["reads"] >= 20
    assert found["path"] == "process_vm"


def test_text_says_the_same(peers: Peers) -> None:
    peer = peers.make(7)
    seen = ping(peer)
    assert seen.returncode == 0
    lines = seen.stdout.splitlines()
    assert lines[0] == f"llm-datadist ping {text(peer.address)}: works, a link would use process_vm"
    assert any(line.split()[:2] == ["process_vm", "used"] for line in lines)
    assert any(line.split()[:2] == ["tcp", "works"] for line in lines)
    assert "set LLMConfig.mem_pool_cfg there" in seen.stdout  # a path below the one that a link would use


@pytest.mark.parametrize("accessible", [True, False])
def test_the_peer_does_not_notice(peers: Peers, accessible: bool) -> None:
    """Neither in its log, nor its links, threads, descriptors; its transfers and role switches go on."""
    peer = peers.make(1, enable_remote_cache_accessible=accessible)
    peer.call(watch_log)
    before = peer.call(open_descriptors)
    assert report(peer)["peer"]["remote_accessible"] is accessible
    assert peer.call(log_lines) == peer.call(log_lines, "ERROR") == []

    def left() -> tuple[tuple[int, ...], int]:
        return peer.call(held), peer.call(open_descriptors)

    until(lambda: left() == ((0, 0, 0, 0, 0), before), what=left)  # it closes after the goodbye
    assert "LINKED" not in peer.call(whole_log)


def test_it_disturbs_no_transfers(peers: Peers) -> None:
    """Caches stay as they are, transfers go on, also while several ping at once."""
    server, client = peers.make(1), peers.make(2)
    with_caches(server, client)
    assert client.link(server) == LLMStatusCode.LLM_SUCCESS
    caches = [peer.memory(name) for peer in (server, client) for name in ("src", "dst")]
    with ThreadPoolExecutor(2) as pool:
        pings = [pool.submit(report, each) for each in (server, client)]
        for _ in range(20):
            client.call(pull, 1, list(range(8)))
        assert [each.result()["peer"]["cluster_id"] for each in pings] == [1, 2]
    now = [peer.memory(name) for peer in (server, client) for name in ("src", "dst")]
    assert all(same(left, right) for left, right in zip(caches[:3], now[:3], strict=True))
    assert client.call("path", 1) == server.call("path", 2) == "process_vm"


def test_forced_paths_of_the_peer_are_told(peers: Peers) -> None:
    """Those of this side's environment are not heeded: they say nothing about the peer."""
    peer = peers.make(1, paths="tcp")
    found = report(peer, LLM_DATADIST_PATHS="process_vm")["peer"]
    reasons = {each["name"]: each["reason"] for each in found["paths"]}
    assert found["path"] == "tcp"
    assert reasons["process_vm"] == "not permitted by the peer's configuration"


def test_a_path_that_is_denied(peers: Peers) -> None:
    """It works over a slower one, and says what would help."""
    peer = peers.make(1)
    tests = str(Path(__file__).parent)
    code = (
        f"import sys; sys.path.insert(0, {tests!r}); from seccomp_kit import refuse_process_vm; refuse_process_vm();"
        "from llm_datadist.cli import main; main()"
    )
    seen = run("ping", text(peer.address), command=(sys.executable, "-c", code))
    assert seen.returncode == 0
    assert "works, a link would use tcp; a faster path does not work" in seen.stdout.splitlines()[0]
    shown = " ".join(seen.stdout.split())
    assert "a seccomp filter of this process refuses process_vm_readv" in shown


def test_a_peer_that_closes_itself_off_is_still_reached(peers: Peers) -> None:
    peer = peers.make(1, process=peers.process(close_off))
    assert report(peer)["ok"]


@pytest.mark.parametrize("kind", ["secret", "tls", "secret and tls"])
def test_protected_peers(peers: Peers, tmp_path: Path, kind: str) -> None:
    """With the right means, from the command line and from the environment."""
    peer = peers.make(1, **protection(kind))
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    secret.chmod(0o600)
    options, variables = [], {}
    if "secret" in kind:
        options += ["--secret-file", str(secret)]
        variables["LLM_DATADIST_SECRET_FILE"] = str(secret)
    if "tls" in kind:
        for name, path in certificates().items():
            options += [f"--{name.replace('_', '-')}", path]
            variables[f"LLM_DATADIST_{name.upper()}"] = path
    for told in (report(peer, *options), report(peer, **variables)):
        found = told["peer"]
        assert (found["authenticated"], found["encrypted"]) == ("secret" in kind, "tls" in kind)
        assert {each["name"] for each in found["paths"] if each["works"]} == {"process_vm", "tcp"}


@pytest.mark.parametrize(
    ("theirs", "ours", "words"),
    [
        ("secret", {"LLM_DATADIST_SECRET": OTHER_SECRET}, "not proved that it knows the secret: set the same secret"),
        ("secret", {}, "the listening side has a secret, the connecting side has shown none: set the same secret"),
        ("", {"LLM_DATADIST_SECRET": SECRET}, "the connecting side has a secret, the listening side has none: set"),
        ("tls", {}, "the listening side uses TLS, the connecting side does not: set tls_cert"),
    ],
)
def test_protection_that_differs(peers: Peers, theirs: str, ours: dict[str, str], words: str) -> None:
    assert words in failure(peers.make(1, **protection(theirs)), **ours)


def test_tls_here_alone(peers: Peers) -> None:
    options = [part for name, path in certificates().items() for part in (f"--{name.replace('_', '-')}", path)]
    told = failure(peers.make(1), *options)
    assert "TLS" in told
    assert "log may say why" in told or "set tls_cert" in told


def old_version() -> None:
    """In a child, before anything else: speak only a protocol that nobody here does."""
    from llm_datadist.wire import messages  # noqa: PLC0415 - in the child only

    messages.VERSION_MIN = messages.VERSION_MAX = 0  # type: ignore[misc]


def test_versions_that_have_none_in_common(peers: Peers) -> None:
    peer = peers.make(1, process=peers.process(old_version))
    assert "protocol versions 1 to 1 and 0 to 0 have none in common: upgrade the side" in failure(peer)


def test_nobody_listens() -> None:
    told = failure(f"127.0.0.1:{free_port()}")
    assert "Connection refused" in told
    assert "nobody listens there: check ip and port" in told


def test_packets_are_dropped() -> None:
    """TCP's backlog is full: the kernel drops what comes, as a firewall does."""
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        with socket.create_connection(full.getsockname(), 20):
            told = failure(text(full.getsockname()), "--timeout", HUNG_S)
    assert "LLM_TIMEOUT" in told
    assert "whether a firewall drops packets" in told


def test_a_stopped_peer(peers: Peers) -> None:
    peer = peers.make(1)
    stop(peer.process.pid)
    try:
        told = failure(peer, "--timeout", HUNG_S)
    finally:
        go_on(peer.process.pid)
    assert "LLM_TIMEOUT" in told
    assert "does not answer" in told
    assert "kill -CONT PID" in told
    assert report(peer)["ok"]
    peer.call("finalize")


def test_somebody_else_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:

        def greet() -> None:
            sock, _ = server.accept()
            with sock:
                sock.recv(1)
                sock.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")

        greeted = pool.submit(greet)
        told = failure(text(server.getsockname()), "--timeout", "5")
        greeted.result(20)
    assert "LLM_LINK_FAILED" in told


def test_another_host_without_protection() -> None:
    """Nothing is sent there: the address is of nobody."""
    told = failure("192.0.2.1:26000")
    assert "on another host, where a link needs protection: set one secret on both sides" in told


def ping_from(_node: Node, target: str) -> Report:
    """In the child: what the command would find."""
    return command.ping(target, EngineOptions.parse({"llm.Role": "Mix"}), 10.0)


def test_another_host(peers: Peers) -> None:
    with network() as net:
        here, there = net.pair()
        server = peers.make(1, process=process_in(peers, there.host), listen_ip_info=f"{there.address}:0")
        client = Peer(process_in(peers, here.host), "client")
        told = client.call(ping_from, text(server.address))
        assert told.ok, told.tried
        assert (told.peer.same_host, told.peer.path) == (False, "tcp")
        reasons = {finding.name: finding.reason for finding in told.peer.paths}
        assert reasons["process_vm"] == reasons["mapped"] == "the peer is on another host"
        strict = Peer(process_in(peers, here.host, permit=False), "strict")
        told = strict.call(ping_from, text(server.address))
        assert not told.ok
        assert "allow_insecure_remote = True" in told.tried[0].cause
        peers.close()


def test_a_name_that_is_not_known() -> None:
    assert "check the name" in failure("no-such-host.invalid:26000")


@pytest.mark.parametrize("target", ["x", ":26000", "host:", "host:0", "host:65536", "host:-1", "fd00::2:26000"])
def test_targets_that_are_none(target: str) -> None:
    with pytest.raises(ValueError, match="give where the peer listens"):
        parse_target(target)


def test_targets() -> None:
    assert parse_target("host.example:26000") == ("host.example", 26000)
    assert parse_target("[fe80::1%eth0]:1") == ("fe80::1%eth0", 1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["x"], "HOST:PORT"),
        ([], "HOST:PORT"),
        (["127.0.0.1:1", "--tls-cert", "/nowhere"], "tls_key, tls_ca is not given"),
        (["127.0.0.1:1", "--secret-file", "/nowhere"], "No such file"),
    ],
)
def test_wrong_usage(arguments: list[str], words: str) -> None:
    seen = run("ping", *arguments)
    assert seen.returncode == 2
    assert words in " ".join(seen.stderr.split())


def test_the_probe_region_holds_nothing_but_its_nonce() -> None:
    table = RegionTable()
    try:
        base, size = table.view.find(table.probe_region)
        held_there = ctypes.string_at(base, size)
        assert size == PROBE_BYTES == 64 << 10
        assert held_there == table.nonce + bytes(PROBE_BYTES - NONCE_BYTES)
    finally:
        table.close()
