"""The live probe of a path."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest

from llm_datadist.paths import ladder
from llm_datadist.paths.base import Path, PathRejectedError, PathTimeoutError, Peer
from llm_datadist.testing.moves import soon
from llm_datadist.testing.owner import identity
from llm_datadist.wire.messages import Offer

if TYPE_CHECKING:
    import numpy as np

    from llm_datadist.layout.spans import Spans
    from llm_datadist.utils.deadline import Deadline

PEER = Peer(identity(), Offer(probe_region=1, nonce=b"n" * 64, table_fd=0, paths=[]))


class Late:
    """A path whose reads fail; ``quiescent`` tells whether their bytes may still arrive."""

    def __init__(self, *, quiescent: bool) -> None:
        self.quiescent = quiescent
        self.bases: list[int] = []

    def read(self, spans: Spans, _deadline: Deadline) -> None:
        self.bases += spans.bases.tolist()
        message = "the deadline passed"
        raise PathTimeoutError(message, quiescent=self.quiescent)


class Stranger:
    """A path to somebody else."""

    def read(self, spans: Spans, _deadline: Deadline) -> None:
        """It reads zeros."""


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """What is kept because something may arrive in it."""
    monkeypatch.setattr(ladder, "_unquiet", found := [])
    return found


def test_memory_in_which_something_may_still_arrive_is_kept(kept: list[np.ndarray]) -> None:
    path = Late(quiescent=False)
    with pytest.raises(PathTimeoutError):
        ladder.probe(cast("Path", path), PEER, soon())
    assert [each.ctypes.data for each in kept] == path.bases != []


def test_other_memory_is_not(kept: list[np.ndarray]) -> None:
    with pytest.raises(PathTimeoutError):
        ladder.probe(cast("Path", Late(quiescent=True)), PEER, soon())
    with pytest.raises(PathRejectedError, match="other bytes"):
        ladder.probe(cast("Path", Stranger()), PEER, soon())
    assert kept == []
