"""The options of ``Initialize`` and ``SetRole``: from the C++ names to the engine's."""

from __future__ import annotations

import ipaddress
import json
from typing import TYPE_CHECKING, Final

from llm_datadist.engine import EngineOptions
from llm_datadist.native.statuses import refuse
from llm_datadist.utils.numbers import small_number

if TYPE_CHECKING:
    from collections.abc import Mapping

LISTEN_IP_INFO: Final = "llm.ListenIpInfo"
DEVICE_ID: Final = "llm.DeviceId"
SYNC_CACHE_WAIT_TIME: Final = "llm.SyncKvCacheWaitTime"
TRANSFER_BACKEND: Final = "llm.TransferBackend"
LOCAL_COMM_RES: Final = "llm.LocalCommRes"

_ROLES: Final = {1: "Prompt", 2: "Decoder", 3: "Mix"}
_PASSED_ON: Final = (
    SYNC_CACHE_WAIT_TIME,
    TRANSFER_BACKEND,
    LOCAL_COMM_RES,
    "llm.GlobalResourceConfig",
    "llm.MemPoolConfig",
    "llm.HostMemPoolConfig",
    "llm.Paths",
    "llm.MaxRegisteredAddrs",
    "llm.HugePages",
    "llm.StrictConstraints",
    "llm.Metrics",
    "llm.VerifyTransfers",
    "llm.Secret",
    "llm.SecretFile",
    "llm.TlsCert",
    "llm.TlsKey",
    "llm.TlsCa",
    "llm.AllowInsecureRemote",
    "llm.HeartbeatIntervalMs",
    "llm.HeartbeatTimeoutMs",
    "llm.RdmaTrafficClass",
    "llm.RdmaServiceLevel",
    "llm.LinkTotalTime",
    "llm.LinkRetryCount",
)
_COMM_RES_VERSIONS: Final = ("1.0", "1.2", "1.3")
_INT32_MAX: Final = 2**31 - 1
_MAX_PORT: Final = 65_535

Address = tuple[str, int]


def role_name(role: int) -> str:
    """The engine's name of a role.

    Raises:
        RefusedError: LLM_PARAM_INVALID.
    """
    if role not in _ROLES:
        reason = f"role {role} is none of 1 (prompt), 2 (decoder), 3 (mix)"
        raise refuse(reason)
    return _ROLES[role]


def engine_options(role: int, options: Mapping[str, str]) -> EngineOptions:
    """Check the options of ``Initialize``; unknown keys are ignored. Peers can always reach the caches.

    Raises:
        RefusedError, LLMException: LLM_PARAM_INVALID.
    """
    effective = {"llm.Role": role_name(role), "llm.EnableRemoteCacheAccessible": "1"}
    effective["ge.exec.deviceId"] = _device(options.get(DEVICE_ID))
    listen = listen_address(options)
    if listen is not None:
        effective.update({"llm.ListenIp": listen[0], "llm.ListenPort": str(listen[1])})
    effective.update({key: options[key] for key in _PASSED_ON if key in options})
    wait = options.get(SYNC_CACHE_WAIT_TIME)
    if wait is not None and small_number(wait) is None:
        reason = f"option {SYNC_CACHE_WAIT_TIME} is {wait!r}: write milliseconds as digits, like '1000'"
        raise refuse(reason)
    parsed = EngineOptions.parse(effective)
    if parsed.hixl:
        if listen is None:
            reason = f"option {LISTEN_IP_INFO} is needed with the transfer backend hixl"
            raise refuse(reason)
        check_comm_res(options)
    return parsed


def check_comm_res(options: Mapping[str, str]) -> None:
    """Look at ``llm.LocalCommRes``, if it is given.

    Raises:
        RefusedError: LLM_PARAM_INVALID.
    """
    text = options.get(LOCAL_COMM_RES)
    if not text:
        return
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict) or parsed.get("version", "1.3") not in _COMM_RES_VERSIONS:
        reason = f"option {LOCAL_COMM_RES} must be a JSON object of version {' or '.join(_COMM_RES_VERSIONS)}"
        raise refuse(reason)


def listen_address(options: Mapping[str, str]) -> Address | None:
    """Where to listen: ``ip:port`` or ``[ipv6]:port``; None if the option is not there.

    Raises:
        RefusedError: LLM_PARAM_INVALID.
    """
    text = options.get(LISTEN_IP_INFO)
    if text is None:
        return None
    host, _, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    number = small_number(port)
    if not is_ip(host) or (":" in host) != bracketed or number is None or number > _MAX_PORT:
        reason = f"option {LISTEN_IP_INFO} is {text!r}: write '192.168.1.2:26000' or '[fd00::2]:26000'"
        raise refuse(reason)
    return host, number


def is_ip(text: str) -> bool:
    """Whether this is an IPv4 or IPv6 literal."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _device(text: str | None) -> str:
    number = None if text is None else small_number(text)
    if text is None or number is None or number > _INT32_MAX:
        reason = f"option {DEVICE_ID} is {text!r}: it must be one device number, like '0'"
        raise refuse(reason)
    return text
