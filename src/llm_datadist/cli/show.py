"""What a command shows while it works."""

from __future__ import annotations

from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

_MIN_WIDTH: Final = 120
"""Columns of what is not a terminal, such as a log."""


def open_console() -> Console:
    """Standard output, wide enough for tables."""
    console = Console()
    if not console.is_interactive:
        console.width = max(console.width, _MIN_WIDTH)
    return console


def print_problem(command: str, text: str) -> None:
    """Tell on standard error what went wrong."""
    Console(stderr=True).print(Text(f"llm-datadist {command}: {text}"), soft_wrap=True)


class Show:
    """A progress bar on a terminal, lines elsewhere."""

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self.bar: Progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_interactive,
        )
        self._task = self.bar.add_task("starting", total=total)

    def step(self, text: str) -> None:
        """Tell what happens now."""
        self.bar.update(self._task, description=f"{text:<34}")

    def advance(self, done: int) -> None:
        """Move the bar."""
        self.bar.advance(self._task, done)

    def say(self, line: str) -> None:
        """Print a line where there is no bar."""
        if not self._console.is_interactive:
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)
