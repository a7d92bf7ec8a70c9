"""Control connections: requests find their replies, waits end, and peers that speak no sense are cut off."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING

import pytest

from channel_kit import End, watched_ends
from llm_datadist.net.channel import Channel, ChannelClosedError, ReplyTimeoutError
from llm_datadist.utils.deadline import Deadline
from llm_datadist.wire import framing, messages
from llm_datadist.wire.messages import Bye, CacheInfo, Catalogue, Confirm, Fetch, Join, Ok, Ping, Refuse
from net_helpers import WAIT_S, ended, logged, receive, running_loop, settle, soon, tcp_pair

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from llm_datadist.net.loop import Loop
    from llm_datadist.wire.messages import Body

PING = Ping(link_token=bytes(16))


@pytest.fixture
def loop() -> Iterator[Loop]:
    with running_loop() as made:
        yield made


@pytest.fixture
def ends(loop: Loop) -> Iterator[tuple[End, End]]:
    with watched_ends(loop) as made:
        yield made


@pytest.fixture
def peer(loop: Loop) -> Iterator[tuple[End, socket.socket]]:
    """A watched end, and the plain socket at the other end."""
    sock, other = tcp_pair()
    end = End(sock, loop).start()
    yield end, other
    end.channel.close("end of the test")
    end.reason()
    other.close()


def echo(channel: Channel, body: Body, request_id: int) -> None:
    assert isinstance(body, Join)
    channel.reply(Confirm(path=body.comm), request_id)


def in_thread(work: Callable[[], object]) -> Callable[[], list[object]]:
    """Run ``work`` on a thread; the result, or the exception, in a list, once it has ended."""
    results: list[object] = []

    def guarded() -> None:
        try:
            results.append(work())
        except Exception as error:  # noqa: BLE001 - handed to the test
            results.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()

    def result() -> list[object]:
        thread.join(WAIT_S)
        assert not thread.is_alive()
        return results

    return result


def big_catalogue() -> Catalogue:
    """A message of about six million bytes."""
    regions = list(range(2**40, 2**40 + 60_000))
    cache = CacheInfo(cache_id=1, kind="blocks", tensor_size=64, entries=4, dtype="f", accessible=True, regions=regions)
    return Catalogue(epoch=3, caches=[cache] * 11, keys=[])


# Messages and replies


def test_messages_arrive_in_order_on_the_loop(ends: tuple[End, End]) -> None:
    left, right = ends
    for number in range(100):
        left.channel.send(Join(comm=str(number)))
    assert right.wait_for(100) == [(Join(comm=str(number)), 0) for number in range(100)]
    right.channel.send(Ok())
    assert left.wait_for(1) == [(Ok(), 0)]
    assert left.on_loop == right.on_loop == {True}


def test_what_was_sent_before_the_start_arrives(loop: Loop) -> None:
    left, right = (End(sock, loop) for sock in tcp_pair())
    left.channel.send(Ok())
    right.start()
    assert right.wait_for(1) == [(Ok(), 0)]
    left.start()
    left.channel.close("done")
    assert (left.reason(), right.reason()) == ("done", "the peer closed the connection")


def test_request_and_reply(ends: tuple[End, End]) -> None:
    left, right = ends
    right.channel.on_message = echo
    assert left.channel.request(Join(comm="a"), soon()) == Confirm(path="a")
    left.channel.on_message = echo
    assert right.channel.request(Join(comm="b"), soon()) == Confirm(path="b")
    assert left.messages == right.messages == []


def test_replies_find_their_requests_in_any_order(ends: tuple[End, End]) -> None:
    left, right = ends
    results = [in_thread(lambda name=name: left.channel.request(Join(comm=name), soon())) for name in "abc"]
    for body, request_id in reversed(right.wait_for(3)):
        assert isinstance(body, Join)
        assert request_id > 0
        right.channel.reply(Confirm(path=body.comm), request_id)
    assert [result() for result in results] == [[Confirm(path=name)] for name in "abc"]


def test_many_threads_ask_at_the_same_time(ends: tuple[End, End]) -> None:
    left, right = ends
    right.channel.on_message = echo

    def ask(thread: int) -> list[Body]:
        return [left.channel.request(Join(comm=f"{thread}-{n}"), soon()) for n in range(50)]

    results = [in_thread(lambda thread=thread: ask(thread)) for thread in range(8)]
    for thread, result in enumerate(results):
        assert result() == [[Confirm(path=f"{thread}-{n}") for n in range(50)]]


def test_long_messages_pass_in_both_directions_at_once(ends: tuple[End, End]) -> None:
    for end in ends:
        end.channel.trust()
        end.channel.on_message = lambda channel, _body, request_id: channel.reply(big_catalogue(), request_id)
    results = [in_thread(lambda end=end: end.channel.request(big_catalogue(), soon())) for end in ends]
    for result in results:
        assert result() == [big_catalogue()]


# Timeouts


@pytest.mark.parametrize("seconds", [0.0, 0.02])
def test_a_request_times_out_and_the_connection_stays(ends: tuple[End, End], seconds: float) -> None:
    left, right = ends
    with pytest.raises(ReplyTimeoutError, match="no reply to Ping in time"):
        left.channel.request(PING, Deadline.after(seconds))
    ((_, request_id),) = right.wait_for(1)
    right.channel.reply(Refuse(code=1, reason="late"), request_id)
    right.channel.on_message = echo
    assert left.channel.request(Join(comm="a"), soon()) == Confirm(path="a")
    assert left.messages == []
    assert not left.channel.closed
    assert left.channel._waiters == {}


def test_a_reply_that_nobody_asked_for_is_dropped(ends: tuple[End, End]) -> None:
    left, right = ends
    right.channel.reply(Ok(), 77)
    right.channel.send(Fetch())
    assert left.wait_for(1) == [(Fetch(), 0)]


# The end


def test_close_wakes_all_that_wait(ends: tuple[End, End]) -> None:
    left, right = ends
    waiting = [in_thread(lambda: left.channel.request(PING, soon())) for _ in range(3)]
    right.wait_for(3)
    left.channel.close("this side has had enough")
    for result in waiting:
        (error,) = result()
        assert isinstance(error, ChannelClosedError)
        assert str(error) == "this side has had enough"
    assert right.reason() == "the peer closed the connection"


def test_the_end_of_the_peer_wakes_all_that_wait(ends: tuple[End, End]) -> None:
    left, right = ends
    waiting = in_thread(lambda: left.channel.request(PING, soon()))
    right.wait_for(1)
    right.channel.close("gone")
    (error,) = waiting()
    assert isinstance(error, ChannelClosedError)
    assert str(error) == "the peer closed the connection"


def test_a_reset_by_the_peer_is_a_lost_connection(peer: tuple[End, socket.socket]) -> None:
    end, other = peer
    other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    other.close()
    assert end.reason() == "connection lost: Connection reset by peer"


def test_nothing_is_sent_on_a_closed_channel(ends: tuple[End, End]) -> None:
    left, _ = ends
    assert not left.channel.closed
    left.channel.close("first reason")
    left.channel.close("second reason")
    assert left.channel.closed
    for call in (lambda: left.channel.send(Ok()), lambda: left.channel.request(PING, soon())):
        with pytest.raises(ChannelClosedError, match="first reason"):
            call()
    left.channel.reply(Ok(), 1)
    assert left.reason() == "first reason"
    assert left.channel._waiters == {}


def test_what_was_sent_before_close_arrives(ends: tuple[End, End]) -> None:
    left, right = ends
    for number in range(50):
        left.channel.send(Join(comm=str(number)))
    left.channel.send(Bye(reason="done"))
    left.channel.close("done")
    assert right.reason() == "the peer closed the connection"
    assert right.messages[-1] == (Bye(reason="done"), 0)
    assert len(right.messages) == 51


def test_close_inside_a_callback_ends_delivery(ends: tuple[End, End]) -> None:
    left, right = ends
    seen: list[Body] = []

    def once(channel: Channel, body: Body, _: int) -> None:
        seen.append(body)
        channel.close("enough")

    right.channel.on_message = once
    # One segment with both messages.
    left.channel._sock.sendall(
        b"".join(framing.frame(messages.encode(messages.Envelope(body=Join(comm=name)))) for name in "ab")
    )
    assert right.reason() == "enough"
    assert seen == [Join(comm="a")]


def test_an_error_in_the_callback_loses_no_other_message(ends: tuple[End, End]) -> None:
    left, right = ends
    seen: list[Body] = []
    done = threading.Event()

    def fail_first(_channel: Channel, body: Body, _: int) -> None:
        seen.append(body)
        if len(seen) == 1:
            message = "injected"
            raise RuntimeError(message)
        done.set()

    right.channel.on_message = fail_first
    with logged() as records:
        left.channel._sock.sendall(
            b"".join(framing.frame(messages.encode(messages.Envelope(body=Join(comm=name)))) for name in "ab")
        )
        arrived = done.wait(1)
    assert [record.levelname for record in records] == ["ERROR"]
    assert not right.channel.closed
    assert arrived
    assert seen == [Join(comm="a"), Join(comm="b")]


# Strangers and liars


def test_garbage_closes(peer: tuple[End, socket.socket]) -> None:
    end, other = peer
    with logged() as records:
        other.sendall(framing.frame(b"\xc1 this is no message"))
        assert "malformed control message" in end.reason()
    assert ended(other)
    assert [record.levelname for record in records] == ["WARNING"]


def test_messages_before_garbage_are_delivered(peer: tuple[End, socket.socket]) -> None:
    end, other = peer
    good = framing.frame(messages.encode(messages.Envelope(body=Ok())))
    other.sendall(good + framing.frame(b"?") + good)
    assert "malformed" in end.reason()
    assert end.messages == [(Ok(), 0)]


def test_an_oversized_frame_closes_before_it_is_buffered(peer: tuple[End, socket.socket]) -> None:
    end, other = peer
    other.sendall((framing.MAX_GREETING + 1).to_bytes(4, "big"))
    assert end.reason() == f"a frame announces {framing.MAX_GREETING + 1} bytes, the limit is {framing.MAX_GREETING}"
    assert ended(other)


def test_a_trusted_peer_may_send_long_frames_but_not_endless_ones(peer: tuple[End, socket.socket]) -> None:
    end, other = peer
    end.channel.trust()
    other.sendall(framing.frame(messages.encode(messages.Envelope(body=big_catalogue()))))
    assert end.wait_for(1) == [(big_catalogue(), 0)]
    other.sendall((framing.MAX_CONTROL_FRAME + 1).to_bytes(4, "big"))
    assert f"the limit is {framing.MAX_CONTROL_FRAME}" in end.reason()


def test_bytes_one_by_one_and_a_cut_in_the_middle(peer: tuple[End, socket.socket]) -> None:
    end, other = peer
    stream = framing.frame(messages.encode(messages.Envelope(body=Join(comm="slow"), id=9)))
    other.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for byte in stream:
        other.sendall(bytes([byte]))
    assert end.wait_for(1) == [(Join(comm="slow"), 9)]
    other.sendall(stream[:-1])
    other.close()
    assert end.reason() == "the peer closed the connection"
    assert len(end.messages) == 1


def test_a_peer_that_does_not_read_is_cut_off(peer: tuple[End, socket.socket]) -> None:
    end, _ = peer
    body = Refuse(code=1, reason="x" * (8 << 20))

    def flood() -> None:
        for _ in range(40):
            end.channel.send(body)

    with pytest.raises(ChannelClosedError, match="the peer does not read its control messages"):
        flood()
    assert end.reason() == "the peer does not read its control messages"


def test_a_peer_that_reads_slowly_gets_everything(peer: tuple[End, socket.socket]) -> None:
    end, other = peer
    expected = b""
    for number in range(6):
        body = Refuse(code=number, reason=str(number) * (1 << 20))
        expected += framing.frame(messages.encode(messages.Envelope(body=body)))
        end.channel.send(body)
    assert receive(other, len(expected)) == expected
    end.channel.send(Ok())
    assert receive(other, 4)


def test_remote_address(ends: tuple[End, End]) -> None:
    left, right = ends
    assert left.channel.remote_address == right.channel._sock.getsockname()
    assert right.channel.remote_address == left.channel._sock.getsockname()


def test_remote_address_of_a_connection_that_is_gone(ends: tuple[End, End]) -> None:
    left, right = ends
    address = right.channel._sock.getsockname()
    left.channel.close("test")
    assert left.channel.wait_over(soon())
    settle(left.channel._loop)
    assert left.channel.remote_address == address


def test_a_connection_that_was_reset_before_it_is_taken_over() -> None:
    ours, theirs = tcp_pair()
    theirs.close()
    ours.shutdown(socket.SHUT_RDWR)
    assert receive(ours, 1) == b""
    with running_loop() as loop:
        channel = Channel(ours, loop)
        assert channel.remote_address == ("unknown", 0)
        channel.start()
        assert channel.wait_over(soon())
        settle(loop)


def test_a_connection_that_comes_after_the_end_of_the_loop_is_closed() -> None:
    with running_loop() as loop:
        pass
    ours, theirs = tcp_pair()
    with theirs:
        channel = Channel(ours, loop)
        channel.start()
        assert channel.wait_over(soon())
        assert ours.fileno() == -1
        assert ended(theirs)
        with pytest.raises(ChannelClosedError, match="this engine has been finalized"):
            channel.request(Fetch(), soon())
