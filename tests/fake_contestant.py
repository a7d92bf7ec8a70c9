"""A program for tests of the benchmark's driver: a contestant that behaves as ``--manner`` says."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm_datadist.cli.bench.contestant import Owner, serve
from llm_datadist.cli.bench.limits import ProcessVm

if TYPE_CHECKING:
    import argparse

    from llm_datadist.cli.bench.protocol import Offer

WAIT_S = 60.0


class FakeOwner(Owner):
    def open(self) -> dict[str, Any]:
        note(self.options, os.getpid())
        print("libraries may print what they like")  # noqa: T201
        if self.options.manner == "owner refuses":
            message = "no memory for you"
            raise RuntimeError(message)
        return {}


class FakeContestant(ProcessVm):
    """Moves as the bare limit does, unless it has manners of its own."""

    def open(self, offer: Offer) -> None:
        super().open(offer)
        self.offer = offer
        note(self.options, os.getpid())
        print("as here", flush=True)  # noqa: T201

    def move(self) -> None:
        manner = self.options.manner
        if manner == "moves nothing":
            return
        super().move()
        if manner == "spoils a byte":
            ctypes.c_uint8.from_address(self.tensors.addresses[-1]).value ^= 1
        elif manner == "dies":
            print("my last words", file=sys.stderr)  # noqa: T201
            os._exit(3)
        elif manner == "owner dies":
            os.kill(self.offer.pid, 9)
        elif manner == "hangs":
            select.select([], [], [])
        elif manner == "raises":
            message = "cannot move"
            raise ValueError(message)
        elif manner == "watches":
            self.watch()

    def watch(self) -> None:
        """All processes that are noted, but not in this group, must be stopped."""
        pids = [int(path.name) for path in Path(self.options.notes).iterdir()]
        others = [pid for pid in pids if pid not in (os.getpid(), self.offer.pid)]
        end = time.monotonic() + WAIT_S
        while not all(state(pid) == "T" for pid in others):
            if time.monotonic() > end:
                message = f"others run: {[(pid, state(pid)) for pid in others]}"
                raise TimeoutError(message)
            os.sched_yield()


def note(options: argparse.Namespace, pid: int) -> None:
    """Leave the pid as the name of a file."""
    if options.notes:
        (Path(options.notes) / str(pid)).touch()


def state(pid: int) -> str:
    """The letter that ps shows; empty if the process is gone."""
    with contextlib.suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        return stat[stat.rindex(")") + 2]
    return ""


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--manner", default="honest")
    parser.add_argument("--notes", default="")


if __name__ == "__main__":
    serve(FakeOwner, FakeContestant, options)
