"""Room for strangers: bounded in number and time, first come, first out."""

from __future__ import annotations

import queue
import resource

import pytest

from llm_datadist.net.waiting import WaitingRoom, share_of_descriptors
from net_helpers import WAIT_S, running_loop, settle


def test_of_too_many_the_oldest_goes_and_who_leaves_makes_room() -> None:
    out: list[tuple[str, str]] = []
    with running_loop() as loop:
        room: WaitingRoom[str] = WaitingRoom(loop, 2, lambda guest, reason: out.append((guest, reason)))
        room.enter("first", WAIT_S)
        room.enter("second", WAIT_S)
        assert room.leave("first")
        assert not room.leave("first")
        room.enter("third", WAIT_S)
        assert out == []
        room.enter("fourth", WAIT_S)
        assert out == [("second", "too many connections at once have not introduced themselves")]
        assert not room.leave("second")
        assert room.leave("third")
        assert room.leave("fourth")


def test_who_waits_too_long_goes_and_who_has_left_does_not() -> None:
    out: queue.Queue[tuple[str, str]] = queue.Queue()
    with running_loop() as loop:
        room: WaitingRoom[str] = WaitingRoom(loop, 9, lambda guest, reason: out.put((guest, reason)))
        room.enter("left", 0.02)
        room.enter("waits", 0.05)
        assert room.leave("left")
        assert out.get(timeout=WAIT_S) == ("waits", "the peer did not introduce itself in time")
        settle(loop)
        assert out.empty()


@pytest.mark.parametrize(("limit", "wanted"), [(1024, 128), (64, 16), (1 << 20, 512), (resource.RLIM_INFINITY, 512)])
def test_strangers_get_a_share_of_the_descriptors(monkeypatch: pytest.MonkeyPatch, limit: int, wanted: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (limit, limit))
    assert share_of_descriptors(512) == wanted
