"""Handing over descriptors of shared memory: to whom, and what a receiver refuses to map."""

from __future__ import annotations

import array
import contextlib
import fcntl
import mmap
import os
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llm_datadist.memory.pool import MemoryPool
from llm_datadist.memory.regions import CAPACITY, ROW_BYTES, RegionTable, RegionView
from llm_datadist.memory.shared import Area, Mapping, NotSealedError
from llm_datadist.net import handover
from llm_datadist.net.handover import HandoverServer, fetch
from llm_datadist.net.workers import Workers
from llm_datadist.paths.base import Context, PathRejectedError, Peer
from llm_datadist.paths.mapped import Mapped
from llm_datadist.utils.deadline import Deadline
from llm_datadist.wire.auth import handover_request
from llm_datadist.wire.framing import ProtocolError
from llm_datadist.wire.handover import MAX_AREAS, Handover, SharedArea, decode, encode
from llm_datadist.wire.messages import Identity, Offer
from net_helpers import WAIT_S, ended, logged, running_loop, settle, soon

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from llm_datadist.net.loop import Loop

TOKEN = b"0123456789abcdef"
REQUEST = handover_request(b"key of the link", TOKEN)
PAGE = 4096
POOL_BYTES = 8 * PAGE


@pytest.fixture
def loop() -> Iterator[Loop]:
    with running_loop() as made:
        yield made


@pytest.fixture
def pool() -> Iterator[MemoryPool]:
    made = MemoryPool(POOL_BYTES, 12)
    yield made
    made.close()


@pytest.fixture
def server(loop: Loop, table: RegionTable, pool: MemoryPool) -> Iterator[HandoverServer]:
    made = HandoverServer([*table.areas, pool.area], loop, lambda request: request == REQUEST)
    yield made
    made.close()


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def memfd(size: int, seals: int = fcntl.F_SEAL_SHRINK) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


# The owner's end


def test_whoever_proves_to_belong_to_the_link_gets_the_descriptors(
    server: HandoverServer, table: RegionTable, pool: MemoryPool
) -> None:
    parcel = fetch(server.name, REQUEST, soon())
    for got, given in zip(parcel.areas, (*table.areas, pool.area), strict=True):
        assert got[1:] == given[1:]
        assert os.fstat(got.fd).st_ino == os.fstat(given.fd).st_ino
        assert not os.get_inheritable(got.fd)
    parcel.close_descriptors()
    parcel.connection.close()


def test_a_receiver_can_read_the_region_table_only(server: HandoverServer, table: RegionTable) -> None:
    parcel = fetch(server.name, REQUEST, soon())
    fd, _, length = parcel.areas[0]
    with pytest.raises(PermissionError):
        mmap.mmap(fd, length)
    with pytest.raises(PermissionError):
        os.pwrite(fd, bytes(8), 8)
    view = RegionView.of_descriptor(fd, "the table")
    assert view.epoch == table.epoch
    table.invalidate()
    assert view.epoch == table.epoch
    view.close()
    parcel.close_descriptors()
    parcel.connection.close()


@pytest.mark.parametrize(
    "request_",
    [bytes(48), TOKEN, handover_request(b"", TOKEN), REQUEST[:47], REQUEST + b"g", b"x"],
    ids=["zeros", "the token alone", "without the key", "short", "long", "one byte"],
)
def test_others_get_none(server: HandoverServer, request_: bytes) -> None:
    before = descriptors()
    with logged() as records, pytest.raises(ProtocolError, match="the peer refused"):
        fetch(server.name, request_, soon())
    assert "not the proof of a link" in records[0].getMessage()
    settle(server._loop)
    assert descriptors() == before


def test_each_link_gets_them_once_at_a_time(server: HandoverServer, loop: Loop) -> None:
    first = fetch(server.name, REQUEST, soon())
    with logged(), pytest.raises(ProtocolError, match="the peer refused"):
        fetch(server.name, REQUEST, soon())
    first.close_descriptors()
    first.connection.close()
    settle(loop)
    settle(loop)
    second = fetch(server.name, REQUEST, soon())
    second.close_descriptors()
    second.connection.close()


