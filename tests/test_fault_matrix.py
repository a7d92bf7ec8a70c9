"""Every cell of the fault matrix, and the document that shows them; see fault_matrix.py."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import fault_matrix_child as child
from fault_matrix_cells import CELLS, Cell, Observed, Phase, expected, objection
from fault_matrix_doc import missing, parse, render
from fault_matrix_rig import Rigs
from fault_matrix_run import Run
from peers import GUARD, Arena, Node

if TYPE_CHECKING:
    from collections.abc import Iterator

DOCUMENT = Path(__file__).parent.parent / "docs" / "reliability.md"


@pytest.fixture(scope="module")
def rigs() -> Iterator[Rigs]:
    """The processes, shared by all cells of a path."""
    made = Rigs()
    yield made
    made.close()


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_cell(rigs: Rigs, cell: Cell) -> None:
    with rigs.use(cell.path) as rig:
        seen = Run(rig, cell).run()
        assert objection(cell, seen) is None


@pytest.fixture
def target() -> Node:
    """A destination that is as the matrix makes it."""
    node = Node()
    node.arenas["target blocks"] = Arena(child.TENSORS, child.SIZES["target blocks"], None)
    child.reset(node)
    return node


def fill(node: Node, blocks: list[int], *, length: int = child.BLOCK_BYTES) -> None:
    """What an operation does, as far as it comes."""
    for at, tensor in enumerate(node.arenas["target blocks"].memory):
        source = child.source_bytes(at, child.SIZES["source blocks"]).reshape(child.BLOCKS, -1)
        found = tensor[GUARD:-GUARD].reshape(child.BLOCKS, -1)
        for index in blocks:
            found[child.TARGETS[index]][:length] = source[child.SOURCES[index]][:length]


def test_the_matrix_tells_what_has_arrived(target: Node) -> None:
    assert child.verdict(target, "target blocks") == "untouched"
    fill(target, [3], length=1)
    assert child.verdict(target, "target blocks") == "partial"
    fill(target, list(range(child.NAMED)))
    assert child.verdict(target, "target blocks") == "complete"
    child.mark(target, "target blocks")
    assert child.still_marked(target, "target blocks")


@pytest.mark.parametrize(
    ("at", "text"),
    [
        (GUARD - 1, "memory around tensor 2"),
        (-GUARD, "memory around tensor 2"),
        (GUARD + 5, "block 0 of tensor 2, which was not named"),
        (-GUARD - 1, "block 15 of tensor 2 has bytes that nobody sent"),
    ],
)
def test_the_matrix_sees_a_single_wrong_byte(target: Node, at: int, text: str) -> None:
    target.arenas["target blocks"].memory[2][at] = 1
    assert child.verdict(target, "target blocks") == f"WRONG: {text}"


def test_the_matrix_sees_what_comes_late(target: Node) -> None:
    child.mark(target, "target blocks")
    fill(target, [7], length=1)
    assert not child.still_marked(target, "target blocks")


def test_a_status_that_is_not_expected_is_an_objection() -> None:
    cell = Cell("peer killed", Phase.LOOKUP, "mapped", "pull_blocks")
    assert objection(cell, Observed("LLM_NOT_YET_LINK", "untouched", "linked again")) is None
    assert objection(cell, Observed("LLM_TIMEOUT", "untouched", "linked again")) is not None
    assert objection(cell, Observed("LLM_NOT_YET_LINK", "partial", "linked again")) is not None


def test_there_are_cells_enough() -> None:
    assert len(CELLS) == len(set(CELLS)) >= 150


def test_the_document_shows_every_cell() -> None:
    assert not missing(DOCUMENT.read_text(encoding="utf-8"))


def test_the_document_shows_what_is_right() -> None:
    shown = parse(DOCUMENT.read_text(encoding="utf-8"))
    assert {cell: objection(cell, seen) for cell, seen in shown.items() if objection(cell, seen)} == {}


def test_a_document_is_read_as_it_was_written() -> None:
    seen = {
        cell: Observed(min(expected(cell)), "partial", "same link") for cell in CELLS if cell.phase is Phase.TRANSFER
    }
    seen |= {cell: Observed(min(expected(cell)), "", "linked again") for cell in CELLS if cell.phase is Phase.LINK}
    assert parse(render(seen)) == seen
