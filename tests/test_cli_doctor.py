"""``llm-datadist doctor``: each check on made-up machines, and the command on this one, whole and crippled."""

from __future__ import annotations

import errno
import json
import re
import resource
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cli_kit import run
from llm_datadist.cli.doctor import limits, memory, network, same_host, software, trials
from llm_datadist.cli.doctor.command import CHECKS, examine
from llm_datadist.cli.doctor.findings import Finding, Group, Level, Report
from llm_datadist.cli.doctor.system import System, Trials
from llm_datadist.cli.doctor.trials import Trial
from llm_datadist.memory.huge_pages import Advice, Outcome
from llm_datadist.paths.nixl_options import installed

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

    Check = Callable[[System], Finding]

INFINITY = resource.RLIM_INFINITY
WORKS = Trials(
    process_vm=Trial,
    memfd=Trial,
    pidfd=Trial,
    handover=Trial,
    loopback=Trial,
    options=Trial,
    collapse=lambda: Advice(1, 1, 0.0, Outcome.DONE),
    nixl=Trial,
)
TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "doctor.md"


def machine(tmp_path: Path, files: dict[str, str] | None = None, **values: Any) -> System:
    """A machine with these files only, where every trial ends well and nothing is limited."""
    for name, text in (files or {}).items():
        path = tmp_path / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    defaults: dict[str, Any] = {
        "root": tmp_path,
        "limit": lambda _: (INFINITY, INFINITY),
        "cores": lambda: 8,
        "space": lambda _: (1 << 34, 1 << 33),
        "version": lambda _: "1.0",
        "paths": lambda: None,
        "trials": WORKS,
    }
    return System(**{**defaults, **values})


def fails(name: str, failed: str = "it failed", code: int = 0) -> dict[str, Trials]:
    return {"trials": replace(WORKS, **{name: lambda: Trial(failed, code)})}


def collapses(outcome: Outcome) -> dict[str, Trials]:
    return {"trials": replace(WORKS, collapse=lambda: Advice(2, 0, 0.1, outcome))}


def limited(which: int, soft: int) -> dict[str, object]:
    return {"limit": lambda asked: (soft, INFINITY) if asked == which else (INFINITY, INFINITY)}


# ---------------------------------------------------------------- made-up machines

YAMA = "/proc/sys/kernel/yama/ptrace_scope"
STATUS = "/proc/self/status"
GROUPS = "/proc/self/cgroup"
RMEM, WMEM = "/proc/sys/net/ipv4/tcp_rmem", "/proc/sys/net/ipv4/tcp_wmem"
THP = "/sys/kernel/mm/transparent_hugepage/enabled"
DENIED = fails("process_vm", "a child could not read its parent", errno.EPERM)
UNTRIED = {"trials": replace(WORKS, process_vm=lambda: Trial("it failed", conclusive=False))}
RDMA = {"/sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE"}
NO_NIXL = {"trials": replace(WORKS, nixl=lambda: Trial("NIXL is not installed", conclusive=False))}
NO_PACKAGE: dict[str, Any] = {"version": lambda _: None}


