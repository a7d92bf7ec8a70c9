"""The options of ``llm-datadist bench``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from llm_datadist.cli.bench.results import Order
from llm_datadist.cli.bench.workload import FULL, QUICK, Kind, Operation, parse_block_sizes
from llm_datadist.cli.models import ModelName
from llm_datadist.cli.plan import PathName


def _check_sizes(text: str | None) -> str | None:
    if text is not None:
        try:
            parse_block_sizes(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
    return text


def _check_directory(file: Path | None) -> Path | None:
    """Rather refuse now than after minutes of measuring."""
    if file is not None and not file.absolute().parent.is_dir():
        message = f"there is no directory {file.absolute().parent}: create it first"
        raise typer.BadParameter(message)
    return file


def _names(operations: tuple[Operation, ...]) -> str:
    return ", ".join(operation.value for operation in operations)


Paths: TypeAlias = Annotated[
    list[PathName],
    typer.Option("--path", help="How bytes move; auto is the fastest way that works here. May be repeated."),
]
Operations: TypeAlias = Annotated[
    list[Operation],
    typer.Option(
        "--operation",
        show_default=f"{_names(FULL.operations)}; with --quick {_names(QUICK.operations)}",
        help="The public call that moves them. May be repeated.",
    ),
]
Blocks: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="SIZES",
        callback=_check_sizes,
        show_default=f"{FULL.block_sizes}; with --quick {QUICK.block_sizes}",
        help="Block sizes, separated by commas.",
    ),
]
Orders: TypeAlias = Annotated[
    list[Order], typer.Option("--order", help="How block ids follow each other in a call. May be repeated.")
]
Total: TypeAlias = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="MIB",
        show_default=f"{FULL.total_mib}; with --quick {QUICK.total_mib}",
        help="MiB that one call moves.",
    ),
]
Rounds: TypeAlias = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="COUNT",
        show_default=f"{FULL.rounds}; with --quick {QUICK.rounds}",
        help="How often everything is measured, in turns.",
    ),
]
Models: TypeAlias = Annotated[
    list[ModelName],
    typer.Option(
        "--model",
        show_default="plain tensors with blocks of --blocks",
        help="Move the KV cache of a model. May be repeated.",
    ),
]
Kinds: TypeAlias = Annotated[
    list[Kind], typer.Option("--measure", show_default="all of them", help="What to find out. May be repeated.")
]
Quick: TypeAlias = Annotated[bool, typer.Option("--quick", help="Less of everything, for a first look.")]
JsonFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="FILE",
        dir_okay=False,
        writable=True,
        callback=_check_directory,
        help="Write every figure of every round as JSON.",
    ),
]
HtmlFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--report",
        metavar="FILE",
        dir_okay=False,
        writable=True,
        callback=_check_directory,
        help="Write one HTML page with plots, tables and how to read them.",
    ),
]
