"""LLMConfig: every property's default, checks and option keys; the address helpers of ``configs``."""

from __future__ import annotations

import json
from enum import IntEnum
from typing import Any

import pytest

from expect import PI, expect
from llm_datadist import LLMConfig, LlmConfig, LLMRole
from llm_datadist.configs import ip_text, parse_listen_ip_info, trans_str_ip

BASE = {"llm.MemoryUtilization": "0.95"}


class Number(IntEnum):
    THREE = 3


DEFAULTS: list[tuple[str, Any]] = [
    ("device_id", None),
    ("sync_kv_timeout", None),
    ("ge_options", {}),
    ("listen_ip_info", ""),
    ("deploy_res_path", ""),
    ("buf_pool_cfg", ""),
    ("mem_pool_cfg", ""),
    ("host_mem_pool_cfg", ""),
    ("enable_cache_manager", False),
    ("enable_remote_cache_accessible", False),
    ("link_total_time", 0),
    ("link_retry_count", 1),
    ("rdma_traffic_class", None),
    ("rdma_service_level", None),
    ("local_comm_res", ""),
    ("transfer_backend", ""),
    ("global_resource_config", ""),
    ("mem_utilization", 0.95),
    ("enable_switch_role", False),
    ("output_max_size", None),
    ("cluster_info", ""),
    ("max_registered_addrs", 240),
    ("allow_multiple_instances", False),
    ("paths", None),
    ("huge_pages", True),
    ("strict_constraints", False),
    ("metrics", False),
    ("verify_transfers", False),
    ("secret", None),
    ("secret_file", None),
    ("tls_cert", None),
    ("tls_key", None),
    ("tls_ca", None),
    ("allow_insecure_remote", False),
]


@pytest.mark.parametrize(("name", "default"), DEFAULTS)
def test_default(name: str, default: object) -> None:
    assert getattr(LLMConfig(), name) == default
    assert type(getattr(LLMConfig(), name)) is type(default)
    assert getattr(LLMConfig, name).__doc__


def test_default_options_and_identity_of_the_class() -> None:
    assert LLMConfig().generate_options() == BASE
    assert LLMConfig is LlmConfig
    assert LLMConfig.__name__ == "LlmConfig"


