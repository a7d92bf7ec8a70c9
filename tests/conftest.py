"""Fixtures that several test modules share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from llm_datadist import LLMConfig, LLMDataDist, LLMRole

if TYPE_CHECKING:
    from collections.abc import Iterator

POOL = '{"memory_size": 16777216}'


def loopback_config(*, accessible: bool) -> LLMConfig:
    """Options of an object with both pools."""
    config = LLMConfig()
    config.enable_cache_manager = True
    config.enable_remote_cache_accessible = accessible
    config.sync_kv_timeout = 3000
    config.mem_pool_cfg = POOL
    config.host_mem_pool_cfg = POOL
    return config


def _loopback(*, accessible: bool) -> Iterator[LLMDataDist]:
    from llm_datadist.testing import loopback  # noqa: PLC0415 - only these fixtures need the engine

    with loopback():
        datadist = LLMDataDist(LLMRole.PROMPT, 3)
        datadist.init(loopback_config(accessible=accessible).generate_options())
        try:
            yield datadist
        finally:
            datadist.finalize()


@pytest.fixture
def loopback_datadist() -> Iterator[LLMDataDist]:
    """Cluster 3 with remote cache access; every cluster id is this process."""
    yield from _loopback(accessible=True)


@pytest.fixture
def loopback_message_datadist() -> Iterator[LLMDataDist]:
    """As ``loopback_datadist``, without remote cache access."""
    yield from _loopback(accessible=False)
