"""The command line: options in, exit code out."""

from __future__ import annotations

import signal
from typing import Annotated

import typer

from llm_datadist.cli.demo import run
from llm_datadist.cli.models import BLOCK_TOKENS, ModelName
from llm_datadist.cli.plan import PathName, Plan
from llm_datadist.native.build import main as native_main

app = typer.Typer(
    name="llm-datadist",
    help="KV-cache transfer between prefill and decode processes.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.callback()
def _commands() -> None:
    """KV-cache transfer between prefill and decode processes."""


@app.command()
def demo(
    model: Annotated[ModelName, typer.Option(help="Whose KV cache is moved.")] = ModelName.LLAMA_3_1_8B,
    tokens: Annotated[int, typer.Option(min=1, help=f"Rounded up to blocks of {BLOCK_TOKENS}.")] = 4096,
    path: Annotated[
        PathName, typer.Option(help="How bytes move between the two processes; auto takes the fastest that works.")
    ] = PathName.AUTO,
    seed: Annotated[int, typer.Option(min=0, max=2**64 - 1, help="Of the contents and the block tables.")] = 1,
) -> None:
    """Move a KV cache between a prefill and a decode process in every way, and verify every block.

    Ends with a table. Exit code 0: all blocks verified; 1: a mismatch or failure; 2: wrong usage; 130: interrupted.
    """
    try:
        code = run(Plan(model, tokens, path, seed))
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # one is enough: it ends anyway
        typer.echo("llm-datadist demo: interrupted", err=True)
        code = 130
    raise typer.Exit(code)


@app.command(name="cpp-config")
def cpp_config(
    *,
    cflags: Annotated[bool, typer.Option("--cflags", help="Options for the compiler.")] = False,
    libs: Annotated[bool, typer.Option("--libs", help="Options for the linker.")] = False,
) -> None:
    """Tell a C++ compiler where the library is that ``python -m llm_datadist.native build`` has built."""
    wanted = [option for option, given in (("--cflags", cflags), ("--libs", libs)) if given]
    raise typer.Exit(native_main(["config", *wanted]))
