"""Every cell of the fault matrix, and the document that shows them; see fault_matrix.py."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fault_matrix_cells import CELLS, Cell, Observed, Phase, expected, objection
from fault_matrix_doc import missing, parse, render
from fault_matrix_rig import Rigs
from fault_matrix_run import Run

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
