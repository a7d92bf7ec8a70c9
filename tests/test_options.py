"""Options of init: one row each of the table in the API specification (12.2), and those that are ours."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import TYPE_CHECKING, Any

import pytest

from expect import PI, expect
from llm_datadist.engine.options import (
    DEFAULT_LINK_TIME_S,
    DEFAULT_MAX_ADDRS,
    DEFAULT_SYNC_TIMEOUT_MS,
    EngineOptions,
    PoolOptions,
)
from llm_datadist.net.security import TlsFiles

if TYPE_CHECKING:
    from pathlib import Path

ROLE = {"llm.Role": "Prompt"}
HIXL = {"llm.TransferBackend": "hixl", "llm.EnableRemoteCacheAccessible": "1"}
PATHS = ("inprocess", "process_vm", "mapped", "nixl", "tcp")
TOO_LONG = "9" * 5000


@pytest.fixture(autouse=True)
def environment_without_options(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("LLM_DATADIST_")]:
        monkeypatch.delenv(name)


def parse(**options: str) -> EngineOptions:
    return EngineOptions.parse(ROLE | {key.replace("__", "."): value for key, value in options.items()})


def parsed(key: str, value: str, **more: str) -> EngineOptions:
    return EngineOptions.parse(ROLE | more | {key: value})


def refused(key: str, value: str, **more: str) -> None:
    """LLM_PARAM_INVALID with a text that names the option and its value, and says what it should be."""
    error: Any = expect(PI, lambda: parsed(key, value, **more))
    assert f"option {key} is {value!r}, it must be " in str(error)
    assert (error.operation, error.phase) == ("init", "check")


def test_defaults() -> None:
    assert dataclasses.asdict(EngineOptions.parse(ROLE)) == {
        "remote_accessible": False,
        "sync_timeout_ms": 1000,
        "listen": None,
        "hixl": False,
        "has_comm_res": False,
        "device_id": 0,
        "link_total_time_s": 120,
        "device_pool": None,
        "host_pool": None,
        "max_registered_addrs": 240,
        "paths": PATHS,
        "huge_pages": True,
        "strict_constraints": False,
        "metrics": False,
        "verify_transfers": False,
        "secret": None,
        "tls": None,
        "allow_insecure_remote": False,
        "heartbeat_interval_ms": 10_000,
        "heartbeat_timeout_ms": 60_000,
        "switch_interval_us": 500,
        "nixl": {"backend": "UCX", "params": (), "wanted": False, "encrypted": False},
    }
    assert (DEFAULT_SYNC_TIMEOUT_MS, DEFAULT_LINK_TIME_S, DEFAULT_MAX_ADDRS) == (1000, 120, 240)
    assert EngineOptions() == EngineOptions.parse(ROLE)


# llm.Role


def test_role_must_exist() -> None:
    expect(PI, lambda: EngineOptions.parse({}), match="option llm.Role is None, it must be given")
    assert EngineOptions.parse({"llm.Role": ""})


# Keys and values


@pytest.mark.parametrize("value", [1, True, None, b"1", ["1"]])
def test_values_must_be_str(value: Any) -> None:
    expect(TypeError, lambda: EngineOptions.parse(ROLE | {"ge.exec.deviceId": value}), match="only support str")
    expect(TypeError, lambda: EngineOptions.parse(ROLE | {"unknown": value}))
    expect(TypeError, lambda: EngineOptions.parse(ROLE | {value if value != ["1"] else 5: "1"}))


@pytest.mark.parametrize("key", ["unknown", "llm.role", "llm.SyncKvCacheWaitTime ", "ge.flowGraphMemMaxSize", ""])
def test_unknown_keys_are_ignored(key: str) -> None:
    assert parsed(key, "anything") == EngineOptions()


# ge.exec.deviceId


@pytest.mark.parametrize(("value", "device"), [("0", 0), ("7", 7), ("007", 7), (str(2**31 - 1), 2**31 - 1)])
def test_device_id(value: str, device: int) -> None:
    assert parsed("ge.exec.deviceId", value).device_id == device


@pytest.mark.parametrize("value", ["0;1", "0,1", "", "-1", "a", "1.0", " 1", "+1", "٣", "0x1", str(2**31), TOO_LONG])
def test_device_id_is_one_int32(value: str) -> None:
    refused("ge.exec.deviceId", value)


# llm.TransferBackend


def test_transfer_backend_is_absent_or_hixl() -> None:
    assert not EngineOptions.parse(ROLE).hixl
    assert EngineOptions.parse(ROLE | HIXL).hixl


@pytest.mark.parametrize("value", ["", "HIXL", "hixl ", "comm", "0"])
def test_transfer_backends_that_are_none(value: str) -> None:
    refused("llm.TransferBackend", value)
    refused("llm.TransferBackend", value, **{"llm.EnableRemoteCacheAccessible": "1"})


@pytest.mark.parametrize("more", [{}, {"llm.EnableRemoteCacheAccessible": "0"}])
def test_hixl_needs_remote_access(more: dict[str, str]) -> None:
    options = ROLE | {"llm.TransferBackend": "hixl"} | more
    expect(PI, lambda: EngineOptions.parse(options), match="llm.EnableRemoteCacheAccessible .* backend hixl")


# llm.EnableRemoteCacheAccessible


@pytest.mark.parametrize(("value", "accessible"), [("0", False), ("1", True)])
def test_remote_access(value: str, accessible: bool) -> None:
    assert parsed("llm.EnableRemoteCacheAccessible", value).remote_accessible is accessible


@pytest.mark.parametrize("value", ["", "2", "True", "true", "01", " 1"])
def test_remote_access_is_0_or_1(value: str) -> None:
    refused("llm.EnableRemoteCacheAccessible", value)


# llm.SyncKvCacheWaitTime


@pytest.mark.parametrize(("value", "timeout"), [("0", 0), ("1", 1), ("3000", 3000), (str(2**31 - 1), 2**31 - 1)])
def test_sync_timeout(value: str, timeout: int) -> None:
    assert parsed("llm.SyncKvCacheWaitTime", value).sync_timeout_ms == timeout


@pytest.mark.parametrize("value", ["", "-1", "1.5", "1s", "a", str(2**31), TOO_LONG])
def test_sync_timeout_is_digits(value: str) -> None:
    refused("llm.SyncKvCacheWaitTime", value)


# llm.MemPoolConfig, llm.HostMemPoolConfig

POOLS = [("llm.MemPoolConfig", "device_pool"), ("llm.HostMemPoolConfig", "host_pool")]


@pytest.mark.parametrize(("key", "field"), POOLS)
@pytest.mark.parametrize(
    ("config", "pool"),
    [
        ({"memory_size": 65536}, PoolOptions(65536, 16)),
        ({"memory_size": 2**40, "page_shift": 30}, PoolOptions(2**40, 30)),
        ({"memory_size": 1024, "page_shift": 10}, PoolOptions(1024, 10)),
        ({"memory_size": 1 << 30, "page_shift": 30, "other": None}, PoolOptions(1 << 30, 30)),
    ],
)
def test_pool(key: str, field: str, config: dict[str, Any], pool: PoolOptions) -> None:
    options = parsed(key, json.dumps(config))
    assert getattr(options, field) == pool
    assert [options.device_pool, options.host_pool].count(None) == 1


@pytest.mark.parametrize("key", [key for key, _ in POOLS])
@pytest.mark.parametrize(
    "value",
    [
        "{",
        "[]",
        "5",
        "null",
        '"memory_size"',
        "65536",
        "{}",
        '{"memory_size": "65536"}',
        '{"memory_size": 65536.0}',
        '{"memory_size": true}',
        '{"memory_size": null}',
        '{"memory_size": -65536}',
        '{"memory_size": 0}',
        '{"memory_size": 65535}',
        '{"memory_size": 18446744073709551616}',
        '{"page_shift": 16}',
        '{"memory_size": 65536, "page_shift": 9}',
        '{"memory_size": 4294967296, "page_shift": 31}',
        '{"memory_size": 65536, "page_shift": 17}',
        '{"memory_size": 65536, "page_shift": "16"}',
        '{"memory_size": 65536, "page_shift": 16.0}',
        '{"memory_size": 65536, "page_shift": true}',
        '{"memory_size": 65536, "page_shift": null}',
        '{"memory_size": 65536, "page_shift": -1}',
        '{"memory_size": 65536,}',
        "{'memory_size': 65536}",
        pytest.param("[" * 100_000, id="deep"),
        pytest.param('{"memory_size": ' + TOO_LONG + "}", id="long number"),
    ],
)
def test_pools_that_are_none(key: str, value: str) -> None:
    refused(key, value)


# llm.ListenIp, llm.ListenPort


def listen(ip: str, port: str) -> tuple[str, int] | None:
    return EngineOptions.parse(ROLE | {"llm.ListenIp": ip, "llm.ListenPort": port}).listen


def test_listen_address() -> None:
    assert listen("10.0.0.1", "26000") == ("10.0.0.1", 26000)
    assert listen("::1", "0") == ("::1", 0)
    assert listen("fe80::1%lo", "65535") == ("fe80::1%lo", 65535)
    assert parsed("llm.ListenPort", "26000").listen is None


@pytest.mark.parametrize("port", ["", "http", "-1", "65536", "1.0", " 1", TOO_LONG])
def test_listen_port_is_a_number(port: str) -> None:
    refused("llm.ListenPort", port, **{"llm.ListenIp": "127.0.0.1"})


def test_listen_needs_a_port() -> None:
    expect(PI, lambda: parsed("llm.ListenIp", "127.0.0.1"), match="option llm.ListenPort is None, it must be given")


# llm.LocalCommRes


@pytest.mark.parametrize(("value", "has"), [("", False), ("{}", True), ('{"a": 1}', True), ("opaque", True)])
def test_local_comm_res_is_opaque(value: str, has: bool) -> None:
    assert parsed("llm.LocalCommRes", value).has_comm_res is has


# llm.LinkTotalTime, llm.LinkRetryCount


@pytest.mark.parametrize(("value", "seconds"), [("1", 1), ("0", DEFAULT_LINK_TIME_S), (str(2**31 - 1), 2**31 - 1)])
def test_link_total_time(value: str, seconds: int) -> None:
    assert parsed("llm.LinkTotalTime", value).link_total_time_s == seconds


@pytest.mark.parametrize("value", [str(2**31), "-1", "", "a", "1.5", TOO_LONG])
def test_link_total_time_is_an_int32(value: str) -> None:
    refused("llm.LinkTotalTime", value)


@pytest.mark.parametrize("value", ["1", "100", "007"])
def test_link_retry_count(value: str) -> None:
    assert parsed("llm.LinkRetryCount", value) == EngineOptions()


@pytest.mark.parametrize("value", ["0", "101", "-1", "", "a", TOO_LONG])
def test_link_retry_count_is_from_1_to_100(value: str) -> None:
    refused("llm.LinkRetryCount", value)


# llm.RdmaTrafficClass, llm.RdmaServiceLevel


@pytest.mark.parametrize("key", ["llm.RdmaTrafficClass", "llm.RdmaServiceLevel"])
def test_rdma_values_are_uint32(key: str) -> None:
    for value in ("0", "3", "100", "257", str(2**32 - 1)):
        assert parsed(key, value) == EngineOptions()
    for value in ("", "-1", "a", str(2**32), TOO_LONG):
        refused(key, value)


def test_rdma_values_of_hixl() -> None:
    for value in ("0", "4", "132", "252"):
        assert parsed("llm.RdmaTrafficClass", value, **HIXL).hixl
    for value in ("1", "133", "255", "256", "-4"):
        refused("llm.RdmaTrafficClass", value, **HIXL)
    for value in ("0", "4", "7"):
        assert parsed("llm.RdmaServiceLevel", value, **HIXL).hixl
    for value in ("8", "100", "-1"):
        refused("llm.RdmaServiceLevel", value, **HIXL)


# llm.GlobalResourceConfig


def test_global_resource_config_is_checked_with_hixl_only() -> None:
    for value in ("{", "[]", "5", "null"):
        assert parsed("llm.GlobalResourceConfig", value) == EngineOptions()
        refused("llm.GlobalResourceConfig", value, **HIXL)
    assert parsed("llm.GlobalResourceConfig", '{"a": {"b": 1}}', **HIXL).hixl


# Ours: llm.MaxRegisteredAddrs, llm.Paths, llm.HugePages, llm.VerifyTransfers


@pytest.mark.parametrize(("value", "limit"), [("1", 1), ("240", 240), ("65000", 65000)])
def test_max_registered_addrs(value: str, limit: int) -> None:
    assert parsed("llm.MaxRegisteredAddrs", value).max_registered_addrs == limit


@pytest.mark.parametrize("value", ["0", "65001", "-1", "", "a", TOO_LONG])
def test_max_registered_addrs_is_limited(value: str) -> None:
    refused("llm.MaxRegisteredAddrs", value)


@pytest.mark.parametrize(
    ("value", "paths"),
    [
        ("auto", PATHS),
        ("tcp", ("tcp",)),
        ("tcp,process_vm", ("tcp", "process_vm")),
        (" tcp , inprocess ", ("tcp", "inprocess")),
        ("inprocess,process_vm,mapped,nixl,tcp", PATHS),
    ],
)
def test_paths(monkeypatch: pytest.MonkeyPatch, value: str, paths: tuple[str, ...]) -> None:
    assert parsed("llm.Paths", value).paths == paths
    monkeypatch.setenv("LLM_DATADIST_PATHS", value)
    assert EngineOptions.parse(ROLE).paths == paths


BAD_PATHS = ["udp", "tcp,", ",tcp", "tcp,tcp", "auto,tcp", "TCP", "tcp;process_vm"]


@pytest.mark.parametrize("value", ["", " ", *BAD_PATHS])
def test_paths_that_are_none(value: str) -> None:
    error = expect(PI, lambda: parsed("llm.Paths", value))
    assert f"llm.Paths is {value!r}, it must be" in str(error)
    assert all(name in str(error) for name in ("auto", *PATHS))


@pytest.mark.parametrize("value", BAD_PATHS)
def test_paths_in_the_environment_that_are_none(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("LLM_DATADIST_PATHS", value)
    error = expect(PI, lambda: EngineOptions.parse(ROLE))
    assert f"LLM_DATADIST_PATHS is {value!r}" in str(error)


def test_an_empty_environment_variable_is_as_good_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_DATADIST_PATHS", "")
    monkeypatch.setenv("LLM_DATADIST_HUGE_PAGES", "")
    assert EngineOptions.parse(ROLE) == EngineOptions()


def test_the_option_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_DATADIST_PATHS", "no such path")
    assert parsed("llm.Paths", "tcp").paths == ("tcp",)


@pytest.mark.parametrize(("value", "wanted"), [("0", False), ("1", True)])
def test_huge_pages(monkeypatch: pytest.MonkeyPatch, value: str, wanted: bool) -> None:
    assert parsed("llm.HugePages", value).huge_pages is wanted
    monkeypatch.setenv("LLM_DATADIST_HUGE_PAGES", value)
    assert EngineOptions.parse(ROLE).huge_pages is wanted
    assert parsed("llm.HugePages", "01"[not wanted]).huge_pages is not wanted


NO_FLAGS = ["2", "True", "on", " 1", "01"]


@pytest.mark.parametrize("value", ["", *NO_FLAGS])
def test_huge_pages_is_0_or_1(value: str) -> None:
    refused("llm.HugePages", value)


@pytest.mark.parametrize("value", NO_FLAGS)
def test_huge_pages_in_the_environment_is_0_or_1(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("LLM_DATADIST_HUGE_PAGES", value)
    error = expect(PI, lambda: EngineOptions.parse(ROLE))
    assert f'LLM_DATADIST_HUGE_PAGES is {value!r}, it must be "0" or "1"' in str(error)


@pytest.mark.parametrize(("value", "wanted"), [("0", False), ("1", True)])
def test_verify_transfers(monkeypatch: pytest.MonkeyPatch, value: str, wanted: bool) -> None:
    assert parsed("llm.VerifyTransfers", value).verify_transfers is wanted
    monkeypatch.setenv("LLM_DATADIST_VERIFY_TRANSFERS", value)
    assert EngineOptions.parse(ROLE).verify_transfers is wanted
    assert parsed("llm.VerifyTransfers", "01"[not wanted]).verify_transfers is not wanted


@pytest.mark.parametrize("value", NO_FLAGS)
def test_verify_transfers_is_0_or_1(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    refused("llm.VerifyTransfers", value)
    monkeypatch.setenv("LLM_DATADIST_VERIFY_TRANSFERS", value)
    error = expect(PI, lambda: EngineOptions.parse(ROLE))
    assert f'LLM_DATADIST_VERIFY_TRANSFERS is {value!r}, it must be "0" or "1"' in str(error)


# Secret and TLS

SECRET = "sixteen bytes or more"


def revealed(options: EngineOptions) -> bytes | None:
    return options.secret.reveal() if options.secret is not None else None


def test_a_secret_comes_from_the_option_its_file_or_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    files = [tmp_path / "option", tmp_path / "environment"]
    for path in files:
        path.write_text(f"{SECRET} in the file of the {path.name}\n")
        path.chmod(0o600)
    assert EngineOptions.parse(ROLE).secret is None
    monkeypatch.setenv("LLM_DATADIST_SECRET_FILE", str(files[1]))
    assert revealed(EngineOptions.parse(ROLE)) == f"{SECRET} in the file of the environment".encode()
    monkeypatch.delenv("LLM_DATADIST_SECRET_FILE")
    monkeypatch.setenv("LLM_DATADIST_SECRET", SECRET)
    assert revealed(EngineOptions.parse(ROLE)) == SECRET.encode()
    assert revealed(parsed("llm.SecretFile", str(files[0]))) == f"{SECRET} in the file of the option".encode()
    assert revealed(parsed("llm.Secret", SECRET + "!")) == f"{SECRET}!".encode()


def test_options_do_not_show_their_secret() -> None:
    assert SECRET not in repr(parsed("llm.Secret", SECRET))
    assert SECRET not in str(dataclasses.asdict(parsed("llm.Secret", SECRET)))


@pytest.mark.parametrize("value", ["", "too short", "x" * 5000])
def test_what_is_no_secret_is_refused_and_not_told(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    for key in ("llm.Secret", "LLM_DATADIST_SECRET"):
        if key.isupper():
            monkeypatch.setenv(key, value)
        error = expect(PI, lambda key=key: EngineOptions.parse(ROLE | ({} if key.isupper() else {key: value})))
        assert f"option {key} is hidden here: it has {len(value)} bytes" in str(error)
        assert not value or value not in str(error)


def test_a_secret_of_the_wrong_type_is_not_told() -> None:
    error = expect(TypeError, lambda: EngineOptions.parse(ROLE | {"llm.Secret": b"itself"}))  # type: ignore[dict-item]
    assert "itself" not in str(error)


def test_two_secrets_are_one_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    error = expect(PI, lambda: parsed("llm.Secret", SECRET, **{"llm.SecretFile": "/run/secret"}))
    assert "llm.Secret and llm.SecretFile are both set; set one of them" in str(error)
    monkeypatch.setenv("LLM_DATADIST_SECRET", SECRET)
    monkeypatch.setenv("LLM_DATADIST_SECRET_FILE", "/run/secret")
    expect(PI, lambda: EngineOptions.parse(ROLE), match="LLM_DATADIST_SECRET and LLM_DATADIST_SECRET_FILE are both set")


def test_a_secret_file_that_cannot_be_read_is_named() -> None:
    error = expect(PI, lambda: parsed("llm.SecretFile", "/nowhere/secret"))
    assert "option llm.SecretFile is '/nowhere/secret': No such file or directory" in str(error)


def test_tls_files(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"llm.TlsCert": "cert", "llm.TlsKey": "key", "llm.TlsCa": "ca"}
    assert EngineOptions.parse(ROLE | files).tls == TlsFiles("cert", "key", "ca")
    for name in ("CERT", "KEY", "CA"):
        monkeypatch.setenv(f"LLM_DATADIST_TLS_{name}", f"{name} of the environment")
    of_environment = TlsFiles("CERT of the environment", "KEY of the environment", "CA of the environment")
    assert EngineOptions.parse(ROLE).tls == of_environment
    assert EngineOptions.parse(ROLE | files).tls == TlsFiles("cert", "key", "ca")


@pytest.mark.parametrize(("value", "wanted"), [("0", False), ("1", True)])
def test_insecure_remote(monkeypatch: pytest.MonkeyPatch, value: str, wanted: bool) -> None:
    assert parsed("llm.AllowInsecureRemote", value).allow_insecure_remote is wanted
    monkeypatch.setenv("LLM_DATADIST_ALLOW_INSECURE_REMOTE", value)
    assert EngineOptions.parse(ROLE).allow_insecure_remote is wanted
    assert parsed("llm.AllowInsecureRemote", "01"[not wanted]).allow_insecure_remote is not wanted


@pytest.mark.parametrize("value", ["", *NO_FLAGS])
def test_insecure_remote_is_0_or_1(value: str) -> None:
    refused("llm.AllowInsecureRemote", value)


def test_the_dictionary_is_not_changed() -> None:
    options = ROLE | HIXL | {"llm.MemPoolConfig": '{"memory_size": 65536}'}
    before = dict(options)
    EngineOptions.parse(options)
    assert options == before
