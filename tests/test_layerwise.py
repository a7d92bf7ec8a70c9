"""Layer ranges, transfer configs, and the argument checks of transfer_cache_async."""

from __future__ import annotations

from typing import Any

import pytest

from expect import PI, expect
from layerwise_kit import BLOCKS_KEY, ID_KEY, Duck, Ready, by_address, by_key, cache, engine_of, manager, start
from llm_datadist import (
    BlocksCacheKey,
    CacheKey,
    LayerSynchronizer,
    Placement,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from llm_datadist.layerwise import check_layer_range
from llm_datadist.v2.llm_utils import layer_range_to_tensor_indices

# ------------------------------------------------------------ ranges


RANGES_REFUSED: list[tuple[Any, Any]] = [
    (None, TypeError),
    (1, TypeError),
    ([0, 1], TypeError),
    (slice(0, 1), TypeError),
    (range(0, 2, 2), PI),
    (range(2, 0, -1), PI),
    (range(0), PI),
    (range(2, 2), PI),
    (range(3, 2), PI),
    (range(-1, 2), PI),
]


@pytest.mark.parametrize(("layers", "failure"), RANGES_REFUSED)
def test_check_layer_range_refuses(layers: Any, failure: Any) -> None:
    expect(failure, lambda: check_layer_range("layers", layers), match="layers")


def test_check_layer_range_accepts() -> None:
    check_layer_range("layers", range(1))
    check_layer_range("layers", range(7, 2**40))


@pytest.mark.parametrize(
    ("src", "dst", "per_layer", "indices"),
    [
        (None, None, 2, ([], [])),
        (range(2), None, 2, ([0, 1, 2, 3], [])),
        (range(1), range(2, 3), 2, ([0, 1], [4, 5])),
        (range(1, 3), range(0), 3, ([3, 4, 5, 6, 7, 8], [])),
        (range(5, 2), None, 1, ([], [])),
    ],
)
def test_layer_range_to_tensor_indices(src: Any, dst: Any, per_layer: int, indices: Any) -> None:
    assert layer_range_to_tensor_indices(src, dst, per_layer) == indices


def test_layer_range_to_tensor_indices_defaults_to_two_tensors() -> None:
    assert layer_range_to_tensor_indices(range(1), None) == ([0, 1], [])


@pytest.mark.parametrize(
    ("layers", "failure"),
    [
        (1, TypeError),
        ([0], TypeError),
        (range(0, 2, 2), PI),
        (range(-1, 1), PI),
        (range(2**32, 2**32 + 1), ValueError),
        (range(2**32 - 1, 2**32 + 1), ValueError),
    ],
)
def test_layer_range_to_tensor_indices_refuses(layers: Any, failure: Any) -> None:
    expect(failure, lambda: layer_range_to_tensor_indices(layers, None))
    expect(failure, lambda: layer_range_to_tensor_indices(None, layers))


# ------------------------------------------------------------ configs


def test_transfer_config() -> None:
    addrs = [1, 2]
    config = TransferConfig(2**64 - 1, addrs)
    assert (config.dst_cluster_id, config.src_layer_range, config.src_batch_index) == (2**64 - 1, None, 0)
    assert config.dst_addrs is addrs
    assert config.dst_layer_range is None
    config = TransferConfig(1, (0, 2**64 - 1), range(1), 2**32 - 1)
    assert (config.src_layer_range, config.src_batch_index) == (range(1), 2**32 - 1)
    assert "dst_cluster_id=1" in repr(config)
    config.dst_layer_range = "not looked at"  # type: ignore[assignment]


CONFIG_REFUSED: list[tuple[str, Any, Any]] = [
    ("dst_cluster_id", None, TypeError),
    ("dst_cluster_id", "1", TypeError),
    ("dst_cluster_id", -1, ValueError),
    ("dst_cluster_id", 2**64, ValueError),
    ("dst_addrs", None, TypeError),
    ("dst_addrs", 1, TypeError),
    ("dst_addrs", range(2), TypeError),
    ("dst_addrs", [1, "2"], TypeError),
    ("dst_addrs", [None], TypeError),
    ("dst_addrs", [1, -1], ValueError),
    ("dst_addrs", [2**64], ValueError),
    *[("src_layer_range", wrong, failure) for wrong, failure in RANGES_REFUSED if wrong is not None],
    ("src_batch_index", None, TypeError),
    ("src_batch_index", "0", TypeError),
    ("src_batch_index", -1, ValueError),
    ("src_batch_index", 2**32, ValueError),
]


@pytest.mark.parametrize(("name", "value", "failure"), CONFIG_REFUSED)
def test_transfer_config_refuses(name: str, value: Any, failure: Any) -> None:
    good: dict[str, Any] = {"dst_cluster_id": 1, "dst_addrs": [1, 2]}
    expect(failure, lambda: TransferConfig(**{**good, name: value}))
    config = TransferConfig(**good)
    before = getattr(config, name)
    expect(failure, lambda: setattr(config, name, value))
    assert getattr(config, name) is before


def test_transfer_with_cache_key_config() -> None:
    config = TransferWithCacheKeyConfig(ID_KEY, range(2), range(4, 6), 7)
    assert (config.src_layer_range, config.dst_layer_range, config.src_batch_index) == (range(2), range(4, 6), 7)
    assert config.cache_key is ID_KEY
    assert config.dst_cluster_id == 3
    config.cache_key = BLOCKS_KEY
    assert config.dst_cluster_id == 3
    config.cache_key = None
    config.src_layer_range = None
    config.dst_layer_range = range(9)
    config.dst_layer_range = None
    config.src_batch_index = 8
    assert "src_batch_index=8" in repr(config)


@pytest.mark.parametrize(
    ("args", "failure"),
    [
        ((None, range(1), range(1)), TypeError),
        ((CacheKey(1, 2), range(1), range(1)), TypeError),
        (("key", range(1), range(1)), TypeError),
        ((BLOCKS_KEY,), TypeError),
        ((BLOCKS_KEY, range(1)), TypeError),
        ((BLOCKS_KEY, None, range(1)), TypeError),
        *[((BLOCKS_KEY, wrong, range(1)), failure) for wrong, failure in RANGES_REFUSED],
        *[((BLOCKS_KEY, range(1), wrong), failure) for wrong, failure in RANGES_REFUSED],
        ((BLOCKS_KEY, range(1), range(2)), PI),
        ((ID_KEY, range(1), range(1), None), TypeError),
        ((ID_KEY, range(1), range(1), "0"), TypeError),
        ((ID_KEY, range(1), range(1), -1), ValueError),
        ((ID_KEY, range(1), range(1), 2**32), ValueError),
        ((BLOCKS_KEY, range(1), range(1), 1), PI),
        ((BLOCKS_KEY, range(1), range(1), "a"), TypeError),
        # order of the checks
        (("key", 1, 1), TypeError),
        ((BLOCKS_KEY, range(0, 2, 2), 1), PI),
        ((BLOCKS_KEY, range(1), range(2), "a"), PI),
    ],
)
def test_transfer_with_cache_key_config_refuses(args: Any, failure: Any) -> None:
    expect(failure, lambda: TransferWithCacheKeyConfig(*args))


@pytest.mark.parametrize(
    ("key", "name", "value", "failure"),
    [
        (ID_KEY, "cache_key", CacheKey(1, 2), TypeError),
        (ID_KEY, "cache_key", 1, TypeError),
        *[
            (ID_KEY, name, wrong, failure)
            for name in ("src_layer_range", "dst_layer_range")
            for wrong, failure in RANGES_REFUSED
            if wrong is not None
        ],
        (ID_KEY, "src_batch_index", None, TypeError),
        (ID_KEY, "src_batch_index", "a", TypeError),
        (ID_KEY, "src_batch_index", -1, ValueError),
        (BLOCKS_KEY, "src_batch_index", 1, PI),
        (BLOCKS_KEY, "src_batch_index", "a", PI),
        (BLOCKS_KEY, "src_batch_index", -1, PI),
    ],
)
def test_transfer_with_cache_key_config_setters_refuse(key: Any, name: str, value: Any, failure: Any) -> None:
    config = TransferWithCacheKeyConfig(key, range(1), range(1))
    before = getattr(config, name)
    expect(failure, lambda: setattr(config, name, value))
    assert getattr(config, name) is before


def test_layer_synchronizer_is_abstract() -> None:
    expect(TypeError, LayerSynchronizer)  # type: ignore[arg-type]


# ------------------------------------------------------------ transfer_cache_async: checks


COMMON_REFUSED: list[tuple[dict[str, Any], Any]] = [
    ({"src_cache": None}, TypeError),
    ({"src_cache": "cache"}, TypeError),
    ({"src_cache": cache(placement=Placement.HOST)}, PI),
    *[
        ({name: wrong}, failure)
        for name in ("dst_block_indices", "src_block_indices")
        for wrong, failure in (
            (1, TypeError),
            (range(2), TypeError),
            (["1"], TypeError),
            ([None], TypeError),
            ([-1], ValueError),
            ([2**64], ValueError),
        )
    ],
    ({"dst_block_memory_size": "1"}, TypeError),
    ({"dst_block_memory_size": 1.0}, TypeError),
    ({"dst_block_memory_size": -1}, ValueError),
    ({"dst_block_memory_size": 2**64}, ValueError),
    ({"src_block_indices": [1]}, PI),
    ({"src_block_indices": [1], "dst_block_indices": []}, PI),
    ({"src_block_indices": [1, 2], "dst_block_indices": [1]}, PI),
    ({"dst_block_indices": [1]}, PI),
    ({"dst_block_indices": [1], "src_block_indices": []}, PI),
    ({"dst_block_indices": [1], "dst_block_memory_size": 0}, PI),
    ({"layer_synchronizer": None}, TypeError),
    ({"layer_synchronizer": Duck()}, TypeError),
    ({"layer_synchronizer": Ready}, TypeError),
    ({"transfer_configs": None}, TypeError),
    ({"transfer_configs": "config"}, TypeError),
    ({"transfer_configs": [None]}, TypeError),
    ({"transfer_configs": {}}, TypeError),
    ({"dst_block_memory_size": 64}, PI),
    ({"dst_block_memory_size": 64, "dst_block_indices": ()}, PI),
    ({"src_cache": cache(7)}, PI),
    # order of the checks
    ({"src_cache": "cache", "layer_synchronizer": None}, TypeError),
    ({"src_cache": cache(placement=Placement.HOST), "dst_block_indices": 1}, PI),
    ({"dst_block_indices": [-1], "src_block_indices": 1}, ValueError),
    ({"src_block_indices": [1], "dst_block_memory_size": "1"}, TypeError),
    ({"src_block_indices": [1], "layer_synchronizer": None}, PI),
    ({"layer_synchronizer": None, "dst_block_memory_size": 64}, TypeError),
    ({"transfer_configs": "config", "dst_block_memory_size": 64}, TypeError),
]


@pytest.mark.parametrize("accessible", [True, False])
@pytest.mark.parametrize(("change", "failure"), COMMON_REFUSED)
def test_transfer_cache_async_refuses(accessible: bool, change: dict[str, Any], failure: Any) -> None:
    subject = manager(accessible=accessible)
    expect(failure, lambda: start(subject, **change))
    assert engine_of(subject).calls == []


def emptied_key() -> TransferWithCacheKeyConfig:
    config = by_key()
    config.cache_key = None
    return config


def with_batch(index: int) -> TransferWithCacheKeyConfig:
    config = by_key(key=ID_KEY)
    config.src_batch_index = index
    return config


CONFIGS_REFUSED: list[tuple[bool, Any, dict[str, Any], Any]] = [
    (True, by_address(), {}, TypeError),
    (False, by_key(), {}, TypeError),
    (True, by_key(range(5), range(5)), {}, PI),
    (True, by_key(range(3, 5), range(2)), {}, PI),
    (True, by_key(None, range(1)), {"src_cache": cache(0)}, PI),
    (True, by_key(range(2), range(3)), {}, PI),
    (True, by_key(None, range(3)), {}, PI),
    (True, emptied_key(), {}, PI),
    (True, by_key(key=BlocksCacheKey(-1)), {}, TypeError),
    (True, with_batch(1), {"src_block_indices": [0], "dst_block_indices": [1]}, PI),
    (False, by_address(src_batch_index=1), {"src_block_indices": [0], "dst_block_indices": [1]}, PI),
    (False, by_address(range(5), 10), {}, PI),
    (False, by_address(range(2), 2), {}, PI),
    (False, by_address(range(1), 3), {}, PI),
    (False, by_address(None, 2), {}, PI),
    (False, by_address(range(1), 0), {}, PI),
]


@pytest.mark.parametrize(("accessible", "config", "change", "failure"), CONFIGS_REFUSED)
def test_transfer_cache_async_refuses_configs(
    accessible: bool, config: Any, change: dict[str, Any], failure: Any
) -> None:
    subject, synchronizer = manager(accessible=accessible), Ready()
    good = by_key(range(1), range(1)) if accessible else by_address()
    change = {"layer_synchronizer": synchronizer, **change}
    expect(failure, lambda: start(subject, transfer_configs=[good, config], **change))
    assert engine_of(subject).calls == []
    assert synchronizer.asked == []
