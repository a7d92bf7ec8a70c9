"""Parts of the path over NIXL at moments that cannot be met by chance, with a stand-in for NIXL itself."""

from __future__ import annotations

import itertools
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llm_datadist.paths import nixl_agent, nixl_options
from llm_datadist.paths.base import ConnectionLostError
from llm_datadist.paths.nixl_agent import Agent, NixlHost, Registrations
from llm_datadist.paths.nixl_options import NixlOptions, NixlUnavailableError
from llm_datadist.paths.nixl_remote import Remote, attach, detach
from llm_datadist.utils.deadline import Deadline
from llm_datadist.wire import messages

if TYPE_CHECKING:
    from collections.abc import Iterator

    from llm_datadist.memory.regions import RegionTable

SOON_S = 30.0
SUCCESS, BUSY = 0, 1


class Native:
    """An agent of NIXL: what is registered, and requests that end when they are told to."""

    def __init__(self, *_: object) -> None:
        self.registered: set[tuple[int, int]] = set()
        self.refused: set[tuple[int, int]] = set()
        self.running: set[int] = set()
        self.released: list[int] = []
        self.fails = False
        self._numbers = itertools.count(1)

    def createBackend(self, *_: object) -> int:  # noqa: N802 - NIXL's name
        return 1

    def registerMem(self, items: list[tuple[int, int, int, str]], _backends: object) -> None:  # noqa: N802
        for base, size, *_ in items:
            if (base, base + size) in self.refused:
                message = "NIXL_ERR_BACKEND"
                raise RuntimeError(message)
            self.registered.add((base, base + size))

    def deregisterMem(self, items: list[tuple[int, int, int, str]], _backends: object) -> None:  # noqa: N802
        for base, size, *_ in items:
            self.registered.remove((base, base + size))

    def createXferReq(self, *_: object) -> int:  # noqa: N802
        if self.fails:
            message = "NIXL_ERR_NOT_FOUND"
            raise RuntimeError(message)
        return next(self._numbers)

    makeXferReq = createXferReq  # noqa: N815

    def postXferReq(self, *_: object) -> int:  # noqa: N802
        return SUCCESS

    def getXferStatus(self, handle: int) -> int:  # noqa: N802
        return BUSY if handle in self.running else SUCCESS

    def releaseXferReq(self, handle: int) -> None:  # noqa: N802
        self.released.append(handle)

    def invalidateRemoteMD(self, _name: str) -> None:  # noqa: N802
        return None

    loadRemoteMD = invalidateRemoteMD  # noqa: N815


BINDINGS = SimpleNamespace(
    nixlAgent=Native,
    nixlAgentConfig=SimpleNamespace,
    nixlRegDList=lambda _kind, items: items,
    nixlXferDList=lambda _kind, items: items,
    NIXL_THREAD_SYNC_STRICT=1,
    NIXL_SUCCESS=SUCCESS,
    NIXL_IN_PROG=BUSY,
    NIXL_READ=1,
    NIXL_WRITE=2,
    DRAM_SEG=1,
    VRAM_SEG=2,
)


