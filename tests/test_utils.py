"""The argument checks that all public calls are made of."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from expect import expect
from llm_datadist.utils import utils

if TYPE_CHECKING:
    from collections.abc import Callable


class Five(IntEnum):
    FIVE = 5


class Text(str):
    __slots__ = ()


RANGES = [
    (utils.check_uint8, 0, 2**8 - 1),
    (utils.check_uint16, 0, 2**16 - 1),
    (utils.check_uint32, 0, 2**32 - 1),
    (utils.check_uint64, 0, 2**64 - 1),
    (utils.check_int32, -(2**31), 2**31 - 1),
    (utils.check_int64, -(2**63), 2**63 - 1),
]
LISTS = [
    (utils.check_list_int32, -(2**31), 2**31 - 1),
    (utils.check_list_int64, -(2**63), 2**63 - 1),
    (utils.check_list_uint64, 0, 2**64 - 1),
]


@pytest.mark.parametrize(("check", "low", "high"), RANGES)
def test_integer_ranges(check: Callable[[str, Any], None], low: int, high: int) -> None:
    for good in (low, high, True, Five.FIVE):
        check("x", good)
    for bad in (low - 1, high + 1):
        expect(ValueError, lambda bad=bad: check("x", bad), match="x must be in")
    for wrong in (None, 1.0, "1", np.int64(1), [1]):
        expect(TypeError, lambda wrong=wrong: check("x", wrong), match="x only support int")


@pytest.mark.parametrize(("check", "low", "high"), LISTS)
def test_integer_lists(check: Callable[[str, Any], None], low: int, high: int) -> None:
    check("x", [low, high, True])
    check("x", ())
    expect(ValueError, lambda: check("x", [0, high + 1]), match="element 1 of x")
    expect(ValueError, lambda: check("x", [low - 1]))
    expect(TypeError, lambda: check("x", [0, None]), match="element 1 of x only support int")
    expect(TypeError, lambda: check("x", None))


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((1, int), {}),
        ((True, int), {}),
        ((None, int), {}),
        (("", [int, str]), {}),
        (([1, 2], list, int), {}),
        (([], list, int), {}),
        (((1, "a"), (list, tuple), [int, str]), {}),
        (({1: "a"}, dict, int), {}),
        (([Text("a")], list, str), {}),
        ((None, int, None, ""), {"allow_none": True}),
    ],
)
def test_check_isinstance_accepts(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    utils.check_isinstance("x", *args, **kwargs)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((1, str), {}),
        ((1, bool), {}),
        ((1.0, [int, str]), {}),
        ((range(2), (list, tuple)), {}),
        (([1, "a"], list, int), {}),
        (([1, None], list, int), {}),
        (({"a": 1}, dict, int), {}),
        ((None, int), {"allow_none": False}),
    ],
)
def test_check_isinstance_refuses(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    expect(TypeError, lambda: utils.check_isinstance("x", *args, **kwargs), match="x only support")


def test_check_isinstance_adds_the_extra_text() -> None:
    expect(TypeError, lambda: utils.check_isinstance("x", 1, str, extra_fmt=", see page 3"), match="see page 3$")


def test_check_dict() -> None:
    utils.check_dict("x", {1: [2]}, int, list, int)
    utils.check_dict("x", {}, int, list, int)
    expect(AttributeError, lambda: utils.check_dict("x", None, int, int))  # type: ignore[arg-type]
    expect(TypeError, lambda: utils.check_dict("x", {"a": 1}, int, int), match="key of x only support int")
    expect(TypeError, lambda: utils.check_dict("x", {1: "a"}, int, int), match="only support int")
    expect(TypeError, lambda: utils.check_dict("x", {1: (2,)}, int, list, int), match="only support list")
    expect(TypeError, lambda: utils.check_dict("x", {1: ["a"]}, int, list, int), match="only support int")


def test_check_positive_or_set_default() -> None:
    assert utils.check_positive_or_set_default("x", None) == -1
    assert utils.check_positive_or_set_default("x", None, 7) == 7
    assert utils.check_positive_or_set_default("x", 0) == 0
    assert utils.check_positive_or_set_default("x", 2**63 - 1) == 2**63 - 1
    expect(ValueError, lambda: utils.check_positive_or_set_default("x", -1))
    expect(ValueError, lambda: utils.check_positive_or_set_default("x", 2**63))
    expect(TypeError, lambda: utils.check_positive_or_set_default("x", "1"))  # type: ignore[arg-type]


def test_require_raises_the_error_asked_for() -> None:
    utils.require("x", 0, "an int")
    expect(AttributeError, lambda: utils.require("x", None, "an int"), match="x is None: pass an int")
    expect(TypeError, lambda: utils.require("x", None, "an int", TypeError))


def test_int_list_keeps_plain_lists_and_makes_other_ints_plain() -> None:
    plain = [1, 2, -3]
    assert utils.int_list("x", plain) is plain
    assert utils.int_list("x", ()) == ()
    assert utils.int_list("x", None) is None
    converted = utils.int_list("x", (True, Five.FIVE, 7))
    assert converted == [1, 5, 7]
    assert {type(each) for each in converted or ()} == {int}
    for wrong in (range(2), {1}, "12", np.array([1]), 1):
        expect(TypeError, lambda wrong=wrong: utils.int_list("x", wrong), match="x only support list or tuple")
    for wrong in ([1, None], [1.0], [np.int64(1)], ["1"]):
        expect(TypeError, lambda wrong=wrong: utils.int_list("x", wrong), match="of x only support int")
