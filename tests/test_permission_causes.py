"""Causes of a denial that this kernel cannot show for real, and the limits that are told with an error."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import pytest

from llm_datadist.memory import syscalls
from llm_datadist.paths import permission
from llm_datadist.paths.base import Peer
from llm_datadist.paths.permission import why_denied
from llm_datadist.utils import limits, process
from llm_datadist.utils.process import Status, user_namespace
from llm_datadist.wire.messages import Identity, Offer

if TYPE_CHECKING:
    from pathlib import Path

USER = Status((1000,) * 4, (1000,) * 4, 0, 0, 0)


def peer(*, namespace: int | None = None, dumpable: bool = True) -> Peer:
    identity = Identity(
        cluster_id=1,
        incarnation=bytes(16),
        boot_id="here",
        pid_namespace=1,
        pid=os.getpid(),
        start_time=1,
        user_namespace=user_namespace() if namespace is None else namespace,
    )
    return Peer(identity, Offer(probe_region=1, nonce=bytes(16), table_fd=0, paths=[], dumpable=dumpable))


@pytest.fixture
def alike(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Both processes of one user without privileges; where Yama's setting would be."""
    monkeypatch.setattr(permission, "status_of", lambda _pid: USER)
    monkeypatch.setattr(permission, "_hidden", lambda _pid, _status: False)
    monkeypatch.setattr(permission, "_YAMA", tmp_path / "ptrace_scope")
    return tmp_path / "ptrace_scope"


@pytest.mark.parametrize(
    ("scope", "cause", "remedy"),
    [
        (
            1,
            "kernel.yama.ptrace_scope is 1: only its parents",
            "call prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY), or grant",
        ),
        (
            2,
            "kernel.yama.ptrace_scope is 2: no process may look",
            "grant CAP_SYS_PTRACE to this process (docker: --cap-",
        ),
        (3, "kernel.yama.ptrace_scope is 3: no process may look", "set it to 0 at boot"),
        (0, "the kernel refuses it (Operation not permitted) and does not say why", "AppArmor"),
    ],
)
def test_yama(alike: Path, scope: int, cause: str, remedy: str) -> None:
    """Where everything else is alike, its setting is the cause."""
    alike.write_text(f"{scope}\n", encoding="ascii")
    denial = why_denied(peer(), errno.EPERM)
    assert cause in denial.cause
    assert remedy in (denial.cause if remedy == "AppArmor" else denial.remedy)


def test_other_causes_come_before_yama(alike: Path) -> None:
    """They would be in the way without it, too."""
    alike.write_text("1\n", encoding="ascii")
    assert "not dumpable" in why_denied(peer(dumpable=False), errno.EPERM).cause
    assert "user namespace" in why_denied(peer(namespace=1), errno.EPERM).cause


def test_a_kernel_without_the_calls(alike: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ENOSYS without any filter."""

    def missing(*_args: int) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(syscalls, "process_vm_readv", missing)
    denial = why_denied(peer(), errno.ENOSYS)
    assert denial.cause == "this kernel has no process_vm_readv"
    assert "CONFIG_CROSS_MEMORY_ATTACH" in denial.remedy


def test_facts_that_are_hidden(alike: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No /proc, nothing to tell: a guess, and no error."""
    monkeypatch.setattr(permission, "status_of", lambda _pid: None)
    assert "does not say why" in why_denied(peer(namespace=0), errno.EACCES).cause
    assert process.status_of("no-such-process") is None


@pytest.mark.parametrize(
    ("error", "reason", "hint"),
    [
        (OSError(errno.ENFILE, "Too many open files in system"), "fs.file-max", "sysctl"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "no memory left", "give the container more"),
        (MemoryError(), "MemoryError (this machine, or the container, has no memory left)", "free some"),
        (RuntimeError("can't start new thread"), "RLIMIT_NPROC", "raise the one that was reached"),
        (RuntimeError("something else"), "something else", None),
        (OSError(errno.ECONNREFUSED, "Connection refused"), "Connection refused", None),
        (OSError("timed out"), "timed out", None),
        (ValueError(), "ValueError", None),
    ],
)
def test_limits_are_named(error: Exception, reason: str, hint: str | None) -> None:
    """Those that were hit; other errors stay as they are."""
    found = limits.explain(error)
    assert reason in found.reason
    assert (found.hint is None) == (hint is None)
    assert hint is None or hint in found.hint  # type: ignore[operator]
    assert limits.with_hint(error) == (found.reason if hint is None else f"{found.reason}: {found.hint}")
