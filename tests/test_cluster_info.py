"""LLMClusterInfo: defaults, checks in their order, IPv4 as little-endian int and IPv6 as text."""

from __future__ import annotations

from typing import Any

import pytest

from expect import expect
from llm_datadist import LLMClusterInfo, LLMRole

APPENDERS = [("append_local_ip_info", "local_ip_info_list"), ("append_remote_ip_info", "remote_ip_info_list")]


def test_defaults() -> None:
    info = LLMClusterInfo()
    assert info.remote_cluster_id is None
    assert info.remote_role_type is None
    assert info.local_ip_info_list == []
    assert info.remote_ip_info_list == []
    assert info.local_ip_info_list is not LLMClusterInfo().local_ip_info_list


@pytest.mark.parametrize("value", [0, 2**64 - 1, True])
def test_remote_cluster_id(value: int) -> None:
    info = LLMClusterInfo()
    info.remote_cluster_id = value
    assert info.remote_cluster_id is value


@pytest.mark.parametrize(
    ("value", "failure"), [(None, TypeError), ("1", TypeError), (1.0, TypeError), (-1, ValueError), (2**64, ValueError)]
)
def test_remote_cluster_id_refuses(value: Any, failure: type[Exception]) -> None:
    expect(failure, lambda: setattr(LLMClusterInfo(), "remote_cluster_id", value))


@pytest.mark.parametrize("value", [LLMRole.PROMPT, 7, None])
def test_remote_role_type(value: Any) -> None:
    info = LLMClusterInfo()
    info.remote_role_type = value
    assert info.remote_role_type is value


@pytest.mark.parametrize("value", ["Prompt", 1.0, []])
def test_remote_role_type_refuses(value: Any) -> None:
    expect(TypeError, lambda: setattr(LLMClusterInfo(), "remote_role_type", value))


@pytest.mark.parametrize(("append", "listed"), APPENDERS)
@pytest.mark.parametrize(
    ("ip", "port", "entry"),
    [
        ("1.2.3.4", 26000, (67305985, 26000)),
        ("127.0.0.1", 0, (16777343, 0)),
        ("1.2", 65535, (0x02000001, 65535)),
        (16777343, 1, (16777343, 1)),
        (-1, 1, (-1, 1)),
        (None, 1, (None, 1)),
        ("::1", 1, ("::1", 1)),
        ("[2001:DB8::0:1]", 1, ("2001:db8::1", 1)),
        ("fe80::1%lo", 1, ("fe80::1%lo", 1)),
    ],
)
def test_addresses(append: str, listed: str, ip: Any, port: int, entry: tuple[object, int]) -> None:
    info = LLMClusterInfo()
    live = getattr(info, listed)
    assert getattr(info, append)(ip, port) is None
    assert getattr(info, append)(ip=ip, port=port) is None
    assert live == [entry, entry]
    assert live is getattr(info, listed)


@pytest.mark.parametrize(("append", "listed"), APPENDERS)
@pytest.mark.parametrize(
    ("ip", "port", "failure"),
    [
        (1.0, 1, TypeError),
        (b"1.2.3.4", 1, TypeError),
        ("1.2.3.4", "1", TypeError),
        ("1.2.3.4", None, TypeError),
        ("1.2.3.4", -1, ValueError),
        ("1.2.3.4", 65536, ValueError),
        ("nonsense", 65536, ValueError),  # the port is looked at before the text of the ip
        ("nonsense", 1, RuntimeError),
        ("", 1, RuntimeError),
        ("1.2.3.4.5", 1, RuntimeError),
        ("::1::2", 1, RuntimeError),
        ("[1.2.3.4]", 1, RuntimeError),
    ],
)
def test_addresses_refuse(append: str, listed: str, ip: Any, port: Any, failure: type[Exception]) -> None:
    info = LLMClusterInfo()
    expect(failure, lambda: getattr(info, append)(ip, port))
    assert getattr(info, listed) == []


@pytest.mark.parametrize("name", ["local_ip_info_list", "remote_ip_info_list"])
def test_lists_have_no_setter(name: str) -> None:
    expect(AttributeError, lambda: setattr(LLMClusterInfo(), name, []))
