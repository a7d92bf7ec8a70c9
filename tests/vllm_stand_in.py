"""As much of vLLM as the connector's halves import, for tests of what they decide; vLLM itself is in tests/serving."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

OURS = "llm_datadist.integrations.vllm"
_ON_VLLM = ("bases", "connector", "metadata", "scheduler", "stats", "tensors", "worker")


class RequestStatus(enum.Enum):
    """Those that the connector knows, and one that it does not."""

    RUNNING = 0
    FINISHED_STOPPED = 1
    FINISHED_LENGTH_CAPPED = 2
    FINISHED_ABORTED = 3


@dataclasses.dataclass
class Spec:
    """Of a KV group."""

    block_size: int


class SlidingWindowSpec(Spec):
    """Of one with a window."""


@dataclasses.dataclass
class _Stats:
    data: dict[str, Any] = dataclasses.field(default_factory=dict)


def _modules() -> dict[str, types.ModuleType]:
    contents: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": "0.32.0"},
        "vllm.v1.request": {"RequestStatus": RequestStatus},
        "vllm.v1.metrics.utils": {"create_metric_per_engine": lambda made, _: made},
        "vllm.v1.kv_cache_interface": {
            "FullAttentionSpec": Spec,
            "MLAAttentionSpec": Spec,
            "SlidingWindowSpec": SlidingWindowSpec,
        },
        "vllm.distributed.kv_transfer.kv_connector.v1.base": {
            name: type(name, (), {})
            for name in ("KVConnectorBase_V1", "KVConnectorHandshakeMetadata", "KVConnectorMetadata", "SupportsHMA")
        },
        "vllm.distributed.kv_transfer.kv_connector.v1.metrics": {
            "KVConnectorPromMetrics": type("KVConnectorPromMetrics", (), {}),
            "KVConnectorStats": _Stats,
        },
    }
    made: dict[str, types.ModuleType] = {}
    for path, names in contents.items():
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            made.setdefault(name, types.ModuleType(name)).__path__ = []
        made[path].__dict__.update(names)
    return made


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of the connector that uses vLLM, with this instead of it; others get nothing of it."""
    for each, module in _modules().items():
        monkeypatch.setitem(sys.modules, each, module)
    for each in _ON_VLLM:  # first set, so that what is imported meanwhile goes with it
        monkeypatch.setitem(sys.modules, f"{OURS}.{each}", types.ModuleType(each))
        del sys.modules[f"{OURS}.{each}"]
        vars(importlib.import_module(OURS)).pop(each, None)  # that of an earlier test
    return importlib.import_module(f"{OURS}.{name}")
