"""Serve until a signal comes."""

from __future__ import annotations

import asyncio
import signal
import urllib.parse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import typer
from aiohttp import web

from llm_datadist.cli.route.engines import Engine, Pool, Role, cause_of, open_session
from llm_datadist.cli.route.modes import Mode
from llm_datadist.cli.route.pull import PullLegs
from llm_datadist.cli.route.push import PushLegs
from llm_datadist.cli.route.router import Router
from llm_datadist.cli.route.server import application
from llm_datadist.cli.show import print_problem

if TYPE_CHECKING:
    from collections.abc import Sequence

_STOP_S: Final = 3.0
"""How long requests may go on when a signal has come; aiohttp waits twice for its time."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What the command line says."""

    prefill: Sequence[str]
    decode: Sequence[str]
    host: str
    port: int
    mode: Mode
    timeout_s: float


def parse_url(url: str) -> str:
    """The URL of an engine, without a slash at the end.

    Raises:
        ValueError: it is none.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        good = parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0
        good = good and not (parts.query or parts.fragment or "@" in parts.netloc)
        versioned = parts.path.rstrip("/").endswith("/v1")
    except ValueError:  # the port is no number, or the address none
        good = versioned = False
    if good and versioned:
        message = f"{url!r} has the /v1 of vLLM's API at its end: leave it out"
        raise ValueError(message)
    if not good or not url.isprintable() or {" ", '"', "\\"} & set(url):
        message = f"{url!r} is no URL of an engine: give where vLLM serves, like http://192.168.1.2:8100"
        raise ValueError(message)
    return url.rstrip("/")


def run(setup: Setup) -> int:
    """Serve.

    Returns:
        The exit code: 0 SIGTERM has ended it, 1 it cannot listen.

    Raises:
        KeyboardInterrupt: SIGINT has ended it.
    """
    signum = asyncio.run(_serve(setup))
    if signum == signal.SIGINT:
        raise KeyboardInterrupt
    return 0 if signum else 1


async def _serve(setup: Setup) -> signal.Signals | None:
    """Serve; the signal that has ended it, None if it cannot listen."""
    loop = asyncio.get_running_loop()
    stop: asyncio.Queue[signal.Signals] = asyncio.Queue()
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, stop.put_nowait, signum)
    async with open_session(setup.timeout_s) as session:
        router = Router(
            Pool([Engine(Role.PREFILL, url, session) for url in dict.fromkeys(setup.prefill)]),
            Pool([Engine(Role.DECODE, url, session) for url in dict.fromkeys(setup.decode)]),
            PullLegs() if setup.mode is Mode.PULL else PushLegs(),
        )
        # A client that goes away cancels its handler, and with it both legs.
        runner = web.AppRunner(
            application(router), handler_cancellation=True, access_log=None, shutdown_timeout=_STOP_S / 2
        )
        await runner.setup()
        try:
            try:
                await web.TCPSite(runner, setup.host, setup.port).start()
            except OSError as error:
                where = f"{setup.host}:{setup.port}"
                print_problem("route", f"cannot listen on {where}: {cause_of(error)}; give another --host or --port")
                return None
            host, port, *_ = runner.addresses[0]
            typer.echo(f"listening on http://{f'[{host}]' if ':' in host else host}:{port}")
            return await stop.get()
        finally:
            await runner.cleanup()
            await router.close()
