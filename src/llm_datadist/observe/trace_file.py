"""Transfers in the trace event format that Perfetto and Chrome open.

Each process writes a file of its own; a viewer, or ``join``, puts several together: times are wall-clock times, and
what belongs to one transfer is connected by its id.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from llm_datadist.observe.events import Served, Transfer

MAX_EVENTS: Final = 1_000_000
"""Of one file; further ones are counted and left out."""


class TraceFile:
    """Keeps what it is told until ``write``. Thread-safe."""

    def __init__(self, name: str) -> None:
        """``name`` is that of this process in the viewer."""
        self._lock = threading.RLock()  # a signal handler may transfer while one is being kept
        self._name = name
        self._pid = os.getpid()
        self._events: list[dict[str, Any]] = []
        self.dropped: int = 0
        """Events that were too many."""

    def transfer(self, event: Transfer) -> None:
        """See ``Observer.transfer``."""
        thread = threading.get_native_id()
        details = {
            "transfer_id": f"{event.transfer_id:016x}",
            "peer": event.peer,
            "path": event.path,
            "fallbacks": [str(each) for each in event.fallbacks],
            "status": event.status,
            "bytes": event.num_bytes,
        }
        whole = self._slice(event.operation, thread, event.start_ns, event.end_ns, details)
        steps = [self._slice(step.phase.value, thread, step.start_ns, step.end_ns, {}) for step in event.steps]
        self._keep([whole, *steps, self._flow("s", event.transfer_id, thread, event.start_ns)])

    def served(self, event: Served) -> None:
        """See ``Observer.served``."""
        thread = threading.get_native_id()
        details = {
            "transfer_id": f"{event.transfer_id:016x}",
            "peer": event.peer,
            "status": event.status,
            "bytes": event.num_bytes,
        }
        whole = self._slice(f"serve {event.operation}", thread, event.start_ns, event.end_ns, details)
        self._keep([whole, self._flow("f", event.transfer_id, thread, event.start_ns)])

    def _slice(self, name: str, thread: int, start_ns: int, end_ns: int, details: dict[str, Any]) -> dict[str, Any]:
        return {
            "ph": "X",
            "cat": "llm_datadist",
            "name": name,
            "pid": self._pid,
            "tid": thread,
            "ts": start_ns / 1000,
            "dur": (end_ns - start_ns) / 1000,
            "args": details,
        }

    def _flow(self, phase: str, transfer_id: int, thread: int, at_ns: int) -> dict[str, Any]:
        event = {
            "ph": phase,
            "cat": "llm_datadist",
            "name": "transfer",
            "id": f"{transfer_id:016x}",
            "pid": self._pid,
            "tid": thread,
            "ts": at_ns / 1000,
        }
        return {**event, "bp": "e"} if phase == "f" else event

    def _keep(self, events: list[dict[str, Any]]) -> None:
        count = len(events)
        with self._lock:
            if len(self._events) + count > MAX_EVENTS:
                self.dropped += count
            else:
                self._events += events

    def write(self, path: Path) -> None:
        """Write what has come so far.

        Raises:
            OSError: the file cannot be written.
        """
        named = {"ph": "M", "name": "process_name", "pid": self._pid, "args": {"name": self._name}}
        with self._lock:
            events = [named, *self._events]
        path.write_bytes(msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"}))


def join(files: Iterable[Path], output: Path) -> None:
    """Put the files of several processes together.

    Raises:
        OSError: a file cannot be read or written.
        ValueError: a file is not a trace; the message names it.
    """
    events: list[Any] = []
    for file in files:
        try:
            trace = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
            events += trace["traceEvents"]
        except (msgspec.MsgspecError, KeyError, TypeError) as error:
            message = f"{file} is not a trace of llm-datadist: {error}"
            raise ValueError(message) from error
    output.write_bytes(msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"}))