@pytest.mark.parametrize(
    ("check", "files", "values", "level", "words"),
    [
        (same_host.process_vm, {}, {}, Level.OK, "read and write"),
        (same_host.process_vm, {}, DENIED, Level.PROBLEM, "could not read its parent: EPERM.*path mapped.*same user"),
        (same_host.process_vm, {YAMA: "1"}, DENIED, Level.PROBLEM, "sysctl -w kernel.yama.ptrace_scope=0; or run"),
        (same_host.process_vm, {YAMA: "3"}, DENIED, Level.PROBLEM, "reboot without"),
        (same_host.process_vm, {STATUS: "Name: x\nSeccomp:\t2\n"}, DENIED, Level.PROBLEM, "--cap-add SYS_PTRACE"),
        (same_host.process_vm, {"/.dockerenv": ""}, DENIED, Level.PROBLEM, "--cap-add SYS_PTRACE"),
        (same_host.process_vm, {}, fails("process_vm", "x", errno.ENOSYS), Level.PROBLEM, "CROSS_MEMORY_ATTACH"),
        (same_host.process_vm, {}, fails("process_vm", "other bytes"), Level.PROBLEM, "^other bytes The path"),
        (same_host.process_vm, {}, UNTRIED, Level.WARNING, "^could not be tried: it failed It is not known"),
        (same_host.ptrace_scope, {}, {}, Level.OK, "not restricted"),
        (same_host.ptrace_scope, {YAMA: "0\n"}, {}, Level.OK, "ptrace_scope is 0"),
        (same_host.ptrace_scope, {YAMA: "2\n"}, {}, Level.NOTE, "ptrace_scope is 2.*sysctl"),
        (same_host.ptrace_scope, {YAMA: "3\n"}, {}, Level.NOTE, "until the next boot"),
        (same_host.ptrace_scope, {YAMA: "what?"}, {}, Level.OK, "not restricted"),
        (same_host.seccomp, {}, {}, Level.OK, "unknown"),
        (same_host.seccomp, {STATUS: "Seccomp:\t0\nSeccomp_filters:\t0\n"}, {}, Level.OK, "off No"),
        (same_host.seccomp, {STATUS: "Seccomp:\t2\n"}, {}, Level.NOTE, "filtered.*--cap-add"),
        (same_host.privileges, {STATUS: "NoNewPrivs:\t1\n"}, {}, Level.NOTE, "is set.*setcap.*--security-opt"),
        (same_host.privileges, {STATUS: "NoNewPrivs:\t0\n"}, {}, Level.OK, "is not set"),
        (same_host.privileges, {}, {}, Level.OK, "unknown"),
        (same_host.memfd, {}, {}, Level.OK, "sealed"),
        (same_host.memfd, {}, fails("memfd"), Level.PROBLEM, "it failed No engine"),
        (same_host.pidfd, {}, {}, Level.OK, "works"),
        (same_host.pidfd, {}, fails("pidfd"), Level.PROBLEM, "it failed.*5.3"),
        (same_host.handover, {}, {}, Level.OK, "mapped works"),
        (same_host.handover, {}, fails("handover"), Level.PROBLEM, "it failed.*Unix sockets"),
        (same_host.boot_id, {}, {}, Level.PROBLEM, "over TCP. mount"),
        (same_host.boot_id, {"/proc/sys/kernel/random/boot_id": "abc\n"}, {}, Level.OK, "same host"),
        (same_host.namespaces, {}, {}, Level.WARNING, "cannot be read"),
        (same_host.container, {}, {}, Level.OK, "no hint"),
        (same_host.container, {"/run/.containerenv": ""}, {}, Level.NOTE, "/run/.containerenv.*--pid=container"),
        (same_host.container, {GROUPS: "0::/kubepods/x\n"}, {}, Level.NOTE, "kubepods in"),
        (memory.huge_pages, {}, {}, Level.WARNING, "cannot be read.*echo madvise"),
        (memory.huge_pages, {THP: "always madvise [never]\n"}, {}, Level.WARNING, "^never.*echo madvise"),
        (memory.huge_pages, {THP: "always [madvise] never\n"}, {}, Level.OK, "^madvise"),
        (memory.huge_pages, {THP: "[always] madvise never\n"}, {}, Level.OK, "^always"),
        (memory.collapse, {}, {}, Level.OK, "works"),
        (memory.collapse, {}, collapses(Outcome.UNSUPPORTED), Level.WARNING, "6.1"),
        (memory.collapse, {}, collapses(Outcome.NO_MEMORY), Level.WARNING, "compact_memory"),
        (memory.collapse, {}, collapses(Outcome.OUT_OF_TIME), Level.WARNING, "less busy"),
        (memory.collapse, {}, collapses(Outcome.REFUSED), Level.WARNING, "PR_SET_THP_DISABLE"),
        (memory.hugetlb, {}, {}, Level.OK, "unknown"),
        (memory.hugetlb, {"/proc/sys/vm/nr_hugepages": "0"}, {}, Level.OK, "no pages"),
        (
            memory.hugetlb,
            {"/proc/sys/vm/nr_hugepages": "600", "/proc/meminfo": "Hugepagesize:    2048 kB\n"},
            {},
            Level.NOTE,
            "600 pages set aside, 1.2 GiB",
        ),
        (memory.shared_memory, {}, {}, Level.OK, "16.0 GiB, 8.0 GiB free"),
        (
            memory.shared_memory,
            {},
            {"space": lambda _: (64 << 20, 1 << 20)},
            Level.NOTE,
            "64 MiB, 1 MiB free.*shm-size",
        ),
        (memory.shared_memory, {}, {"space": lambda _: None}, Level.NOTE, "no /dev/shm"),
        (memory.room, {}, {}, Level.OK, "unknown how much"),
        (memory.room, {"/proc/meminfo": "MemAvailable: 8388608 kB\n"}, {}, Level.OK, "^8.0 GiB available Bounds"),
        (memory.room, {"/proc/meminfo": "MemAvailable: 1024 kB\n"}, {}, Level.WARNING, "^1 MiB available"),
        (memory.room, {"/sys/fs/cgroup/memory.max": "536870912\n"}, {}, Level.WARNING, "limit 512 MiB.*--memory"),
        (memory.room, {"/sys/fs/cgroup/memory.max": "max\n"}, {}, Level.OK, "unknown how much is available Bounds"),
        (
            memory.room,
            {GROUPS: "4:memory:/a/b\n0::/\n", "/sys/fs/cgroup/memory/a/memory.limit_in_bytes": "1048576"},
            {},
            Level.WARNING,
            "limit 1 MiB",
        ),
        (limits.open_files, {}, {}, Level.OK, "unlimited"),
        (limits.open_files, {}, limited(resource.RLIMIT_NOFILE, 65536), Level.OK, "65536"),
        (limits.open_files, {}, limited(resource.RLIMIT_NOFILE, 256), Level.WARNING, "about 24 links.*ulimit -n"),
        (limits.open_files, {}, limited(resource.RLIMIT_NOFILE, 64), Level.PROBLEM, "Not enough.*ulimit -n"),
        (limits.locked_memory, {}, limited(resource.RLIMIT_MEMLOCK, 65536), Level.OK, "64 KiB No path"),
        (
            limits.locked_memory,
            {"/sys/class/infiniband/mlx5_0": ""},
            limited(resource.RLIMIT_MEMLOCK, 65536),
            Level.NOTE,
            "64 KiB, and there is an RDMA device.*ulimit -l",
        ),
        (limits.locked_memory, {"/sys/class/infiniband/mlx5_0": ""}, {}, Level.OK, "unlimited RDMA"),
        (limits.threads, {}, {}, Level.OK, "unlimited"),
        (limits.threads, {}, limited(resource.RLIMIT_NPROC, 1000), Level.OK, "1000"),
        (limits.threads, {}, limited(resource.RLIMIT_NPROC, 100), Level.WARNING, "100 processes.*ulimit -u"),
        (limits.threads, {"/sys/fs/cgroup/pids.max": "50"}, {}, Level.WARNING, "50 processes.*pids-limit"),
        (limits.threads, {"/sys/fs/cgroup/pids.max": "max"}, {}, Level.OK, "unlimited"),
        (limits.mappings, {}, {}, Level.OK, "unknown"),
        (limits.mappings, {"/proc/sys/vm/max_map_count": "65530"}, {}, Level.OK, "65530"),
        (limits.mappings, {"/proc/sys/vm/max_map_count": "1000"}, {}, Level.WARNING, "1000.*max_map_count=65530"),
        (limits.sizes, {}, {}, Level.OK, "unlimited"),
        (limits.sizes, {}, limited(resource.RLIMIT_FSIZE, 1 << 24), Level.WARNING, "file size .ulimit -f.: 16 MiB"),
        (limits.sizes, {}, limited(resource.RLIMIT_AS, 1 << 30), Level.WARNING, "^address space .*: 1024 MiB A pool"),
        (limits.cores, {}, {}, Level.OK, "8 cores Large"),
        (limits.cores, {}, {"cores": lambda: 1}, Level.WARNING, "1 core Both.*taskset"),
        (limits.cores, {"/sys/fs/cgroup/cpu.max": "150000 100000"}, {}, Level.WARNING, "8 cores, quota 1.5"),
        (limits.cores, {"/sys/fs/cgroup/cpu.max": "max 100000"}, {}, Level.OK, "8 cores Large"),
        (
            limits.cores,
            {GROUPS: "3:cpu,cpuacct:/pod\n", "/sys/fs/cgroup/cpu,cpuacct/pod/cpu.cfs_quota_us": "50000"},
            {},
            Level.WARNING,
            "quota 0.5",
        ),
        (
            limits.cores,
            {GROUPS: "3:cpu:/\n", "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1"},
            {},
            Level.OK,
            "8 cores Large",
        ),
        (network.loopback, {}, {}, Level.OK, "works"),
        (network.loopback, {}, fails("loopback"), Level.PROBLEM, "it failed Every link"),
        (network.buffers, {}, {}, Level.OK, "unknown"),
        (network.buffers, {RMEM: "4096 131072 33554432", WMEM: "4096 1 4194304"}, {}, Level.OK, "32 MiB .* 4 MiB"),
        (network.buffers, {RMEM: "4096 131072 262144"}, {}, Level.WARNING, "0.25 MiB received and unknown.*tcp_rmem="),
        (network.backlog, {}, {}, Level.OK, "unknown"),
        (network.backlog, {"/proc/sys/net/core/somaxconn": "4096"}, {}, Level.OK, "4096"),
        (network.backlog, {"/proc/sys/net/core/somaxconn": "128"}, {}, Level.NOTE, "128.*somaxconn=512"),
        (network.ipv6, {}, {}, Level.OK, "not available"),
        (network.ipv6, {"/proc/net/if_inet6": "0001 01 80 10 80 lo\n"}, {}, Level.OK, "^available"),
        (network.rdma, {}, {}, Level.OK, "none"),
        (network.rdma, {"/sys/class/infiniband/mlx5_0": ""}, {}, Level.NOTE, "mlx5_0 No port"),
        (network.rdma, RDMA, {}, Level.OK, "mlx5_0 The path nixl uses"),
        (network.nixl, {}, {}, Level.OK, "only where LLMConfig.paths names it"),
        (network.nixl, RDMA, {}, Level.OK, "used between hosts"),
        (network.nixl, {}, NO_NIXL, Level.OK, "not installed Without RDMA.*pip install"),
        (network.nixl, RDMA, NO_NIXL, Level.NOTE, "not installed The RDMA devices are not used.*pip install"),
        (network.nixl, RDMA, fails("nixl", "it ends with -11"), Level.WARNING, "-11.*pip install"),
        (network.gpu, {}, {}, Level.OK, "none"),
        (network.gpu, {"/proc/driver/nvidia/gpus/0000:01:00.0/information": ""}, {}, Level.NOTE, "0000:01:00.0"),
        (
            network.gpu,
            {"/dev/davinci3": "", "/dev/davinci_manager": "", "/dev/kfd": ""},
            {},
            Level.NOTE,
            "davinci3, kfd",
        ),
        (software.needed, {}, {}, Level.OK, "numpy 1.0, msgspec 1.0"),
        (software.needed, {}, NO_PACKAGE, Level.PROBLEM, "numpy missing.*pip install numpy msgspec"),
        (software.optional, {}, {}, Level.OK, "torch 1.0.*not installed: none"),
        (software.optional, {}, NO_PACKAGE, Level.OK, "none; not installed: torch"),
        (software.environment, {}, {}, Level.OK, "valid"),
        (software.environment, {}, {"paths": lambda: "auto"}, Level.OK, "valid"),
        (software.environment, {}, {"paths": lambda: "tcp"}, Level.NOTE, "^LLM_DATADIST_PATHS=tcp Only.*unset"),
        (software.environment, {}, fails("options"), Level.PROBLEM, "it failed"),
    ],
)
def test_check(
    tmp_path: Path, check: Check, files: dict[str, str], values: dict[str, Any], level: Level, words: str
) -> None:
    finding = check(machine(tmp_path, files, **values))
    assert finding.level is level
    assert re.search(words, f"{finding.seen} {finding.meaning} {finding.fix}")
    assert (finding.fix is not None) >= (level in (Level.PROBLEM, Level.WARNING))


