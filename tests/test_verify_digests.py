"""Digests of memory, and what an owner answers to those who ask for them."""

from __future__ import annotations

import errno
import sys
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llm_datadist import LLMStatusCode
from llm_datadist.engine.verify import _MAX_ANSWERED, DigestService
from llm_datadist.memory import digests, iovec, shared, syscalls
from llm_datadist.memory.move import MemoryFaultError
from llm_datadist.memory.regions import RegionTable
from llm_datadist.net.workers import Workers
from llm_datadist.status import code_2_status
from llm_datadist.wire import data, messages
from llm_datadist.wire.framing import ProtocolError
from net_helpers import WAIT_S
from test_exports import python

if TYPE_CHECKING:
    from collections.abc import Iterator

SIZE = 4096
MEMORY = np.random.default_rng(1).integers(0, 256, SIZE, dtype=np.uint8)
ranges = st.lists(
    st.integers(0, SIZE - 1).flatmap(lambda at: st.tuples(st.just(at), st.integers(1, SIZE - at))), min_size=1
)


def iovecs(pieces: list[tuple[int, int]], base: int = MEMORY.ctypes.data) -> Any:
    starts, lengths = np.array(pieces, dtype=np.int64).T
    return iovec.pair(np.uint64(base) + starts.astype(np.uint64), lengths)


@pytest.mark.parametrize("denied", [False, True])
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(pieces=ranges, stage=st.integers(20, 5000))
def test_a_digest_is_that_of_all_bytes_in_order(denied: bool, pieces: list[tuple[int, int]], stage: int) -> None:
    """However they are gathered: also in small steps, and where the kernel may not do it."""

    def refuse(*_args: int) -> int:
        raise OSError(errno.EPERM, "denied")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digests, "STAGE_BYTES", stage)
        if denied:
            patch.setattr(syscalls, "gather", refuse)
        found = digests.digest(iovecs(pieces))
    assert found == xxhash.xxh3_64_intdigest(b"".join(MEMORY[at : at + length].tobytes() for at, length in pieces))


def test_more_ranges_than_one_call_takes() -> None:
    pieces = [(at, 1) for at in range(SIZE)]
    assert len(pieces) > syscalls.MAX_IOVECS
    assert digests.digest(iovecs(pieces)) == xxhash.xxh3_64_intdigest(MEMORY.tobytes())


def test_memory_that_is_not_mapped_raises() -> None:
    """At the begin, and after bytes that could be read."""
    area = shared.create("test", 1 << 16)
    base = area.base
    shared.release(area)
    with pytest.raises(MemoryFaultError, match="after 0 of 5 bytes"):
        digests.digest(iovecs([(0, 5)], base))
    mixed = np.array([[MEMORY.ctypes.data, 10], [base, 5]], dtype=np.uint64)
    with pytest.raises(MemoryFaultError, match="after 10 of 15 bytes"):
        digests.digest(mixed)


def test_other_errors_of_the_system_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: int) -> int:
        raise OSError(errno.ESRCH, "gone")

    monkeypatch.setattr(syscalls, "gather", fail)
    with pytest.raises(ProcessLookupError):
        digests.digest(iovecs([(0, 5)]))


def test_it_stops_when_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "STAGE_BYTES", 10)
    looks = iter(range(3))
    with pytest.raises(StopIteration):
        digests.digest(iovecs([(0, SIZE)]), lambda: next(looks))


# The owner's answers


class Owner:
    """A table with one region over ``MEMORY`` and one that is not for peers."""

    def __init__(self) -> None:
        self.table = RegionTable()
        self.workers = Workers("test-digests", 1)
        self.service = DigestService(self.table, self.workers)
        self.region = self.table.add(MEMORY.ctypes.data, SIZE)
        self.closed = self.table.add(MEMORY.ctypes.data, SIZE, reachable=False)

    def ask(self, pieces: list[tuple[int, int]], region: int | None = None, *, timeout_ms: int = 20_000) -> Any:
        offsets, lengths = np.array(pieces, dtype=np.int64).T
        regions = np.array([self.region if region is None else region], dtype=np.uint64)
        total = int(lengths.sum())
        header = data.Request(data.Op.READ, 1, len(pieces), 0, total, timeout_ms).encode()
        tables = data.encode_spans(regions, np.zeros(1, dtype=np.int64), offsets, lengths)
        return self.service.compute(messages.Digest(spans=header + tables))


@pytest.fixture
def owner() -> Iterator[Owner]:
    made = Owner()
    yield made
    made.workers.close()
    made.table.close()


