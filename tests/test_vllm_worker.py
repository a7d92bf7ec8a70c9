"""What the worker's half of the vLLM connector tells vLLM."""

from __future__ import annotations

import types
from typing import Any

import pytest

import vllm_stand_in
from llm_datadist.integrations.vllm.arrivals import ABORTED
from llm_datadist.integrations.vllm.options import Options
from llm_datadist.integrations.vllm.orders import Load
from llm_datadist.integrations.vllm.params import VERSION, Facts, Remote

REMOTE = Remote(VERSION, "P", Facts("1", "m", "d", "c", "f", 1, ()), ())


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    cache = types.SimpleNamespace(transfer_groups=[types.SimpleNamespace(kv_cache_spec=vllm_stand_in.Spec(16))])
    config = types.SimpleNamespace(parallel_config=types.SimpleNamespace())
    made = vllm_stand_in.load("worker", monkeypatch).Worker(Options(), config, cache, 0)
    made._pusher = types.SimpleNamespace(expire=lambda _: [], freed=set, keeps=False)
    return made


@pytest.mark.parametrize(
    ("error", "failed", "counted"), [("", False, 0), ("the link has ended", True, 1), (ABORTED, False, 0)]
)
def test_a_load_that_fails_is_told_as_a_whole(worker: Any, error: str, failed: bool, counted: int) -> None:
    worker._running = 1
    worker._ended(Load("r", REMOTE, 16, 48, ((0, 2, 3),)), 0.1, 7, error)
    ended = worker.end(None)
    assert (ended.received, ended.failed) == ({"r"}, {"r"} if failed else set())
    stats = worker.stats()
    assert len(stats.data["failed_loads"] if stats else []) == counted


def test_nothing_is_pushed_from_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = vllm_stand_in.load("tensors", monkeypatch)
    tensors.check_push({"a": types.SimpleNamespace(device=types.SimpleNamespace(type="cpu"))})
    device = types.SimpleNamespace(type="cuda")
    with pytest.raises(ValueError, match=r"needs KV in host memory, but that of layer b is on .*: use 'pull'"):
        tensors.check_push({"b": types.SimpleNamespace(device=device)})