# property, value, what is added to the options
EMITTED: list[tuple[str, Any, dict[str, str]]] = [
    ("device_id", 0, {"ge.exec.deviceId": "0", "ge.session_device_id": "0"}),
    ("device_id", True, {"ge.exec.deviceId": "1", "ge.session_device_id": "1"}),
    ("device_id", [2], {"ge.exec.deviceId": "2", "ge.session_device_id": "2"}),
    ("device_id", (0, 1, 5), {"ge.exec.deviceId": "0;1;5", "ge.session_device_id": "0"}),
    ("sync_kv_timeout", 1, {"llm.SyncKvCacheWaitTime": "1"}),
    ("sync_kv_timeout", Number.THREE, {"llm.SyncKvCacheWaitTime": "3"}),
    ("sync_kv_timeout", "0020", {"llm.SyncKvCacheWaitTime": "0020"}),
    ("ge_options", {"a": "b", "llm.MemoryUtilization": "0.5"}, {"a": "b"}),
    ("ge_options", {}, {}),
    ("listen_ip_info", "not checked here", {"llm.listenIpInfo": "not checked here"}),
    ("deploy_res_path", "p", {"llm.deployResPath": "p"}),
    ("buf_pool_cfg", "{}", {"llm.BufPoolCfg": "{}"}),
    ("mem_pool_cfg", "{}", {"llm.MemPoolConfig": "{}"}),
    ("host_mem_pool_cfg", "{}", {"llm.HostMemPoolConfig": "{}"}),
    *[
        (name, empty, {})
        for name in ("listen_ip_info", "deploy_res_path", "buf_pool_cfg", "mem_pool_cfg", "host_mem_pool_cfg")
        for empty in ("", None)
    ],
    ("enable_cache_manager", True, {"llm.EnableCacheManager": "1"}),
    ("enable_cache_manager", False, {"llm.EnableCacheManager": "0"}),
    ("enable_cache_manager", None, {}),
    ("enable_remote_cache_accessible", True, {"llm.EnableRemoteCacheAccessible": "1"}),
    ("enable_remote_cache_accessible", False, {"llm.EnableRemoteCacheAccessible": "0"}),
    ("enable_remote_cache_accessible", None, {}),
    ("link_total_time", 0, {"llm.LinkTotalTime": "0"}),
    ("link_total_time", 2**32 - 1, {"llm.LinkTotalTime": "4294967295"}),
    ("link_retry_count", 1, {"llm.LinkRetryCount": "1"}),
    ("link_retry_count", 100, {"llm.LinkRetryCount": "100"}),
    ("rdma_traffic_class", 2**32 - 1, {"llm.RdmaTrafficClass": "4294967295"}),
    ("rdma_service_level", 100, {"llm.RdmaServiceLevel": "100"}),
    *[
        (name, value, {key: value})
        for name, key in (
            ("local_comm_res", "llm.LocalCommRes"),
            ("transfer_backend", "llm.TransferBackend"),
            ("global_resource_config", "llm.GlobalResourceConfig"),
        )
        for value in ("", "text")
    ],
    ("local_comm_res", None, {}),
    ("transfer_backend", None, {}),
    ("global_resource_config", None, {}),
    ("mem_utilization", 0.0, {"llm.MemoryUtilization": "0.0"}),
    ("mem_utilization", 1.0, {"llm.MemoryUtilization": "1.0"}),
    ("enable_switch_role", True, {"llm.EnableSwitchRole": "1"}),
    ("enable_switch_role", False, {}),
    ("enable_switch_role", None, {}),
    ("output_max_size", 0, {"llm.OutputMaxSize": "0"}),
    ("output_max_size", -5, {"llm.OutputMaxSize": "-5"}),
    ("output_max_size", None, {}),
    ("cluster_info", '{"a": 1}', {"llm.ClusterInfo": '{"a": 1}'}),
    ("max_registered_addrs", 1, {"llm.MaxRegisteredAddrs": "1"}),
    ("max_registered_addrs", 65000, {"llm.MaxRegisteredAddrs": "65000"}),
    ("allow_multiple_instances", True, {"llm.AllowMultipleInstances": "1"}),
    ("allow_multiple_instances", False, {"llm.AllowMultipleInstances": "0"}),
    ("allow_multiple_instances", None, {}),
    ("paths", "tcp,process_vm", {"llm.Paths": "tcp,process_vm"}),
    ("paths", "auto", {"llm.Paths": "auto"}),
    ("paths", "", {"llm.Paths": ""}),
    ("paths", None, {}),
    ("huge_pages", True, {"llm.HugePages": "1"}),
    ("huge_pages", False, {"llm.HugePages": "0"}),
    ("huge_pages", None, {}),
    ("strict_constraints", True, {"llm.StrictConstraints": "1"}),
    ("strict_constraints", False, {"llm.StrictConstraints": "0"}),
    ("strict_constraints", None, {}),
    ("metrics", True, {"llm.Metrics": "1"}),
    ("metrics", None, {}),
    ("verify_transfers", True, {"llm.VerifyTransfers": "1"}),
    ("verify_transfers", False, {"llm.VerifyTransfers": "0"}),
    ("verify_transfers", None, {}),
    ("heartbeat_interval_ms", 0, {"llm.HeartbeatIntervalMs": "0"}),
    ("switch_interval_us", 0, {"llm.SwitchIntervalUs": "0"}),
    ("heartbeat_timeout_ms", 2**31 - 1, {"llm.HeartbeatTimeoutMs": "2147483647"}),
    ("secret", "x" * 16, {"llm.Secret": "x" * 16}),
    ("secret", "", {"llm.Secret": ""}),
    ("secret", None, {}),
    ("secret_file", "/run/secret", {"llm.SecretFile": "/run/secret"}),
    ("tls_cert", "cert.pem", {"llm.TlsCert": "cert.pem"}),
    ("tls_key", "key.pem", {"llm.TlsKey": "key.pem"}),
    ("tls_ca", "ca.pem", {"llm.TlsCa": "ca.pem"}),
    ("allow_insecure_remote", True, {"llm.AllowInsecureRemote": "1"}),
    ("allow_insecure_remote", False, {"llm.AllowInsecureRemote": "0"}),
    ("allow_insecure_remote", None, {}),
]


@pytest.mark.parametrize(("name", "value", "added"), EMITTED)
def test_value_is_kept_and_emitted(name: str, value: object, added: dict[str, str]) -> None:
    config = LLMConfig()
    setattr(config, name, value)
    assert getattr(config, name) == value
    assert config.generate_options() == {**BASE, **added}


