"""Why a cluster could not be linked or unlinked: each cause has its own words, kept until the next attempt."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING, Any

import pytest

from expect import expect
from llm_datadist import LLMException, LLMStatusCode
from llm_datadist.engine.errors import LinkError
from llm_datadist.engine.link_failures import LinkFailures
from llm_datadist.engine.requests import PeerAddress
from llm_datadist.wire import messages
from net_helpers import logged
from peers import TIMEOUT_S, Node
from stopping import stop
from test_links import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

    from llm_datadist import LLMDataDist
    from peers import Peer, Peers

OK = LLMStatusCode.LLM_SUCCESS
REFUSED = LLMStatusCode.LLM_LINK_FAILED
TIMEOUT = LLMStatusCode.LLM_TIMEOUT
PI = LLMStatusCode.LLM_PARAM_INVALID


def last(node: Node, cluster_id: int) -> LLMException | None:
    """In the child."""
    return node.datadist.last_link_error(cluster_id)


def failed(client: Peer, status: LLMStatusCode, address: tuple[str, int], timeout: int = 10_000) -> LLMException:
    """Link cluster 1 in vain; the error that is kept."""
    assert client.call("link", 1, address, timeout) == status
    return kept(client, status)


def kept(client: Peer, status: LLMStatusCode, operation: str = "link_clusters") -> LLMException:
    """What is kept of cluster 1."""
    error: LLMException | None = client.call(last, 1)
    assert error is not None
    assert (error.status_code, error.peer, error.operation, error.phase) == (status, 1, operation, "link")
    assert f"[{operation}] failed, error code is {status}, cluster 1 (" in str(error)
    if error.hint is not None:
        assert error.hint in str(error)
    return error


@pytest.fixture(scope="module")
def shared() -> Iterator[Peers]:
    """Processes for tests that leave them as they are."""
    from peers import Peers  # noqa: PLC0415 - the name is for types above

    made = Peers()
    yield made
    made.close()


@pytest.fixture(scope="module")
def client(shared: Peers) -> Peer:
    return shared.make(2)


def test_nothing_to_tell(client: Peer) -> None:
    assert client.call(last, 77) is None


def test_refused(client: Peer) -> None:
    port = free_port()
    error = failed(client, REFUSED, ("127.0.0.1", port))
    assert isinstance(error, ConnectionError)
    assert f"cannot connect to 127.0.0.1:{port}: Connection refused" in str(error)
    assert error.retryable
    assert "nobody listens there" in str(error.hint)


def test_host_that_does_not_answer(client: Peer) -> None:
    """TCP's backlog is full: the kernel drops what comes, as a host does that is down."""
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        with socket.create_connection(full.getsockname(), TIMEOUT_S):
            error = failed(client, TIMEOUT, full.getsockname(), 300)
    assert isinstance(error, TimeoutError)
    assert error.retryable
    assert "the host does not answer" in str(error.hint)


def test_no_way_to_the_host(peers: Peers) -> None:
    client = peers.make(2, allow_insecure_remote=True)
    error = failed(client, REFUSED, ("255.255.255.255", 26000))
    assert "cannot connect to 255.255.255.255:26000" in str(error)
    assert "there is no way to that host" in str(error.hint)


