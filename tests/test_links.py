"""How links begin, end, and tell why."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from expect import expect
from llm_datadist import BlocksCacheKey, LLMDataDist, LLMRole, LLMStatusCode
from peers import TIMEOUT_S, Node

if TYPE_CHECKING:
    from collections.abc import Iterator

    from peers import Peers

OK = LLMStatusCode.LLM_SUCCESS


def pull_one(node: Node, cluster_id: int, model_id: int = 0) -> None:
    """In the child: pull block 0 into block 0 of cache "dst"."""
    node.manager.pull_blocks(BlocksCacheKey(cluster_id, model_id), node.caches["dst"], [0], [0])


def with_caches(*peers: Any) -> None:
    """Give each peer a cache that others can name and one to pull into."""
    for peer in peers:
        peer.call("register_blocks", "src", 2, 4, 512, model_id=0, seed=peer.cluster_id)
        peer.call("register_blocks", "dst", 2, 4, 512)


def test_both_directions_after_one_side_linked(peers: Peers) -> None:
    """The listening side pulls from the one that connected, which does not listen."""
    server, client = peers.make(1), peers.make(2, listen=False)
    with_caches(server, client)
    assert client.link(server) == OK
    client.call(pull_one, 1)
    server.call(pull_one, 2)


def test_second_link_is_already_link(peers: Peers) -> None:
    """From either side."""
    server, client = peers.make(1), peers.make(2)
    assert client.link(server) == OK
    assert client.link(server) == LLMStatusCode.LLM_ALREADY_LINK
    assert server.link(client) == LLMStatusCode.LLM_ALREADY_LINK


def test_unlink_tells_the_peer(peers: Peers) -> None:
    """Not forced: both halves are gone, and unlinking what is not linked succeeds."""
    server, client = peers.make(1), peers.make(2)
    with_caches(server, client)
    assert client.link(server) == OK
    assert client.call("unlink", 1, server.address) == OK
    error = expect(LLMStatusCode.LLM_NOT_YET_LINK, lambda: client.call(pull_one, 1))
    assert "call link_clusters" in str(error)
    expect(LLMStatusCode.LLM_NOT_YET_LINK, lambda: server.call(pull_one, 2))
    assert client.call("unlink", 1, server.address) == OK
    assert server.call("unlink", 2, client.address) == OK
    assert client.link(server) == OK
    client.call(pull_one, 1)


def test_unlink_needs_an_address_unless_forced(peers: Peers) -> None:
    """As the original's table says."""
    server, client = peers.make(1), peers.make(2)
    assert client.link(server) == OK
    assert client.call("unlink", 1) == LLMStatusCode.LLM_PARAM_INVALID
    assert client.call("unlink", 1, force=True) == OK


def test_unlink_of_a_dead_peer(peers: Peers) -> None:
    """Without force it says that the peer could not be told; with force it always works."""
    server, client = peers.make(1), peers.make(2)
    assert client.link(server) == OK
    server.process.kill()
    assert client.call("unlink", 1, server.address) == LLMStatusCode.LLM_UNLINK_FAILED
    assert client.call("unlink", 1, force=True) == OK
    assert client.call("unlink", 1, server.address) == OK


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def test_link_failures_have_their_own_status(peers: Peers) -> None:
    """Refused, silent, speaking something else."""
    client = peers.make(2, listen=False)
    assert client.call("link", 1, ("127.0.0.1", free_port())) == LLMStatusCode.LLM_LINK_FAILED
    with socket.create_server(("127.0.0.1", 0)) as silent:
        status = client.call("link", 1, ("127.0.0.1", silent.getsockname()[1]), 300)
    assert status == LLMStatusCode.LLM_TIMEOUT
    with socket.create_server(("127.0.0.1", 0)) as http:

        def answer() -> None:
            connection, _ = http.accept()
            with connection:
                connection.recv(100)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                connection.recv(100)

        thread = threading.Thread(target=answer)
        thread.start()
        status = client.call("link", 1, ("127.0.0.1", http.getsockname()[1]))
        thread.join(TIMEOUT_S)
    assert status == LLMStatusCode.LLM_LINK_FAILED


def test_modes_must_agree(peers: Peers) -> None:
    """A peer in message mode and one in remote-accessible mode."""
    server = peers.make(1)
    client = peers.make(2, enable_remote_cache_accessible=False)
    assert client.link(server) == LLMStatusCode.LLM_PARAM_INVALID
    assert server.link(client) == LLMStatusCode.LLM_PARAM_INVALID


