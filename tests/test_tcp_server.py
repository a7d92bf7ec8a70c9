"""The owner's end of a data connection: whatever bytes come, and however they are cut, it answers what was asked."""

from __future__ import annotations

import ctypes
import gc
import itertools
import mmap
import socket
import threading
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llm_datadist.paths.base import FEW
from llm_datadist.wire.data import MAX_SPANS, REPLY_BYTES, Op, Reply, Request, Result, encode_spans
from net_helpers import WAIT_S, ended, logged, receive, soon
from tcp_kit import TOKEN, Owner, memory, owner

if TYPE_CHECKING:
    from collections.abc import Iterator

SIZE = 64
TIMEOUT_MS = 20_000
KINDS = (np.uint64, np.int64, np.int64, np.int64)
UNKNOWN = 77 << 16 | 9


class Served(NamedTuple):
    """Regions: three that can be used, one that is not for peers, one that is not mapped, one that does not exist."""

    owner: Owner
    memory: list[np.ndarray]
    regions: list[int]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with owner() as made:
        buffers = memory(3, SIZE)
        regions = [made.add(buffer) for buffer in buffers]
        regions.append(made.table.add(buffers[0].ctypes.data, SIZE, reachable=False))
        regions.append(made.table.add(4096, SIZE))
        made.table.invalidate()
        yield Served(made, buffers, [*regions, UNKNOWN])


class Ask(NamedTuple):
    """One request, with regions by their position in ``Served.regions``."""

    op: Op
    tensors: list[tuple[int, int]]
    runs: list[tuple[int, int]]
    age: int
    """0: planned in the present epoch; 1: in the one before; 2: in whichever, it does not matter."""
    payload: bytes

    @property
    def total(self) -> int:
        return len(self.tensors) * sum(length for _, length in self.runs)

    def encode(self, served: Served) -> bytes:
        """All that is sent."""
        epoch = 0 if self.age == 2 else served.owner.table.epoch - self.age
        request = Request(self.op, len(self.tensors), len(self.runs), epoch, self.total, TIMEOUT_MS)
        tables = encode_spans(
            np.array([served.regions[at] for at, _ in self.tensors], dtype=np.uint64),
            np.array([start for _, start in self.tensors], dtype=np.int64),
            np.array([offset for offset, _ in self.runs], dtype=np.int64),
            np.array([length for _, length in self.runs], dtype=np.int64),
        )
        return request.encode() + tables + bytes(request.padding) + self.payload

    def answer(self, content: list[bytearray]) -> tuple[Result, bytes]:
        """What must come back, and happens to the content of the three good regions."""
        at, ends = [at for at, _ in self.tensors], [offset + length for offset, length in self.runs]
        if 5 in at:
            return Result.UNKNOWN_REGION, b""
        if self.age == 1:
            return Result.STALE, b""
        if 3 in at or any(start + max(ends) > SIZE for _, start in self.tensors):
            return Result.OUT_OF_RANGE, b""
        if 4 in at:
            return Result.FAULT, b""
        spans = [(content[at], start + offset, length) for at, start in self.tensors for offset, length in self.runs]
        if self.op is Op.READ:
            return Result.OK, b"".join(bytes(region[first : first + length]) for region, first, length in spans)
        done = 0
        for region, first, length in spans:
            region[first : first + length] = self.payload[done : done + length]
            done += length
        return Result.OK, b""


@st.composite
def asks(draw: st.DrawFn) -> Ask:
    """A request: most can be served, some are refused for one reason or another."""
    usual = st.integers(0, 2)
    region = draw(st.sampled_from([usual, usual, usual, st.integers(0, 5)]))
    tensors = draw(st.lists(st.tuples(region, st.integers(0, 8)), min_size=1, max_size=9))
    runs = draw(st.lists(st.tuples(st.integers(0, 32), st.integers(0, 24)), min_size=1, max_size=9))
    if draw(st.integers(0, 9)) == 0:
        runs.append((40, draw(st.integers(10, 40))))
    op = draw(st.sampled_from(Op))
    total = len(tensors) * sum(length for _, length in runs)
    payload = draw(st.binary(min_size=total, max_size=total)) if op is Op.WRITE and total < 40 else None
    if payload is None:
        first = draw(st.integers(0, 255))
        payload = bytes((first + 7 * n) % 256 for n in range(total)) if op is Op.WRITE else b""
    return Ask(op, tensors, runs, draw(st.sampled_from([0, 0, 0, 1, 2])), payload)