@pytest.mark.parametrize(
    ("pid", "user", "level", "words"),
    [
        ("pid:[4026531836]", "user:[4026531837]", Level.OK, "those of the host"),
        ("pid:[4026532001]", "user:[4026531837]", Level.NOTE, "not those of the host: pid "),
        ("pid:[4026531836]", "user:[4026532002]", Level.NOTE, "not those of the host: user "),
        ("pid:[4026532001]", "user:[4026532002]", Level.NOTE, "not those of the host: pid and user "),
    ],
)
def test_namespaces(tmp_path: Path, pid: str, user: str, level: Level, words: str) -> None:
    folder = tmp_path / "proc" / "self" / "ns"
    folder.mkdir(parents=True)
    (folder / "pid").symlink_to(pid)
    (folder / "user").symlink_to(user)
    finding = same_host.namespaces(machine(tmp_path))
    assert (finding.level, finding.seen.startswith(words)) == (level, True)
    assert finding.facts == {"pid": pid, "user": user}


def test_a_machine_that_shows_nothing(tmp_path: Path) -> None:
    """Neither /proc nor /sys: every check still has something to say."""
    report = examine(machine(tmp_path))
    assert len({finding.name for finding in report.findings}) == len(CHECKS) == len(report.findings)
    assert {finding.group for finding in report.findings} == set(Group)
    assert [finding.name for finding in report.findings if finding.level is Level.PROBLEM] == ["boot-id"]


