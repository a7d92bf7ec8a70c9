"""What the worker's half of the vLLM connector tells vLLM."""

from __future__ import annotations

import contextlib
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
    parallel = types.SimpleNamespace(data_parallel_index=0, data_parallel_external_lb=False)
    config = types.SimpleNamespace(parallel_config=parallel)
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


@pytest.mark.parametrize(
    ("mode", "engine", "apart", "producer", "refused"),
    [
        ("push", 1, False, True, True),
        ("push", 0, False, True, False),
        ("push", 1, True, True, False),
        ("push", 1, False, False, False),
        ("pull", 1, False, True, False),
    ],
)
def test_a_server_with_several_engines_does_not_push(
    monkeypatch: pytest.MonkeyPatch, mode: str, engine: int, apart: bool, producer: bool, refused: bool
) -> None:
    tensors = vllm_stand_in.load("tensors", monkeypatch)
    config = types.SimpleNamespace(
        parallel_config=types.SimpleNamespace(data_parallel_index=engine, data_parallel_external_lb=apart),
        kv_transfer_config=types.SimpleNamespace(is_kv_producer=producer),
    )
    cache = types.SimpleNamespace(transfer_groups=[])
    with pytest.raises(ValueError, match="several data-parallel engines") if refused else contextlib.nullcontext():
        tensors.check(config, cache, mode)


def test_nothing_is_pushed_from_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = vllm_stand_in.load("tensors", monkeypatch)
    tensors.check_push({"a": types.SimpleNamespace(device=types.SimpleNamespace(type="cpu"))})
    device = types.SimpleNamespace(type="cuda")
    with pytest.raises(ValueError, match=r"needs KV in host memory, but that of layer b is on .*: use 'pull'"):
        tensors.check_push({"b": types.SimpleNamespace(device=device)})
