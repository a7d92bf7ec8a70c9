"""The check of GPU memory, as far as it can run without a GPU: with host memory in its place."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu_check.py"
TIMEOUT_S = 200


def check(tmp_path: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Run it; what came of it, and what it wrote."""
    target = tmp_path / "result.json"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--json", str(target), *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    return done, json.loads(target.read_text(encoding="utf-8")) if target.exists() else {}


def test_all_but_the_gpu(tmp_path: Path) -> None:
    done, result = check(tmp_path, "--host-only", "--mib", "8", "--round-s", "0.01", "--limit-s", "150")
    assert done.returncode == 0, done.stdout + done.stderr
    assert result["passed"]
    assert result["host_only"]
    assert done.stdout.splitlines()[-1] == "passed (host memory alone, no GPU)"
    rows = result["rows"]
    assert {(row["here"], row["there"]) for row in rows} == {
        (here, there) for here in ("host", "device") for there in ("host", "device")
    }
    checked = {row["what"] for row in rows if row["gib_s"] is None and not row["what"].startswith("bare")}
    assert checked == {
        *(f"{call}, {count}" for call in ("pull_blocks", "push_blocks") for count in ("few", "many")),
        "pull_cache",
        "push_cache",
        "pull_blocks of an entry",
        "transfer_cache_async",
    }
    assert not any(row["detail"] for row in rows if row["what"] in checked)
    measured = {row["what"] for row in rows if row["gib_s"]}
    assert {"plain copy", "pull_blocks, 64 KiB", "push_blocks, 1 MiB"} <= measured
    assert "path process_vm" in result["link"]


def test_wrong_bytes_are_found(tmp_path: Path) -> None:
    """In every operation, over a path that leaves the last tensor out."""
    broken = tmp_path / "broken.py"
    broken.write_text(BROKEN.format(folder=str(SCRIPT.parent)), encoding="utf-8")
    done = subprocess.run([sys.executable, str(broken)], check=False, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert {what for what, _ in rows} >= {"pull_blocks, few", "push_blocks, many", "pull_cache", "push_cache"}
    assert all("bytes are wrong" in detail for _, detail in rows), rows


BROKEN = """
import argparse, json, sys
sys.path.insert(0, {folder!r})
import gpu_check
from llm_datadist.paths import process_vm
from llm_datadist.paths.process_vm import ProcessVmPath

def less(spans):
    return spans[slice(0, max(1, len(spans.bases) - 1)), slice(None)]

def lossy(move):
    return lambda self, spans, deadline, epoch=0: move(self, less(spans), deadline, epoch)

ProcessVmPath.read, ProcessVmPath.write = lossy(ProcessVmPath.read), lossy(ProcessVmPath.write)
ProcessVmPath.shortcut = lambda self, pairs: super(process_vm.OneSidedPath, self).shortcut(pairs)

if __name__ == "__main__":
    check = gpu_check.Check(argparse.Namespace(mib=4, paths=None, host_only=True, limit_s=100.0, round_s=0.01))
    try:
        for step in check.run():
            if step.startswith("bandwidth"):
                break
    finally:
        check.close()
    print(json.dumps([(row.what, row.detail) for row in check.rows]))
"""


def test_it_reports_what_it_has_when_the_time_is_over(tmp_path: Path) -> None:
    # All rounds of this size take some ten seconds.
    done, result = check(tmp_path, "--host-only", "--mib", "512", "--round-s", "60", "--limit-s", "1.5")
    assert done.returncode == 1
    assert "its time was over" in result["failure"]
    assert not result["passed"]


def test_without_a_gpu_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")  # should there be one
    done, result = check(tmp_path)
    assert done.returncode == 2
    assert "nothing was checked" in done.stderr
    assert not result


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--mib", "0"], "--mib: 0 is not a positive multiple of 4"),
        (["--mib", "6"], "--mib: 6 is not a positive multiple of 4"),
        (["--json", "/no/such/folder/result.json"], "--json: /no/such/folder/result.json cannot be written"),
        (["--json", "/"], "--json: / cannot be written"),
    ],
)
def test_wrong_arguments(arguments: list[str], words: str) -> None:
    """They are refused before anything starts."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--host-only", *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_it_reports_what_it_has_when_it_is_interrupted(tmp_path: Path) -> None:
    target = tmp_path / "result.json"
    command = [sys.executable, str(SCRIPT), "--host-only", "--json", str(target), "--round-s", "60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            while "bandwidth" not in process.stderr.readline():
                assert process.poll() is None
            process.send_signal(signal.SIGINT)
            output, errors = process.communicate(timeout=TIMEOUT_S)
        finally:
            process.kill()
    assert process.returncode == 1
    assert "Traceback" not in errors
    assert "it was interrupted" in output
    result = json.loads(target.read_text(encoding="utf-8"))
    assert not result["passed"]
    assert result["rows"]