def test_the_worst_comes_first() -> None:
    levels = [Level.OK, Level.WARNING, Level.PROBLEM, Level.NOTE, Level.PROBLEM]
    findings = [Finding(str(at), Group.MEMORY, level, "", "") for at, level in enumerate(levels)]
    report = Report.of(findings, version="1", kernel="6", python="3")
    assert [finding.name for finding in report.findings] == ["2", "4", "1", "3", "0"]
    assert (report.ok, Report.of(findings[:2], version="1", kernel="6", python="3").ok) == (False, True)
    assert report.counts() == {Level.PROBLEM: 2, Level.WARNING: 1, Level.NOTE: 1, Level.OK: 1}


def test_every_finding_is_documented() -> None:
    section = PAGE.read_text(encoding="utf-8").partition("## Findings")[2].partition("\n## ")[0]
    documented = set(re.findall(r"^\| `([a-z0-9-]+)` \|", section, re.MULTILINE))
    assert documented == {finding.name for finding in examine(System(trials=WORKS)).findings}


# ---------------------------------------------------------------- trials that fail


def test_a_child_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "_CHILD_S", 0.2)
    monkeypatch.setattr(sys, "executable", "/bin/cat")  # complains about its options and ends
    silent = trials.process_vm()
    assert "ended without a word" in silent.failed
    assert not silent.conclusive
    monkeypatch.setattr(sys, "executable", "/no/such/program")
    failed = trials.process_vm()
    assert failed.failed.startswith("no process can be started")
    assert (failed.code, failed.conclusive) == (errno.ENOENT, False)


