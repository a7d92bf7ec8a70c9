"""The doctor's round: every check once, then the report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
import typer

from llm_datadist import __version__
from llm_datadist.cli.doctor import limits, memory, network, same_host, software
from llm_datadist.cli.doctor.findings import Report
from llm_datadist.cli.doctor.show import show
from llm_datadist.cli.doctor.system import System
from llm_datadist.cli.show import open_console

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm_datadist.cli.doctor.findings import Finding

CHECKS: Final[tuple[Callable[[System], Finding], ...]] = (
    same_host.process_vm,
    same_host.ptrace_scope,
    same_host.seccomp,
    same_host.privileges,
    same_host.memfd,
    same_host.pidfd,
    same_host.handover,
    same_host.boot_id,
    same_host.namespaces,
    same_host.container,
    memory.huge_pages,
    memory.collapse,
    memory.hugetlb,
    memory.shared_memory,
    memory.room,
    limits.open_files,
    limits.locked_memory,
    limits.threads,
    limits.mappings,
    limits.sizes,
    limits.cores,
    network.loopback,
    network.buffers,
    network.backlog,
    network.ipv6,
    network.rdma,
    network.nixl,
    network.gpu,
    software.needed,
    software.optional,
    software.environment,
)


def examine(system: System) -> Report:
    """All findings about this machine."""
    findings = [check(system) for check in CHECKS]
    return Report.of(findings, version=__version__, kernel=system.kernel, python=system.python)


def run(*, as_json: bool) -> int:
    """Print the report on this machine.

    Returns:
        The exit code: 1 if there is a problem, else 0.
    """
    report = examine(System())
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(report), indent=2))
    else:
        show(report, open_console())
    return 0 if report.ok else 1