def refused(answer: messages.Body, status: LLMStatusCode, match: str) -> None:
    assert isinstance(answer, messages.Refuse)
    assert code_2_status(answer.code) is status
    assert match in answer.reason


def test_the_owner_tells_the_digest_of_spans_in_its_regions(owner: Owner) -> None:
    answer = owner.ask([(10, 20), (0, 5), (4000, 96)])
    expected = MEMORY[10:30].tobytes() + MEMORY[:5].tobytes() + MEMORY[4000:].tobytes()
    assert answer == messages.Digested(value=xxhash.xxh3_64_intdigest(expected))


def test_spans_outside_registered_memory_are_refused(owner: Owner) -> None:
    refused(owner.ask([(4000, 97)]), LLMStatusCode.LLM_PARAM_INVALID, "outside their region")
    refused(owner.ask([(0, 5)], owner.closed), LLMStatusCode.LLM_PARAM_INVALID, "not remote accessible")
    for region in (0, owner.region + 5, 2**64 - 1):
        refused(owner.ask([(0, 5)], region), LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, "is not registered")
    owner.table.remove([owner.region])
    refused(owner.ask([(0, 5)]), LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, "is not registered")
    assert not owner.table._leases


def test_memory_of_the_owner_that_has_gone_is_refused(owner: Owner) -> None:
    area = shared.create("test", 1 << 16)
    region = owner.table.add(area.base, 1 << 16)
    shared.release(area)
    refused(owner.ask([(0, 5)], region), LLMStatusCode.LLM_FAILED, "must stay mapped")


def test_an_owner_without_the_package_says_so(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xxhash", None)
    assert not digests.available()
    refused(owner.ask([(0, 5)]), LLMStatusCode.LLM_FAILED, "xxhash")


def test_the_asker_s_patience_bounds_the_work(owner: Owner) -> None:
    refused(owner.ask([(0, 5)], timeout_ms=0), LLMStatusCode.LLM_TIMEOUT, "deadline")


def test_the_longest_request_fits_into_a_message() -> None:
    count = data.MAX_SPANS
    tables = data.encode_spans(*(np.ones(size, dtype=np.uint64) for size in (1, 1, count, count)))  # type: ignore[arg-type]
    header = data.Request(data.Op.READ, 1, count, 0, count, 100).encode()
    payload = messages.encode(messages.Envelope(body=messages.Digest(spans=header + tables)))
    found = messages.decode(payload).body
    assert isinstance(found, messages.Digest)
    assert data.decode_whole(found.spans)[0].runs == count


@settings(deadline=None)
@given(junk=st.binary(max_size=200))
def test_malformed_tables_are_refused(junk: bytes) -> None:
    made = Owner()
    try:
        head = data.Request(data.Op.READ, 1, 1, 0, 5, 100).encode()
        for spans in (junk, head + junk):
            with pytest.raises(ProtocolError):
                data.decode_whole(spans)
            refused(made.service.compute(messages.Digest(spans=spans)), LLMStatusCode.LLM_PARAM_INVALID, "")
    finally:
        made.workers.close()
        made.table.close()


def test_one_link_cannot_pile_up_work(owner: Owner) -> None:
    """While one digest is being computed a limited number waits; another link has its own limit."""
    gate, answers = threading.Event(), []
    owner.workers.run(lambda: gate.wait(WAIT_S))
    malformed = messages.Digest(spans=b"")
    for _ in range(_MAX_ANSWERED):
        owner.service.answer(b"one", malformed, answers.append)
    assert answers == []
    owner.service.answer(b"one", malformed, answers.append)
    refused(answers.pop(), LLMStatusCode.LLM_FAILED, f"{_MAX_ANSWERED} digests are being computed")
    done = threading.Event()
    owner.service.answer(b"two", malformed, lambda _answer: done.set())
    gate.set()
    assert done.wait(WAIT_S)
    assert len(answers) == _MAX_ANSWERED
    assert owner.service._running == {}


def test_work_that_is_dropped_is_not_counted_any_more(owner: Owner) -> None:
    owner.workers.close()
    owner.service.answer(b"one", messages.Digest(spans=b""), pytest.fail)
    assert owner.service._running == {}


def test_nothing_is_imported_until_it_is_used() -> None:
    """Every process tells its peers whether it could; that alone must not load the package."""
    code = (
        "import sys; from llm_datadist import *\n"
        "config = LLMConfig(); config.enable_cache_manager = True\n"
        "one = LLMDataDist(LLMRole.MIX, 1); one.init(config.generate_options()); one.finalize()\n"
        "print('xxhash' in sys.modules)"
    )
    assert python(code) == "False"
