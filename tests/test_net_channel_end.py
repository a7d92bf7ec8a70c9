"""A side that holds its end of a control connection is seen to have gone only when it hangs up."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from channel_kit import End, watched_ends
from llm_datadist.net.channel import Channel, ChannelClosedError
from llm_datadist.utils.deadline import Deadline
from llm_datadist.wire import messages
from net_helpers import WAIT_S, ended, running_loop, settle, tcp_pair

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def ends() -> Iterator[tuple[End, End]]:
    with running_loop() as loop, watched_ends(loop) as made:
        yield made


def watched_over(end: End) -> threading.Event:
    """Set when ``on_over`` is called."""
    seen = threading.Event()
    end.channel.on_over = seen.set
    return seen


def test_a_held_channel_ends_for_the_peer_only_when_it_hangs_up(ends: tuple[End, End]) -> None:
    """Here it is closed at once: nothing is sent any more, nobody waits for a reply."""
    left, right = ends
    over = watched_over(left)
    left.channel.hold()
    left.channel.close("done")
    assert left.reason() == "done"
    with pytest.raises(ChannelClosedError, match="done"):
        left.channel.send(messages.Ok())
    right.channel.send(messages.Ok())  # goes nowhere, and breaks nothing
    settle(left.loop)
    assert not right.channel.closed
    assert not over.is_set()
    left.channel.hang_up(wait=True)
    assert right.reason() == "the peer closed the connection"
    assert right.channel.over
    assert over.wait(WAIT_S)
    assert left.channel.over


def test_a_channel_that_was_closed_just_before_it_was_held_is_over(ends: tuple[End, End]) -> None:
    """Whoever held it has something to give back, and nobody will hang up."""
    left, _ = ends
    over = watched_over(left)
    left.channel.close("too early")
    left.channel.hold()
    assert over.wait(WAIT_S)
    assert left.channel.over


def test_a_peer_that_never_hangs_up_is_waited_for_until_it_is_given_up(ends: tuple[End, End]) -> None:
    """It holds its side, too."""
    left, right = ends
    over = watched_over(left)
    for end in ends:
        end.channel.hold()
    left.channel.close("done")
    left.channel.hang_up(wait=True)
    left.channel.hang_up(wait=True)
    assert right.reason() == "the peer closed the connection"
    assert not left.channel.wait_over(Deadline.after(0.05))
    assert not over.is_set()
    left.channel.abandon()
    assert over.wait(WAIT_S)
    right.channel.hang_up(wait=False)


def test_who_does_not_wait_hangs_up_and_has_done(ends: tuple[End, End]) -> None:
    left, right = ends
    over = watched_over(left)
    for end in ends:
        end.channel.hold()
    left.channel.close("done")
    left.channel.hang_up(wait=False)
    assert over.wait(WAIT_S)
    assert right.reason()
    right.channel.hang_up(wait=False)


def test_a_channel_whose_loop_has_ended_still_hangs_up() -> None:
    """The last transfer over a link may end after the engine has."""
    ours, theirs = tcp_pair()
    with running_loop() as loop:
        channel = Channel(ours, loop)
        channel.hold()
        channel.start()
        settle(loop)
        channel.close("finalized")
    assert loop.ended
    theirs.setblocking(False)
    with pytest.raises(BlockingIOError):
        theirs.recv(1)
    theirs.setblocking(True)
    channel.hang_up(wait=True)
    assert ended(theirs)
    theirs.close()