@pytest.mark.parametrize(
    ("program", "words", "conclusive"),
    [
        ("import os; os.kill(os.getpid(), 11)", "a process that uses NIXL is ended by signal 11", True),
        ("raise SystemExit(3)", "a process that uses NIXL ends with 3", True),
        ("print('it is broken', end='')", "it is broken", True),
        ("import time; time.sleep(60)", "a process that uses NIXL does not end within 1 s", True),
        (None, "NIXL cannot be tried, as no process can be started: No such file or directory", False),
    ],
)
def test_trial_of_nixl(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str | None, words: str, conclusive: bool
) -> None:
    """What becomes of its process is told in words."""
    python = tmp_path / "python"
    if program is not None:
        python.write_text(f"#!{sys.executable}\n{program}\n", encoding="utf-8")
        python.chmod(0o755)
    monkeypatch.setattr(trials, "installed", lambda: "nixl")
    monkeypatch.setattr(trials, "_NIXL_S", 1.0 if "sleep" in str(program) else 20.0)
    monkeypatch.setattr(sys, "executable", str(python))
    trial = trials.nixl()
    assert (trial.failed, trial.conclusive) == (words, conclusive)


@pytest.mark.skipif(installed() is None, reason="NIXL is not installed")
def test_trial_of_nixl_as_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert trials.nixl() == Trial()
    monkeypatch.setenv("LLM_DATADIST_NIXL_BACKEND", "NO_SUCH")
    failed = trials.nixl().failed
    assert "cannot start its backend NO_SUCH" in failed
    assert "NIXL_LOG_LEVEL=INFO" in failed