def test_several_clusters_in_one_call(peers: Peers) -> None:
    """Good ones are linked, bad ones get their own status, and the overall one is the last failure."""
    first, second, client = peers.make(1), peers.make(2), peers.make(3, listen=False)
    wrong = ("127.0.0.1", free_port())
    overall, each = client.call(link_several, {1: first.address, 9: wrong, 2: second.address})
    assert overall == LLMStatusCode.LLM_LINK_FAILED
    assert each == [OK, LLMStatusCode.LLM_LINK_FAILED, OK]


def link_several(node: Node, addresses: dict[int, tuple[str, int]], timeout: int = 10_000) -> Any:
    """In the child."""
    return node.datadist.link_clusters([node.cluster(peer, address) for peer, address in addresses.items()], timeout)


def test_both_sides_link_each_other_at_once(peers: Peers) -> None:
    """One connection survives; both calls succeed (or one finds it linked already) and data flows both ways."""
    one, two = peers.make(1), peers.make(2)
    with_caches(one, two)
    for _ in range(20):
        futures = [one.begin("link", 2, two.address), two.begin("link", 1, one.address)]
        statuses = [future.result(TIMEOUT_S) for future in futures]
        assert OK in statuses
        assert set(statuses) <= {OK, LLMStatusCode.LLM_ALREADY_LINK}
        one.call(pull_one, 2)
        two.call(pull_one, 1)
        assert one.call("unlink", 2, two.address) == OK


def test_hixl_sides_link_each_other_and_both_succeed(peers: Peers) -> None:
    """With the hixl backend each side makes its own link; unlinking needs neither force nor an address."""
    one = peers.make(1, local_comm_res="", transfer_backend="hixl")
    two = peers.make(2, local_comm_res="", transfer_backend="hixl")
    with_caches(one, two)
    futures = [one.begin("link", 2, two.address), two.begin("link", 1, one.address)]
    assert [future.result(TIMEOUT_S) for future in futures] == [OK, OK]
    assert one.link(two) == LLMStatusCode.LLM_ALREADY_LINK
    one.call(pull_one, 2)
    two.call(pull_one, 1)
    assert one.call("unlink", 2) == OK
    assert two.call("unlink", 1) == OK


def test_sixteen_threads_link_one_cluster(peers: Peers) -> None:
    """Exactly one makes the link."""
    server, client = peers.make(1), peers.make(2, listen=False)
    futures = [client.begin("link", 1, server.address) for _ in range(16)]
    statuses = [future.result(TIMEOUT_S) for future in futures]
    assert statuses.count(OK) == 1
    assert statuses.count(LLMStatusCode.LLM_ALREADY_LINK) == 15


def test_link_to_itself(peers: Peers) -> None:
    """An engine may link its own listener; pushes work, pulls from the own id are refused."""
    peer = peers.make(1)
    with_caches(peer)
    assert peer.link(peer) == OK
    peer.call(push_one, 1)
    expect(LLMStatusCode.LLM_PARAM_INVALID, lambda: peer.call(pull_one, 1))
    assert peer.call("unlink", 1, peer.address) == OK


def push_one(node: Node, cluster_id: int) -> None:
    """In the child: push block 1 to block 1."""
    node.manager.push_blocks(BlocksCacheKey(cluster_id, 0), node.caches["dst"], [1], [1])


def test_link_to_itself_over_tcp(peers: Peers) -> None:
    """The same over data connections."""
    peer = peers.make(1, paths="tcp")
    with_caches(peer)
    assert peer.link(peer) == OK
    peer.call(push_one, 1)


def test_wrong_remote_cluster_id(peers: Peers) -> None:
    """The link belongs to the id that the peer declares."""
    server, client = peers.make(1), peers.make(2)
    with_caches(server, client)
    assert client.call("link", 77, server.address) == OK
    client.call(pull_one, 1)
    expect(LLMStatusCode.LLM_NOT_YET_LINK, lambda: client.call(pull_one, 77))


def test_new_incarnation_replaces_the_old_link(peers: Peers) -> None:
    """A second process with the same cluster id links while the first one still lives."""
    server, client = peers.make(1), peers.make(2, listen=False)
    with_caches(server, client)
    assert client.link(server) == OK
    other = peers.make(2, listen=False)
    with_caches(other)
    assert other.link(server) == OK
    other.call(pull_one, 1)
    server.call(pull_one, 2)
    expect(LLMStatusCode.LLM_NOT_YET_LINK, lambda: client.call(pull_one, 1))


