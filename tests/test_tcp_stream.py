"""How a thread waits for bytes on a data connection."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llm_datadist.paths.tcp_stream import Stream
from net_helpers import receive, soon, tcp_pair

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator


@pytest.fixture
def pair() -> Iterator[tuple[Stream, socket.socket]]:
    near, far = tcp_pair()
    with near, far:
        yield Stream(near), far


def test_spins_in_vain_are_followed_by_more_and_more_that_are_left_out(pair: tuple[Stream, socket.socket]) -> None:
    stream, far = pair
    room = memoryview(bytearray(1))
    for left_out in (1, 3, 7):
        assert stream.spin_into(room) == 0  # nothing is there
        far.sendall(b"x")
        assert [stream.spin_into(room) for _ in range(left_out)] == [0] * left_out  # it does not even look
        assert stream.receive_into(room, soon()) == 1
    far.sendall(b"x")
    assert stream.spin_into(room) == 1
    assert stream.spin_into(room) == 0  # one that found something: the count begins anew
    far.sendall(b"x")
    assert [stream.spin_into(room) for _ in range(2)] == [0, 1]


class Busy(Stream):
    """Before it sends what did not fit into the buffer, all memory that is free is used for something else."""

    def _pump(self, *arguments: Any) -> None:
        used = [bytes([0xEE]) * size for size in range(0, 4 << 20, 1 << 14)]
        super()._pump(*arguments)
        del used


@pytest.mark.parametrize("kind", [bytes, memoryview])
def test_a_header_that_does_not_fit_into_the_buffer_is_sent_as_it_is(kind: type) -> None:
    """It is much longer than any header is."""
    data = np.random.default_rng(1).integers(0, 256, 1 << 20, dtype=np.uint8).tobytes()
    near, far = tcp_pair()
    with near, far:
        sender = threading.Thread(target=Busy(near).send_bytes, args=(kind(data), soon()))
        sender.start()
        assert receive(far, len(data)) == data
        sender.join()


def test_what_comes_while_spins_are_left_out_is_received(pair: tuple[Stream, socket.socket]) -> None:
    stream, far = pair
    for size in range(1, 9):
        assert stream.spin_into(memoryview(bytearray(1))) == 0
        far.sendall(bytes(range(size)))
        assert stream.receive_exactly(size, soon()) == bytes(range(size))
