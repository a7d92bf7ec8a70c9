"""vLLM servers of the example, as processes of their own."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pathlib import Path

START_TIMEOUT_S: Final = 300.0
ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "UCX_MODULES": "^ib",
}
RANKS: Final = {"OMP_NUM_THREADS": "1"}
"""Several ranks of an engine share few cores here."""
_PORTS: Final = itertools.count(10_000 + os.getpid() % 15_000)
"""Below those that systems give to whoever connects, from 32,768 on: a server takes its port minutes later."""
CONNECTOR: Final = {
    "kv_connector": "LLMDataDistConnector",
    "kv_connector_module_path": "llm_datadist.integrations.vllm",
}


def free_port() -> int:
    """A port that is free, and was not given before."""
    while True:
        port = next(_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def stop_on_signals() -> None:
    """Have SIGTERM end this program as Ctrl-C does, so that it stops its engines."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


class Engine:
    """One server; ``start`` returns at once, ``wait`` when it serves."""

    def __init__(
        self, name: str, model: Path, logs: Path, transfer: dict[str, Any] | None = None, ranks: int = 1
    ) -> None:
        self.name = name
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = logs / f"{name}.log"
        self._model = model
        self._transfer = transfer
        self._ranks = ranks
        self._process: subprocess.Popen[bytes] | None = None
        self._serves = False
        """Known to have begun to, since the last start."""

    @property
    def pid(self) -> int:
        """Of the server process."""
        assert self._process is not None
        return self._process.pid

    def start(self, *options: str, environment: dict[str, str] | None = None) -> Engine:
        """Start the server."""
        self._serves = False
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self._model)]
        command += ["--served-model-name", "model", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--enforce-eager", "--max-model-len", "4096", "--tensor-parallel-size", str(self._ranks)]
        command += ["--distributed-executor-backend", "uni" if self._ranks == 1 else "mp", *options]
        if self._transfer is not None:
            command += ["--kv-transfer-config", json.dumps(self._transfer)]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **ENVIRONMENT, **(RANKS if self._ranks > 1 else {}), **(environment or {})},
                start_new_session=True,
            )
        return self

    def wait(self) -> Engine:
        """Return when it serves."""
        assert self._process is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    self._serves = True
                    return self
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        tail = self.log.read_text(errors="replace")[-3000:]
        raise SystemExit(f"{self.name} does not serve; the end of {self.log}:\n{tail}")

    def kill(self) -> None:
        """End it and its engine process without a word."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(30)

    def stop(self) -> int:
        """End it in order, or at once if it does not serve yet: then it would not listen for long; the exit code."""
        if self._process is None:
            return 0
        if not self._serves and self._process.poll() is None:
            self.kill()
            return -9
        self._process.terminate()
        try:
            return self._process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()
            return -9


def ours(role: str, **extra: Any) -> dict[str, Any]:
    """``--kv-transfer-config`` with LLMDataDistConnector."""
    policy = extra.pop("policy", "fail")
    return {**CONNECTOR, "kv_role": role, "kv_load_failure_policy": policy, "kv_connector_extra_config": extra}
