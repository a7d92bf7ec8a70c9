"""``llm-datadist bench`` as a user runs it."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import msgspec
import pytest

from cli_kit import WAIT_S, run, running, wait_gone
from llm_datadist.cli.bench.results import Contestant, Order, Report
from until import until

TINY = ("bench", "--quick", "--total", "1", "--rounds", "2")


def family_of(pid: int) -> set[int]:
    """All processes that a process has started, and those that these have started."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    except (FileNotFoundError, ProcessLookupError):
        return set()
    children = set(map(int, text.split()))
    return children.union(*map(family_of, children))


def wait_for_family(pid: int, count: int) -> set[int]:
    """Wait until a process has started so many."""

    def family() -> set[int]:
        found = family_of(pid)
        return found if len(found) >= count else set()

    return until(family)


def test_throughput_of_operations_over_both_paths(tmp_path: Path) -> None:
    json, html = tmp_path / "report.json", tmp_path / "report.html"
    names = ("pull_blocks", "pull_cache", "transfer_cache_async")
    operations = [word for name in names for word in ("--operation", name)]
    done = run(
        *TINY,
        *("--path", "process_vm", "--path", "tcp", "--blocks", "4KiB,64KiB", "--measure", "throughput"),
        *operations,
        *("--json", str(json), "--report", str(html)),
    )
    assert (done.returncode, done.stderr) == (0, "")
    report = msgspec.json.decode(json.read_bytes(), type=Report)
    assert (report.rounds, report.latencies, report.scales) == (2, [], [])
    assert len({each.case for each in report.throughputs}) == 2 * (2 * 2 + 1)
    assert {each.contestant for each in report.throughputs} == {
        Contestant.OURS,
        Contestant.LIMIT_PROCESS_VM,
        Contestant.LIMIT_SOCKETS,
        Contestant.LIMIT_MEMCPY,
    }
    assert all(len(each.seconds) == 2 for each in report.throughputs)
    assert re.search(r"^pull_blocks process_vm 64 KiB: [\d.,]+ GB/s, [\d.]+ of the limit$", done.stdout, re.MULTILINE)
    assert re.search(r"^ *64 KiB +[\d.]+ +[\d.]+\.\.[\d.]+ +[\d.]+", done.stdout, re.MULTILINE)
    assert report.command in html.read_text(encoding="utf-8")


def test_latency_and_scale_over_the_fastest_path(tmp_path: Path) -> None:
    json = tmp_path / "report.json"
    measured = ("--path", "auto", "--measure", "latency", "--measure", "scale")
    done = run(*TINY, *measured, "--json", str(json))
    assert (done.returncode, done.stderr) == (0, "")
    report = msgspec.json.decode(json.read_bytes(), type=Report)
    assert not report.throughputs
    assert [(each.contestant, each.case.path) for each in report.latencies] == [
        (Contestant.OURS, "process_vm"),
        (Contestant.LIMIT_PROCESS_VM, "process_vm"),
    ]
    assert [len(each.x) for each in report.scales] == [3, 3, 3]
    for words in ("p99.9", "links that are up", "spans of one pull_blocks", "tensors"):
        assert words in done.stdout


def test_model_in_an_order_over_tcp_because_the_environment_says_so(tmp_path: Path) -> None:
    json = tmp_path / "report.json"
    asked = ("--path", "auto", "--model", "deepseek-r1", "--order", "runs_of_8", "--measure", "throughput")
    done = run(*TINY, "--total", "20", *asked, "--json", str(json), LLM_DATADIST_PATHS="tcp")
    assert done.returncode == 0
    assert "not measuring process_vm, which does not work here: " in done.stderr
    report = msgspec.json.decode(json.read_bytes(), type=Report)
    assert {(each.case.model, each.case.path, each.case.order) for each in report.throughputs} == {
        ("deepseek-r1 latent", "tcp", Order.RUNS),
        ("deepseek-r1 rope", "tcp", Order.RUNS),
    }


def test_a_path_that_does_not_work_is_a_failure_that_says_why(tmp_path: Path) -> None:
    html = tmp_path / "report.html"
    done = run(*TINY, "--path", "process_vm", "--report", str(html), LLM_DATADIST_PATHS="tcp")
    assert done.returncode == 1
    assert "the link uses the path tcp, not process_vm" in done.stderr
    assert not html.exists()


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("--path", "rdma", "process_vm"),
        ("--operation", "copy", "pull_blocks"),
        ("--order", "random", "shuffled"),
        ("--blocks", "4KB", "is no size"),
        ("--blocks", "4KiB,12", "multiple of 8"),
        ("--total", "0", "1"),
        ("--rounds", "0", "1"),
        ("--model", "gpt-2", "llama-3.1-8b"),
        ("--measure", "heat", "latency"),
        ("--json", "/no/such/directory/report.json", "/no/such/directory"),
        ("--report", "/", "directory"),
    ],
)
def test_wrong_options_are_refused(option: str, value: str, expected: str) -> None:
    done = run("bench", option, value, COLUMNS="200")
    assert done.returncode == 2
    assert option in done.stderr
    assert expected in done.stderr
    assert "Traceback" not in done.stderr


def test_what_does_not_fit_is_refused() -> None:
    done = run(*TINY, "--path", "tcp", "--total", "1000000000")
    assert done.returncode == 1
    assert re.search(
        r"need [\d.]+ GiB of memory, but only [\d.]+ GiB are available: use a smaller --total", done.stderr
    )


def test_help_explains_every_option() -> None:
    shown = run("bench", "--help", COLUMNS="200").stdout
    for option in ("path", "operation", "blocks", "order", "total", "rounds", "model", "measure", "quick", "json"):
        assert re.search(rf"--{option} .* \w+", shown)


@pytest.mark.parametrize("ended_by", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_when_it_is_ended(ended_by: signal.Signals) -> None:
    with running("bench", "--path", "tcp", "--blocks", "4KiB,8KiB", "--total", "64", "--rounds", "1000") as process:
        family = wait_for_family(process.pid, 4)  # two contestants, each with an owner
        os.kill(process.pid, ended_by)
        _, errors = process.communicate(timeout=WAIT_S)
        if ended_by is signal.SIGINT:
            assert process.returncode == 130
            assert errors == "llm-datadist bench: interrupted\n"
        wait_gone(family)
