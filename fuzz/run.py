"""Coverage-guided fuzzing with atheris: ``python -m fuzz.run [TARGET ...] --seconds 600 --jobs 2``.

Without a target it runs all of them, some at a time, and prints a table. Inputs that reach new code are kept in
``--found``; an input that makes a target fail is kept there, too, and its path is printed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
CORPUS = ROOT / "fuzz" / "corpus"
_RSS_LIMIT_MB = 4096
"""atheris itself keeps some 60 bytes of every execution; what a decoder takes is bounded by tests/test_fuzz.py."""
_LONGEST = 4096
_GRACE_S = 120
_ROW = "{:<16}{:>12}{:>9}{:>9}{:>10}{:>10}  {}"


class Outcome(NamedTuple):
    """One row of the table."""

    target: str
    executions: int
    seconds: float
    corpus: int
    """Inputs that reach different code."""
    peak_mb: int
    findings: list[Path]
    """Inputs that made the target fail."""
    ended: int
    """Exit status; anything but 0 is a finding, too."""

    def row(self) -> str:
        """For people."""
        told = ", ".join(map(str, self.findings)) or ("-" if not self.ended else f"exit status {self.ended}")
        return _ROW.format(
            self.target,
            self.executions,
            f"{self.seconds:.0f}",
            self.corpus,
            len(self.findings),
            f"{self.peak_mb} MB",
            told,
        )


def fuzz(target: str, found: Path, flags: list[str]) -> None:
    """Fuzz one target in this process; does not return."""
    import atheris  # noqa: PLC0415 - needed in the children only

    with atheris.instrument_imports(include=["llm_datadist"]):
        from fuzz.mutants import quiet  # noqa: PLC0415 - instrumented where it is imported
        from fuzz.targets import TARGETS  # noqa: PLC0415

    quiet()
    atheris.Setup([sys.argv[0], *flags, str(found), str(CORPUS / target)], TARGETS[target].run)
    atheris.Fuzz()


def watch(target: str, seconds: int, found: Path) -> Outcome:
    """Fuzz one target in a child for so long."""
    kept = found / target
    crashes = found / "findings"
    kept.mkdir(parents=True, exist_ok=True)
    crashes.mkdir(exist_ok=True)
    flags = [
        f"-max_total_time={seconds}",
        f"-rss_limit_mb={_RSS_LIMIT_MB}",
        f"-max_len={_LONGEST}",
        f"-artifact_prefix={crashes / target}-",
        "-print_final_stats=1",
        "-timeout=20",
    ]
    command = [
        sys.executable,
        "-m",
        "fuzz.run",
        "--child",
        "--found",
        str(kept),
        target,
        *(f"--flag={f}" for f in flags),
    ]
    begin = time.monotonic()
    done = subprocess.run(  # noqa: S603 - this very module
        command, cwd=ROOT, capture_output=True, text=True, errors="replace", timeout=seconds + _GRACE_S, check=False
    )
    (crashes / f"{target}.log").write_text(done.stderr[-65536:], encoding="utf-8")
    return Outcome(
        target,
        _stat(done.stderr, "number_of_executed_units"),
        time.monotonic() - begin,
        len(list(kept.iterdir())) + len(list((CORPUS / target).iterdir())),
        _stat(done.stderr, "peak_rss_mb"),
        [path for path in crashes.glob(f"{target}-*") if path.suffix != ".log"],
        done.returncode,
    )


def _stat(text: str, name: str) -> int:
    found = re.search(rf"stat::{name}:\s+(\d+)", text)
    return int(found[1]) if found else 0


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", help="decoders; all if none is given")
    parser.add_argument("--seconds", type=int, default=600, help="for each target")
    parser.add_argument("--jobs", type=int, default=2, help="targets at a time")
    parser.add_argument("--found", type=Path, help="folder for what is found; a new one by default")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--flag", action="append", default=[], help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        fuzz(given.targets[0], given.found, given.flag)
    names = given.targets or sorted(path.name for path in CORPUS.iterdir() if path.is_dir())
    unknown = [name for name in names if not (CORPUS / name).is_dir()]
    if unknown:
        parser.error(f"no target {', '.join(unknown)}: there are {', '.join(sorted(p.name for p in CORPUS.iterdir()))}")
    found = given.found or Path(tempfile.mkdtemp(prefix="fuzz-"))
    print(f"kept in {found}")
    print(_ROW.format("target", "executions", "seconds", "corpus", "findings", "peak", "inputs"), flush=True)
    failed = False
    with ThreadPoolExecutor(given.jobs) as pool:
        for outcome in pool.map(lambda name: watch(name, given.seconds, found), names):
            print(outcome.row(), flush=True)
            failed |= bool(outcome.findings or outcome.ended)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