def read_reply(sock: socket.socket, ask: Ask) -> tuple[Result, bytes]:
    """The result, and the bytes of a read."""
    reply = Reply.decode(receive(sock, REPLY_BYTES))
    if reply.result is not Result.OK:
        assert receive(sock, reply.reason_bytes).decode()
        return reply.result, b""
    return reply.result, receive(sock, ask.total) if ask.op is Op.READ else b""


@pytest.fixture(scope="module")
def connection(served: Served) -> Iterator[socket.socket]:
    """One connection for all: it must stay in step whatever is asked."""
    _, sock = served.owner.connect()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    yield sock
    sock.close()


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(requests=st.lists(asks(), min_size=1, max_size=8), cuts=st.lists(st.floats(0, 1), max_size=6))
def test_requests_that_follow_each_other_cut_anywhere(
    served: Served, connection: socket.socket, requests: list[Ask], cuts: list[float]
) -> None:
    """Also those that are read together with the first bytes of a write, or of the next request."""
    content = [bytearray(bytes((at * 40 + n) % 256 for n in range(SIZE))) for at in range(3)]
    for buffer, start in zip(served.memory, content, strict=True):
        buffer[:] = np.frombuffer(start, dtype=np.uint8)
    stream = b"".join(ask.encode(served) for ask in requests)
    marks = [0, *sorted(int(cut * len(stream)) for cut in cuts), len(stream)]
    for start, stop in itertools.pairwise(marks):
        connection.sendall(stream[start:stop])
    for ask in requests:
        assert read_reply(connection, ask) == ask.answer(content)
    assert [buffer.tobytes() for buffer in served.memory] == [bytes(region) for region in content]


@pytest.mark.parametrize("op", Op)
@pytest.mark.parametrize(("tensors", "runs"), [(1, FEW), (1, FEW + 1), (FEW, 1), (8, 8), (13, 5), (3, 700), (700, 3)])
def test_requests_of_few_and_many_spans(op: Op, tensors: int, runs: int) -> None:
    """On both sides of the border between the two ways to serve them."""
    rng = np.random.default_rng(tensors)
    with owner() as made:
        buffers = memory(tensors, 16 * runs, seed=runs)
        mine = Served(made, buffers, [made.add(buffer) for buffer in buffers])
        order = [16 * int(at) + 3 for at in rng.permutation(runs)]
        total = tensors * runs * 11
        payload = rng.integers(0, 256, total, dtype=np.uint8).tobytes() if op is Op.WRITE else b""
        ask = Ask(op, [(n, 0) for n in range(tensors)], [(at, 11) for at in order], 0, payload)
        content = [bytearray(buffer.tobytes()) for buffer in buffers]
        expected = b""
        for n, at in itertools.product(range(tensors), order):
            if op is Op.READ:
                expected += bytes(content[n][at : at + 11])
            else:
                content[n][at : at + 11], payload = payload[:11], payload[11:]
        _, sock = made.connect()
        sock.sendall(ask.encode(mine))
        assert read_reply(sock, ask) == (Result.OK, expected)
        assert [buffer.tobytes() for buffer in buffers] == [bytes(each) for each in content]
        sock.close()


def test_the_largest_request() -> None:
    """8192 runs: its tables are much longer than what is read at once."""
    with owner() as made:
        (buffer,) = buffers = memory(1, 16 * MAX_SPANS, seed=3)
        mine = Served(made, buffers, [made.add(buffer)])
        ask = Ask(Op.READ, [(0, 0)], [(16 * n, 8) for n in range(MAX_SPANS)], 0, b"")
        _, sock = made.connect()
        sending = threading.Thread(target=sock.sendall, args=(2 * ask.encode(mine),))
        sending.start()
        for _ in range(2):
            result, data = read_reply(sock, ask)
            assert result is Result.OK
            assert data == buffer.reshape(-1, 16)[:, :8].tobytes()
        sending.join(WAIT_S)
        assert not sending.is_alive()
        sock.close()


GOOD = Ask(Op.READ, [(0, 0)], [(0, SIZE)], 0, b"")
"""For the whole first region."""


def whole(request: Request, tables: bytes) -> bytes:
    return request.encode() + tables + bytes(request.padding)


