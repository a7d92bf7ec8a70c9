"""Routers in front of the engines: vllm-router for pulls, ``llm-datadist route`` for pulls and pushes."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Final

from engines import free_port

if TYPE_CHECKING:
    from collections.abc import Sequence

START_TIMEOUT_S: Final = 60.0


class Router:
    """A router process that serves at ``url``."""

    def __init__(self, command: Sequence[str], port: int, log: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        with log.open("ab") as file:
            self._process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        self._wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        self.stop()
        raise SystemExit(f"the router does not serve; the end of {self._log}:\n{self._log.read_text()[-2000:]}")

    def stop(self) -> None:
        """End it."""
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(20)


def _program(name: str) -> str:
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise SystemExit(f"{name} is not installed: pip install {name}")
    return found


def vllm_router(prefills: Sequence[str], decodes: Sequence[str], logs: Path) -> Router:
    """The router of the vLLM project, unchanged."""
    port = free_port()
    command = [_program("vllm-router"), "--vllm-pd-disaggregation", "--policy", "round_robin"]
    for url in prefills:
        command += ["--prefill", url]
    for url in decodes:
        command += ["--decode", url]
    command += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    return Router(command, port, logs / "router.log")


def our_router(prefills: Sequence[str], decodes: Sequence[str], logs: Path, mode: str) -> Router:
    """Ours, which has both engines work at once, or the client have the prefill engine's first token."""
    port = free_port()
    command = [_program("llm-datadist"), "route", "--mode", mode, "--port", str(port)]
    for url in prefills:
        command += ["--prefill", url]
    for url in decodes:
        command += ["--decode", url]
    return Router(command, port, logs / "router.log")