# property, value, failure
REFUSED: list[tuple[str, Any, Any]] = [
    *[("device_id", wrong, TypeError) for wrong in ("0", 1.0, {0}, None, ["0"], [None], (0, 1.0))],
    *[("device_id", wrong, PI) for wrong in (-1, [0, -1], (-(2**40),), [])],
    *[("device_id", wrong, ValueError) for wrong in (2**31, [0, 2**31])],
    *[("sync_kv_timeout", wrong, TypeError) for wrong in (1.0, None, b"1", [1])],
    *[("sync_kv_timeout", wrong, PI) for wrong in ("1.5", "-1", "", " 1", "a", "²", 0, -1, "0", False)],
    *[("sync_kv_timeout", wrong, ValueError) for wrong in (2**31, str(2**31))],
    *[("ge_options", wrong, TypeError) for wrong in ("a", [("a", "b")], {1: "a"}, {"a": 1}, {"a": None})],
    ("ge_options", None, AttributeError),
    *[
        (name, wrong, TypeError)
        for name in (
            "listen_ip_info",
            "deploy_res_path",
            "buf_pool_cfg",
            "mem_pool_cfg",
            "host_mem_pool_cfg",
            "local_comm_res",
            "transfer_backend",
            "global_resource_config",
            "paths",
            "secret",
            "secret_file",
            "tls_cert",
            "tls_key",
            "tls_ca",
        )
        for wrong in (1, b"x", {}, ["x"])
    ],
    *[
        (name, wrong, TypeError)
        for name in (
            "enable_cache_manager",
            "enable_remote_cache_accessible",
            "enable_switch_role",
            "allow_multiple_instances",
            "huge_pages",
            "strict_constraints",
            "metrics",
            "verify_transfers",
            "allow_insecure_remote",
        )
        for wrong in (1, 0, "1", "True")
    ],
    *[("link_total_time", wrong, TypeError) for wrong in ("1", 1.0, None)],
    *[("link_total_time", wrong, PI) for wrong in (-1, 2**32)],
    *[("link_retry_count", wrong, TypeError) for wrong in ("1", 1.0, None)],
    *[("link_retry_count", wrong, PI) for wrong in (0, 101, -1)],
    *[(name, wrong, TypeError) for name in ("rdma_traffic_class", "rdma_service_level") for wrong in ("1", 1.0, None)],
    *[(name, wrong, ValueError) for name in ("rdma_traffic_class", "rdma_service_level") for wrong in (-1, 2**32)],
    *[("mem_utilization", wrong, TypeError) for wrong in (1, "0.5", None, True)],
    *[("mem_utilization", wrong, PI) for wrong in (-0.1, 1.1, float("nan"))],
    *[("output_max_size", wrong, TypeError) for wrong in ("1", 1.0)],
    *[("cluster_info", wrong, TypeError) for wrong in (None, {}, 1)],
    *[("cluster_info", wrong, json.JSONDecodeError) for wrong in ("", "{", "a")],
    ("cluster_info", "[]", PI),
    ("cluster_info", '{"listen_ip_info": [{"ip": "nonsense"}]}', RuntimeError),
    *[("max_registered_addrs", wrong, TypeError) for wrong in ("1", 1.0, None)],
    *[("max_registered_addrs", wrong, PI) for wrong in (0, 65001, -1)],
]


@pytest.mark.parametrize(("name", "value", "failure"), REFUSED)
def test_refused_value_leaves_the_old_one(name: str, value: object, failure: Any) -> None:
    config = LLMConfig()
    before = getattr(config, name)
    expect(failure, lambda: setattr(config, name, value))
    assert getattr(config, name) == before
    assert config.generate_options() == BASE


def test_options_is_one_live_sticky_dict() -> None:
    config = LLMConfig()
    assert config.generate_options() is config.options
    assert config.gen_options() is config.options
    config.listen_ip_info = "1.2.3.4:5"
    assert "llm.listenIpInfo" not in config.options
    config.gen_options()
    config.listen_ip_info = None
    config.enable_cache_manager = True
    assert config.generate_options() == {**BASE, "llm.listenIpInfo": "1.2.3.4:5", "llm.EnableCacheManager": "1"}
    with pytest.raises(AttributeError):
        config.options = {}  # type: ignore[misc]


def test_named_properties_win_over_raw_options() -> None:
    config = LLMConfig()
    config.link_retry_count = 7
    config.ge_options = {"llm.LinkRetryCount": "3", "other": "x"}
    assert config.generate_options() == {**BASE, "llm.LinkRetryCount": "7", "other": "x"}


def test_objects_share_no_state_and_take_unknown_attributes() -> None:
    first, second = LLMConfig(), LLMConfig()
    first.ge_options["a"] = "b"
    first.device_id = 1
    first.some_future_option = 1  # type: ignore[attr-defined]
    assert second.generate_options() == BASE
    assert first.generate_options()["a"] == "b"


def test_what_is_implied_at_init_is_not_shown_before() -> None:
    config = LLMConfig()
    config.local_comm_res = ""
    assert config.enable_cache_manager is False
    assert "llm.EnableCacheManager" not in config.generate_options()