@pytest.mark.parametrize("how", ["give_up", "close"])
def test_the_connection_ends_with_the_link_and_with_the_owner(server: HandoverServer, how: str) -> None:
    parcel = fetch(server.name, REQUEST, soon())
    parcel.close_descriptors()
    if how == "give_up":
        server.give_up(bytes(16))
        settle(server._loop)
        parcel.connection.settimeout(0)
        with pytest.raises(BlockingIOError):
            parcel.connection.recv(1)
        server.give_up(TOKEN)
    else:
        server.close()
    assert ended(parcel.connection)
    parcel.connection.close()


def test_another_user_is_dropped_before_it_says_anything(
    server: HandoverServer, loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "_trusted", lambda: (1 << 30, 1 << 30))
    with logged() as records, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(WAIT_S)
        sock.connect("\0" + server.name)
        assert ended(sock)
    settle(loop)
    assert f"it came from user {os.geteuid()}" in records[0].getMessage()


# The receiver


@contextlib.contextmanager
def owner(packet: bytes, fds: Sequence[int], *, silent: bool = False) -> Iterator[str]:
    """Somebody who answers like that; the name."""
    name = f"llm-datadist-test-{os.urandom(8).hex()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.settimeout(WAIT_S)
        listening.bind("\0" + name)
        listening.listen()
        gate = threading.Event()

        def answer() -> None:
            sock, _ = listening.accept()
            with sock:
                sock.settimeout(WAIT_S)
                if silent:
                    gate.wait(WAIT_S)
                elif sock.recv(100):
                    sock.sendmsg([packet], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield name
        finally:
            gate.set()
            thread.join(WAIT_S)


def announced(*lengths: int) -> bytes:
    """The packet for areas of these lengths, 1 GiB apart."""
    return encode(Handover(areas=[SharedArea(base=at << 30, length=size) for at, size in enumerate(lengths, 1)]))


@pytest.mark.parametrize(("count", "came"), [(1, 0), (1, 2), (2, 1), (MAX_AREAS, MAX_AREAS + 1), (1, 200)])
def test_other_than_the_announced_descriptors_are_refused(count: int, came: int) -> None:
    before = descriptors()
    with open(os.devnull, "rb") as null:  # noqa: PTH123 - a descriptor, not a path
        fds = [null.fileno()] * came
        with (
            owner(announced(*[PAGE] * count), fds) as name,
            pytest.raises(ProtocolError, match=f"{count} descriptors were announced"),
        ):
            fetch(name, REQUEST, soon())
    assert descriptors() == before


@pytest.mark.parametrize("packet", [b"x", b"\x80", bytes(8000), announced(PAGE)[:-1]])
def test_malformed_answers_are_refused(packet: bytes) -> None:
    before = descriptors()
    fd = memfd(PAGE)
    with owner(packet, [fd]) as name, pytest.raises(ProtocolError, match="malformed hand-over"):
        fetch(name, REQUEST, soon())
    os.close(fd)
    assert descriptors() == before


@pytest.mark.parametrize("areas", [[], [(1, 0)], [(1, -1)], [(-1, 1)], [(1, 1 << 63)], [(1, 1)] * (MAX_AREAS + 1)])
def test_messages_out_of_bounds_are_refused(areas: list[tuple[int, int]]) -> None:
    message = Handover(areas=[SharedArea(base=base, length=length) for base, length in areas])
    with pytest.raises(ProtocolError):
        decode(encode(message))


def test_an_owner_that_is_silent_is_waited_for_until_the_deadline() -> None:
    before = descriptors()
    with owner(b"", [], silent=True) as name, pytest.raises(BlockingIOError):
        fetch(name, REQUEST, Deadline.after(0.05))
    assert descriptors() == before


def test_an_owner_who_is_another_user_does_not_learn_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "_trusted", lambda: (1 << 30, 1 << 30))
    with (
        owner(announced(PAGE), []) as name,
        pytest.raises(ProtocolError, match=f"the peer runs as user {os.geteuid()}"),
    ):
        fetch(name, REQUEST, soon())


# What is mapped


@pytest.mark.parametrize("kind", ["unsealed", "short", "long", "file", "pipe"])
def test_only_sealed_memfds_of_the_announced_size_are_mapped(kind: str, tmp_path: Path) -> None:
    good = memfd(POOL_BYTES)
    bad = {
        "unsealed": lambda: memfd(POOL_BYTES, 0),
        "short": lambda: memfd(POOL_BYTES - PAGE),
        "long": lambda: memfd(POOL_BYTES + PAGE),
        "file": lambda: os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT),
        "pipe": lambda: os.pipe()[0],
    }[kind]()
    if kind == "file":
        os.ftruncate(bad, POOL_BYTES)
    before = Path("/proc/self/maps").read_text(encoding="utf-8").count("memfd:test")
    with pytest.raises(NotSealedError, match="not a memfd of 32768 bytes that is sealed"):
        Mapping([Area(good, PAGE, POOL_BYTES), Area(bad, 1 << 30, POOL_BYTES)])
    assert Path("/proc/self/maps").read_text(encoding="utf-8").count("memfd:test") == before
    for fd in (good, bad):
        os.close(fd)


