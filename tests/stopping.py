"""Stopping processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from until import until

_AT_REST = "TtZX"
"""States of a thread that does nothing: stopped, traced, ended."""


def stop(pid: int) -> None:
    """SIGSTOP; when this returns no thread of the process runs.

    kill itself returns when the signal is queued: on a busy machine other threads go on, and answer, until the one that
    is to take it gets a core.
    """
    os.kill(pid, signal.SIGSTOP)
    until(lambda: _at_rest(pid), what=lambda: f"process {pid} does not stop")


def go_on(pid: int) -> None:
    """SIGCONT."""
    os.kill(pid, signal.SIGCONT)


def _at_rest(pid: int) -> bool:
    return all(map(_thread_at_rest, Path(f"/proc/{pid}/task").iterdir()))


def _thread_at_rest(task: Path) -> bool:
    try:
        return (task / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0] in _AT_REST
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return True
