"""How far a transfer came: the arithmetic, against a model that knows every single byte."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from llm_datadist.layout import plan
from llm_datadist.layout.progress import Progress
from llm_datadist.layout.spans import Runs
from llm_datadist.memory import iovec

if TYPE_CHECKING:
    from llm_datadist.memory.iovec import Part

ENTRIES = 12


def pieces(runs: Runs, longest: int) -> Runs:
    """The same bytes in runs of at most ``longest`` bytes."""
    cut = [
        (int(local) + at, int(remote) + at, min(longest, int(length) - at))
        for local, remote, length in zip(runs.local, runs.remote, runs.lengths, strict=True)
        for at in range(0, int(length), longest)
    ]
    return Runs(*(np.array(column, dtype=np.int64) for column in zip(*cut, strict=True)))


class Model:
    """Every byte that is in place, as (tensor, local offset, remote offset)."""

    def __init__(self, tensors: int, runs: Runs) -> None:
        self.tensors = tensors
        self.runs = list(zip(runs.local.tolist(), runs.remote.tolist(), runs.lengths.tolist(), strict=True))
        self.all = {byte for tensor in range(tensors) for run in self.runs for byte in self.bytes_of(tensor, run)}
        self.done: set[tuple[int, int, int]] = set()

    def bytes_of(self, tensor: int, run: tuple[int, int, int]) -> list[tuple[int, int, int]]:
        local, remote, length = run
        return [(tensor, local + at, remote + at) for at in range(length)]

    def mark(self, part: Part, size: int | None = None) -> None:
        """A part is in place, or of its first ``size`` bytes the whole runs are."""
        left = len(self.all) if size is None else size
        for tensor in range(self.tensors)[part[0]]:
            for run in self.runs[part[1]]:
                if run[2] <= left:
                    self.done.update(self.bytes_of(tensor, run))
                left -= run[2]

    def finished(self, ids: list[int], size: int, *, local: bool) -> tuple[int, ...]:
        missing = {byte[1 if local else 2] // size for byte in self.all - self.done}
        return tuple(sorted(set(ids) - missing))


@given(
    data=st.data(), tensors=st.integers(1, 4), size=st.integers(1, 6), local=st.booleans(), longest=st.integers(1, 20)
)
def test_blocks_to_blocks(data: st.DataObject, tensors: int, size: int, local: bool, longest: int) -> None:
    """Duplicates, adjacent blocks that are merged, pieces that are cut in the middle of a block, any order of parts."""
    here = data.draw(st.lists(st.integers(0, ENTRIES - 1), min_size=1, max_size=ENTRIES))
    there = data.draw(st.lists(st.integers(0, ENTRIES - 1), min_size=len(here), max_size=len(here)))
    geometry = plan.Geometry(size * ENTRIES, ENTRIES)
    ids = [np.array(blocks, dtype=np.int64) for blocks in (here, there)]
    runs = pieces(plan.blocks(geometry, geometry, *ids, into_local=local), longest)
    check(data, tensors, runs, here if local else there, size, local=local)


@given(
    data=st.data(), tensors=st.integers(1, 3), size=st.integers(1, 6), local=st.booleans(), longest=st.integers(1, 20)
)
def test_batch_entry_to_blocks(data: st.DataObject, tensors: int, size: int, local: bool, longest: int) -> None:
    """The last piece may be short: its block is whole when the piece is there."""
    entry = plan.Window(data.draw(st.integers(0, 30)), data.draw(st.integers(size, size * ENTRIES)))
    most = -(-entry.size // size)
    blocks = data.draw(st.lists(st.integers(0, ENTRIES - 1), min_size=1, max_size=most))
    geometry = plan.Geometry(size * ENTRIES, ENTRIES)
    runs = plan.into_blocks(entry, geometry, np.array(blocks, dtype=np.int64), into_local=local)
    check(data, tensors, pieces(runs, longest), blocks, size, local=local)


def check(data: st.DataObject, tensors: int, runs: Runs, ids: list[int], size: int, *, local: bool) -> None:
    most, longest = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 100))
    parts = list(iovec.parts(tensors, runs.lengths, most, max(longest, int(runs.lengths.max()))))
    progress, model = Progress(tensors, runs), Model(tensors, runs)
    moved = data.draw(st.lists(st.sampled_from(range(len(parts))), unique=True))
    for index in moved:
        progress.mark(parts[index])
        model.mark(parts[index])
    left = [part for index, part in enumerate(parts) if index not in moved]
    if left:
        part = data.draw(st.sampled_from(left))
        whole = len(range(tensors)[part[0]]) * runs[part[1]].total
        some = data.draw(st.integers(0, whole))
        progress.mark_begin(part, some)
        model.mark(part, some)
    assert progress.bytes_done == len(model.done)
    asked = np.array(ids, dtype=np.int64)
    assert progress.finished_blocks(asked, size, local=local) == model.finished(ids, size, local=local)
    assert (progress.pending().total == 0) == (model.done == model.all)


def test_nothing_and_everything() -> None:
    runs = Runs(*(np.array(column, dtype=np.int64) for column in ([0, 20], [40, 0], [10, 10])))
    progress = Progress(3, runs)
    ids = np.array([2, 0], dtype=np.int64)
    assert (progress.bytes_done, progress.finished_blocks(ids, 10, local=True)) == (0, ())
    progress.mark((slice(0, 5), slice(0, 1)))  # a part may reach beyond the last tensor
    assert (progress.bytes_done, progress.finished_blocks(ids, 10, local=True)) == (30, (0,))
    progress.mark_begin((slice(0, 3), slice(1, 2)), 29)
    assert (progress.bytes_done, progress.finished_blocks(ids, 10, local=True)) == (50, (0,))
    progress.mark((slice(2, 3), slice(1, 2)))
    assert (progress.bytes_done, progress.finished_blocks(ids, 10, local=True)) == (60, (0, 2))
