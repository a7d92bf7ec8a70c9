"""One ping: from the address as it was typed to the report."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec
import typer

from llm_datadist.cli.ping.report import Report, Try, of_visit
from llm_datadist.cli.ping.show import show
from llm_datadist.cli.show import open_console, print_problem
from llm_datadist.configs import LLMConfig
from llm_datadist.engine.errors import LinkError
from llm_datadist.engine.options import EngineOptions
from llm_datadist.engine.visit import visit
from llm_datadist.net.address import text
from llm_datadist.status import LLMException, LLMStatusCode
from llm_datadist.utils import limits

if TYPE_CHECKING:
    from llm_datadist.net.address import Address

_MAX_PORT: Final = 65_535
_MOST_ADDRESSES: Final = 4
"""Of a name that has many."""


@dataclass(frozen=True, slots=True)
class Protection:
    """What the command line says of secret and certificates; None is what the environment says."""

    secret_file: str | None
    tls_cert: str | None
    tls_key: str | None
    tls_ca: str | None
    allow_insecure_remote: bool | None


def parse_target(target: str) -> tuple[str, int]:
    """Host and port of ``host:port`` or ``[v6]:port``.

    Raises:
        ValueError: it is none.
    """
    host, colon, port = target.rpartition(":")
    number = int(port) if port.isascii() and port.isdigit() else 0
    bare = host.removeprefix("[").removesuffix("]")
    if not colon or not bare or not 0 < number <= _MAX_PORT or (":" in bare and bare == host):
        message = f"{target!r} is no HOST:PORT: give where the peer listens, like 192.168.1.2:26000 or [fd00::2]:26000"
        raise ValueError(message)
    return bare, number


def run(target: str, protection: Protection, timeout_s: float, *, as_json: bool) -> int:
    """Ping, and print the report.

    Returns:
        The exit code: 0 a link can be made, 1 it cannot, 2 the options are of no use.
    """
    try:
        options = _options(protection)
    except (LLMException, TypeError) as error:
        print_problem("ping", str(error))
        return 2
    report = ping(target, options, timeout_s)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(report), indent=2))
    else:
        show(report, open_console())
    return 0 if report.ok else 1


def _options(protection: Protection) -> EngineOptions:
    config = LLMConfig()
    config.paths = "auto"  # what the environment permits here says nothing about the peer
    config.secret_file = protection.secret_file
    config.tls_cert, config.tls_key, config.tls_ca = protection.tls_cert, protection.tls_key, protection.tls_ca
    config.allow_insecure_remote = protection.allow_insecure_remote
    return EngineOptions.parse({"llm.Role": "Mix", **config.generate_options()})


def ping(target: str, options: EngineOptions, timeout_s: float) -> Report:
    """Try the addresses of the target until one answers.

    Raises:
        ValueError: see ``parse_target``.
    """
    host, port = parse_target(target)
    begun = time.perf_counter()
    try:
        addresses = _addresses(host, port)
    except OSError as error:
        cause = f"the name {host!r} is not known here: {error.strerror or error}"
        fix = "check the name (getent hosts NAME), or give the ip address"
        status = LLMStatusCode.LLM_LINK_FAILED.name
        failed = Try(target, time.perf_counter() - begun, status, cause, fix)
        return Report(target=target, ok=False, tried=(failed,))
    tried: list[Try] = []
    for address in addresses:
        begun = time.perf_counter()
        try:
            seen = visit(address, options, timeout_s)
        except (LinkError, LLMException, OSError, RuntimeError) as error:
            tried.append(_failed(text(address), time.perf_counter() - begun, error))
            continue
        tried.append(Try(text(address), seen.seconds, LLMStatusCode.LLM_SUCCESS.name))
        return of_visit(target, tuple(tried), seen)
    return Report(target=target, ok=False, tried=tuple(tried))


def _addresses(host: str, port: int) -> list[Address]:
    """What a name stands for; an address with its scope stays as it is."""
    if "%" in host:
        return [(host, port)]
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys((str(where[0]), port) for *_, where in found))[:_MOST_ADDRESSES]


def _failed(where: str, seconds: float, error: Exception) -> Try:
    if isinstance(error, LinkError):
        return Try(where, seconds, error.code.name, str(error), error.hint)
    if isinstance(error, LLMException):
        return Try(where, seconds, error.status_code.name, str(error), getattr(error, "hint", None))
    reason, hint = limits.explain(error) if isinstance(error, OSError) else (str(error), None)
    return Try(where, seconds, LLMStatusCode.LLM_FAILED.name, f"this process cannot begin: {reason}", hint)