@pytest.fixture
def agent(table: RegionTable, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    monkeypatch.setattr(nixl_agent, "load", lambda _options: BINDINGS)
    made = Agent(NixlOptions(), table, [])
    yield made
    made.close()


def ask(_body: messages.Body, _deadline: Deadline) -> messages.Body:
    """The peer's answer."""
    return messages.Agent(name="peer", metadata=b"", table=64, generation=1, regions=[], ranges=[])


def soon() -> Deadline:
    return Deadline.after(SOON_S)


def connected(agent: Agent) -> Remote:
    """A peer that is in use by a path, with a look that is free."""
    remote = attach(agent, "peer")
    remote.leave(remote.enter(ask, soon()))
    return remote


class Looks(list[Any]):
    """Those of a remote; tells when one is taken."""

    def __init__(self, looks: list[Any], taken: Any) -> None:
        super().__init__(looks)
        self._taken = taken

    def pop(self, *at: Any) -> Any:
        look = super().pop(*at)
        self._taken()
        return look


def test_nobody_connects_anew_while_a_transfer_begins(agent: Agent) -> None:
    """It may have its look already, which connecting anew gives back."""
    remote = connected(agent)
    paused: list[bool] = []

    def pause() -> None:
        other = threading.Thread(target=lambda: paused.append(remote.pause(Deadline.after(0))))
        other.start()
        other.join()

    remote._looks = Looks(remote._looks, pause)
    look = remote.borrow()
    assert look is not None
    assert paused == [False]
    remote.leave(look)
    assert remote.pause(soon())


def test_a_transfer_that_begins_too_late_tells_those_who_wait_for_it(agent: Agent) -> None:
    remote = connected(agent)
    assert remote.pause(soon())
    assert remote.borrow() is None
    remote.resume()
    look = remote.borrow()
    assert look is not None
    remote.leave(look)


def test_a_peer_that_nixl_has_forgotten_is_connected_anew(agent: Agent) -> None:
    remote = connected(agent)
    look = remote.enter(ask, soon())
    before = set(agent.native.registered)
    agent.native.fails = True
    with pytest.raises(ConnectionLostError):
        remote.enter(ask, soon())
    assert agent.native.registered == before
    agent.native.fails = False
    remote.leave(look)
    remote.leave(remote.enter(ask, soon()))
    assert remote.connection == 2


def test_what_a_path_uses_is_not_closed_by_the_end_of_another(agent: Agent) -> None:
    """One path ends, and sees that it is the last one; another begins before it has closed what both use."""
    remote = connected(agent)
    remote.lost()
    remote.users -= 1  # ``detach`` has come so far
    assert attach(agent, "peer") is remote
    remote.retire()
    assert agent.remotes == {"peer": remote}
    detach(agent, remote)
    assert agent.remotes == {}


def test_a_transfer_that_runs_keeps_the_agent(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[object] = []
    monkeypatch.setattr(nixl_agent, "_keep", kept.append)
    native = agent.native
    registered = set(native.registered)
    look = connected(agent).enter(ask, soon())
    agent.close()
    assert kept == [native]
    assert native.registered > registered
    assert look.ticket is not None


def test_finalize_lets_go_of_the_agent(agent: Agent) -> None:
    """Its thread and its sockets end with it, although paths and shortcuts may refer to us for long."""
    remote = connected(agent)
    native, registered = id(agent.native), agent.native.registered
    agent.close()
    assert registered == set()
    values = [value for each in (agent, agent.requests, agent.registrations, remote) for value in vars(each).values()]
    assert not any(native in {id(value), id(getattr(value, "__self__", None))} for value in values)
    with pytest.raises(ConnectionLostError, match="finalized"):
        agent.requests.make([], [], "peer", writing=False)


def test_memory_that_cannot_be_registered_as_one(table: RegionTable) -> None:
    """What was registered before is so again, and forgotten when it goes."""
    memory = np.zeros(1 << 16, dtype=np.uint8)
    base, native = memory.ctypes.data, Native()
    parts = [(base, base + 4096), (base + 8192, base + 12288)]
    regions = [table.add(begin, end - begin) for begin, end in parts]
    registrations = Registrations(BINDINGS, native, 1, table, [])
    assert [registrations.of_region(region) for region in regions] == parts
    native.refused.add((base, base + 12288))
    with pytest.raises(NixlUnavailableError):
        registrations.merge(base + 2048, base + 10240)
    assert native.registered == set(parts)
    assert registrations.forget(regions)
    assert native.registered == set()


def test_what_a_late_request_held_is_free_when_it_has_settled(agent: Agent) -> None:
    """A failure in the middle of giving one back does not keep the others from it."""
    requests, native = agent.requests, agent.native
    handles = [requests.make([], [], "peer", writing=False) for _ in range(2)]
    native.running.update(handles)
    begun, go_on, ended = threading.Event(), threading.Event(), []

    def fails() -> None:
        begun.set()
        go_on.wait(SOON_S)
        message = "it cannot be given back"
        raise ValueError(message)

    requests.leave(handles[0], fails)
    native.running.remove(handles[0])
    assert begun.wait(SOON_S)
    assert not requests.settle(Deadline.after(0.01))
    go_on.set()
    requests.leave(handles[1], lambda: ended.append(True))
    native.running.remove(handles[1])
    assert requests.settle(soon())
    assert ended == [True]


def test_a_late_request_without_a_thread(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next who has to wait for its end finds one."""
    remote, ended = connected(agent), []
    handle = agent.requests.make([], [], "peer", writing=False)
    agent.native.running.add(handle)
    look = remote.enter(ask, soon())
    remote.abandon()

    def end() -> None:
        ended.append(handle)
        remote.leave(look, was_left=True)

    def no_thread(_thread: threading.Thread) -> None:
        message = "can't start new thread"
        raise RuntimeError(message)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        agent.requests.leave(handle, end)
    agent.native.running.remove(handle)
    remote.leave(remote.enter(ask, soon()))
    assert ended == [handle]


def test_the_reason_why_there_is_no_agent(table: RegionTable, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told to everybody who asks; one exception for all would keep the frames of all of them."""
    monkeypatch.setattr(nixl_options, "PACKAGES", ("no_such_nixl",))
    host = NixlHost(NixlOptions(wanted=True), table)
    caught = []
    for _ in range(3):
        with pytest.raises(NixlUnavailableError, match="not installed") as each:
            host.agent()
        caught.append(each.value)
    assert len({id(each) for each in caught}) == 3
    assert {each.hint for each in caught} == {nixl_options.INSTALL}