def test_silence(client: Peer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        error = failed(client, TIMEOUT, silent.getsockname(), 300)
    assert "no reply to Hello in time" in str(error)
    assert "does not answer: see whether it is an LLMDataDist, and not stalled" in str(error.hint)


@pytest.mark.parametrize(
    ("answer", "words"), [(b"HTTP/1.1 400 Bad Request\r\n\r\n", "frame"), (b"", "the peer closed the connection")]
)
def test_something_else_listens_there(client: Peer, answer: bytes, words: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(100)
                connection.sendall(answer)
                connection.shutdown(socket.SHUT_WR)
                with contextlib.suppress(ConnectionResetError):
                    while connection.recv(4096):  # what is not read would become a reset
                        pass

        thread = threading.Thread(target=serve)
        thread.start()
        error = failed(client, REFUSED, server.getsockname())
        thread.join(TIMEOUT_S)
    assert words in str(error)
    assert "see whether it is an LLMDataDist" in str(error.hint)


def other_version(_node: Node) -> None:
    """In the child: it speaks a protocol of another time."""
    messages.VERSION_MIN = messages.VERSION_MAX = 99


def test_versions(peers: Peers, client: Peer) -> None:
    server = peers.make(1)
    server.call(other_version)
    error = failed(client, REFUSED, server.address)  # type: ignore[arg-type]
    ours = f"{messages.VERSION_MIN} to {messages.VERSION_MAX}"
    assert f"refused by the peer: protocol versions {ours} and 99 to 99 have none in common: upgrade" in str(error)
    assert not error.retryable


def test_modes(peers: Peers, client: Peer) -> None:
    server = peers.make(1, enable_remote_cache_accessible=False)
    error = failed(client, PI, server.address)  # type: ignore[arg-type]
    assert isinstance(error, ValueError)
    assert "enable_remote_cache_accessible is True at cluster 2 and False at cluster 1" in str(error)
    assert not error.retryable


def test_a_cluster_id_that_is_linked_already(peers: Peers, client: Peer) -> None:
    """Also if another process has it."""
    server, twin = peers.make(1), peers.make(1)
    assert client.link(server) == OK
    for address in (server.address, twin.address):
        error = failed(client, LLMStatusCode.LLM_ALREADY_LINK, address)  # type: ignore[arg-type]
        assert f"linked already (with pid {server.process.pid} at 127.0.0.1:{server.address[1]})" in str(error)  # type: ignore[index]
        assert "two processes need two cluster ids" in str(error.hint)
    assert client.call("unlink", 1, server.address) == OK
    assert client.call(last, 1) is None


def test_no_path(peers: Peers, client: Peer) -> None:
    """Each side permits one that the other does not."""
    server, other = peers.make(1, paths="tcp"), peers.make(3, paths="process_vm")
    error = failed(other, REFUSED, server.address)  # type: ignore[arg-type]
    assert "process_vm: not permitted by the peer's configuration" in str(error)
    assert "LLMConfig.paths" in str(error.hint)


def test_a_link_to_oneself_is_none_that_failed(client: Peer) -> None:
    assert client.call("link", 2, client.address) == OK
    assert client.call(last, 2) is None
    assert client.call("unlink", 2, force=True) == OK


def test_wrong_number_of_addresses(client: Peer) -> None:
    error = failed(client, PI, None)  # type: ignore[arg-type]
    assert "exactly one remote address is needed, 0 given" in str(error)
    assert "(no address given)" in str(error)


def test_unlink(peers: Peers, client: Peer) -> None:
    """A stopped peer, then a dead one; what succeeds ends the matter."""
    server = peers.make(1)
    assert client.link(server) == OK
    stop(server.process.pid)
    try:
        assert client.call("unlink", 1, server.address, timeout=300) == TIMEOUT
        error = kept(client, TIMEOUT, "unlink_clusters")
        assert error.retryable
        assert "use force=True" in str(error.hint)
    finally:
        server.process.kill()
    assert client.call("unlink", 1, server.address) == LLMStatusCode.LLM_UNLINK_FAILED
    error = kept(client, LLMStatusCode.LLM_UNLINK_FAILED, "unlink_clusters")
    assert not error.retryable
    assert error.hint == "use force=True"
    assert client.call("unlink", 1, force=True) == OK
    assert client.call(last, 1) is None


def refuse_with_success(_node: Node) -> None:
    """In the child: it refuses every link, with the status of a success."""
    from llm_datadist.engine.handshake import Handshaker  # noqa: PLC0415 - only in the child

    def lie(*_: object) -> messages.Refuse:
        return messages.Refuse(code=0, reason="never mind")

    Handshaker._objection = lie  # type: ignore[method-assign]


def test_a_peer_that_refuses_with_success(peers: Peers, client: Peer) -> None:
    """No link, no success."""
    server = peers.make(1)
    server.call(refuse_with_success)
    error = failed(client, LLMStatusCode.LLM_FAILED, server.address)  # type: ignore[arg-type]
    assert "refused by the peer: never mind" in str(error)


def test_arguments(datadist: LLMDataDist) -> None:
    expect(TypeError, lambda: datadist.last_link_error("1"))  # type: ignore[arg-type]
    expect(ValueError, lambda: datadist.last_link_error(-1))
    datadist.finalize()
    expect(RuntimeError, lambda: datadist.last_link_error(1))


def test_in_loopback_mode(loopback_datadist: LLMDataDist) -> None:
    from loopback_kit import cluster  # noqa: PLC0415 - the only test that needs it

    assert loopback_datadist.link_clusters([cluster(2)])[0] == OK
    assert loopback_datadist.last_link_error(2) is None
    assert loopback_datadist.link_clusters([cluster(2)])[0] == LLMStatusCode.LLM_ALREADY_LINK
    assert "linked already" in str(loopback_datadist.last_link_error(2))
    assert loopback_datadist.unlink_clusters([cluster(2)])[0] == OK
    assert loopback_datadist.last_link_error(2) is None


def test_memory_is_bounded_and_what_is_told_is_the_caller_s() -> None:
    """The latest 1024 clusters; a raised copy keeps no frames alive here."""
    failures = LinkFailures()
    error = LinkError(REFUSED, "nobody there", retryable=True, hint="look")
    with logged() as records:
        for cluster_id in (*range(2000), 976):
            failures.add("link_clusters", PeerAddress(cluster_id, (("127.0.0.1", 1),)), error)
    assert "nobody there; look." in records[0].getMessage()
    assert [failures.get(cluster_id) is not None for cluster_id in (0, 975, 976, 1999)] == [False, False, True, True]
    failures.add("link_clusters", PeerAddress(2000, ()), error)
    assert failures.get(976) is not None
    assert failures.get(977) is None
    told: Any = failures.get(976)
    with pytest.raises(ConnectionError):
        raise told
    assert told.__traceback__ is not None
    again = failures.get(976)
    assert again is not None
    assert again.__traceback__ is None
    failures.forget(976)
    assert failures.get(976) is None
