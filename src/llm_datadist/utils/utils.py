"""Argument checks of the public calls.

The rules are the original's: a wrong type is ``TypeError``, a number out of range ``ValueError``; ``bool`` and
``IntEnum`` members are integers, numpy integers and floats are not; ``None`` passes a type check unless refused by
name.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import TypeAlias

    Classes: TypeAlias = type | Sequence[type]

UINT8_MAX = 2**8 - 1
UINT16_MAX = 2**16 - 1
UINT32_MAX = 2**32 - 1
UINT64_MAX = 2**64 - 1
INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


def check_isinstance(
    name: str,
    value: object,
    classes: Classes,
    inner_class: Classes | None = None,
    extra_fmt: str = "",
    allow_none: bool = True,  # noqa: FBT001, FBT002 - the original's signature
) -> None:
    """Check the type of an argument and, if asked, of its elements (the keys of a dict).

    Args:
        name: the argument, for the message.
        value: what was given; None passes when ``allow_none``.
        classes: the accepted class or classes.
        inner_class: the accepted class or classes of the elements; None checks no element.
        extra_fmt: text to add to the message.
        allow_none: whether None passes.

    Raises:
        TypeError: ``value`` or one of its elements is of another type.
    """
    if value is None and allow_none:
        return
    accepted = _as_tuple(classes)
    if not isinstance(value, accepted):
        raise TypeError(_mismatch(name, value, accepted, extra_fmt))
    if inner_class is not None:
        _check_elements(name, value, _as_tuple(inner_class), extra_fmt)  # type: ignore[arg-type]


def check_dict(
    name: str, value: Mapping[Any, Any], key_class: Classes, value_class: Classes, inner_class: Classes | None = None
) -> None:
    """Check each key, then its value, then the elements of the value.

    Raises:
        AttributeError: ``value`` is None.
        TypeError: a key, value or element is of another type.
    """
    require(name, value, "a dict")
    for key, item in value.items():
        check_isinstance(f"key of {name}", key, key_class, allow_none=False)
        check_isinstance(f"{name}[{key!r}]", item, value_class, inner_class, allow_none=False)


def require(name: str, value: object, wanted: str, error: type[Exception] = AttributeError) -> None:
    """Refuse None where the type check lets it pass.

    Raises:
        Exception: ``error``, when ``value`` is None.
    """
    if value is None:
        message = f"{name} is None: pass {wanted}"
        raise error(message)


def check_uint8(name: str, value: int) -> None:
    """An integer in [0, 2**8 - 1]: TypeError for another type or None, ValueError out of range."""
    _check_int(name, value, 0, UINT8_MAX)


def check_uint16(name: str, value: int) -> None:
    """An integer in [0, 2**16 - 1]: TypeError for another type or None, ValueError out of range."""
    _check_int(name, value, 0, UINT16_MAX)


def check_uint32(name: str, value: int) -> None:
    """An integer in [0, 2**32 - 1]: TypeError for another type or None, ValueError out of range."""
    _check_int(name, value, 0, UINT32_MAX)


def check_uint64(name: str, value: int) -> None:
    """An integer in [0, 2**64 - 1]: TypeError for another type or None, ValueError out of range."""
    _check_int(name, value, 0, UINT64_MAX)


def check_int32(name: str, value: int) -> None:
    """An integer in [-2**31, 2**31 - 1]: TypeError for another type or None, ValueError out of range."""
    _check_int(name, value, INT32_MIN, INT32_MAX)


def check_int64(name: str, value: int) -> None:
    """An integer in [-2**63, 2**63 - 1]: TypeError for another type or None, ValueError out of range."""
    _check_int(name, value, INT64_MIN, INT64_MAX)


def check_list_int32(name: str, values: Iterable[int]) -> None:
    """:func:`check_int32` for each element."""
    _check_ints(name, values, INT32_MIN, INT32_MAX)


def check_list_int64(name: str, values: Iterable[int]) -> None:
    """:func:`check_int64` for each element."""
    _check_ints(name, values, INT64_MIN, INT64_MAX)


def check_list_uint64(name: str, values: Iterable[int]) -> None:
    """:func:`check_uint64` for each element."""
    _check_ints(name, values, 0, UINT64_MAX)


def check_positive_or_set_default(name: str, value: int | None, default: int = -1) -> int:
    """``value``, or ``default`` for None.

    Raises:
        TypeError: not an integer.
        ValueError: negative, or beyond 64 bits.
    """
    if value is None:
        return default
    _check_int(name, value, 0, INT64_MAX)
    return value


def int_list(name: str, values: Sequence[int] | None) -> Sequence[int] | None:
    """Check that ``values`` is a list or tuple of int (None passes) and give it back with plain ints.

    Thousands of block ids pass here on every transfer, so the usual case is one pass at C speed.

    Raises:
        TypeError: not a list or tuple (a ``range`` is neither), or an element is not an int.
    """
    check_isinstance(name, values, (list, tuple))
    if not values or set(map(type, values)) == {int}:
        return values
    _check_elements(name, values, (int,), "")
    return [int(value) for value in values]


def _as_tuple(classes: Classes) -> tuple[type, ...]:
    return tuple(classes) if isinstance(classes, Sequence) else (classes,)


def _mismatch(name: str, value: object, classes: tuple[type, ...], extra: str = "") -> str:
    wanted = " or ".join(each.__name__ for each in classes)
    return f"{name} only support {wanted}, but got {reprlib.repr(value)} of type {type(value).__name__}{extra}"


def _check_elements(name: str, values: Iterable[object], classes: tuple[type, ...], extra: str) -> None:
    if set(map(type, values)) <= set(classes):
        return
    for index, value in enumerate(values):
        if not isinstance(value, classes):
            raise TypeError(_mismatch(f"element {index} of {name}", value, classes, extra))


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int):
        raise TypeError(_mismatch(name, value, (int,)))
    if not low <= value <= high:
        message = f"{name} must be in [{low}, {high}], but got {value}"
        raise ValueError(message)


def _check_ints(name: str, values: Iterable[object], low: int, high: int) -> None:
    for index, value in enumerate(values):
        _check_int(f"element {index} of {name}", value, low, high)
