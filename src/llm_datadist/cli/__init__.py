"""The command ``llm-datadist``. Importing this package loads neither typer nor rich; running :func:`main` does."""

from __future__ import annotations

from llm_datadist.cli.entry import main

__all__ = ["main"]
