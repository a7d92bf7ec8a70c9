"""Run the command line as a user does."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from until import until

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Sequence

MODULE = (sys.executable, "-m", "llm_datadist.cli")
WAIT_S = 100


def environment() -> dict[str, str]:
    """The environment without what changes the output."""
    changing = {"COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "LLM_DATADIST_PATHS"}
    return {name: value for name, value in os.environ.items() if name not in changing}


def run(*arguments: str, command: Sequence[str] = MODULE, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end, with these environment variables."""
    return subprocess.run(
        [*command, *arguments],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        env={**environment(), **variables},
        check=False,
    )


@contextlib.contextmanager
def running(*arguments: str) -> Generator[subprocess.Popen[str], None, None]:
    """The command in a process group of its own, killed when a test waits for too long."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [*MODULE, *arguments],
        stdout=pipe,
        stderr=pipe,
        text=True,
        env=environment(),
        start_new_session=True,
    ) as process:
        watchdog = threading.Timer(WAIT_S, process.kill)
        watchdog.start()
        try:
            yield process
        finally:
            watchdog.cancel()
            process.kill()


def line_with(process: subprocess.Popen[str], start: str) -> str:
    """The next line of output that begins so."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(start):
            return line
    pytest.fail(f"the command ended before it printed {start!r}")


def is_running(pid: int) -> bool:
    """Whether a process exists and has not ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def wait_gone(pids: Iterable[int]) -> None:
    """Wait until none of the processes runs."""
    pids = list(pids)
    until(lambda: not any(map(is_running, pids)), what=lambda: f"still running: {pids}")