def test_explain(peers: Peers) -> None:
    """Which path, and why not the others."""
    server, client = peers.make(1), peers.make(2, paths="inprocess,tcp")
    assert client.link(server) == OK
    report = client.call(explain, 1)
    assert report.path == "tcp"
    assert {attempt.name: attempt.chosen for attempt in report.attempts} == {
        "tcp": True,
        "inprocess": False,
        "process_vm": False,
        "mapped": False,
        "nixl": False,
    }
    text = str(report)
    assert "the peer is another process" in text
    assert "not permitted by this side's configuration" in text
    expect(LLMStatusCode.LLM_NOT_YET_LINK, lambda: client.call(explain, 5))


def explain(node: Node, cluster_id: int) -> Any:
    """In the child."""
    return node.datadist.explain_link(cluster_id)


def test_no_common_path_fails_the_link(peers: Peers) -> None:
    """With the reason of every path in the log, and nothing left behind."""
    server, client = peers.make(1, paths="tcp"), peers.make(2, paths="process_vm")
    assert client.link(server) == LLMStatusCode.LLM_LINK_FAILED
    expect(LLMStatusCode.LLM_NOT_YET_LINK, lambda: client.call(explain, 1))
    expect(LLMStatusCode.LLM_NOT_YET_LINK, lambda: server.call(explain, 2))


@pytest.mark.parametrize("host", ["::1", "127.0.0.1"])
@pytest.mark.parametrize("paths", ["process_vm", "tcp"])
def test_address_families(peers: Peers, host: str, paths: str) -> None:
    """IPv6 works as IPv4 does."""
    listen = f"[{host}]:0" if ":" in host else f"{host}:0"
    server = peers.make(1, listen_ip_info=listen, paths=paths)
    client = peers.make(2, listen=False, paths=paths)
    with_caches(server, client)
    assert server.address is not None
    assert server.address[0] == host
    assert client.link(server) == OK
    client.call(pull_one, 1)
    server.call(pull_one, 2)
    assert client.call("unlink", 1, server.address) == OK


def test_port_in_use(peers: Peers) -> None:
    """Init names the address; the object stays usable."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        error = expect(LLMStatusCode.LLM_FAILED, lambda: peers.make(1, listen_ip_info=where))
        assert where in str(error)


def test_second_instance_needs_permission(local: LLMDataDist) -> None:
    """One initialised instance per process, unless the second one's options allow more."""
    other = LLMDataDist(LLMRole.DECODER, 2)
    options = {"llm.EnableCacheManager": "1"}
    error = expect(LLMStatusCode.LLM_FAILED, lambda: other.init(options))
    assert "allow_multiple_instances" in str(error)
    other.init({**options, "llm.AllowMultipleInstances": "1"})
    assert LLMDataDist.llm_engine_instance is local
    other.finalize()


@pytest.fixture
def local() -> Iterator[LLMDataDist]:
    """An initialised object of this process."""
    datadist = LLMDataDist(LLMRole.PROMPT, 1)
    datadist.init({"llm.EnableCacheManager": "1"})
    yield datadist
    datadist.finalize()


def test_finalize_is_noticed_and_idempotent(peers: Peers) -> None:
    """The peer's link ends in good order; the object can be initialised again and relinked."""
    server, client = peers.make(1), peers.make(2, listen=False)
    with_caches(server, client)
    assert client.link(server) == OK
    server.call("finalize")
    server.call("finalize")
    expect(LLMStatusCode.LLM_NOT_YET_LINK, lambda: client.call(pull_one, 1))
    server.address = server.call(init_again)
    server.call("register_blocks", "src", 2, 4, 512, model_id=0, seed=3)
    assert client.link(server) == OK
    client.call(pull_one, 1)


def init_again(node: Node) -> tuple[str, int] | None:
    """In the child: the same object with the same options."""
    node.caches.clear()
    node.datadist.init(node.config.generate_options())
    return node.datadist.listen_address


def test_finalize_while_transfers_run(peers: Peers) -> None:
    """Whoever pulls gets its bytes or LLM_NOT_YET_LINK; finalize ends."""
    server, client = peers.make(1), peers.make(2, listen=False)
    with_caches(server, client)
    assert client.link(server) == OK
    futures = [client.begin(pull_until_unlinked, 1) for _ in range(4)]
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(server.call, "finalize")
        assert done.result(TIMEOUT_S) is None
    assert [future.result(TIMEOUT_S) for future in futures] == [LLMStatusCode.LLM_NOT_YET_LINK] * 4


def pull_until_unlinked(node: Node, cluster_id: int) -> LLMStatusCode:
    """In the child: pull until it fails; the status."""
    from llm_datadist import LLMException  # noqa: PLC0415

    try:
        while True:
            pull_one(node, cluster_id)
    except LLMException as error:
        return error.status_code