GARBAGE = [
    b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n",
    bytes(200),
    b"\xff" * 5000,
    Request(Op.READ, 1, 1, 0, 8, 5).encode()[:-1] + b"\xff" + bytes(16),
    whole(Request(Op.READ, 1, 1, 0, 8, TIMEOUT_MS), bytes(24) + (9).to_bytes(8, "little")),
    whole(Request(Op.WRITE, 1, 1, 0, 2**62, TIMEOUT_MS), bytes(24) + (2**62).to_bytes(8, "little")),
    whole(Request(Op.WRITE, 1, FEW + 1, 0, 8, TIMEOUT_MS), bytes(16 * (FEW + 2))),
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=lambda raw: raw[:12].hex())
@pytest.mark.parametrize("behind", [False, True])
def test_garbage_ends_the_connection_and_only_that(served: Served, garbage: bytes, behind: bool) -> None:
    """Also behind a good request, which is answered before."""
    _, sock = served.owner.connect()
    _, other = served.owner.connect()
    before = [buffer.copy() for buffer in served.memory]
    with logged() as records:
        sock.sendall((GOOD.encode(served) if behind else b"") + garbage)
        if behind:
            assert read_reply(sock, GOOD) == (Result.OK, before[0].tobytes())
        assert ended(sock)
    assert any("data connection closed" in record.getMessage() for record in records)
    other.sendall(GOOD.encode(served))
    assert read_reply(other, GOOD) == (Result.OK, before[0].tobytes())
    assert all((a == b).all() for a, b in zip(before, served.memory, strict=True))
    for each in (sock, other):
        each.close()


@pytest.mark.parametrize("part", [1, 31, 32, 40, 63, 64, 100])
def test_connections_that_end_in_the_middle_are_forgotten(part: int) -> None:
    """And nothing that they held stays held."""
    with owner() as made:
        (buffer,) = buffers = memory(1, SIZE, seed=1)
        mine = Served(made, buffers, [made.add(buffer)])
        ask = Ask(Op.WRITE, [(0, 0)], [(0, SIZE)], 0, bytes(SIZE))
        _, sock = made.connect()
        sock.sendall(ask.encode(mine)[:part])
        sock.shutdown(socket.SHUT_WR)
        assert ended(sock)
        sock.close()
        done = threading.Event()
        made.server.give_up(TOKEN, None, done.set)
        assert done.wait(WAIT_S)
        assert made.table.wait_unused(mine.regions, soon())
        assert made.server.count(TOKEN) == 0


def test_a_connection_that_comes_after_the_end_is_closed() -> None:
    with owner() as made:
        made.server.close()
        _, asking = made.connect()
        with asking:
            assert ended(asking)


@pytest.mark.parametrize("runs", [1, FEW + 1])
def test_memory_that_is_unmapped_after_it_was_served(runs: int) -> None:
    """Refused, and the connection goes on."""
    with owner() as made:
        (good,) = memory(1, mmap.PAGESIZE)
        area = mmap.mmap(-1, mmap.PAGESIZE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(area))
        made_served = Served(made, [good], [made.add(good), made.table.add(address, mmap.PAGESIZE)])
        _, sock = made.connect()
        with sock:
            for expected in (Result.OK, Result.FAULT):
                if expected is Result.FAULT:
                    gc.collect()  # what was made of it in order to know its address
                    area.close()
                for region, result in 2 * ((1, expected), (0, Result.OK)):
                    ask = Ask(Op.READ, [(region, 0)], [(at, 1) for at in range(runs)], 2, b"")
                    sock.sendall(ask.encode(made_served))
                    assert read_reply(sock, ask)[0] is result


def test_who_gives_up_what_is_being_given_up_waits_for_it_too() -> None:
    """The end of a link closes a connection while a write is stored; then its asker wants to know when that is over."""
    with owner() as made:
        (target,) = memory(1, SIZE)
        region = made.add(target)
        stored, go_on = threading.Event(), threading.Event()
        let_go = made.table.let_go

        def slow(lease: object) -> None:
            stored.set()
            assert go_on.wait(WAIT_S)
            let_go(lease)

        made.table.let_go = slow  # type: ignore[method-assign]
        number, sock = made.connect()
        with sock:
            table = encode_spans(
                *(np.array([word], dtype=kind) for word, kind in zip((region, 0, 0, SIZE), KINDS, strict=True))
            )
            request = Request(Op.WRITE, 1, 1, 0, SIZE, TIMEOUT_MS)
            sock.sendall(request.encode() + table + bytes(request.padding + SIZE))
            assert stored.wait(WAIT_S)
            ends = [threading.Event() for _ in range(3)]
            for numbers, end in zip((None, [number], [number]), ends, strict=True):
                made.server.give_up(TOKEN, numbers, end.set)
            assert not any(end.is_set() for end in ends)
            go_on.set()
            assert all(end.wait(WAIT_S) for end in ends)
            later = threading.Event()
            made.server.give_up(TOKEN, [number], later.set)
            assert later.is_set()