def test_addresses_are_located_only_within_one_area() -> None:
    fds = [memfd(POOL_BYTES), memfd(2 * POOL_BYTES)]
    low, high = 1 << 20, (1 << 20) + POOL_BYTES  # adjacent at the owner, not here
    mapping = Mapping([Area(fds[1], high, 2 * POOL_BYTES), Area(fds[0], low, POOL_BYTES)])
    first, second = (int(mapping.locate(np.array([at], dtype=np.uint64), 0)[0]) for at in (low, high))  # type: ignore[index]

    def locate(end: int, *addresses: int) -> list[int] | None:
        found = mapping.locate(np.array(addresses, dtype=np.uint64), end)
        return None if found is None else found.tolist()

    assert locate(POOL_BYTES, low, high, high + POOL_BYTES) == [first, second, second + POOL_BYTES]
    assert locate(0, high + 2 * POOL_BYTES) == [second + 2 * POOL_BYTES]
    assert locate(16) == []
    for end, address in (
        (1, low - 1),
        (POOL_BYTES + 1, low),
        (POOL_BYTES, low + 1),
        (2, high - 1),
        (1, high + 2 * POOL_BYTES),
        (0, high + 2 * POOL_BYTES + 1),
        (1 << 63, high),
        (8, 0),
        (8, 2**64 - 8),
    ):
        assert locate(end, low, address) is None
    mapping.close()
    mapping.close()
    for fd in fds:
        os.close(fd)


# As a path


def _peer(table: RegionTable, **changes: Any) -> Peer:
    facts = {"cluster_id": 1, "incarnation": bytes(16), "boot_id": "here", "pid_namespace": 1, "pid": 1}
    identity = Identity(start_time=1, **{**facts, **changes.pop("identity", {})})
    offer = Offer(probe_region=table.probe_region, nonce=table.nonce, table_fd=0, paths=["mapped"], **changes)
    return Peer(identity, offer)


def _context(table: RegionTable) -> Context:
    return Context(
        identity=_peer(table).identity,
        regions=table,
        copiers=Workers("test-mapped", 1),
        copy_threads=1,
        open_data=lambda _count, _deadline: [],
        fence=lambda _numbers, _deadline: True,
        token=REQUEST,
    )


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"identity": {"boot_id": "there"}, "handover": "x"}, "on another host"),
        ({"identity": {"boot_id": ""}, "handover": "x"}, "cannot tell on which host it is"),
        ({}, "has no memory pool"),
        ({"handover": "llm-datadist-nobody"}, "cannot be seen from here"),
        ({"handover": "x" * 128}, "cannot get the peer's shared memory: .*too long"),
    ],
)
def test_the_path_is_rejected(table: RegionTable, changes: dict[str, Any], match: str) -> None:
    with pytest.raises(PathRejectedError, match=match):
        Mapped().connect(_peer(table, **changes), _context(table), soon())


@pytest.mark.parametrize("kind", ["table", "pool", "silent"])
def test_owners_that_offer_what_must_not_be_mapped_are_rejected(table: RegionTable, kind: str) -> None:
    """A table that is none, a pool that could be truncated, nothing at all: nothing stays behind."""
    pool = memfd(POOL_BYTES, 0)
    first = memfd(CAPACITY * ROW_BYTES) if kind == "table" else os.dup(table.fd)
    match = {"table": "is not a region table", "pool": "not a memfd", "silent": "did not answer in time"}[kind]
    before = descriptors()
    with owner(announced(CAPACITY * ROW_BYTES, POOL_BYTES), [first, pool], silent=kind == "silent") as name:
        deadline = Deadline.after(0.05) if kind == "silent" else soon()
        with pytest.raises(PathRejectedError, match=match):
            Mapped().connect(_peer(table, handover=name), _context(table), deadline)
    assert descriptors() == before
    for fd in (first, pool):
        os.close(fd)
