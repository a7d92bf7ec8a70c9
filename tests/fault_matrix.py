"""The fault matrix as a command: run its cells, print what is seen, write docs/reliability.md.

python tests/fault_matrix.py [--write docs/reliability.md] [PART OF A NAME ...]
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fault_matrix_cells import CELLS, PATHS, Cell, Observed, objection
from fault_matrix_doc import render
from fault_matrix_rig import Rigs
from fault_matrix_run import CellError, Run


def run_all(cells: list[Cell]) -> tuple[dict[Cell, Observed], int]:
    """What is seen in each cell, and how many are not as they should be. All paths at the same time."""
    seen: dict[Cell, Observed] = {}
    rigs = Rigs()

    def run(cell: Cell) -> bool:
        begin = time.monotonic()
        try:
            with rigs.use(cell.path) as rig:
                seen[cell] = Run(rig, cell).run()
            bad = objection(cell, seen[cell])
        except (CellError, AssertionError, EOFError, TimeoutError, OSError) as error:
            bad = f"{type(error).__name__}: {error}"
        verdict = f"WRONG: {bad}" if bad else str(seen[cell])
        sys.stdout.write(f"{time.monotonic() - begin:6.2f} s  {cell}: {verdict}\n")
        sys.stdout.flush()
        return bad is not None

    def run_path(path: str) -> int:
        return sum([run(cell) for cell in cells if cell.path == path])

    try:
        with ThreadPoolExecutor(len(PATHS)) as pool:
            wrong = sum(pool.map(run_path, PATHS))
    finally:
        rigs.close()
    return seen, wrong


def main() -> int:
    """Run the command; its exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help="only cells whose names contain all of these")
    parser.add_argument("--write", type=Path, help="the document to write, if all cells are as they should be")
    arguments = parser.parse_args()
    cells = [cell for cell in CELLS if all(part in str(cell) for part in arguments.parts)]
    begin = time.monotonic()
    seen, wrong = run_all(cells)
    sys.stdout.write(f"{len(cells)} cells, {wrong} wrong, {time.monotonic() - begin:.0f} s\n")
    if arguments.write and not wrong:
        arguments.write.write_text(render(seen), encoding="utf-8")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
