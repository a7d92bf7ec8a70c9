"""Run tests/test_matrix.py and bring the table of docs/migration.md up to date with what it has shown.

python docs/make_matrix.py [--check]
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree as ET

TARGET = Path(__file__).with_name("migration.md")
TESTS = Path(__file__).parents[1] / "tests" / "test_matrix.py"
BEGIN = "<!-- from tests/test_matrix.py by docs/make_matrix.py -->\n"
END = "<!-- end -->\n"
PATHS = ("inprocess", "process_vm", "mapped", "tcp")
MODES = ("A", "M")
TIMEOUT_S = 280


class Run(NamedTuple):
    """One test that has passed."""

    operation: str
    path: str
    mode: str
    refused: str
    """How; empty if the bytes were moved."""


def run_tests() -> list[Run]:
    """Every test for an operation, with what it has seen.

    Raises:
        SystemExit: one did not pass.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = (
            "-q",
            "-o",
            "addopts=",
            "-p",
            "no:cacheprovider",
            "--tb=short",
            "-o",
            "junit_family=xunit1",
            f"--junitxml={report}",
        )
        done = subprocess.run(  # noqa: S603 - of this program
            [sys.executable, "-m", "pytest", *options, str(TESTS)],
            env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
            cwd=TESTS.parent,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        runs = [_run(case) for case in ET.parse(report).iter("testcase")]  # noqa: S314 - written by pytest, just now
        return [run for run in runs if run is not None]


def _run(case: ET.Element) -> Run | None:
    """What one test has seen; None if it has no initiator, so that it tests no operation."""
    operation, _, parameters = case.attrib["name"].rstrip("]").partition("[")
    path, mode, *initiator = parameters.split("-")
    if not initiator:
        return None
    refused = case.find("properties/property[@name='refused']")
    return Run(operation, path, mode, "" if refused is None else refused.attrib["value"])


def rows(runs: list[Run]) -> list[str]:
    """The table: a row for each operation, in the order of the tests."""
    functions = (
        node for node in ast.parse(TESTS.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)
    )
    about = {each.name: (ast.get_docstring(each) or "").splitlines() for each in functions}
    seen: dict[str, dict[tuple[str, str], set[str]]] = defaultdict(lambda: defaultdict(set))
    for run in runs:
        seen[run.operation][run.path, run.mode].add(run.refused)
    lines = [f"| test | what | {' | '.join(f'`{path}`' for path in PATHS)} |", "|---|---|" + "---|" * len(PATHS)]
    for operation, outcomes in seen.items():
        cells = (_cell({mode: outcomes[path, mode] for mode in MODES}) for path in PATHS)
        lines.append(f"| {operation.removeprefix('test_')} | {about[operation][0].rstrip('.')} | {' | '.join(cells)} |")
    return lines


def _cell(modes: dict[str, set[str]]) -> str:
    return ", ".join(
        mode + " or ".join(f": {how}" if how else "" for how in sorted(seen)) for mode, seen in modes.items()
    )


def main() -> None:
    """Write the page, or say that it is out of date."""
    page = TARGET.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    after = rest.split(END, 1)[1]
    fresh = before + BEGIN + "".join(f"{row}\n" for row in rows(run_tests())) + END + after
    if sys.argv[1:] == ["--check"]:
        raise SystemExit(0 if fresh == page else f"{TARGET.name} is out of date: python docs/make_matrix.py")
    TARGET.write_text(fresh, encoding="utf-8")


if __name__ == "__main__":
    main()
