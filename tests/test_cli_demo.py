"""``llm-datadist demo`` as a user runs it, and what its parent process does when something goes wrong."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from typing import TYPE_CHECKING

import pytest

from cli_kit import WAIT_S, is_running, line_with, run, running, wait_gone
from llm_datadist.cli import demo
from llm_datadist.cli.kv import Verified
from llm_datadist.cli.models import ModelName
from llm_datadist.cli.orders import Done, Moved, Poison, Prepare, Transfer
from llm_datadist.cli.plan import Operation, PathName, Plan, Role
from llm_datadist.cli.team import DemoError, Limits, started_team
from stopping import stop

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

    from llm_datadist.cli.team import Team

SCRIPT = "import sys\nfrom llm_datadist.cli import main\nif __name__ == '__main__':\n    sys.exit(main())\n"
"""What installers write as the command."""
PLAN = Plan(ModelName.TINY, 64, PathName.AUTO, 1)
LONG = ("--model", "tiny", "--tokens", "400000")
"""Takes a while: 200 MB on each side."""


def pids_of(process: subprocess.Popen[str]) -> dict[str, int]:
    """The process ids that the demo prints once it has started both processes."""
    line = line_with(process, "prefill process")
    return {role: int(pid) for role, pid in re.findall(r"(\w+) process (\d+)", line)}


def stop_process(team: Team, role: Role) -> int:
    """Make a process hang; its id."""
    pid = team.pid(role)
    assert pid is not None
    stop(pid)
    return pid


def table_rows(output: str) -> dict[str, tuple[str, int, int]]:
    """Of each operation of the table: path, blocks verified, blocks in total."""
    table = output[output.index("operation") :]
    row = re.compile(r"^ *(\S.*?) {2,}[\d.]+ MB +(\w+) +[\d.]+ ms +[\d.]+ +(\d+)/(\d+) *$", re.MULTILINE)
    return {name: (path, int(ok), int(total)) for name, path, ok, total in row.findall(table)}


def all_verified(path: str, blocks: int) -> dict[str, tuple[str, int, int]]:
    """The table of a run without failures."""
    return {operation.value: (path, blocks, blocks) for operation in Operation}


# ---------------------------------------------------------------- as a user


def test_process_vm() -> None:
    done = run("demo", "--model", "tiny", "--path", "process_vm")
    assert (done.returncode, done.stderr) == (0, "")
    assert table_rows(done.stdout) == all_verified("process_vm", 1024)


def test_tcp_from_an_installed_script(tmp_path: Path) -> None:
    script = tmp_path / "llm-datadist"
    script.write_text(SCRIPT, encoding="utf-8")
    arguments = ("demo", "--model", "tiny", "--path", "tcp", "--tokens", "100", "--seed", "18446744073709551615")
    done = run(*arguments, command=(sys.executable, str(script)))
    assert (done.returncode, done.stderr) == (0, "")
    assert table_rows(done.stdout) == all_verified("tcp", 4 * 7)


def test_latent_caches() -> None:
    done = run("demo", "--model", "deepseek-r1", "--tokens", "100", "--path", "process_vm")
    assert (done.returncode, done.stderr) == (0, "")
    assert table_rows(done.stdout) == all_verified("process_vm", 2 * 61 * 8)


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("--path", "inprocess", "process_vm"),
        ("--path", "rdma", "process_vm"),
        ("--model", "gpt-2", "llama-3.1-8b"),
        ("--tokens", "0", "1"),
        ("--tokens", "many", "integer"),
        ("--seed", "-1", "0"),
    ],
)
def test_wrong_options_are_refused(option: str, value: str, expected: str) -> None:
    done = run("demo", option, value)
    assert done.returncode == 2
    assert option in done.stderr
    assert expected in done.stderr
    assert "Traceback" not in done.stderr


def test_what_does_not_fit_is_refused() -> None:
    done = run("demo", "--tokens", "1000000000000")
    assert done.returncode == 1
    assert re.search(r"need [\d.]+ GiB of memory .* only [\d.]+ GiB are available: use fewer --tokens", done.stderr)


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_without_the_extra(package: str) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; from llm_datadist.cli import main; main()"
    done = run(command=(sys.executable, "-c", code))
    assert done.returncode == 2
    assert done.stderr == f"llm-datadist needs the package {package}: run pip install 'llm-datadist[cli]'\n"


def test_import_is_light() -> None:
    code = "import sys, llm_datadist.cli; print(sorted({'typer', 'rich', 'numpy'} & set(sys.modules)))"
    assert run(command=(sys.executable, "-c", code)).stdout == "[]\n"


# ---------------------------------------------------------------- interrupted, killed, stuck


@pytest.mark.parametrize("moment", ["prefill process", "pull_blocks"])
def test_interrupt(moment: str) -> None:
    with running("demo", *LONG) as process:
        pids = pids_of(process)
        if moment != "prefill process":
            line_with(process, moment)
        start = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=WAIT_S)
        assert process.returncode == 130
        assert errors == "llm-datadist demo: interrupted\n"
        assert time.monotonic() - start < 10
        assert not any(map(is_running, pids.values()))


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_killed_child(role: str) -> None:
    with running("demo", *LONG) as process:
        pids = pids_of(process)
        os.kill(pids[role], signal.SIGKILL)
        _, errors = process.communicate(timeout=WAIT_S)
        assert process.returncode == 1
        assert f"the {role} process was killed by SIGKILL" in errors
        assert not any(map(is_running, pids.values()))


def test_children_do_not_outlive_a_killed_parent() -> None:
    with running("demo", *LONG) as process:
        pids = pids_of(process)
        process.kill()
        process.communicate(timeout=WAIT_S)
        wait_gone(pids.values())


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (Limits(silence_s=0.5, total_s=60), "no sign of life for 0.5 s from: decode"),
        (Limits(silence_s=60, total_s=0.5), "not finished after 0.5 s, still waiting for: decode"),
    ],
)
def test_stuck_child(limits: Limits, reason: str) -> None:
    stopped: list[int] = []

    def wait_for_a_stopped_process() -> None:
        with started_team(PLAN, limits, lambda _: None) as team:
            stopped.append(stop_process(team, Role.DECODE))
            team.ask(Role.DECODE, Prepare(), Done)

    with pytest.raises(DemoError, match=reason):
        wait_for_a_stopped_process()
    assert not is_running(stopped[0])


def test_child_that_does_not_finalize() -> None:
    stopped: list[int] = []

    def end_with_a_stopped_process() -> None:
        with started_team(PLAN, Limits(silence_s=60, total_s=60, stop_s=0.5), lambda _: None) as team:
            team.ask_all({Role.PREFILL: Prepare(), Role.DECODE: Prepare()})
            stopped.append(stop_process(team, Role.PREFILL))

    with pytest.raises(DemoError, match=r"^the prefill process did not finalize within 0\.5 s$"):
        end_with_a_stopped_process()
    assert not is_running(stopped[0])


def test_end_of_the_process_that_nobody_waits_for() -> None:
    def wait_for_the_other_one() -> None:
        with started_team(PLAN, Limits(silence_s=60, total_s=60), lambda _: None) as team:
            stop_process(team, Role.DECODE)
            os.kill(stop_process(team, Role.PREFILL), signal.SIGKILL)
            team.ask(Role.DECODE, Prepare(), Done)

    with pytest.raises(DemoError, match="the prefill process was killed by SIGKILL"):
        wait_for_the_other_one()


def test_failing_child_tells_why() -> None:
    limits = Limits(silence_s=60, total_s=60)
    with started_team(PLAN, limits, lambda _: None) as team:
        team.ask_all({Role.PREFILL: Prepare(), Role.DECODE: Prepare()})
        with pytest.raises(DemoError, match=r"the decode process failed: .*LLM_NOT_YET_LINK"):
            team.ask(Role.DECODE, Transfer(Operation.PULL_BLOCKS), Moved)
        with pytest.raises(DemoError, match=r"the prefill process failed: .*Poison"):
            team.ask(Role.PREFILL, Poison(), Done)


# ---------------------------------------------------------------- the judgement


MOVED = Moved(bytes_moved=1_000_000, seconds=0.001, path="tcp")
GOOD = Verified(8, 8)


def judged(monkeypatch: pytest.MonkeyPatch, *rows: demo.Row, error: str | None = None) -> int:
    """What the parent makes of these rows, and of a failure after them."""

    def conduct(_team: object, _show: object, filled: list[demo.Row]) -> None:
        filled.extend(rows)
        if error is not None:
            raise DemoError(error)

    monkeypatch.setattr(demo, "conduct", conduct)
    monkeypatch.setattr(demo, "started_team", lambda *_: contextlib.nullcontext())
    return demo.run(PLAN)


def test_all_rows_verified(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert judged(monkeypatch, *(demo.Row(operation, MOVED, GOOD) for operation in Operation)) == 0
    captured = capsys.readouterr()
    assert table_rows(captured.out) == all_verified("tcp", 8)
    assert not captured.err


def test_mismatch_fails_and_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    bad = demo.Row(Operation.PUSH_BLOCKS, MOVED, Verified(7, 8, ("block 3 was never written",)))
    assert judged(monkeypatch, demo.Row(Operation.PULL_BLOCKS, MOVED, GOOD), bad) == 1
    captured = capsys.readouterr()
    assert table_rows(captured.out)["push_blocks"] == ("tcp", 7, 8)
    assert captured.err == "llm-datadist demo: push_blocks: block 3 was never written\n"


def test_stray_bytes_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    stray = demo.Row(Operation.PULL_CACHE, MOVED, Verified(8, 8, ("block 9 was overwritten",)))
    assert judged(monkeypatch, stray) == 1


def test_failure_prints_the_table_so_far(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rows = (demo.Row(Operation.PULL_BLOCKS, MOVED, GOOD), demo.Row(Operation.PUSH_BLOCKS))
    assert judged(monkeypatch, *rows, error="[push_blocks] failed") == 1
    captured = capsys.readouterr()
    assert table_rows(captured.out) == {"pull_blocks": ("tcp", 8, 8)}
    assert re.search(r"push_blocks .* failed", captured.out)
    assert captured.err == "llm-datadist demo: push_blocks: [push_blocks] failed\n"


def test_failure_at_the_end_blames_no_operation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert judged(monkeypatch, demo.Row(Operation.PULL_CACHE, MOVED, GOOD), error="it did not finalize") == 1
    assert capsys.readouterr().err == "llm-datadist demo: it did not finalize\n"


def test_memory_check(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  9 kB\nMemAvailable:  1024 kB\n", encoding="ascii")
    with pytest.raises(DemoError, match=r"64 tokens of tiny need 0\.3 GiB .* only 0\.0 GiB"):
        demo.check_memory(PLAN, meminfo)
    meminfo.write_text("MemAvailable:  10000000 kB\n", encoding="ascii")
    demo.check_memory(PLAN, meminfo)
    demo.check_memory(PLAN, tmp_path / "missing")
