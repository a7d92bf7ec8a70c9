"""The faulty path for tests: where the faults hit, that they repeat, and what a link makes of them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expect import expect
from llm_datadist import LLMStatusCode
from llm_datadist.layout.spans import Runs, Spans
from llm_datadist.paths.base import ConnectionLostError, Path, PathRejectedError, PathTimeoutError, PeerGoneError
from llm_datadist.testing import Fault, FaultKind, Faults, FaultyPath, faulty_path
from llm_datadist.testing.faulty import cut_at
from llm_datadist.utils.deadline import Deadline
from net_helpers import WAIT_S, soon
from peers import GUARD, Node
from test_links import pull_one

if TYPE_CHECKING:
    from peers import Peers

OK = LLMStatusCode.LLM_SUCCESS


class Memory(Path):
    """Copies between two arrays; region ``i`` is at ``i`` times ``SIZE`` in the remote one."""

    name = "memory"
    SIZE = 1000

    def __init__(self, tensors: int) -> None:
        rng = np.random.default_rng(1)
        self.here = np.zeros((tensors, self.SIZE), dtype=np.uint8)
        self.there = rng.integers(1, 256, (tensors, self.SIZE), dtype=np.uint8)
        self.moved: list[int] = []

    def spans(self, *runs: tuple[int, int, int]) -> Spans:
        local, remote, lengths = np.array(runs, dtype=np.int64).T.copy()
        count = len(self.here)
        bases = np.array([row.ctypes.data for row in self.here], dtype=np.uint64)
        regions = np.arange(count, dtype=np.uint64)
        return Spans(bases, regions, np.zeros(count, dtype=np.int64), Runs(local, remote, lengths))

    def read(self, spans: Spans, deadline: Deadline, epoch: int = 0) -> None:
        self._copy(spans, into_here=True)

    def write(self, spans: Spans, deadline: Deadline, epoch: int = 0) -> None:
        self._copy(spans, into_here=False)

    def _copy(self, spans: Spans, *, into_here: bool) -> None:
        import ctypes  # noqa: PLC0415

        self.moved.append(spans.total)
        for base, region, start in zip(spans.bases, spans.regions, spans.starts, strict=True):
            for at in range(len(spans.runs)):
                ours = int(base) + int(spans.runs.local[at])
                offset = int(start) + int(spans.runs.remote[at])
                length = int(spans.runs.lengths[at])
                theirs = self.there[int(region)].ctypes.data + offset
                target, source = (ours, theirs) if into_here else (theirs, ours)
                ctypes.memmove(target, source, length)

    def close(self) -> None:
        self.moved.append(-1)

    def abort(self) -> None:
        self.moved.append(-2)

    def describe(self) -> str:
        return "copies arrays"


def faulty(tensors: int = 2) -> tuple[Memory, Faults, FaultyPath]:
    memory, faults = Memory(tensors), Faults()
    return memory, faults, FaultyPath(memory, faults)


RUNS = ((0, 0, 100), (200, 300, 50))


def order(memory: Memory) -> list[bool]:
    """Whether each byte that ``RUNS`` name has come, in the order in which they are moved."""
    flat = []
    for here, there in zip(memory.here, memory.there, strict=True):
        for local, remote, length in RUNS:
            flat += (here[local : local + length] == there[remote : remote + length]).tolist()
    return flat


@pytest.mark.parametrize("at", [0, 1, 99, 100, 149, 150, 151, 299, 300])
def test_a_cut_comes_after_exactly_so_many_bytes(at: int) -> None:
    memory, faults, path = faulty()
    fault = faults.inject(Fault(FaultKind.CUT, at=at))
    with pytest.raises(ConnectionLostError, match=f"cut after {at} bytes"):
        path.read(memory.spans(*RUNS), soon())
    assert order(memory) == [True] * at + [False] * (300 - at)
    assert fault.wait(0)
    path.read(memory.spans(*RUNS), soon())
    assert all(order(memory))


@given(
    runs=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50), st.integers(0, 9)), min_size=1, max_size=8),
    tensors=st.integers(1, 4),
    count=st.integers(0, 300),
)
def test_cutting_spans_keeps_every_byte_in_order(runs: list[tuple[int, int, int]], tensors: int, count: int) -> None:
    spans = Memory(tensors).spans(*runs)
    count = min(count, spans.total)
    before, after = cut_at(spans, count)

    def flat(parts: list[Spans]) -> list[tuple[int, int, int]]:
        return [
            (int(base) + int(local) + byte, int(region), int(start) + int(remote) + byte)
            for part in parts
            for base, region, start in zip(part.bases, part.regions, part.starts, strict=True)
            for local, remote, length in zip(part.runs.local, part.runs.remote, part.runs.lengths, strict=True)
            for byte in range(int(length))
        ]

    assert sum(part.total for part in before) == count
    assert flat(before) + flat(after) == flat([spans])


@pytest.mark.parametrize("method", ["read", "write"])
def test_corruption_changes_exactly_the_bytes_it_names(method: str) -> None:
    memory, faults, path = faulty()
    memory.here[:] = 7
    source = {"read": memory.there, "write": memory.here}[method].copy()
    faults.inject(Fault(FaultKind.CORRUPT, at=95, length=60, seed=2))
    getattr(path, method)(memory.spans(*RUNS), soon())
    assert [at for at, right in enumerate(order(memory)) if not right] == list(range(95, 155))
    assert ({"read": memory.there, "write": memory.here}[method] == source).all()


def test_corruption_of_everything_that_follows() -> None:
    memory, faults, path = faulty()
    faults.inject(Fault(FaultKind.CORRUPT, at=10, length=None))
    path.read(memory.spans(*RUNS), soon())
    assert [at for at, right in enumerate(order(memory)) if right] == list(range(10))


def test_drops_are_not_told() -> None:
    memory, faults, path = faulty()
    faults.inject(Fault(FaultKind.DROP, at=120))
    path.read(memory.spans(*RUNS), soon())
    assert order(memory).count(True) == 120


def test_a_stall_ends_with_its_deadline_or_its_release() -> None:
    memory, faults, path = faulty()
    faults.inject(Fault(FaultKind.STALL, at=5))
    with pytest.raises(PathTimeoutError, match="after 5 bytes"):
        path.read(memory.spans(*RUNS), Deadline.after(0.05))
    fault = faults.inject(Fault(FaultKind.STALL, at=5))
    thread = threading.Thread(target=path.read, args=(memory.spans(*RUNS), soon()))
    thread.start()
    assert fault.wait(WAIT_S)
    assert not all(order(memory))
    fault.release()
    thread.join(WAIT_S)
    assert all(order(memory))


def test_abort_ends_a_stall() -> None:
    memory, faults, path = faulty()
    fault = faults.inject(Fault(FaultKind.STALL))
    raised: list[BaseException] = []

    def read() -> None:
        try:
            path.read(memory.spans(*RUNS), soon())
        except PeerGoneError as error:
            raised.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    assert fault.wait(WAIT_S)
    path.abort()
    thread.join(WAIT_S)
    assert len(raised) == 1
    assert memory.moved == [-2]


def test_a_delay_beyond_the_deadline_is_too_late() -> None:
    memory, faults, path = faulty()
    faults.inject(Fault(FaultKind.DELAY, seconds=60))
    with pytest.raises(PathTimeoutError):
        path.read(memory.spans(*RUNS), Deadline.after(0.05))
    faults.inject(Fault(FaultKind.DELAY, seconds=0.001))
    path.read(memory.spans(*RUNS), soon())
    assert all(order(memory))


def test_faults_wait_for_a_transfer_that_is_long_enough() -> None:
    memory, faults, path = faulty()
    faults.inject(Fault(FaultKind.CUT, at=250))
    path.read(memory.spans((0, 0, 100)), soon())
    with pytest.raises(ConnectionLostError):
        path.read(memory.spans(*RUNS), soon())


def storm(seed: int) -> list[tuple[FaultKind, int] | None]:
    faults = Faults()
    faults.storm(seed, 0.5)
    dealt = [faults.deal(1000) for _ in range(200)]
    return [fault and (fault.kind, fault.at) for fault in dealt]


def test_storms_repeat() -> None:
    one = storm(1)
    assert one == storm(1)
    assert one != storm(2)
    assert {fault[0] for fault in one if fault} == set(FaultKind)
    assert 60 < sum(fault is not None for fault in one) < 140


@pytest.mark.parametrize("values", [{"rate": 1.5}, {"rate": -0.1}, {"rate": 0.5, "kinds": []}])
def test_storms_that_make_no_sense(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="the rate goes from 0 to 1, kinds name at least one"):
        Faults().storm(1, **values)


def in_the_child(node: Node, server: tuple[str, int], path: str) -> list[tuple[str, bool]]:
    """Link with a faulty path: what becomes of pulls, and whether the bytes of block 0 are those of the peer."""
    seen = []

    def pull() -> None:
        for tensor in node.arenas["dst"].memory:
            tensor[GUARD:-GUARD] = 0
        try:
            pull_one(node, 1)
        except Exception as error:  # noqa: BLE001 - told below
            status = getattr(error, "status_code", None)
            seen.append((status.name if status else repr(error), False))
        else:
            seen.append(("", all(tensor[GUARD : GUARD + 512].all() for tensor in node.arenas["dst"].memory)))

    with faulty_path(path) as faults:
        assert node.link(1, server) == OK
        assert path in node.datadist.explain_link(1).path
        assert "with faults" in str(node.datadist.explain_link(1))
        pull()
        for kind in (FaultKind.CUT, FaultKind.DROP, FaultKind.DELAY):
            faults.inject(Fault(kind, at=700, seconds=0.01))
            pull()
            pull()
    return seen


def ones(node: Node) -> None:
    """In the child: a source without zeros."""
    for tensor in node.arenas["src"].memory:
        tensor[GUARD:-GUARD] = 1


@pytest.mark.parametrize("path", ["process_vm", "tcp"])
def test_a_link_over_a_faulty_path(peers: Peers, path: str) -> None:
    """A cut is LLM_FAILED, what is dropped is not noticed, and the link goes on."""
    server, client = peers.make(1, paths=path), peers.make(2, paths=path, listen=False)
    server.call("register_blocks", "src", 2, 4, 512, model_id=0)
    server.call(ones)
    client.call("register_blocks", "dst", 2, 4, 512)
    good = ("", True)
    seen = client.call(in_the_child, server.address, path)
    assert seen == [good, ("LLM_FAILED", False), good, ("", False), good, good, good]


def test_paths_that_do_not_exist() -> None:
    with pytest.raises(PathRejectedError, match="no such path"), faulty_path("pigeon"):
        pass


def test_status_of_a_stall(peers: Peers) -> None:
    """The transfer ends by its deadline."""
    server, client = peers.make(1, paths="tcp"), peers.make(2, paths="tcp", listen=False, sync_kv_timeout=300)
    for peer, name in ((server, "src"), (client, "dst")):
        peer.call("register_blocks", name, 2, 4, 512, model_id=0 if name == "src" else None)
    expect(LLMStatusCode.LLM_TIMEOUT, lambda: client.call(stalled, server.address))


def stalled(node: Node, server: tuple[str, int]) -> None:
    """In the child."""
    with faulty_path("tcp") as faults:
        assert node.link(1, server) == OK
        faults.inject(Fault(FaultKind.STALL, at=10))
        pull_one(node, 1)