def test_cluster_info_addresses_are_converted() -> None:
    config = LLMConfig()
    config.cluster_info = '{"listen_ip_info": [{"ip": "127.0.0.1", "port": 1}, {"ip": 7}, {"ip": "::1"}, {}], "x": [1]}'
    stored = json.loads(config.generate_options()["llm.ClusterInfo"])
    assert stored == {"listen_ip_info": [{"ip": 16777343, "port": 1}, {"ip": 7}, {"ip": "::1"}, {}], "x": [1]}


@pytest.mark.parametrize(("member", "number"), [("PROMPT", 1), ("DECODER", 2), ("MIX", 3)])
def test_roles(member: str, number: int) -> None:
    assert LLMRole[member] == number
    assert str(LLMRole[member]) == f"{LLMRole[member]}" == f"LLMRole.{member}"


@pytest.mark.parametrize(
    ("ip", "stored"),
    [
        ("1.2.3.4", 67305985),
        ("127.0.0.1", 16777343),
        ("1.2", 0x02000001),
        ("0.0.0.0", 0),
        ("255.255.255.255", 2**32 - 1),
        ("::1", "::1"),
        ("[::1]", "::1"),
        ("2001:0DB8:0:0::0001", "2001:db8::1"),
        ("fe80::1%lo", "fe80::1%lo"),
        ("[fe80::1%2]", "fe80::1%2"),
        (7, 7),
        (-7, -7),
        (None, None),
    ],
)
def test_trans_str_ip(ip: Any, stored: object) -> None:
    assert trans_str_ip(ip) == stored


@pytest.mark.parametrize(
    "ip",
    ["", "localhost", "1.2.3.4.5", "256.1.1.1", "1.2.3.4 x", " 1.2.3.4", "[1.2.3.4]", "[]", ":", ":::", "::g", "[::1"],
)
def test_trans_str_ip_refuses(ip: str) -> None:
    expect(RuntimeError, lambda: trans_str_ip(ip), match="is not an IP address")


@pytest.mark.parametrize("ip", ["1.2.3.4", "127.0.0.1", "255.0.0.255", "::1", "fe80::1%lo"])
def test_ip_text_is_the_inverse(ip: str) -> None:
    assert ip_text(trans_str_ip(ip)) == ip


@pytest.mark.parametrize("ip", [-1, 2**32, None, 1.0])
def test_ip_text_refuses(ip: object) -> None:
    expect(TypeError, lambda: ip_text(ip))


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("1.2.3.4:26000", ("1.2.3.4", 26000)),
        ("1.2.3.4:0", ("1.2.3.4", 0)),
        ("1.2.3.4:65535", ("1.2.3.4", 65535)),
        ("a name is not looked at:1", ("a name is not looked at", 1)),
        ("[::1]:26000", ("::1", 26000)),
        ("[fe80::1%lo]:0", ("fe80::1%lo", 0)),
    ],
)
def test_parse_listen_ip_info(text: str, parsed: tuple[str, int]) -> None:
    assert parse_listen_ip_info(text) == parsed


@pytest.mark.parametrize(
    ("text", "failure"),
    [
        (None, AttributeError),
        (1, TypeError),
        (["1.2.3.4:1"], TypeError),
        ("1.2.3.4", PI),
        ("1.2.3.4:1:2", PI),
        ("1.2.3.4:1;1.2.3.5:2", PI),
        ("", PI),
        (":1", PI),
        ("::1:26000", PI),
        ("[::1]", PI),
        ("[::1]26000", PI),
        ("[]:1", PI),
        ("[1.2.3.4]:1", PI),
        ("[::1:26000", PI),
        ("1.2.3.4:65536", PI),
        ("1.2.3.4:-1", PI),
        ("[::1]:65536", PI),
        ("1.2.3.4:", ValueError),
        ("1.2.3.4:a", ValueError),
        ("[::1]:x", ValueError),
    ],
)
def test_parse_listen_ip_info_refuses(text: Any, failure: Any) -> None:
    expect(failure, lambda: parse_listen_ip_info(text))


def test_ipv6_without_brackets_is_answered_with_an_example() -> None:
    expect(PI, lambda: parse_listen_ip_info("::1:26000"), match=r"\[fd00::2\]:26000")


def test_cluster_info_that_is_nested_too_deeply() -> None:
    config = LLMConfig()
    with pytest.raises(ValueError, match="cluster_info is nested too deeply"):
        config.cluster_info = "[" * 100_000
    assert config.cluster_info == ""


def test_a_secret_of_the_wrong_type_is_not_told() -> None:
    error = expect(TypeError, lambda: setattr(LLMConfig(), "secret", b"the secret itself"))
    assert str(error) == "secret only support a str, but got a bytes"
