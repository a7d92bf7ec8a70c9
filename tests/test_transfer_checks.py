"""Pulls and pushes: every row of their validation tables, and what reaches the engine."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
import pytest

from expect import PI, expect
from fake_engine import DEADLINE
from llm_datadist import (
    BlocksCacheKey,
    CacheKey,
    LLMStatusCode,
)
from llm_datadist.cache_manager import CacheManager
from llm_datadist.engine.requests import (
    INVALID_ID,
    BlocksKey,
    IdKey,
    PrefixKey,
    PullRequest,
    PushRequest,
    RequestKey,
)
from llm_datadist.status import exception_for
from manager_kit import (
    BY_BLOCKS,
    BY_ID,
    BY_PREFIX,
    BY_REQUEST,
    accessible_manager,
    blocks,
    check_row,
    contiguous,
    engine_of,
    message_manager,
)


class Index(IntEnum):
    TWO = 2


# ------------------------------------------------------------ pull_cache

PER_LAYER_REFUSED: list[tuple[Any, Any]] = [
    (None, TypeError),
    ("2", TypeError),
    (1.0, TypeError),
    (-1, ValueError),
    (2**32, ValueError),
    (0, PI),
]
PULL_RANGES_REFUSED: list[tuple[Any, Any]] = [
    (1, TypeError),
    ([0, 1], TypeError),
    ("range", TypeError),
    (range(0, 4, 2), PI),
    (range(0, 0, 2), PI),
    (range(3, 0, -1), PI),
    (range(-1, 2), PI),
    (range(2**32, 2**32 + 1), ValueError),
    (range(2**32 + 1), ValueError),
]
PULL_KWARGS_REFUSED: list[tuple[dict[str, Any], Any]] = [
    *[({"tensor_num_per_layer": wrong}, failure) for wrong, failure in PER_LAYER_REFUSED],
    *[
        ({name: wrong}, failure)
        for name in ("src_layer_range", "dst_layer_range")
        for wrong, failure in PULL_RANGES_REFUSED
    ],
    ({"tensor_num_per_layer": 0, "src_layer_range": 1}, PI),
]
PULL_CACHE_REFUSED: list[tuple[dict[str, Any], Any]] = [
    ({"cache_key": "key"}, TypeError),
    ({"cache_key": BlocksCacheKey(2)}, TypeError),
    ({"cache_key": None}, AttributeError),
    ({"cache": 5}, TypeError),
    ({"cache": None}, AttributeError),
    ({"batch_index": None}, TypeError),
    ({"batch_index": "0"}, TypeError),
    ({"batch_index": -1}, ValueError),
    ({"batch_index": 2**32}, ValueError),
    ({"size": None}, TypeError),
    ({"size": 1.0}, TypeError),
    ({"size": 2**63}, ValueError),
    ({"cache": blocks()}, PI),
    ({"size": 0}, PI),
    ({"size": -2}, PI),
    *PULL_KWARGS_REFUSED,
    # order of the checks
    ({"cache_key": "key", "cache": None}, TypeError),
    ({"cache": blocks(), "size": 2**63}, ValueError),
    ({"cache": blocks(), "tensor_num_per_layer": "2"}, PI),
    ({"cache": None, "size": 0}, AttributeError),
    ({"cache_key": None, "size": 0}, PI),
]


@pytest.mark.parametrize("make", [message_manager, accessible_manager])
@pytest.mark.parametrize(("change", "failure"), PULL_CACHE_REFUSED)
def test_pull_cache_refuses(make: Any, change: dict[str, Any], failure: Any) -> None:
    check_row(make(), lambda m: m.pull_cache(**{"cache_key": BY_ID, "cache": contiguous(), **change}), failure)


ONE_ID_REFUSED = [CacheKey(2, INVALID_ID), CacheKey(2, 7, 0, 8)]


@pytest.mark.parametrize("key", ONE_ID_REFUSED)
def test_pull_needs_exactly_one_id_in_a_cache_key(key: CacheKey) -> None:
    check_row(message_manager(), lambda m: m.pull_cache(key, contiguous()), PI)
    check_row(message_manager(), lambda m: m.pull_blocks(key, blocks(), [], [1]), PI)
    expect(PI, lambda: CacheManager.check_cache_key(key))
    # order: after tensor_num_per_layer, before the ranges
    check_row(message_manager(), lambda m: m.pull_cache(key, contiguous(), tensor_num_per_layer="2"), TypeError)
    check_row(message_manager(), lambda m: m.pull_cache(key, contiguous(), src_layer_range=1), PI)


@pytest.mark.parametrize("key", [BY_REQUEST, BY_PREFIX])
def test_check_cache_key_accepts(key: CacheKey) -> None:
    assert CacheManager.check_cache_key(key) is None  # type: ignore[func-returns-value]


@pytest.mark.parametrize("key", [BY_REQUEST, BY_PREFIX, BlocksCacheKey(2)])
def test_pull_cache_with_remote_access_takes_only_ids(key: Any) -> None:
    check_row(accessible_manager(), lambda m: m.pull_cache(key, contiguous()), TypeError)


@pytest.mark.parametrize(
    ("key", "meaning"), [(BY_REQUEST, RequestKey(7, 1)), (BY_PREFIX, PrefixKey(8, 1)), (BY_ID, IdKey(1, 3))]
)
def test_pull_cache_passes_everything_on(key: Any, meaning: Any) -> None:
    subject = message_manager()
    assert subject.pull_cache(key, contiguous()) is None
    subject.pull_cache(
        key, contiguous(), 1, 64, src_layer_range=range(1), dst_layer_range=range(1, 2), tensor_num_per_layer=1, other=1
    )
    subject.pull_cache(key, contiguous(), src_layer_range=range(3, 3), dst_layer_range=None, tensor_num_per_layer=99)
    base = {"operation": "pull_cache", "cluster_id": 2, "key": meaning, "cache_id": 5}
    ranged = {"src_layers": range(1), "dst_layers": range(1, 2), "tensors_per_layer": 1}
    assert engine_of(subject).requests("pull") == [
        PullRequest(**base),
        PullRequest(**base, batch_index=1, size=64, **ranged),
        PullRequest(**base, tensors_per_layer=99),
    ]


# ------------------------------------------------------------ pull_blocks


LISTS_REFUSED: list[Any] = [range(2), {1}, "1", 1, ["1"], [1.0], [None], [np.int64(1)], np.array([1])]

PULL_BLOCKS_REFUSED: list[tuple[dict[str, Any], Any]] = [
    ({"src_cache_key": "key"}, TypeError),
    ({"src_cache_key": None, "src_blocks": []}, AttributeError),
    ({"dst_cache": 5}, TypeError),
    ({"dst_cache": None}, AttributeError),
    *[({name: wrong}, TypeError) for name in ("src_blocks", "dst_blocks") for wrong in LISTS_REFUSED],
    ({"dst_cache": contiguous()}, PI),
    ({"dst_blocks": []}, PI),
    ({"dst_blocks": ()}, PI),
    ({"dst_blocks": None}, TypeError),
    ({"src_blocks": []}, PI),
    ({"src_blocks": None}, TypeError),
    ({"src_cache_key": BY_REQUEST}, PI),
    ({"src_cache_key": BY_ID}, PI),
    ({"src_cache_key": BY_REQUEST, "src_blocks": None}, TypeError),
    ({"src_cache_key": BY_ID, "src_blocks": None}, TypeError),
    *PULL_KWARGS_REFUSED,
    # ids of a BlocksCacheKey are looked at when it is used
    ({"src_cache_key": BlocksCacheKey(-1)}, TypeError),
    ({"src_cache_key": BlocksCacheKey(None)}, TypeError),
    ({"src_cache_key": BlocksCacheKey(2, -1)}, TypeError),
    # order of the checks
    ({"dst_cache": contiguous(), "src_blocks": range(2)}, TypeError),
    ({"dst_cache": None, "dst_blocks": []}, AttributeError),
    ({"dst_blocks": [], "tensor_num_per_layer": "2"}, PI),
    ({"src_blocks": [], "tensor_num_per_layer": "2"}, TypeError),
    ({"src_blocks": [], "src_layer_range": 1}, PI),
]


@pytest.mark.parametrize("make", [message_manager, accessible_manager])
@pytest.mark.parametrize(("change", "failure"), PULL_BLOCKS_REFUSED)
def test_pull_blocks_refuses(make: Any, change: dict[str, Any], failure: Any) -> None:
    good = {"src_cache_key": BY_BLOCKS, "dst_cache": blocks(), "src_blocks": [0], "dst_blocks": [1]}
    check_row(make(), lambda m: m.pull_blocks(**{**good, **change}), failure)


@pytest.mark.parametrize("make", [message_manager, accessible_manager])
def test_pull_blocks_passes_everything_on(make: Any) -> None:
    subject = make()
    assert subject.pull_blocks(BY_BLOCKS, blocks(), [0, 3], (2, 1)) is None
    subject.pull_blocks(
        BY_BLOCKS, blocks(), (True, Index.TWO), [0, 1], src_layer_range=range(1), tensor_num_per_layer=1, other=1
    )
    subject.pull_blocks(BY_REQUEST, blocks(), dst_blocks=[3])
    subject.pull_blocks(BY_PREFIX, blocks(), [], [3])
    subject.pull_blocks(BY_ID, blocks(), (), [3])
    base = {"operation": "pull_blocks", "cluster_id": 2, "cache_id": 6}
    requests = engine_of(subject).requests("pull")
    assert requests == [
        PullRequest(**base, key=BlocksKey(4), src_blocks=[0, 3], dst_blocks=(2, 1)),
        PullRequest(
            **base, key=BlocksKey(4), src_blocks=[1, 2], dst_blocks=[0, 1], src_layers=range(1), tensors_per_layer=1
        ),
        PullRequest(**base, key=RequestKey(7, 1), dst_blocks=[3]),
        PullRequest(**base, key=PrefixKey(8, 1), dst_blocks=[3]),
        PullRequest(**base, key=IdKey(1, 3), dst_blocks=[3]),
    ]
    assert {type(each) for each in requests[1].src_blocks} == {int}


# ------------------------------------------------------------ push_cache


PUSH_RANGES_REFUSED: list[tuple[dict[str, Any], Any]] = [
    *[
        ({name: wrong}, failure)
        for name in ("src_layer_range", "dst_layer_range")
        for wrong, failure in (
            (1, TypeError),
            ([0], TypeError),
            (range(0, 1, 2), PI),
            (range(0), PI),
            (range(-1, 1), PI),
            (range(2, 1), PI),
        )
    ],
    ({"src_layer_range": range(2), "dst_layer_range": range(1)}, PI),
    ({"src_layer_range": range(2)}, PI),
    ({"dst_layer_range": range(2)}, PI),
    ({"tensor_num_per_layer": 99, "src_layer_range": range(1)}, PI),
]
PUSH_COMMON_REFUSED: list[tuple[dict[str, Any], Any]] = [
    *[({"tensor_num_per_layer": wrong}, failure) for wrong, failure in PER_LAYER_REFUSED],
    *PUSH_RANGES_REFUSED,
    ({"tensor_num_per_layer": 0, "src_layer_range": 1}, PI),
]
PUSH_CACHE_REFUSED: list[tuple[dict[str, Any], Any]] = [
    ({"dst_cache_key": "key"}, TypeError),
    ({"dst_cache_key": BY_BLOCKS}, TypeError),
    ({"dst_cache_key": BY_REQUEST}, TypeError),
    ({"dst_cache_key": None}, TypeError),
    ({"src_cache": 5}, TypeError),
    ({"src_cache": None}, TypeError),
    ({"src_batch_index": None}, TypeError),
    ({"src_batch_index": "0"}, TypeError),
    ({"src_batch_index": -1}, ValueError),
    ({"src_batch_index": 2**32}, ValueError),
    ({"src_cache": blocks()}, PI),
    *PUSH_COMMON_REFUSED,
    ({"size": None}, TypeError),
    ({"size": "1"}, TypeError),
    ({"size": 2**63}, ValueError),
    ({"size": 64}, PI),
    ({"size": 0}, PI),
    # order of the checks
    ({"src_cache": blocks(), "src_batch_index": -1}, ValueError),
    ({"src_cache": blocks(), "tensor_num_per_layer": "2"}, PI),
    ({"src_layer_range": range(2), "size": "1"}, PI),
    ({"src_cache": contiguous(num_tensors=1), "size": 64}, PI),
]


@pytest.mark.parametrize(("change", "failure"), PUSH_CACHE_REFUSED)
def test_push_cache_refuses(change: dict[str, Any], failure: Any) -> None:
    good = {"dst_cache_key": BY_ID, "src_cache": contiguous()}
    check_row(accessible_manager(), lambda m: m.push_cache(**{**good, **change}), failure)


@pytest.mark.parametrize("method", ["push_cache", "push_blocks"])
def test_push_needs_remote_access_before_anything_else(method: str) -> None:
    for arguments in ((None, None), ("key", 5), (BY_ID, contiguous())):
        check_row(message_manager(), lambda m, arguments=arguments: getattr(m, method)(*arguments), PI)


def test_push_cache_passes_everything_on_in_one_request() -> None:
    subject = accessible_manager()
    cache = contiguous(num_tensors=6)
    assert subject.push_cache(BY_ID, cache) is None
    subject.push_cache(BY_ID, cache, 1, range(1, 3), range(4, 6), -1, 1)
    subject.push_cache(BY_ID, cache, dst_layer_range=range(7, 9), tensor_num_per_layer=3)
    base = {"operation": "push_cache", "cluster_id": 2, "key": IdKey(1, 3), "cache_id": 5}
    assert engine_of(subject).requests("push") == [
        PushRequest(**base, src_layers=range(3), dst_layers=range(3)),
        PushRequest(**base, src_layers=range(1, 3), dst_layers=range(4, 6), batch_index=1, tensors_per_layer=1),
        PushRequest(**base, src_layers=range(2), dst_layers=range(7, 9), tensors_per_layer=3),
    ]


def test_push_of_no_layer_succeeds_without_the_engine() -> None:
    subject = accessible_manager()
    subject.push_cache(BY_ID, contiguous(num_tensors=1))
    subject.push_blocks(BY_BLOCKS, blocks(num_tensors=1), [0], [1])
    subject.push_blocks(BY_BLOCKS, blocks(num_tensors=1), None, [1, 2])
    assert engine_of(subject).calls == []


# ------------------------------------------------------------ push_blocks


PUSH_BLOCKS_REFUSED: list[tuple[dict[str, Any], Any]] = [
    ({"dst_cache_key": "key"}, TypeError),
    ({"dst_cache_key": BY_ID}, TypeError),
    ({"dst_cache_key": None}, AttributeError),
    ({"src_cache": 5}, TypeError),
    ({"src_cache": None}, AttributeError),
    *[({name: wrong}, TypeError) for name in ("src_blocks", "dst_blocks") for wrong in LISTS_REFUSED],
    ({"src_cache": contiguous()}, PI),
    ({"dst_blocks": []}, PI),
    ({"dst_blocks": None}, TypeError),
    *PUSH_COMMON_REFUSED,
    ({"dst_cache_key": BlocksCacheKey(-1)}, TypeError),
    ({"dst_cache_key": BlocksCacheKey(2, None)}, TypeError),
    # order of the checks
    ({"src_cache": contiguous(), "src_blocks": range(2)}, TypeError),
    ({"src_cache": None, "dst_blocks": []}, AttributeError),
    ({"dst_cache_key": None, "dst_blocks": []}, PI),
    ({"dst_cache_key": None, "src_layer_range": 1}, TypeError),
]


@pytest.mark.parametrize(("change", "failure"), PUSH_BLOCKS_REFUSED)
def test_push_blocks_refuses(change: dict[str, Any], failure: Any) -> None:
    good = {"dst_cache_key": BY_BLOCKS, "src_cache": blocks(), "src_blocks": [0], "dst_blocks": [1]}
    check_row(accessible_manager(), lambda m: m.push_blocks(**{**good, **change}), failure)


def test_push_blocks_passes_everything_on() -> None:
    subject = accessible_manager()
    assert subject.push_blocks(BY_BLOCKS, blocks(), [0, 1], (2, 3)) is None
    subject.push_blocks(BY_BLOCKS, blocks(), [0], [2], range(1, 2), range(1), 1)
    subject.push_blocks(BY_BLOCKS, blocks(), None, [2])
    base = {"operation": "push_blocks", "cluster_id": 2, "key": BlocksKey(4), "cache_id": 6}
    assert engine_of(subject).requests("push") == [
        PushRequest(**base, src_layers=range(1), dst_layers=range(1), src_blocks=[0, 1], dst_blocks=(2, 3)),
        PushRequest(
            **base, src_layers=range(1, 2), dst_layers=range(1), src_blocks=[0], dst_blocks=[2], tensors_per_layer=1
        ),
        PushRequest(**base, src_layers=range(1), dst_layers=range(1), src_blocks=(), dst_blocks=[2]),
    ]


def test_block_transfers_hand_on_the_deadline_with_which_they_began() -> None:
    """Whichever way they go, it is the same one, and taken first."""
    subject = accessible_manager()
    subject.pull_blocks(BY_BLOCKS, blocks(), [0], [1])
    subject.push_blocks(BY_BLOCKS, blocks(), [0], [1])
    assert [(name, args[1:]) for name, args in engine_of(subject).calls] == [
        ("pull", (DEADLINE,)),
        ("push", (DEADLINE,)),
    ]


# ------------------------------------------------------------ engine failures


@pytest.mark.parametrize("failure", [exception_for(LLMStatusCode.LLM_TIMEOUT, "no"), TypeError("negative")])
def test_engine_failures_reach_the_caller_as_they_are(failure: Exception) -> None:
    subject = accessible_manager()
    engine_of(subject).failures = {"pull": failure, "push": failure}
    for call in (
        lambda: subject.pull_cache(BY_ID, contiguous()),
        lambda: subject.pull_blocks(BY_BLOCKS, blocks(), [0], [1]),
        lambda: subject.push_cache(BY_ID, contiguous()),
        lambda: subject.push_blocks(BY_BLOCKS, blocks(), [0], [1]),
    ):
        with pytest.raises(type(failure)) as caught:
            call()
        assert caught.value is failure
