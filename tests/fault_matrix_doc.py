"""docs/reliability.md: written from what the cells of the fault matrix have shown, and read back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fault_matrix_cells import CELLS, FAULTS, PATHS, Cell, Observed, Phase, operations

if TYPE_CHECKING:
    from collections.abc import Mapping

HEAD = """\
# Reliability

What happens when something goes wrong in the middle. The tables below are written by the tests: each cell has been
run, between real processes, with the fault made at exactly that moment, and shows what was observed (`python
tests/fault_matrix.py --write docs/reliability.md`; the test suite runs all of them again).

## What holds in every cell

- **No hang.** The call returns by its deadline, a peer that has ended is noticed at once.
- **No crash.** The survivor gets a status or an `LLMException`, never a signal.
- **No wrong byte.** Of the destination only the blocks that were named change; each of their bytes is the old one or
  the right one. What lies around them, and every other block, is as before.
- **Nothing comes late.** When the call has returned, its destination does not change any more: it is *quiescent*, and
  may be used for something else at once. The one exception says so: after `LLM_TIMEOUT` of a push over TCP to a peer
  that cannot confirm that it has stopped, the text ends with "the peer did not confirm that it has stopped writing".
  Then leave those blocks alone until the next transfer to that peer has succeeded, which waits for the confirmation,
  or the cluster is unlinked.
- **Nothing is left.** After unlinking, both sides have as many descriptors and threads as before.
- **It goes on.** The next operation succeeds, on the same link or after `unlink_clusters(..., force=True)` and
  `link_clusters`; no survivor needs to be restarted.

## How to read a cell

*status, destination, what it took to go on.*

| word | meaning |
|---|---|
| `SUCCESS`, `TIMEOUT`, ... | the status (`LLM_` left out) that the call raised or returned, see [errors](errors.md) |
| untouched | no byte of the destination has changed |
| partial | some of the named blocks have arrived, wholly or in part; which ones is not known |
| complete | everything has arrived; with a failure: the fault came after the last byte, and the call cannot know that |
| gone with its owner | the destination was at the peer, whose memory has gone |
| same link | the next operation succeeded without further ado (at most, a broken data connection had to be replaced) |
| linked again | it took `unlink_clusters` with `force=True` and `link_clusters` |

Phases: *link* is the handshake; *lookup* the question to the peer where its cache is (its catalogue, asked anew
because it has changed; for pulls, which run in message mode there, the look-up of each call); *transfer* the moving
of bytes, in the middle of which the fault happens; *unlink* the goodbye. Deadlines are 20 s; 0.4 s where the fault
lasts longer than the deadline; 1 ms where it is far too short.

Where two outcomes are possible because the fault and the last byte cross each other, the table shows the one that was
observed; the tests accept the other one, too (`expected` in `tests/fault_matrix_cells.py`). With `process_vm`,
`mapped` and `inprocess` the peer has no part in a transfer, so one that is stopped does no harm, and there is no data
connection to cut, stall or garble. Memory of a pool cannot be unmapped by its user.

## Over NIXL

The path `nixl` has no cells here, for it depends on what the host has. Its faults are in `tests/test_nixl_faults.py`
(kill -9 in the middle, a peer that is stopped, memory that is registered again or overlaps; over shared memory and over
TCP of UCX), `tests/test_nixl_few.py` (memory that is not mapped any more), `tests/test_nixl_parts.py` (moments that
cannot be met by chance) and `tests/test_kills.py` (kill -9 at random moments); they are skipped where NIXL is not
installed. What differs from the list above: a transfer that is late cannot be taken back from NIXL. If its bytes may
still move, the exception's `quiescent` is False, and the memory cannot be unregistered before they have arrived
(LLM_LINK_BUSY).
"""


def render(seen: Mapping[Cell, Observed]) -> str:
    """The document."""
    parts = [HEAD, f"\n## The {len(seen)} cells\n"]
    for phase in Phase:
        for path in PATHS:
            rows = [fault for fault in FAULTS if any(_key(cell) == (fault, phase, path) for cell in seen)]
            if rows:
                names = operations(phase)
                parts.append(
                    f"\n### {phase.value}, {path}\n\n| fault | {' | '.join(f'`{name}`' for name in names)} |\n"
                )
                parts.append("|---" * (len(names) + 1) + "|\n")
                for fault in rows:
                    cells = [str(seen[Cell(fault, phase, path, name)]) for name in names]
                    parts.append(f"| {fault} | {' | '.join(cells)} |\n")
    return "".join(parts)


def parse(text: str) -> dict[Cell, Observed]:
    """The cells of a document."""
    found: dict[Cell, Observed] = {}
    phase, path, names = Phase.LINK, "", ()
    for line in text.splitlines():
        columns = [column.strip().strip("`") for column in line.strip("|").split("|")]
        if line.startswith("### "):
            first, path = line.removeprefix("### ").split(", ")
            phase, names = Phase(first), ()
        elif line.startswith("| fault |"):
            names = tuple(columns[1:])
        elif line.startswith("| ") and names:
            for name, shown in zip(names, columns[1:], strict=True):
                words = shown.split(", ")
                destination = words[1] if len(words) > 2 else ""
                found[Cell(columns[0], phase, path, name)] = Observed(f"LLM_{words[0]}", destination, words[-1])
    return found


def missing(text: str) -> set[Cell]:
    """Cells of the matrix that a document does not show, or shows although there are none."""
    return set(parse(text)) ^ set(CELLS)


def _key(cell: Cell) -> tuple[str, Phase, str]:
    return cell.fault, cell.phase, cell.path
