"""Ranges of memory through one TLS connection: whatever their sizes, the same bytes come out, and nowhere else."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_datadist.net.security import TlsFiles
from llm_datadist.net.tls import TlsContexts, TlsSocket
from llm_datadist.paths.base import ConnectionLostError, PathFaultError, PathTimeoutError
from llm_datadist.paths.tcp_stream import Stream, iovec_of, stream_on
from llm_datadist.paths.tls_stream import TlsStream
from llm_datadist.utils.deadline import Deadline
from net_helpers import WAIT_S, soon, tcp_pair
from paged_memory import Paged
from security_kit import certificates

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOM = 3 << 20
lengths = st.lists(
    st.one_of(st.integers(0, 100), st.integers(0, 70_000), st.sampled_from([65_535, 65_536, 262_144, 700_001])),
    min_size=1,
    max_size=12,
).filter(lambda sizes: 0 < sum(sizes) <= ROOM)


def pair() -> tuple[TlsStream, TlsStream]:
    """Both ends of a connection whose handshake is over."""
    files = certificates()
    contexts = TlsContexts(TlsFiles(files["tls_cert"], files["tls_key"], files["tls_ca"]))
    left, right = contexts.connecting(), contexts.listening()
    over = [False, False]
    while not all(over):
        over[0] = left.shake_hands()
        right.feed(left.outgoing())
        over[1] = right.shake_hands()
        left.feed(right.outgoing())
    ends = [TlsSocket.adopt(sock, tls) for sock, tls in zip(tcp_pair(), (left, right), strict=True)]
    for end in ends:
        end.settimeout(None)
    made = [stream_on(end) for end in ends]
    assert all(isinstance(stream, TlsStream) for stream in made)
    return made[0], made[1]  # type: ignore[return-value]


@pytest.fixture(scope="module")
def streams() -> Iterator[tuple[TlsStream, TlsStream]]:
    made = pair()
    yield made
    for stream in made:
        stream.sock.close()


def ranges(memory: np.ndarray, sizes: Sequence[int], gap: int) -> tuple[np.ndarray, np.ndarray]:
    """An iovec array of ranges with gaps between them, and which bytes are in it."""
    inside = np.zeros(len(memory), dtype=bool)
    rows, at = [], gap
    for size in sizes:
        rows.append((memory.ctypes.data + at, size))
        inside[at : at + size] = True
        at += size + gap
    return np.array(rows, dtype=np.uint64), inside


@settings(deadline=None, max_examples=60)
@given(sizes=lengths, other=st.integers(1, 300_000), begin=st.integers(0, 5000))
def test_any_ranges_there_and_any_others_here(
    streams: tuple[TlsStream, TlsStream], sizes: list[int], other: int, begin: int
) -> None:
    """The receiving side has another cut, and some bytes have come before."""
    near, far = streams
    total = sum(sizes)
    source = np.random.default_rng(total).integers(0, 256, ROOM + 13 * 7, dtype=np.uint8)
    target = np.full(2 * ROOM, 0xEE, dtype=np.uint8)
    cut = [min(other, total - at) for at in range(0, total, other)][:2000]
    cut[-1] += total - sum(cut)
    out, taken = ranges(source, sizes, 7)
    into, given_ = ranges(target, cut, 3)
    early = source[taken][: min(begin, total)].tobytes()
    sender = threading.Thread(target=near.send, args=(out.copy(), soon()))
    sender.start()
    head = far.receive_exactly(len(early), soon()) if early else b""
    assert head == early
    far.receive(into.copy(), soon(), memoryview(head))
    sender.join(WAIT_S)
    assert not sender.is_alive()
    assert (target[given_] == source[taken]).all()
    assert (target[~given_] == 0xEE).all()


def test_a_few_ranges(streams: tuple[TlsStream, TlsStream]) -> None:
    near, far = streams
    source, target = np.arange(100, dtype=np.uint8), np.zeros(100, dtype=np.uint8)
    near.send_few([source.ctypes.data, 60, source.ctypes.data + 60, 40], 100, soon())
    far.receive_few([target.ctypes.data, 1, target.ctypes.data + 1, 99], 100, soon())
    assert (source == target).all()


def test_what_is_posted_and_not_sent_is_flushed(streams: tuple[TlsStream, TlsStream]) -> None:
    near, far = streams
    data = np.random.default_rng(3).integers(0, 256, 8 << 20, dtype=np.uint8).tobytes()
    near.post(data)
    sender = threading.Thread(target=near.flush, args=(soon(),))
    sender.start()
    assert far.receive_exactly(len(data), soon()) == data
    sender.join(WAIT_S)
    assert not sender.is_alive()


def test_memory_that_is_not_mapped_is_an_error() -> None:
    near, far = pair()
    hole = Paged(1)
    hole.unmap(10, 5)
    iovecs = np.array([[hole.start, hole.size]], dtype=np.uint64)
    with pytest.raises(PathFaultError):
        near.send(iovecs.copy(), soon())
    sender = threading.Thread(target=lambda: near.send_bytes(bytes(hole.size), soon()))
    sender.start()
    with pytest.raises(PathFaultError):
        far.receive(iovecs.copy(), soon())
    far.discard(hole.size - (256 << 10), soon())
    sender.join(WAIT_S)
    for stream in (near, far):
        stream.sock.close()


def test_waiting_ends_by_the_deadline_and_loses_nothing(streams: tuple[TlsStream, TlsStream]) -> None:
    near, far = streams
    room = memoryview(bytearray(8))
    with pytest.raises(PathTimeoutError):
        far.receive_into(room, Deadline.after(0.05))
    sealed = near._encrypted(b"complete")
    near.sock.sendall(sealed[:7])
    with pytest.raises(PathTimeoutError):
        far.receive_into(room, Deadline.after(0.05))
    near.sock.sendall(sealed[7:])
    assert far.receive_exactly(8, soon()) == b"complete"


def test_what_was_altered_or_is_not_encrypted_is_an_error() -> None:
    for index in (3, 20, -1):
        near, far = pair()
        sealed = bytearray(near._encrypted(bytes(100)))
        sealed[index] ^= 1
        near.sock.sendall(sealed + bytes(1 << 16))
        with pytest.raises(ConnectionLostError, match="TLS"):
            far.receive_exactly(100, soon())
        for stream in (near, far):
            stream.sock.close()
    near, far = pair()
    plain = np.zeros(1000, dtype=np.uint8)
    Stream.send(near, iovec_of(plain), soon())
    with pytest.raises(ConnectionLostError, match="TLS"):
        far.receive_exactly(100, soon())
    for stream in (near, far):
        stream.sock.close()
