"""Paths that ping tries: what becomes of those that fail only when they are measured."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import pytest

from llm_datadist.memory.regions import PROBE_BYTES, StaleEpochError
from llm_datadist.paths import registry
from llm_datadist.paths.base import Path, PathRejectedError, PathTimeoutError, Peer, Transport
from llm_datadist.paths.survey import LARGE_BYTES, SMALL_BYTES, survey
from llm_datadist.wire.messages import Identity, Offer

if TYPE_CHECKING:
    from llm_datadist.layout.spans import Spans
    from llm_datadist.paths.base import Context
    from llm_datadist.utils.deadline import Deadline

NONCE = bytes(range(64))


class Odd(Path, Transport):
    """A path of another package to a probe region of its own making."""

    name = "odd"

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.epochs: set[int] = set()
        self.failure: Exception | None = None
        self.moving = False
        self.closed = 0

    def connect(self, peer: Peer, context: Context, deadline: Deadline) -> Path:
        if isinstance(self.failure, PathRejectedError):
            raise self.failure
        return self

    def read(self, spans: Spans, deadline: Deadline, epoch: int = 0) -> None:
        probe = spans.total == len(NONCE)
        if self.failure is not None and not probe:
            raise self.failure
        if self.moving and epoch:
            message = "a cache was unregistered"
            raise StaleEpochError(message)
        self.epochs.add(epoch)
        self.sizes.append(spans.total)
        assert spans.runs.extent[1] <= PROBE_BYTES
        if probe:
            ctypes.memmove(int(spans.bases[0]), NONCE, len(NONCE))

    def write(self, spans: Spans, deadline: Deadline, epoch: int = 0) -> None:
        assert spans.total == len(NONCE), "nothing else is written"

    def close(self) -> None:
        self.closed += 1

    def abort(self) -> None:
        pytest.fail("nobody aborts it")

    def describe(self) -> str:
        return "oddly"


@pytest.fixture
def odd(monkeypatch: pytest.MonkeyPatch) -> Odd:
    made = Odd()
    monkeypatch.setattr(registry, "names", lambda: ("odd",))
    monkeypatch.setitem(registry.transports, "odd", made)
    return made


def find(epoch: int = 5, paths: tuple[str, ...] = ("odd",)) -> Any:
    identity = Identity(cluster_id=1, incarnation=bytes(16), boot_id="", pid_namespace=0, pid=1, start_time=0)
    peer = Peer(identity, Offer(probe_region=1, nonce=NONCE, table_fd=0, paths=list(paths)))
    context: Any = None
    (finding,) = survey(peer, context, epoch, 20.0)
    return finding


def test_it_is_measured_within_the_probe_region(odd: Odd) -> None:
    finding = find()
    assert (finding.works, finding.reason, odd.closed) == (True, "oddly", 1)
    assert set(odd.sizes) == {len(NONCE), SMALL_BYTES, LARGE_BYTES}
    assert finding.figures.reads == odd.sizes.count(SMALL_BYTES)


@pytest.mark.parametrize("failure", [RuntimeError("no idea"), PathTimeoutError("too late")])
def test_one_that_fails_when_it_is_measured(odd: Odd, failure: Exception) -> None:
    odd.failure = failure
    finding = find()
    assert (finding.works, finding.figures, odd.closed) == (False, None, 1)
    assert finding.reason == f"it was probed, but failed when it was measured: {failure}"


def test_one_that_is_rejected(odd: Odd) -> None:
    odd.failure = PathRejectedError("no cable", "plug it in")
    finding = find()
    assert (finding.works, finding.reason, finding.hint) == (False, "no cable", "plug it in")


def test_one_that_the_peer_does_not_permit(odd: Odd) -> None:
    assert find(paths=("tcp",)).reason == "not permitted by the peer's configuration"
    assert odd.closed == 0


def test_a_peer_that_unregisters_a_cache_meanwhile(odd: Odd) -> None:
    odd.moving = True
    assert find().works
    assert odd.epochs == {0}
