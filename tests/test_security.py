"""Secret and TLS between real processes: who is let in, who is not, and that nobody who is not leaves a trace."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import ssl
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from expect import PI, expect
from llm_datadist import BlocksCacheKey, CacheDesc, DataType, LLMException, LLMStatusCode
from llm_datadist.wire import framing
from llm_datadist.wire.auth import handover_request
from llm_datadist.wire.data import GREETING_BYTES
from net_helpers import WAIT_S, ended, receive
from paged_memory import Paged
from peers import TIMEOUT_S, Node, close_off
from security_kit import (
    BLOCK_BYTES,
    BLOCKS,
    SECRET,
    certificates,
    log_lines,
    middleman,
    open_descriptors,
    protection,
    pull,
    push,
    same,
    watch_log,
    whole_log,
    with_caches,
)
from stopping import go_on, stop
from until import until

if TYPE_CHECKING:
    from pathlib import Path

    from peers import Peer, Peers

OK, FAILED = LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_LINK_FAILED
EVERY = list(range(BLOCKS))
KINDS = ["secret", "tls", "secret and tls"]


def pair(peers: Peers, kind: str, **more: Any) -> tuple[Peer, Peer]:
    """Cluster 1 listens, cluster 2 connects; both watch their log."""
    options = {"paths": "tcp"} | protection(kind) | more
    server, client = peers.make(1, **options), peers.make(2, listen=False, **options)
    for peer in (server, client):
        peer.call(watch_log)
    return server, client


# Links that are let in


@pytest.mark.parametrize("kind", ["none", *KINDS])
def test_bytes_arrive_in_both_directions_by_pull_and_push(peers: Peers, kind: str) -> None:
    server, client = pair(peers, kind)
    with_caches(server, client)
    assert client.link(server) == OK
    for asker, owner in ((client, server), (server, client)):
        for move, source, target in ((pull, owner, asker), (push, asker, owner)):
            for some in ([3], list(range(0, BLOCKS, 2)), EVERY):
                target.call("register_blocks", "dst", 2, BLOCKS, BLOCK_BYTES, model_id=1)
                asker.call(move, owner.cluster_id, some)
                for there, here in zip(source.memory("src"), target.memory("dst"), strict=True):
                    for block in range(BLOCKS):
                        begin = 4096 + block * BLOCK_BYTES
                        part = slice(begin, begin + BLOCK_BYTES)
                        assert (here[part] == (there[part] if block in some else 0xEE)).all()
    assert all(SECRET not in peer.call(whole_log) for peer in (server, client))
    assert server.call(log_lines) == client.call(log_lines) == []


@pytest.mark.parametrize("kind", KINDS)
def test_many_small_blocks(peers: Peers, kind: str) -> None:
    """Blocks of 24 bytes, none next to the other: more of them than one system call takes."""
    server, client = pair(peers, kind)
    with_caches(server, client, blocks=6000, block_bytes=24)
    assert client.link(server) == OK
    some = list(range(0, 6000, 2))
    client.call(pull, 1, some)
    client.call(push, 1, some)
    for here, there, source, mine in zip(
        client.memory("dst"), server.memory("dst"), server.memory("src"), client.memory("src"), strict=True
    ):
        for got, sent in ((here, source), (there, mine)):
            rows, wanted = got[4096:-4096].reshape(6000, 24), sent[4096:-4096].reshape(6000, 24)
            assert (rows[::2] == wanted[::2]).all()
            assert (rows[1::2] == 0xEE).all()


@pytest.mark.parametrize("kind", ["none", "secret"])
def test_shared_memory_is_handed_over_to_who_proves_to_be_linked(peers: Peers, kind: str) -> None:
    """The path "mapped", where processes cannot look into each other."""
    options = {"paths": "mapped,tcp", "mem_pool_cfg": '{"memory_size": 33554432}'} | protection(kind)
    server = peers.make(1, process=peers.process(close_off), **options)
    client = peers.make(2, process=peers.process(close_off), listen=False, **options)
    for peer in (server, client):
        peer.call("use_pool")
    with_caches(server, client)
    assert client.link(server) == OK
    assert client.call("path", 1) == server.call("path", 2) == "mapped"
    client.call(pull, 1, EVERY)
    assert same(client.memory("dst"), server.memory("src"))


def test_all_ways_to_give_a_secret_give_the_same_one(peers: Peers, tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text(SECRET + "\n")
    path.chmod(0o600)
    server = peers.make(1, secret=SECRET)
    for number, variable, value in (
        (2, None, str(path)),
        (3, "LLM_DATADIST_SECRET", SECRET),
        (4, "LLM_DATADIST_SECRET_FILE", str(path)),
    ):
        process = peers.process()
        if variable is not None:
            process.call("environment", set_environment, variable, value)
        client = peers.make(
            number, process=process, listen=False, **({} if variable is not None else {"secret_file": value})
        )
        assert client.link(server) == OK


def set_environment(_node: Node, variable: str, value: str) -> None:
    """In the child."""
    os.environ[variable] = value


# Links that are not


def refused(server: Peer, client: Peer, reason: str) -> None:
    """The link fails at once, both sides tell why once, and nothing is left of it."""
    before = server.call(open_descriptors)
    begin = time.monotonic()
    assert client.link(server) == FAILED
    assert time.monotonic() - begin < 8  # of the ten seconds that it may take
    assert [reason in line for line in client.call(log_lines, "ERROR")] == [True]
    wait_for_log(server)
    expect(LLMStatusCode.LLM_NOT_YET_LINK, lambda: client.call("path", 1))
    expect(LLMStatusCode.LLM_NOT_YET_LINK, lambda: server.call("path", 2))
    until(lambda: server.call(open_descriptors) <= before)
    assert len(server.call(log_lines)) == 1
    for peer in (server, client):
        assert SECRET not in peer.call(whole_log)


def wait_for_log(peer: Peer) -> None:
    """The other side may know earlier that there is no link."""
    until(lambda: peer.call(log_lines))


@pytest.mark.parametrize(
    ("theirs", "ours", "reason"),
    [
        ("secret", "none", "the listening side has a secret, the connecting side has shown none"),
        ("none", "secret", "the connecting side has a secret, the listening side has none"),
        ("secret", "wrong", "the connecting side has not proved that it knows the secret"),
        ("tls", "none", "the listening side uses TLS, the connecting side does not"),
        ("none", "tls", "it uses no TLS: set tls_cert, tls_key and tls_ca there, too"),
        ("secret and tls", "tls", "the connecting side has shown none"),
        ("tls", "other CA", "certificate"),
        ("other CA", "tls", "certificate"),
    ],
)
def test_who_does_not_fit_is_refused_and_told_why(peers: Peers, theirs: str, ours: str, reason: str) -> None:
    options = {
        **{kind: protection(kind) for kind in ("none", *KINDS)},
        "wrong": {"secret": SECRET[::-1]},
        "other CA": certificates("another cluster"),
    }
    server = peers.make(1, **options[theirs])
    stranger = peers.make(2, listen=False, **options[ours])
    for peer in (server, stranger):
        peer.call(watch_log)
    refused(server, stranger, reason)
    friend = peers.make(3, listen=False, **options[theirs])
    assert friend.link(server) == OK


def test_a_listening_side_that_takes_anybody_learns_nothing_and_is_not_linked(peers: Peers) -> None:
    """It answers as one without a secret would: the connecting side has sent a nonce by then, and gives up."""
    client = peers.make(2, listen=False, secret=SECRET)
    client.call(watch_log)
    with socket.create_server(("127.0.0.1", 0)) as rogue:
        rogue.settimeout(WAIT_S)
        linking = client.begin("link", 1, rogue.getsockname())
        sock, _ = rogue.accept()
        with sock:
            head = receive(sock, framing.PREAMBLE_SIZE + 4)
            said = receive(sock, int.from_bytes(head[-4:], "big"))
            assert b"greet" in said
            assert len(said) < 128
            sock.sendall(framing.frame(b"\x82\xa4body\x81\xa4type\xa2ok\xa8reply_to\x01"))
            assert linking.result(TIMEOUT_S) == FAILED
            assert ended(sock)
    assert "has not proved that it knows the secret" in client.call(log_lines, "ERROR")[0]


# Recorded and altered


@pytest.mark.parametrize("kind", KINDS)
def test_a_recorded_link_is_of_no_use(peers: Peers, kind: str) -> None:
    """Everything that the connecting side said is said again, while the link is up and when it has ended."""
    server, client = pair(peers, kind)
    with_caches(server, client)
    with middleman(server.address) as between:
        assert client.call("link", 1, between.address) == OK
        client.call(pull, 1, EVERY)
        before = server.memory("src") + server.memory("dst")
        for attempt in range(2):
            descriptors = server.call(open_descriptors)
            for said, answered in zip(list(between.said), list(between.answered), strict=True):
                replay(server, bytes(said), bytes(answered))
            if attempt == 0:
                client.call(pull, 1, EVERY)  # the link has not noticed
                assert len(server.call(log_lines)) in (1, 2)  # one for each sort of connection
                assert client.call("unlink", 1, between.address) == OK
            until(lambda most=descriptors: server.call(open_descriptors) <= most)
        assert same(before, server.memory("src") + server.memory("dst"))
    expect(LLMStatusCode.LLM_NOT_YET_LINK, lambda: server.call("path", 2))
    assert client.link(server) == OK


def replay(server: Peer, said: bytes, answered: bytes) -> None:
    """Say the same again; the answer is another one, and the connection is closed."""
    assert server.address is not None
    with socket.create_connection(server.address, WAIT_S) as sock:
        with contextlib.suppress(OSError):  # it need not listen to the end
            sock.sendall(said)
            sock.shutdown(socket.SHUT_WR)
        got = b""
        while more := receive_some(sock):
            got += more
    tls = said[6] == 1
    assert len(got) < len(answered) or got[: len(answered)] != answered
    if not tls and said[4:5] == b"D":
        assert got == b""


def receive_some(sock: socket.socket) -> bytes:
    sock.settimeout(WAIT_S)
    try:
        return sock.recv(1 << 16)
    except ConnectionResetError:
        return b""


def test_a_token_that_was_overheard_opens_no_data_connection(peers: Peers) -> None:
    """With the next number, and whatever proof can be made without the secret."""
    server, client = pair(peers, "secret")
    with_caches(server, client)
    with middleman(server.address) as between:
        assert client.call("link", 1, between.address) == OK
        heads = [said for said in between.said if said[4:5] == b"D"]
        assert heads
        start = framing.PREAMBLE_SIZE
        greeting = bytes(heads[-1][start : start + GREETING_BYTES])
        number = int.from_bytes(greeting[16:24], "little")
        for forged_number, proof in (
            (number + 1, greeting[-32:]),
            (number + 1, bytes(32)),
            (number + 1, handover_request(b"", greeting[:16])[-32:]),
            (number, greeting[-32:]),
        ):
            forged = greeting[:16] + forged_number.to_bytes(8, "little") + greeting[24:-32] + proof
            assert server.address is not None
            with socket.create_connection(server.address, WAIT_S) as sock:
                sock.sendall(framing.preamble(framing.Kind.DATA) + forged)
                assert ended(sock)
        client.call(pull, 1, EVERY)
        assert same(client.memory("dst"), server.memory("src"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", ["said", "answered"])
def test_an_introduction_that_is_altered_makes_no_link(peers: Peers, kind: str, side: str) -> None:
    server, client = pair(peers, kind)

    def alter(_connection: int, which: str, offset: int, data: bytes) -> bytes:
        """The paths that are offered, or else, where that cannot be seen, any byte."""
        if which != side:
            return data
        at = data.find(b"probe_region")
        if at < 0 and (b"LLMD" in data or "tls" not in kind or offset < 500):
            return data
        return data[: at + 3] + bytes([data[at + 3] ^ 1]) + data[at + 4 :]

    with middleman(server.address) as between:
        between.alter = alter
        assert client.call("link", 1, between.address) in (FAILED, LLMStatusCode.LLM_TIMEOUT)
    expect(LLMStatusCode.LLM_NOT_YET_LINK, lambda: client.call("path", 1))
    expect(LLMStatusCode.LLM_NOT_YET_LINK, lambda: server.call("path", 2))
    assert client.link(server) == OK


def test_with_tls_nothing_can_be_read_on_the_way(peers: Peers) -> None:
    server, client = pair(peers, "tls")
    with_caches(server, client)
    with middleman(server.address) as between:
        assert client.call("link", 1, between.address) == OK
        client.call(pull, 1, EVERY)
        client.call(push, 1, EVERY)
        recorded = b"".join([*between.said, *between.answered])
    assert len(recorded) > 4 * BLOCKS * BLOCK_BYTES
    for data in (server.memory("src")[0][4096:-4096], client.memory("src")[1][4096:-4096]):
        assert all(data[at : at + 16].tobytes() not in recorded for at in range(0, len(data), BLOCK_BYTES))
    assert b"probe_region" not in recorded


def test_with_tls_a_transfer_that_is_altered_fails_and_the_next_one_works(peers: Peers) -> None:
    """At once, or by the deadline if it was the length of a record, so that both sides wait."""
    server, client = pair(peers, "tls", sync_kv_timeout=4000)
    with_caches(server, client)
    with middleman(server.address) as between:
        assert client.call("link", 1, between.address) == OK
        for move, side in ((pull, "answered"), (push, "said")):
            passed = [len(record) for record in getattr(between, side)]

            def alter(number: int, which: str, at: int, data: bytes, side: str = side, passed: Any = passed) -> bytes:
                known = 0 < number < len(passed)  # the first one is the control connection
                return bytes([data[0] ^ 1]) + data[1:] if known and which == side and at > passed[number] else data

            between.alter = alter
            with pytest.raises(LLMException) as caught:
                client.call(move, 1, EVERY)
            assert caught.value.status_code in (LLMStatusCode.LLM_FAILED, LLMStatusCode.LLM_TIMEOUT)
            assert caught.value.retryable
            between.alter = lambda _connection, _side, _offset, data: data
            assert again(client, move) is None
        assert same(client.memory("dst"), server.memory("src"))
        assert same(server.memory("dst"), client.memory("src"))


def again(client: Peer, move: Any) -> Exception | None:
    """Try until the transfer works, which it must soon; the last error."""
    error: Exception | None = None
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        try:
            client.call(move, 1, EVERY)
        except LLMException as failed:  # what was under way has to end first
            error = failed
        else:
            return None
    return error


# TLS


def test_older_versions_of_tls_are_refused(peers: Peers) -> None:
    server = peers.make(1, **protection("tls"))
    server.call(watch_log)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.load_cert_chain(certificates()["tls_cert"], certificates()["tls_key"])
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    assert server.address is not None
    with socket.create_connection(server.address, WAIT_S) as sock:
        sock.sendall(framing.preamble(framing.Kind.CONTROL, tls=True))
        assert receive(sock, framing.PREAMBLE_SIZE) == framing.preamble(framing.Kind.CONTROL, tls=True)
        with pytest.raises(ssl.SSLError, match="PROTOCOL_VERSION"):
            context.wrap_socket(sock)
    wait_for_log(server)
    assert ["unsupported protocol" in line for line in server.call(log_lines)] == [True]


def test_a_client_without_a_certificate_is_refused(peers: Peers) -> None:
    server = peers.make(1, **protection("tls"))
    server.call(watch_log)
    context = ssl.create_default_context(cafile=certificates()["tls_ca"])
    context.check_hostname = False
    assert server.address is not None
    with socket.create_connection(server.address, WAIT_S) as sock:
        sock.sendall(framing.preamble(framing.Kind.CONTROL, tls=True))
        receive(sock, framing.PREAMBLE_SIZE)
        with pytest.raises(ssl.SSLError, match="CERTIFICATE_REQUIRED"), context.wrap_socket(sock) as wrapped:
            wrapped.recv(1)
    wait_for_log(server)
    assert ["peer did not return a certificate" in line for line in server.call(log_lines)] == [True]


@pytest.mark.parametrize("missing", ["tls_cert", "tls_key", "tls_ca"])
def test_all_three_files_or_none(peers: Peers, missing: str) -> None:
    options = certificates() | {missing: None}
    error = expect(PI, lambda: peers.make(1, **options))
    assert f"{missing} is not given" in str(error)


@pytest.mark.parametrize(
    ("changed", "to", "match"),
    [
        ("tls_ca", "/nowhere/ca", "the CA certificates '/nowhere/ca' cannot be used: No such file"),
        ("tls_cert", "/nowhere/cert", "the certificate '/nowhere/cert' with the key"),
        ("tls_key", "ca", "key values mismatch|cannot be used"),
        ("tls_ca", "key", "cannot be used"),
    ],
)
def test_files_that_cannot_be_used_are_named(peers: Peers, changed: str, to: str, match: str) -> None:
    options = certificates() | {changed: certificates().get(f"tls_{to}", to)}
    expect(PI, lambda: peers.make(1, **options), match=match)


def test_a_key_with_a_password_does_not_ask_for_it(peers: Peers, tmp_path: Path) -> None:
    from security_kit import _openssl  # noqa: PLC0415

    locked = str(tmp_path / "locked")
    _openssl("pkey", "-in", certificates()["tls_key"], "-aes256", "-passout", "pass:word", "-out", locked)
    expect(PI, lambda: peers.make(1, **certificates() | {"tls_key": locked}), match="without a password")


def test_with_tls_a_stalled_peer_costs_no_more_than_the_deadline(peers: Peers) -> None:
    server, client = pair(peers, "tls", sync_kv_timeout=1000)
    with_caches(server, client)
    assert client.link(server) == OK
    client.call(pull, 1, EVERY)
    stop(server.process.pid)
    try:
        for move in (pull, push):
            begin = time.monotonic()
            expect(LLMStatusCode.LLM_TIMEOUT, lambda move=move: client.call(move, 1, EVERY))
            assert 0.9 < time.monotonic() - begin < WAIT_S
    finally:
        go_on(server.process.pid)
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        try:
            client.call(pull, 1, EVERY)
            break
        except Exception:  # noqa: BLE001 - what was under way ends first
            pass
    assert same(client.memory("dst"), server.memory("src"))


def wear_out(_node: Node) -> None:
    """In the child: a connection is worn after 8 MiB."""
    from llm_datadist.net import tls  # noqa: PLC0415

    tls.WORN_BYTES = 8 << 20  # type: ignore[misc]


def test_connections_are_replaced_before_a_key_is_worn(peers: Peers) -> None:
    server, client = pair(peers, "tls")
    with_caches(server, client)
    client.call(wear_out)
    with middleman(server.address) as between:
        assert client.call("link", 1, between.address) == OK
        before = len(between.said)
        for _ in range(8):
            client.call(pull, 1, EVERY)
        assert len(between.said) > before + 2
        assert same(client.memory("dst"), server.memory("src"))
        assert server.call(log_lines) == client.call(log_lines) == []


def unmap_source(node: Node) -> None:
    """In the child: a cache with a hole of memory that is not mapped any more."""
    memory = Paged(1)
    node.extra["hole"] = memory
    desc = CacheDesc(1, [64, mmap.PAGESIZE], DataType.DT_UINT8)
    node.manager.register_blocks_cache(desc, [memory.start], BlocksCacheKey(node.datadist.cluster_id, 5))
    memory.unmap(40, 8)


def pull_with_hole(node: Node, cluster_id: int) -> None:
    """In the child."""
    desc = CacheDesc(1, [64, mmap.PAGESIZE], DataType.DT_UINT8)
    node.extra["room"] = np.zeros(64 * mmap.PAGESIZE, dtype=np.uint8)
    cache = node.manager.register_blocks_cache(desc, [node.extra["room"].ctypes.data])
    node.manager.pull_blocks(BlocksCacheKey(cluster_id, 5), cache, list(range(64)), list(range(64)))


def test_with_tls_memory_that_is_gone_is_an_error_and_ends_nobody(peers: Peers) -> None:
    server, client = pair(peers, "tls", sync_kv_timeout=5000)
    with_caches(server, client)
    server.call(unmap_source)
    assert client.link(server) == OK
    with pytest.raises(LLMException):
        client.call(pull_with_hole, 1)
    client.call(pull, 1, EVERY)
    assert same(client.memory("dst"), server.memory("src"))
