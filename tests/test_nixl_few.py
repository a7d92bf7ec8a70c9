"""The short way of small transfers over NIXL."""

from __future__ import annotations

import ctypes
import gc
import mmap
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llm_datadist.layout.spans import Spans
from llm_datadist.memory.move import peeker
from llm_datadist.paths import nixl_few
from llm_datadist.paths.base import ConnectionLostError, PathFaultError, TensorPairs
from llm_datadist.paths.nixl import Nixl, NixlPath
from llm_datadist.paths.nixl_few import OneRequest
from llm_datadist.testing import ends_of
from llm_datadist.testing.moves import soon
from llm_datadist.testing.owner import pattern
from llm_datadist.utils.deadline import Deadline
from nixl_kit import TRANSPORTS, needs_nixl

if TYPE_CHECKING:
    from collections.abc import Iterator

    from llm_datadist.testing import PathEnds

pytestmark = needs_nixl
SIZE, BLOCK = 1 << 20, 4096
_libc = ctypes.CDLL(None)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


@pytest.fixture(params=TRANSPORTS.values(), ids=TRANSPORTS.keys())
def ends(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[PathEnds]:
    monkeypatch.setenv("UCX_TLS", request.param)
    with ends_of(Nixl()) as made:
        yield made


@pytest.fixture
def path(ends: PathEnds) -> Iterator[NixlPath]:
    made = ends.connect()
    assert isinstance(made, NixlPath)
    yield made
    made.close()


def shortcut(ends: PathEnds, path: NixlPath, base: int) -> OneRequest:
    """From the memory at ``base`` to memory of the peer, and used once."""
    ends.register_here(base, SIZE)
    region = ends.owner.register(SIZE, 0)
    ends.owner.fill(region, 1)
    epoch = ends.owner.epoch()
    path.read(Spans.single(base, region, SIZE), soon(), epoch)
    made = path.shortcut(TensorPairs([base], [region], epoch))
    assert isinstance(made, OneRequest)
    made.read(BLOCK, [0], [1], soon())
    return made


@pytest.mark.parametrize("operation", ["read", "write"])
def test_local_memory_that_is_not_mapped_any_more(ends: PathEnds, path: NixlPath, operation: str) -> None:
    """An error, and the path is as good as before; NIXL would end the process, or the connection."""
    base = _libc.mmap(None, SIZE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    memory = np.zeros(SIZE, dtype=np.uint8)
    here, other = shortcut(ends, path, base), shortcut(ends, path, memory.ctypes.data)
    connection = path.remote.connection
    assert _libc.munmap(base, SIZE) == 0
    with pytest.raises(PathFaultError, match="not mapped"):
        getattr(here, operation)(BLOCK, [0], [1], soon())
    other.read(BLOCK, [0], [1], soon())
    assert path.remote.connection == connection


def test_where_the_system_does_not_let_us_look(ends: PathEnds, path: NixlPath, monkeypatch: pytest.MonkeyPatch) -> None:
    """The short way is taken nevertheless."""
    monkeypatch.setattr(nixl_few, "peeker", lambda _addresses: lambda: -1)
    memory = np.zeros(SIZE, dtype=np.uint8)
    here = shortcut(ends, path, memory.ctypes.data)
    monkeypatch.setattr(path, "read", None)  # the long way
    here.read(BLOCK, [5], [6], soon())
    assert (memory[5 * BLOCK : 6 * BLOCK] == pattern(1, SIZE)[6 * BLOCK : 7 * BLOCK]).all()


def test_blocks_that_another_thread_exchanges_stay_while_they_are_used(
    ends: PathEnds, path: NixlPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory of another cache is let go of between two steps of a transfer, and a second transfer follows at once."""
    requests, discarded, used = path.agent.requests, [], []
    choose, discard = requests.choose, requests.discard

    def discarding(blocks: int) -> None:
        discarded.append(blocks)
        discard(blocks)

    def choosing(*arguments: Any, writing: bool) -> int:
        monkeypatch.setattr(requests, "choose", choose)
        used.extend((arguments[0], arguments[2]))
        path.agent._changed()
        here.read(BLOCK, [2], [3], soon())
        gc.collect()
        assert discarded == []
        return choose(*arguments, writing=writing)

    monkeypatch.setattr(requests, "discard", discarding)
    memory = np.zeros(SIZE, dtype=np.uint8)
    here = shortcut(ends, path, memory.ctypes.data)
    with path.begin(soon()), path.begin(soon()):
        pass  # now two transfers at a time find all that they need
    monkeypatch.setattr(requests, "choose", choosing)
    here.read(BLOCK, [0], [7], soon())
    assert (memory[:BLOCK] == pattern(1, SIZE)[7 * BLOCK : 8 * BLOCK]).all()
    gc.collect()
    assert sorted(discarded) == sorted(used) != []


def test_a_list_that_nixl_does_not_take(ends: PathEnds, path: NixlPath, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of this side, which is ready already, is given back."""
    requests, made, discarded = path.agent.requests, [], []
    prepare = requests.prepare

    def preparing(remote: str | None, rows: Any) -> int:
        if remote is not None:
            message = "NIXL does not take the memory"
            raise ConnectionLostError(message)
        made.append(prepare(remote, rows))
        return made[-1]

    memory = np.zeros(SIZE, dtype=np.uint8)
    here = shortcut(ends, path, memory.ctypes.data)
    monkeypatch.setattr(requests, "prepare", preparing)
    monkeypatch.setattr(requests, "discard", discarded.append)
    with pytest.raises(ConnectionLostError, match="does not take"):
        here.read(2 * BLOCK, [0], [1], soon())
    assert made == discarded != []


def test_what_is_under_way_holds_all_caches_of_its_memory(ends: PathEnds, path: NixlPath) -> None:
    """A tensor may belong to several; which of them the transfer was for is not known any more."""
    memory = np.zeros(SIZE, dtype=np.uint8)
    base, regions = memory.ctypes.data, path.context.regions
    ends.register_here(base, SIZE // 2)
    ends.register_here(base, SIZE)
    with path.begin(soon()) as flight:
        flight.bases = [base]
        path.hold(flight)
        held = regions.at(base)
        assert len(held) == 2
        for region in held:
            assert not regions.wait_unused([region], Deadline.after(0))
    assert regions.wait_unused(held, Deadline.after(0))


def test_how_many_bytes_can_be_read() -> None:
    memory = np.zeros(2, dtype=np.uint8)
    first = memory.ctypes.data
    assert peeker([first])() == 1
    assert peeker([first, first + 1])() == 2
    assert peeker([first, 8])() == 1
    assert peeker([8, first])() < 1
