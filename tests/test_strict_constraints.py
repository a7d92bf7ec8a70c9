"""Documented constraints of the original: errors where that is asked for, nothing otherwise."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from expect import PI, expect
from layerwise_kit import Ready
from llm_datadist import (
    BlocksCacheKey,
    CacheKey,
    CacheKeyByIdAndIndex,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
    TransferWithCacheKeyConfig,
)
from llm_datadist.engine import EngineOptions, constraints
from llm_datadist.engine.requests import CacheKind, CacheSpec, PullRequest
from loopback_kit import HOST, SUCCESS, WAIT_MS, addrs, cluster, desc, loopback_config, started, tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

STRICT = r"; the original does not allow it \(LLMConfig.strict_constraints is set\)\.$"
BASE = {"llm.Role": "Mix"}


@contextlib.contextmanager
def made(*, strict: bool, accessible: bool = True, pools: bool = True) -> Iterator[LLMDataDist]:
    config: LLMConfig = loopback_config(accessible=accessible)
    if not pools:
        config.mem_pool_cfg = None
    config.strict_constraints = strict
    with started(config) as datadist:
        yield datadist


@pytest.fixture(params=[True, False], ids=["strict", "usual"])
def strict(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def datadist(strict: bool) -> Iterator[LLMDataDist]:
    with made(strict=strict) as datadist:
        yield datadist


def judge(strict: bool, call: Callable[[], object], match: str = "") -> None:
    """Refused, and why, where constraints are strict; else it works."""
    if strict:
        expect(PI, call, match=match)
    else:
        call()


GOOD_LISTEN = {"llm.ListenIp": "127.0.0.1", "llm.ListenPort": "9"}
OPTIONS: list[tuple[dict[str, str], dict[str, str], str]] = [
    (GOOD_LISTEN | {"llm.ListenIp": "::1"}, GOOD_LISTEN, "ListenIp"),
    (GOOD_LISTEN | {"llm.ListenPort": "0"}, GOOD_LISTEN, "ListenPort"),
    ({"llm.MaxRegisteredAddrs": "241"}, {"llm.MaxRegisteredAddrs": "240"}, "MaxRegisteredAddrs"),
    (
        {"llm.HostMemPoolConfig": '{"memory_size": 21474836481}'},
        {"llm.HostMemPoolConfig": '{"memory_size": 21474836480}'},
        "HostMemPoolConfig",
    ),
    ({"llm.AllowMultipleInstances": "1"}, {"llm.AllowMultipleInstances": "0"}, "AllowMultipleInstances"),
    ({"llm.RdmaTrafficClass": "6"}, {"llm.RdmaTrafficClass": "8"}, "RdmaTrafficClass"),
    ({"llm.RdmaServiceLevel": "8"}, {"llm.RdmaServiceLevel": "7"}, "RdmaServiceLevel"),
]


@pytest.mark.parametrize(("bad", "good", "name"), OPTIONS, ids=[name for _, _, name in OPTIONS])
def test_options(strict: bool, bad: dict[str, str], good: dict[str, str], name: str) -> None:
    flag = {"llm.StrictConstraints": "1" if strict else "0"}
    judge(strict, lambda: EngineOptions.parse(BASE | flag | bad), match=rf"option llm\.{name} is .* strict")
    assert EngineOptions.parse(BASE | flag | good).strict_constraints is strict


@pytest.mark.parametrize("value", ["", "2", "True"])
def test_the_option_itself(value: str) -> None:
    expect(PI, lambda: EngineOptions.parse(BASE | {"llm.StrictConstraints": value}), match="llm.StrictConstraints is")


def test_memory_is_registered_before_the_first_link_and_given_back_after_the_last(
    datadist: LLMDataDist, strict: bool
) -> None:
    manager, memory = datadist.cache_manager, tensors()
    cache = manager.register_cache(desc(), addrs(memory))
    assert datadist.link_clusters([cluster(2)])[0] == SUCCESS
    judge(
        strict, lambda: manager.register_cache(desc(), addrs(memory)), "registered after a cluster was linked" + STRICT
    )
    manager.register_cache(desc(), addrs(memory), remote_accessible=False)
    judge(strict, lambda: manager.unregister_cache(cache.cache_id), "unregistered while a cluster is linked" + STRICT)
    assert datadist.unlink_clusters([cluster(2)], force=True)[0] == SUCCESS
    manager.unregister_cache(cache.cache_id)


def test_bytes_on_the_device() -> None:
    half = CacheSpec(1, (25 << 30,), 1, "DT_UINT8", on_device=True, kind=CacheKind.BLOCKS)
    more = CacheSpec(2, (25 << 30,), 1, "DT_UINT8", on_device=True, kind=CacheKind.BLOCKS)
    there: Any = [type("Entry", (), {"spec": half, "owned": owned}) for owned in (False, True)]
    constraints.check_register("register_cache", half, accessible=True, linked=False, registered=there)
    with pytest.raises(ValueError, match="would be registered, more than 53687091200" + STRICT):
        constraints.check_register("register_cache", more, accessible=True, linked=False, registered=there)


def test_clusters_in_one_call(datadist: LLMDataDist, strict: bool) -> None:
    judge(
        strict,
        lambda: datadist.link_clusters([cluster(number) for number in range(10, 27)]),
        "17 clusters in one call, more than 16" + STRICT,
    )
    assert datadist.link_clusters([cluster(number) for number in range(30, 46)])[0] == SUCCESS


def test_ipv6(datadist: LLMDataDist, strict: bool) -> None:
    info = LLMClusterInfo()
    info.remote_cluster_id = 2
    info.append_local_ip_info("127.0.0.1", 0)
    info.append_remote_ip_info("::1", 1)
    judge(strict, lambda: datadist.link_clusters([info]), "cluster 2 has the IPv6 address ::1" + STRICT)


def test_switch_role(datadist: LLMDataDist, strict: bool) -> None:
    judge(strict, lambda: datadist.switch_role(LLMRole.PROMPT), "switch_role to PROMPT needs llm.listenIpInfo")
    datadist.switch_role(LLMRole.DECODER)
    datadist.switch_role(LLMRole.PROMPT, {"llm.listenIpInfo": "127.0.0.1:1"})


def test_layers(datadist: LLMDataDist, strict: bool) -> None:
    manager, memory = datadist.cache_manager, tensors(16)
    ours = manager.register_blocks_cache(desc(8), addrs(memory[:8]))
    manager.register_blocks_cache(desc(8), addrs(memory[8:]), BlocksCacheKey(2))
    flat = manager.register_cache(desc(1), addrs(memory[:1]))
    assert datadist.link_clusters([cluster(2)])[0] == SUCCESS
    key, shifted = BlocksCacheKey(2), {"src_layer_range": range(1), "dst_layer_range": range(1, 2)}
    differ = r"src_layer_range range\(0, 1\) is not range\(1, 2\)" + STRICT
    judge(strict, lambda: manager.pull_blocks(key, ours, [0], [1], **shifted), differ)
    judge(strict, lambda: manager.push_blocks(key, ours, [0], [1], **shifted), differ)
    same = {"src_layer_range": range(1, 2), "dst_layer_range": range(1, 2)}
    manager.pull_blocks(key, ours, [0], [1], **same)
    manager.push_blocks(key, ours, [0], [1], **same)
    nothing = "of a cache of 1 tensors moves nothing"
    judge(strict, lambda: manager.push_cache(CacheKeyByIdAndIndex(2, 3), flat), "push_cache " + nothing)
    one = manager.register_blocks_cache(desc(1), addrs(memory[:1]), remote_accessible=False)
    judge(strict, lambda: manager.push_blocks(key, one, [0], [0]), "push_blocks " + nothing)

    def layer_by_layer(first: int) -> None:
        config = TransferWithCacheKeyConfig(key, range(first, 2), range(first, 2))
        task = manager.transfer_cache_async(ours, Ready(), [config], [0], [1])
        assert task.synchronize(WAIT_MS) is SUCCESS

    judge(strict, lambda: layer_by_layer(1), "src_layer_range must begin with layer 0")
    layer_by_layer(0)
    config = TransferWithCacheKeyConfig(key, range(2), range(1, 3))  # shifted there: that works in the original
    assert manager.transfer_cache_async(ours, Ready(), [config], [0], [1]).synchronize(WAIT_MS) is SUCCESS


@pytest.mark.parametrize("pools", [True, False])
def test_pull_into_host_memory_in_message_mode(strict: bool, pools: bool) -> None:
    with made(strict=strict, accessible=False, pools=pools) as datadist:
        manager, memory, target = datadist.cache_manager, tensors(), tensors()
        manager.register_cache(desc(), addrs(memory), [CacheKey(2, 1)])
        into = manager.register_cache(desc(placement=HOST), addrs(target))
        assert datadist.link_clusters([cluster(2)])[0] == SUCCESS
        needs = "a pull into HOST memory in message mode needs a device pool" + r" \(mem_pool_cfg\)" + STRICT
        judge(strict and not pools, lambda: manager.pull_cache(CacheKey(2, 1), into, 1), needs)
        assert not (strict and not pools) or all(map(np.array_equal, target, tensors()))


@pytest.mark.parametrize(("blocks", "tensor_count", "good"), [(7158, 2, True), (7159, 2, False), (61_441, 1, False)])
def test_blocks_into_host_memory_in_message_mode(blocks: int, tensor_count: int, good: bool) -> None:
    spec = CacheSpec(tensor_count, (blocks, 1), 1, "DT_UINT8", on_device=False, kind=CacheKind.BLOCKS)
    local: Any = type("Entry", (), {"spec": spec})
    options = EngineOptions.parse(BASE | {"llm.MemPoolConfig": '{"memory_size": 65536}'})
    request = PullRequest("pull_blocks", 2, None, 1, dst_blocks=range(blocks))  # type: ignore[arg-type]
    if good:
        constraints.check_request(request, local, options)
        return
    with pytest.raises(ValueError, match=f"{blocks} blocks and {tensor_count} tensors are pulled into HOST") as caught:
        constraints.check_request(request, local, options)
    assert caught.value.status_code is LLMStatusCode.LLM_PARAM_INVALID  # type: ignore[attr-defined]
