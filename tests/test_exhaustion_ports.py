"""Addresses at which nobody can listen: who is in the way, and what to do."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
from typing import TYPE_CHECKING

import pytest

from confine_kit import become, in_turn
from exhaustion_kit import as_root
from expect import expect
from hosts_kit import enter, network
from llm_datadist import LLMConfig, LLMDataDist, LLMException, LLMRole, LLMStatusCode
from peers import Peer, Peers
from test_links import pull_one, with_caches

if TYPE_CHECKING:
    from collections.abc import Iterator

OK = LLMStatusCode.LLM_SUCCESS
FAILED = LLMStatusCode.LLM_FAILED


@contextlib.contextmanager
def taken(family: socket.AddressFamily = socket.AF_INET, host: str = "127.0.0.1") -> Iterator[int]:
    """A port of this process."""
    with socket.socket(family) as sock:
        sock.bind((host, 0))
        sock.listen()
        yield sock.getsockname()[1]


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_port_of_another_process(peers: Peers, family: socket.AddressFamily, host: str) -> None:
    """It is named, and nothing is left of the attempt."""
    peer = Peer(peers.process(), "node-1")
    with taken(family, host) as port:
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        error = expect(FAILED, lambda: peer.init(1, listen_ip_info=where))
    text = str(error)
    assert f"cannot listen at {where}: Address already in use (process {os.getpid()} (" in text
    assert "listens there); choose another port (0 takes a free one) or end the process" in text
    assert peer.init(1, listen_ip_info=where).address == (host, port)


def test_port_of_another_instance(peers: Peers) -> None:
    """In the same process, at the start and when the role is switched: the old address stays."""
    process = peers.process()
    first, second = (peers.make(number, process=process) for number in (1, 2))
    reader = peers.make(3, listen=False)
    with_caches(second, reader)
    assert first.address is not None
    assert second.address is not None
    where = f"127.0.0.1:{first.address[1]}"
    third = Peer(process, "node-4")
    for call in (lambda: third.init(4, listen_ip_info=where), lambda: second.call(switch, first.address)):
        assert "(this process listens there)" in str(expect(FAILED, call))
    assert reader.link(second) == OK
    reader.call(pull_one, 2)


def switch(node: object, address: tuple[str, int]) -> None:
    """In the child."""
    options = {"llm.listenIpInfo": f"{address[0]}:{address[1]}"}
    node.datadist.switch_role(LLMRole.PROMPT, options)  # type: ignore[attr-defined]


@as_root
def test_port_of_the_privileged() -> None:
    """Port 80 as nobody."""
    peers = Peers()
    with network() as net, contextlib.closing(peers):
        wire = net.wire(net.host("web"))
        first = in_turn(
            functools.partial(enter, wire.host.name, str(wire.host.boot_id)), functools.partial(become, 65534)
        )
        peer = Peer(peers.process(first), "node-1")
        error = expect(FAILED, lambda: peer.init(1, listen_ip_info=f"{wire.address}:80"))
        assert "Permission denied (ports below 1024 are for privileged processes); choose a port from 1024" in str(
            error
        )
        assert peer.init(1, listen_ip_info=f"{wire.address}:1024").address == (wire.address, 1024)


def test_address_of_another_host(peers: Peers) -> None:
    """TEST-NET is nobody's."""
    peer = Peer(peers.process(), "node-1")
    error = expect(FAILED, lambda: peer.init(1, listen_ip_info="192.0.2.1:0"))
    assert "cannot listen at 192.0.2.1:0: Cannot assign requested address; choose an address that a network" in str(
        error
    )


@pytest.mark.parametrize("where", ["127.0.0.1:65536", "127.0.0.1:-1", "127.0.0.1:abc", "127.0.0.1:"])
def test_no_port(where: str) -> None:
    """Refused before anything is opened, with the value."""
    config = LLMConfig()
    config.device_id = 0
    config.enable_cache_manager = True
    config.allow_multiple_instances = True
    with pytest.raises((LLMException, ValueError, TypeError)) as caught:  # noqa: PT012 - either may refuse
        config.listen_ip_info = where
        LLMDataDist(LLMRole.MIX, 1).init(config.generate_options())
    assert where.rsplit(":", 1)[1] in str(caught.value)