def test_environment_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_DATADIST_PATHS", "carrier-pigeon")
    assert "carrier-pigeon" in trials.options().failed


@pytest.mark.parametrize("trial", [trials.memfd, trials.pidfd, trials.handover, trials.loopback, trials.process_vm])
def test_trials_leave_no_descriptor(trial: Callable[[], Trial]) -> None:
    before = set(Path("/proc/self/fd").iterdir())
    assert trial() == Trial()
    assert set(Path("/proc/self/fd").iterdir()) == before


# ---------------------------------------------------------------- the command


def findings(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    """The findings of a report in JSON, by name."""
    assert done.stderr == ""
    report = json.loads(done.stdout)
    assert list(report) == ["schema", "version", "kernel", "python", "ok", "findings"]
    assert report["schema"] == 1
    assert done.returncode == (0 if report["ok"] else 1)
    for finding in report["findings"]:
        assert list(finding) == ["name", "group", "level", "seen", "meaning", "fix", "facts"]
    return {finding["name"]: finding for finding in report["findings"]}


def crippled(preparation: str) -> dict[str, dict[str, Any]]:
    """The findings of the doctor in a process that did something to itself first."""
    code = (
        f"import sys; sys.path.insert(0, {str(TESTS)!r}); {preparation}; "
        "from llm_datadist.cli import main; sys.argv = ['llm-datadist', 'doctor', '--json']; main()"
    )
    return findings(run(command=(sys.executable, "-c", code)))


def test_this_machine() -> None:
    done = run("doctor", "--json")
    found = findings(done)
    assert {name for name, finding in found.items() if finding["level"] == "problem"} <= {"process-vm"}
    assert found["memfd"]["level"] == found["loopback"]["level"] == "ok"
    assert found["packages"]["facts"]["python"] == ".".join(map(str, sys.version_info[:3]))


def test_text() -> None:
    done = run("doctor", LLM_DATADIST_PATHS="carrier-pigeon")
    assert (done.returncode, done.stderr) == (1, "")
    lines = done.stdout.splitlines()
    assert re.match(r"llm-datadist \S+, Linux \S+, Python \S+: \d+ problems?, .*\d+ ok$", lines[0])
    shown = [line.split()[0] for line in lines if re.match(r"(problem|warning|note|ok) ", line)]
    assert shown[0] == "problem"
    assert shown == sorted(shown, key=["problem", "warning", "note", "ok"].index)
    text = " ".join(done.stdout.split())
    assert re.search(r"problem environment .*carrier-pigeon.*fix: unset the variable", text)


def test_interpreter_that_others_may_not_look_into() -> None:
    """Not dumpable, and without the privilege to look into others."""
    found = crippled("from peers import close_off; close_off()")
    assert found["process-vm"]["level"] == "problem"
    assert found["process-vm"]["facts"]["works"] is False
    assert "same user" in found["process-vm"]["fix"]
    assert found["handover"]["level"] == "ok"


def test_system_calls_that_are_filtered() -> None:
    found = crippled("from seccomp_kit import refuse_process_vm; refuse_process_vm()")
    assert found["process-vm"]["level"] == "problem"
    assert found["process-vm"]["facts"] == {"works": False, "errno": "EPERM"}
    assert "--cap-add SYS_PTRACE" in found["process-vm"]["fix"]
    assert found["seccomp"]["level"] == found["no-new-privs"]["level"] == "note"


@pytest.mark.parametrize("count", [64, 24])
def test_few_descriptors(count: int) -> None:
    found = crippled(f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({count}, {count}))")
    assert found["open-files"]["level"] == "problem"
    assert found["open-files"]["facts"] == {"soft": count, "hard": count, "links": 0}
    assert "ulimit -n" in found["open-files"]["fix"]


def test_without_huge_pages() -> None:
    found = crippled("import ctypes; ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)")  # PR_SET_THP_DISABLE
    assert found["collapse"]["level"] == "warning"
