"""Properties of ``LlmConfig``: what each one takes, and the option keys that it writes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast, overload

from llm_datadist.configs.addresses import trans_str_ip
from llm_datadist.status import raise_if_false
from llm_datadist.utils import utils

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from llm_datadist.configs.config import LlmConfig

_T = TypeVar("_T")


class Option(Generic[_T]):
    """A property of :class:`LlmConfig`: checks what is set, and writes its option keys once it was set."""

    def __init__(
        self,
        key: str | Callable[[_T], Mapping[str, str]],
        check: Callable[[str, Any], _T],
        default: _T,
        doc: str,
        *,
        skip_empty: bool = False,
    ) -> None:
        self._key = key
        self._check = check
        self._default = default
        self._skip_empty = skip_empty
        self.__doc__ = doc

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, config: None, owner: type) -> Option[_T]: ...
    @overload
    def __get__(self, config: LlmConfig, owner: type) -> _T: ...
    def __get__(self, config: LlmConfig | None, owner: type) -> Option[_T] | _T:
        if config is None:
            return self
        return cast("_T", config.stored.get(self._name, self._default))

    def __set__(self, config: LlmConfig, value: _T) -> None:
        config.stored[self._name] = self._check(self._name, value)

    def entries(self, config: LlmConfig) -> Mapping[str, str]:
        """The option keys and values, empty when there is nothing to say."""
        value = config.stored.get(self._name)
        if value is None or (self._skip_empty and not value):
            return {}
        return {self._key: _option_text(value)} if isinstance(self._key, str) else self._key(value)


def _option_text(value: object) -> str:
    if isinstance(value, int):  # of bool and IntEnum, too, options hold the number
        return str(int(value))
    return str(float(value)) if isinstance(value, float) else str(value)


def a_text(name: str, value: str | None) -> str | None:
    """A str, or None."""
    utils.check_isinstance(name, value, str)
    return value


def a_hidden_text(name: str, value: str | None) -> str | None:
    """As ``a_text``, for what must not be told."""
    if value is not None and not isinstance(value, str):
        message = f"{name} only support a str, but got a {type(value).__name__}"  # not the value: it may be the secret
        raise TypeError(message)
    return value


def a_flag(name: str, value: bool | None) -> bool | None:  # noqa: FBT001 - the value of the property
    """A bool, or None."""
    utils.check_isinstance(name, value, bool)
    return value


def a_uint32(name: str, value: int | None) -> int | None:
    """An unsigned 32-bit int, or None."""
    utils.check_uint32(name, cast("int", value))
    return value


def an_int(name: str, value: int | None) -> int | None:
    """An int, or None."""
    utils.check_isinstance(name, value, int)
    return value


def a_number_in(low: float, high: float, kind: type) -> Callable[[str, Any], Any]:
    """A number of this type from ``low`` to ``high``."""

    def check(name: str, value: float) -> float:
        utils.check_isinstance(name, value, kind, allow_none=False)
        raise_if_false(low <= value <= high, "{} must be in [{}, {}], but got {}", name, low, high, value)
        return value

    return check


def device_ids(name: str, value: int | list[int] | tuple[int, ...]) -> int | list[int] | tuple[int, ...]:
    """One device id, or a list or tuple of them."""
    utils.check_isinstance(name, value, (list, tuple, int), allow_none=False)
    ids = [value] if isinstance(value, int) else value
    raise_if_false(ids, "{} is empty: give one device id", name)
    for each in ids:
        utils.check_isinstance(f"element of {name}", each, int, allow_none=False)
        raise_if_false(each >= 0, "{} must not be negative, but got {}", name, value)
        utils.check_int32(name, each)
    return value


def device_entries(value: int | list[int] | tuple[int, ...] | None) -> dict[str, str]:
    """The option keys and values of ``device_ids``."""
    ids = [str(int(each)) for each in (value if isinstance(value, (list, tuple)) else [cast("int", value)])]
    return {"ge.session_device_id": ids[0], "ge.exec.deviceId": ";".join(ids)}


def nixl_entries(value: dict[str, str] | None) -> dict[str, str]:
    """The option key and value of ``nixl_params``."""
    return {"llm.NixlParams": json.dumps(value)}


def milliseconds(name: str, value: int | str) -> int | str:
    """A positive number of milliseconds, also as str of digits."""
    utils.check_isinstance(name, value, (int, str), allow_none=False)
    if isinstance(value, str):
        raise_if_false(
            value.isascii() and value.isdecimal(), "{} must be a number of milliseconds, but got {!r}", name, value
        )
    raise_if_false(int(value) > 0, "{} must be at least 1 ms, but got {}", name, value)
    utils.check_int32(name, int(value))
    return value


def a_str_dict(name: str, value: dict[str, str]) -> dict[str, str]:
    """A dict of str to str."""
    utils.check_isinstance(name, value, dict)
    utils.check_dict(name, value, str, str)
    return value


def a_cluster_info(name: str, value: str) -> str:
    """A JSON object, with the addresses in it as ``trans_str_ip`` gives them."""
    utils.check_isinstance(name, value, str, allow_none=False)
    try:
        return _with_text_ips(name, value)
    except RecursionError as error:
        message = f"{name} is nested too deeply: give a JSON object like {{}}"
        raise ValueError(message) from error


def _with_text_ips(name: str, value: str) -> str:
    info = json.loads(value)
    raise_if_false(isinstance(info, dict), "{} must be a JSON object, but got {!r}", name, value)
    for listener in info.get("listen_ip_info", ()):
        if isinstance(listener, dict) and "ip" in listener:
            listener["ip"] = trans_str_ip(listener["ip"])
    return json.dumps(info)
