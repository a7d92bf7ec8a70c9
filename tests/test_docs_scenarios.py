"""The table of situations names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
TEXT = (TESTS.parent / "docs" / "scenarios.md").read_text(encoding="utf-8")
ROWS = [line for line in TEXT.splitlines() if line.startswith("| ") and not line.startswith("| situation")]
NAMED = re.compile(r"`(test_\w+\.py)::(\w+)`")


def functions(name: str) -> set[str]:
    """The functions of a test module."""
    tree = ast.parse((TESTS / name).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip())
def test_every_row_names_tests_that_exist(row: str) -> None:
    _, situation, outcome, tests, _ = (cell.strip() for cell in row.split("|"))
    assert situation
    assert outcome
    present = NAMED.findall(tests)
    assert present
    missing = [f"{name}::{test}" for name, test in present if test not in functions(name)]
    assert missing == []


def test_there_are_rows_for_all() -> None:
    """Of the collection that this table answers."""
    assert len(ROWS) == 63
    assert TEXT.count("\n## ") == 8
