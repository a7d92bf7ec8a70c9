"""The command line: options in, exit code out."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Annotated

import typer

from llm_datadist.cli.bench import command as bench_command
from llm_datadist.cli.bench import options
from llm_datadist.cli.bench.results import Order
from llm_datadist.cli.bench.workload import FULL, QUICK, Kind, Workload, parse_block_sizes
from llm_datadist.cli.demo import run
from llm_datadist.cli.doctor import command as doctor_command
from llm_datadist.cli.models import BLOCK_TOKENS, ModelName
from llm_datadist.cli.ping import command as ping_command
from llm_datadist.cli.plan import PathName, Plan
from llm_datadist.cli.route.modes import Mode
from llm_datadist.cli.soak import command as soak_command
from llm_datadist.native.build import main as native_main

if TYPE_CHECKING:
    from collections.abc import Callable

app: typer.Typer = typer.Typer(
    name="llm-datadist",
    help="KV-cache transfer between prefill and decode processes.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.callback()
def _commands() -> None:
    """KV-cache transfer between prefill and decode processes."""


def _interruptible(name: str, work: Callable[[], int]) -> int:
    """Exit code of the work, also when it is interrupted."""
    try:
        return work()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # one is enough: it ends anyway
        typer.echo(f"llm-datadist {name}: interrupted", err=True)
        return 130


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
    raise typer.Exit(_interruptible("demo", lambda: run(Plan(model, tokens, path, seed))))


@app.command()
def bench(  # noqa: PLR0913 - one argument an option
    *,
    path: options.Paths = [PathName.AUTO, PathName.TCP],  # noqa: B006 - never changed, as all defaults here
    operation: options.Operations = [],  # noqa: B006
    blocks: options.Blocks = None,
    order: options.Orders = [Order.SHUFFLED],  # noqa: B006
    total: options.Total = None,
    rounds: options.Rounds = None,
    model: options.Models = [],  # noqa: B006
    measure: options.Kinds = [],  # noqa: B006
    quick: options.Quick = False,
    json: options.JsonFile = None,
    report: options.HtmlFile = None,
) -> None:
    """Measure transfers beside what this machine can do: bare system calls on the same bytes, in the same rounds.

    Every byte is compared before a figure counts. Takes about two minutes, with --quick some 20 seconds.
    Ends with tables. Exit code 0: all measured; 1: a failure; 2: wrong usage; 130: interrupted.
    """
    effort = QUICK if quick else FULL
    workload = Workload(
        effort=effort,
        paths=tuple(each.value for each in path),
        operations=tuple(operation) or effort.operations,
        block_sizes=parse_block_sizes(blocks or effort.block_sizes),
        orders=tuple(order),
        total_bytes=(total or effort.total_mib) << 20,
        rounds=rounds or effort.rounds,
        models=tuple(model),
        kinds=tuple(measure or Kind),
    )
    outputs = bench_command.Outputs(json, report)
    raise typer.Exit(_interruptible("bench", lambda: bench_command.run(workload, outputs)))


@app.command()
def soak(
    minutes: Annotated[float, typer.Option(min=0.01, help="How long; a round under way is finished.")] = 20.0,
    processes: Annotated[int, typer.Option(min=2, max=16, help="The first one is never killed.")] = 4,
    seed: Annotated[int, typer.Option(min=0, help="Of operations, block tables, contents and disturbances.")] = 1,
) -> None:
    """Let processes make every kind of transfer over every path, kill, stop and restart them, and verify every byte.

    Ends with tables. Exit code 0: all bytes right, every failure has its reason, and the first process uses no more
    descriptors, threads and memory than before; 1: not so; 2: wrong usage; 130: interrupted.
    """
    raise typer.Exit(_interruptible("soak", lambda: soak_command.run(minutes * 60, processes, seed)))


@app.command()
def doctor(
    *,
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON instead.")] = False,
) -> None:
    """Examine this machine: what helps transfers, what hinders them, and the command that changes it.

    What is wrong comes first. Exit code 0: nothing prevents transfers or paths on one host; 1: something does;
    2: wrong usage; 130: interrupted.
    """
    raise typer.Exit(_interruptible("doctor", lambda: doctor_command.run(as_json=json)))


@app.command()
def ping(
    target: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Where the peer listens (listen_ip_info).")],
    *,
    secret_file: Annotated[str | None, typer.Option(help="As LLMConfig.secret_file.")] = None,
    tls_cert: Annotated[str | None, typer.Option(help="As LLMConfig.tls_cert.")] = None,
    tls_key: Annotated[str | None, typer.Option(help="As LLMConfig.tls_key.")] = None,
    tls_ca: Annotated[str | None, typer.Option(help="As LLMConfig.tls_ca.")] = None,
    allow_insecure_remote: Annotated[
        bool | None, typer.Option("--allow-insecure-remote", help="As LLMConfig.allow_insecure_remote.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, max=60, help="Seconds for each address, and each path.")] = 5.0,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON instead.")] = False,
) -> None:
    """Look at a running peer: whether it lets this side in, which paths work and why not the others, how fast they are.

    Touches no cache and makes no link. What is not given comes from the environment (LLM_DATADIST_SECRET_FILE, ...).
    Exit code 0: a link can be made; 1: it cannot; 2: wrong usage; 130: interrupted.
    """
    try:
        ping_command.parse_target(target)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    protection = ping_command.Protection(secret_file, tls_cert, tls_key, tls_ca, allow_insecure_remote)
    raise typer.Exit(_interruptible("ping", lambda: ping_command.run(target, protection, timeout, as_json=json)))


@app.command()
def top(
    endpoints: Annotated[list[str], typer.Argument(metavar="HOST:PORT|URL...", help="Prometheus endpoints.")],
    *,
    interval: Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look twice, one interval apart, print that, and end.")] = False,
) -> None:
    """Watch running processes: links, transfers a second, bytes a second, latencies, failures.

    Reads what llm_datadist.observe.prometheus exports; needs the extra metrics. Ctrl-C ends it.
    Exit code 0: all endpoints told something; 1: one did not; 2: wrong usage; 130: interrupted.
    """
    from llm_datadist.cli.top import command, scrape  # noqa: PLC0415 - they need the extra metrics

    try:
        for endpoint in endpoints:
            scrape.url_of(endpoint)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    raise typer.Exit(_interruptible("top", lambda: command.run(endpoints, interval, once=once)))


@app.command()
def route(
    *,
    prefill: Annotated[list[str], typer.Option(metavar="URL", help="A vLLM that prefills; give it once for each.")],
    decode: Annotated[list[str], typer.Option(metavar="URL", help="A vLLM that decodes; give it once for each.")],
    host: Annotated[str, typer.Option(help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    mode: Annotated[Mode, typer.Option(help="That of the engines' LLMDataDistConnector.")] = Mode.PUSH,
    timeout: Annotated[float, typer.Option(min=0.1, max=86400, help="Seconds for each request to an engine.")] = 600.0,
) -> None:
    """Serve vLLM's API in front of engines that prefill and engines that decode.

    push: both engines of a request work at once. pull: one after the other, and the prefill engine's first token goes
    straight to the client. Needs the extra route. Prints the address it listens on; Ctrl-C ends it.
    Exit code 0: SIGTERM has ended it; 1: it cannot listen; 2: wrong usage; 130: interrupted.
    """
    from llm_datadist.cli.route import command  # noqa: PLC0415 - it needs the extra route

    try:
        prefill, decode = ([command.parse_url(url) for url in urls] for urls in (prefill, decode))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    setup = command.Setup(prefill, decode, host, port, mode, timeout)
    raise typer.Exit(_interruptible("route", lambda: command.run(setup)))


@app.command(name="cpp-config")
def cpp_config(
    *,
    cflags: Annotated[bool, typer.Option("--cflags", help="Options for the compiler.")] = False,
    libs: Annotated[bool, typer.Option("--libs", help="Options for the linker.")] = False,
) -> None:
    """Tell a C++ compiler where the library is that ``python -m llm_datadist.native build`` has built."""
    wanted = [option for option, given in (("--cflags", cflags), ("--libs", libs)) if given]
    raise typer.Exit(native_main(["config", *wanted]))
