"""The fault matrix as a command: run its cells, print what is seen, write docs/reliability.md.

python tests/fault_matrix.py [--write docs/reliability.md] [PART OF A NAME ...]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from fault_matrix_cells import CELLS, Cell, Observed
from fault_matrix_rig import Rig
from fault_matrix_run import CellError, Run


def run_all(cells: list[Cell]) -> tuple[dict[Cell, Observed], dict[Cell, str]]:
    """What is seen in each cell, and which promises were broken."""
    seen: dict[Cell, Observed] = {}
    broken: dict[Cell, str] = {}
    rigs: dict[str, Rig] = {}
    try:
        for cell in cells:
            begin = time.monotonic()
            rig = rigs.get(cell.path) or rigs.setdefault(cell.path, Rig(cell.path))
            try:
                seen[cell] = Run(rig, cell).run()
            except Exception as error:
                broken[cell] = f"{type(error).__name__}: {error}"
                rigs.pop(cell.path).close()
            print(f"{time.monotonic() - begin:6.2f} s  {cell}: {seen.get(cell) or broken[cell]}", flush=True)
    finally:
        for rig in rigs.values():
            rig.close()
    return seen, broken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help="only cells whose names contain all of these")
    parser.add_argument("--write", type=Path, help="the document to write")
    arguments = parser.parse_args()
    cells = [cell for cell in CELLS if all(part in str(cell) for part in arguments.parts)]
    begin = time.monotonic()
    _, broken = run_all(cells)
    print(f"{len(cells)} cells, {len(broken)} broken, {time.monotonic() - begin:.0f} s")
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())
