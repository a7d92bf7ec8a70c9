"""Fixtures that several test modules share."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

import llm_datadist.engine
from datadist_kit import MANAGED, FakeOptions
from fake_engine import FakeEngine
from llm_datadist import LLMDataDist, LLMRole
from llm_datadist.datadist import _shutdown_handler
from llm_datadist.memory.regions import RegionTable
from loopback_kit import SUCCESS, cluster, loopback_config, started
from peers import Peers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from llm_datadist.cache_manager import CacheManager
    from route_kit import Engines

# A shell that starts the suite in the background has it ignore SIGINT, and children would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def fake_engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Objects that a test initialises get the fake engine, and are all finalized afterwards."""
    names = vars(llm_datadist.engine)
    monkeypatch.setitem(names, "Engine", FakeEngine)
    monkeypatch.setitem(names, "EngineOptions", FakeOptions)
    yield
    _shutdown_handler()
    assert LLMDataDist.llm_engine_instance is None


@pytest.fixture
def datadist(fake_engines: None) -> LLMDataDist:
    """Cluster 3 on the fake engine."""
    made = LLMDataDist(LLMRole.PROMPT, 3)
    made.init(MANAGED)
    return made


@pytest.fixture
def loopback_datadist() -> Iterator[LLMDataDist]:
    """Cluster 3 with remote cache access and pools, not linked; every cluster id is this process."""
    with started(loopback_config(accessible=True), LLMRole.PROMPT) as datadist:
        yield datadist


@pytest.fixture
def loopback_message_datadist() -> Iterator[LLMDataDist]:
    """As ``loopback_datadist``, without remote cache access."""
    with started(loopback_config(accessible=False), LLMRole.PROMPT) as datadist:
        yield datadist


@pytest.fixture
def plain() -> Iterator[LLMDataDist]:
    """As ``loopback_datadist``, without pools."""
    config = loopback_config(accessible=True)
    config.mem_pool_cfg = config.host_mem_pool_cfg = None
    with started(config, LLMRole.PROMPT) as datadist:
        yield datadist


@pytest.fixture
def linked(loopback_datadist: LLMDataDist) -> CacheManager:
    """Remote access, linked to cluster 2."""
    assert loopback_datadist.link_clusters([cluster(2)]) == (SUCCESS, [SUCCESS])
    return loopback_datadist.cache_manager


@pytest.fixture
def messaging(loopback_message_datadist: LLMDataDist) -> CacheManager:
    """No remote access, linked to cluster 2."""
    assert loopback_message_datadist.link_clusters([cluster(2)]) == (SUCCESS, [SUCCESS])
    return loopback_message_datadist.cache_manager


@pytest.fixture
def table() -> Iterator[RegionTable]:
    """An empty table of regions."""
    made = RegionTable()
    yield made
    made.close()


@pytest.fixture
def peers() -> Iterator[Peers]:
    """A factory of peers in child processes, for one test."""
    made = Peers()
    yield made
    made.close()


@pytest.fixture
def engines() -> Iterator[Engines]:
    """A factory of stand-ins for vLLM engines, for one test."""
    from route_kit import Engines  # noqa: PLC0415 - only the tests of the router need aiohttp

    made = Engines()
    yield made
    made.close()
