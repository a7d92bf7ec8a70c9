"""What a program sets before ``LLMDataDist.init`` and passes to ``link_clusters``: roles, options, addresses."""

from __future__ import annotations

import ipaddress
import json
import socket
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar, cast, overload

from llm_datadist.status import raise_if_false
from llm_datadist.utils import utils

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Address: TypeAlias = tuple[int | str | None, int]

_T = TypeVar("_T")
_MAX_PORT = utils.UINT16_MAX


class LLMRole(IntEnum):
    """What a process does with KV caches. Transfers work the same way in every role."""

    PROMPT = 1
    DECODER = 2
    MIX = 3

    def __str__(self) -> str:
        return f"LLMRole.{self.name}"

    def __format__(self, spec: str) -> str:
        return int.__format__(self, spec) if spec else str(self)


# ---------------------------------------------------------------- addresses


@overload
def trans_str_ip(ip: str) -> int | str: ...
@overload
def trans_str_ip(ip: _T) -> _T: ...
def trans_str_ip(ip: object) -> object:
    """The stored form of an IP literal.

    IPv4, in every form ``inet_aton`` takes, becomes an int whose little-endian bytes are the address: "127.0.0.1" is
    16777343.
    IPv6, with or without brackets and scope id, becomes its canonical text. Anything but a str is returned unchanged.

    Raises:
        RuntimeError: the text is no IP literal.
    """
    if not isinstance(ip, str):
        return ip
    text = ip[1:-1] if ip.startswith("[") and ip.endswith("]") else ip
    try:
        if ":" in text:
            return str(ipaddress.IPv6Address(text))
        if text == ip and not any(map(str.isspace, ip)):  # inet_aton itself ignores what follows a space
            return int.from_bytes(socket.inet_aton(ip), "little")
    except (OSError, ValueError):
        pass
    message = f"ip {ip!r} is not an IP address: pass a literal like '192.168.1.2' or 'fd00::2'"
    raise RuntimeError(message)


def ip_text(ip: object) -> str:
    """The literal of a stored address: the inverse of :func:`trans_str_ip`.

    Raises:
        TypeError: not an unsigned 32-bit int and not a str.
    """
    if isinstance(ip, str):
        return ip
    if isinstance(ip, int) and 0 <= ip <= utils.UINT32_MAX:
        return socket.inet_ntoa(int(ip).to_bytes(4, "little"))
    message = f"ip only support a literal or its unsigned 32-bit little-endian int, but got {ip!r}"
    raise TypeError(message)


def parse_listen_ip_info(listen_ip_info: str) -> tuple[str, int]:
    """Split ``"192.168.1.2:26000"`` or ``"[fd00::2]:26000"`` into host (without brackets) and port.

    Port 0 lets the system choose. The host is not looked at: to listen on it fails if it is no address of this machine.

    Raises:
        TypeError: not a str.
        AttributeError: None.
        ValueError: the port is not a number.
        LLMException: LLM_PARAM_INVALID: not exactly one host and one port, an empty host, a port outside 0..65535.
    """
    utils.require("listen_ip_info", listen_ip_info, "a str like '192.168.1.2:26000'")
    utils.check_isinstance("listen_ip_info", listen_ip_info, str)
    host, port = _split_host_port(listen_ip_info)
    try:
        number = int(port)
    except ValueError:
        message = f"port {port!r} of listen_ip_info {listen_ip_info!r} is not a number: write '192.168.1.2:26000'"
        raise ValueError(message) from None
    raise_if_false(
        0 <= number <= _MAX_PORT,
        "port {} of listen_ip_info {!r} is outside [0, {}]: choose one in it, 0 lets the system choose",
        number,
        listen_ip_info,
        _MAX_PORT,
    )
    return host, number


def _split_host_port(text: str) -> tuple[str, str]:
    example = "write '192.168.1.2:26000', or '[fd00::2]:26000' for IPv6"
    if text.startswith("["):
        host, bracket, port = text[1:].partition("]:")
        well_formed = bool(bracket) and _is_ipv6(host)
    else:
        host, colon, port = text.partition(":")
        well_formed = bool(colon) and bool(host) and ":" not in port
    raise_if_false(well_formed, "listen_ip_info {!r} is not one host and one port: {}", text, example)
    return host, port


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


# ---------------------------------------------------------------- options


class _Option(Generic[_T]):
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
    def __get__(self, config: None, owner: type) -> _Option[_T]: ...
    @overload
    def __get__(self, config: LlmConfig, owner: type) -> _T: ...
    def __get__(self, config: LlmConfig | None, owner: type) -> _Option[_T] | _T:
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


def _text(name: str, value: str | None) -> str | None:
    utils.check_isinstance(name, value, str)
    return value


def _hidden_text(name: str, value: str | None) -> str | None:
    if value is not None and not isinstance(value, str):
        message = f"{name} only support a str, but got a {type(value).__name__}"  # not the value: it may be the secret
        raise TypeError(message)
    return value


def _flag(name: str, value: bool | None) -> bool | None:  # noqa: FBT001 - the value of the property
    utils.check_isinstance(name, value, bool)
    return value


def _uint32(name: str, value: int | None) -> int | None:
    utils.check_uint32(name, cast("int", value))
    return value


def _optional_int(name: str, value: int | None) -> int | None:
    utils.check_isinstance(name, value, int)
    return value


def _number_in(low: float, high: float, kind: type) -> Callable[[str, Any], Any]:
    def check(name: str, value: float) -> float:
        utils.check_isinstance(name, value, kind, allow_none=False)
        raise_if_false(low <= value <= high, "{} must be in [{}, {}], but got {}", name, low, high, value)
        return value

    return check


def _device_id(name: str, value: int | list[int] | tuple[int, ...]) -> int | list[int] | tuple[int, ...]:
    utils.check_isinstance(name, value, (list, tuple, int), allow_none=False)
    ids = [value] if isinstance(value, int) else value
    raise_if_false(ids, "{} is empty: give one device id", name)
    for each in ids:
        utils.check_isinstance(f"element of {name}", each, int, allow_none=False)
        raise_if_false(each >= 0, "{} must not be negative, but got {}", name, value)
        utils.check_int32(name, each)
    return value


def _device_entries(value: int | list[int] | tuple[int, ...] | None) -> dict[str, str]:
    ids = [str(int(each)) for each in (value if isinstance(value, (list, tuple)) else [cast("int", value)])]
    return {"ge.session_device_id": ids[0], "ge.exec.deviceId": ";".join(ids)}


def _timeout(name: str, value: int | str) -> int | str:
    utils.check_isinstance(name, value, (int, str), allow_none=False)
    if isinstance(value, str):
        raise_if_false(
            value.isascii() and value.isdecimal(), "{} must be a number of milliseconds, but got {!r}", name, value
        )
    raise_if_false(int(value) > 0, "{} must be at least 1 ms, but got {}", name, value)
    utils.check_int32(name, int(value))
    return value


def _str_dict(name: str, value: dict[str, str]) -> dict[str, str]:
    utils.check_isinstance(name, value, dict)
    utils.check_dict(name, value, str, str)
    return value


def _cluster_info(name: str, value: str) -> str:
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


_Text: TypeAlias = _Option[str | None]
_Flag: TypeAlias = _Option[bool | None]


class LlmConfig:
    """The options of one :class:`LLMDataDist`: set properties, then pass ``generate_options()`` to ``init``.

    A setter refuses another type with TypeError, and a wrong value with LLMException (LLM_PARAM_INVALID) or, where the
    value must fit an integer type, ValueError. A property that was never set reads as its default and writes no option
    (only ``mem_utilization`` always does). Unknown attributes may be set and are ignored. ``LLMConfig`` is the same
    class.
    """

    ge_options: _Option[dict[str, str]] = _Option(
        dict, _str_dict, {}, "dict of str to str: raw options. A named property wins over the same key here."
    )
    device_id: _Option[int | list[int] | tuple[int, ...] | None] = _Option(
        _device_entries,
        _device_id,
        None,
        "Device to use, or a list or tuple of ids, of which init takes only one; 0 if not set.",
    )
    sync_kv_timeout: _Option[int | str | None] = _Option(
        "llm.SyncKvCacheWaitTime",
        _timeout,
        None,
        "Milliseconds (int, or str of digits) that bound each pull, push and layer-wise step; 1000 if not set.",
    )
    listen_ip_info: _Text = _Option(
        "llm.listenIpInfo",
        _text,
        "",
        "Where to listen for peers, like '192.168.1.2:26000' or '[fd00::2]:26000'; port 0: the system chooses.",
        skip_empty=True,
    )
    deploy_res_path: _Text = _Option("llm.deployResPath", _text, "", "Accepted, not used.", skip_empty=True)
    buf_pool_cfg: _Text = _Option("llm.BufPoolCfg", _text, "", "Accepted, not used.", skip_empty=True)
    mem_pool_cfg: _Text = _Option(
        "llm.MemPoolConfig",
        _text,
        "",
        'Pool of allocate_cache on DEVICE, as JSON: {"memory_size": bytes, "page_shift": 10 to 30, default 16}.',
        skip_empty=True,
    )
    host_mem_pool_cfg: _Text = _Option(
        "llm.HostMemPoolConfig", _text, "", "As mem_pool_cfg, for caches placed on HOST.", skip_empty=True
    )
    enable_cache_manager: _Flag = _Option(
        "llm.EnableCacheManager",
        _flag,
        False,  # noqa: FBT003 - the default of the property
        "init needs it: set it to True, or set local_comm_res, which implies it (not shown when read here).",
    )
    enable_remote_cache_accessible: _Flag = _Option(
        "llm.EnableRemoteCacheAccessible",
        _flag,
        False,  # noqa: FBT003 - the default of the property
        "Peers address each other's caches directly: needed for push; both sides of a link must agree. "
        "Implied by local_comm_res (not shown when read here).",
    )
    link_total_time: _Option[int] = _Option(
        "llm.LinkTotalTime",
        _number_in(0, utils.UINT32_MAX, int),
        0,
        "Seconds within which a link of link() becomes OK or FAILED; 0 is 120.",
    )
    link_retry_count: _Option[int] = _Option(
        "llm.LinkRetryCount",
        _number_in(1, 100, int),
        1,
        "1 to 100; accepted, not used: link() tries to reach a peer again until link_total_time is over.",
    )
    rdma_traffic_class: _Option[int | None] = _Option(
        "llm.RdmaTrafficClass",
        _uint32,
        None,
        "Unsigned 32 bits; accepted, not used. With 'hixl' it must be a multiple of 4 up to 255.",
    )
    rdma_service_level: _Option[int | None] = _Option(
        "llm.RdmaServiceLevel", _uint32, None, "Unsigned 32 bits; accepted, not used. With 'hixl' it must be at most 7."
    )
    local_comm_res: _Text = _Option(
        "llm.LocalCommRes",
        _text,
        "",
        "Once set, even to '', init turns enable_cache_manager and enable_remote_cache_accessible on if not set.",
    )
    transfer_backend: _Text = _Option(
        "llm.TransferBackend",
        _text,
        "",
        "'hixl', or do not set it: init refuses anything else, also ''. With 'hixl' each side makes its own link, "
        "addresses are not needed to unlink, and there are no rank tables.",
    )
    global_resource_config: _Text = _Option(
        "llm.GlobalResourceConfig", _text, "", "Accepted, not used. With 'hixl' it must be a JSON object."
    )
    mem_utilization: _Option[float] = _Option(
        "llm.MemoryUtilization", _number_in(0.0, 1.0, float), 0.95, "0.0 to 1.0; accepted, not used."
    )
    enable_switch_role: _Flag = _Option(
        "llm.EnableSwitchRole",
        _flag,
        False,  # noqa: FBT003 - the default of the property
        "Accepted; switch_role works without it.",
        skip_empty=True,
    )
    output_max_size: _Option[int | None] = _Option("llm.OutputMaxSize", _optional_int, None, "Accepted, not used.")
    cluster_info: _Option[str] = _Option(
        "llm.ClusterInfo",
        _cluster_info,
        "",
        "JSON object; accepted, not used. Its listen_ip_info addresses are stored as trans_str_ip gives them.",
        skip_empty=True,
    )
    max_registered_addrs: _Option[int] = _Option(
        "llm.MaxRegisteredAddrs",
        _number_in(1, 65000, int),
        240,
        "How many tensor addresses register_cache and register_blocks_cache may hold at a time, 1 to 65000.",
    )
    allow_multiple_instances: _Flag = _Option(
        "llm.AllowMultipleInstances",
        _flag,
        False,  # noqa: FBT003 - the default of the property
        "Whether init may succeed although another LLMDataDist of this process is initialised.",
    )
    paths: _Text = _Option(
        "llm.Paths",
        _text,
        None,
        "Transfer paths: 'auto', or a comma list, the preferred first. None: as LLM_DATADIST_PATHS says, else auto.",
    )

    huge_pages: _Flag = _Option(
        "llm.HugePages",
        _flag,
        True,  # noqa: FBT003 - the default of the property
        "Whether memory of caches is moved into huge pages, which can double the speed of copies on one host. "
        "Registering may take longer by 1 s and 0.5 s a GiB. None: as LLM_DATADIST_HUGE_PAGES says, else True.",
    )
    metrics: _Flag = _Option(
        "llm.Metrics",
        _flag,
        False,  # noqa: FBT003 - the default of the property
        "Whether transfers are counted and timed, for LLMDataDist.metrics() and exporters; costs about a microsecond "
        "each. None: as LLM_DATADIST_METRICS says, else False.",
    )
    verify_transfers: _Flag = _Option(
        "llm.VerifyTransfers",
        _flag,
        False,  # noqa: FBT003 - the default of the property
        "Whether the bytes of both sides are compared after each transfer that this side asks for, by digests; needs "
        "the extra 'verify' on both. None: as LLM_DATADIST_VERIFY_TRANSFERS says, else False.",
    )

    strict_constraints: _Flag = _Option(
        "llm.StrictConstraints",
        _flag,
        False,  # noqa: FBT003 - the default of the property
        "Whether documented constraints of the original that this library does not have are errors, too: for programs "
        "that will be deployed there. docs/compatibility.md lists them.",
    )

    secret: _Text = _Option(
        "llm.Secret", _hidden_text, None, "Secret, 16 bytes or more, that peers must know, too; rather use secret_file."
    )
    secret_file: _Text = _Option(
        "llm.SecretFile", _text, None, "File that holds the secret. None: secret, LLM_DATADIST_SECRET[_FILE], or none."
    )
    tls_cert: _Text = _Option(
        "llm.TlsCert", _text, None, "PEM file: certificate for TLS 1.3. None: LLM_DATADIST_TLS_CERT, ..., or no TLS."
    )
    tls_key: _Text = _Option("llm.TlsKey", _text, None, "PEM file: key of tls_cert, without a password.")
    tls_ca: _Text = _Option("llm.TlsCa", _text, None, "PEM file: certificates of the CA that peers must be of, too.")
    allow_insecure_remote: _Flag = _Option(
        "llm.AllowInsecureRemote",
        _flag,
        False,  # noqa: FBT003 - the default of the property
        "Link other hosts with neither secret nor TLS. None: LLM_DATADIST_ALLOW_INSECURE_REMOTE, or False.",
    )
    heartbeat_interval_ms: _Option[int] = _Option(
        "llm.HeartbeatIntervalMs",
        _number_in(0, utils.INT32_MAX, int),
        10_000,
        "Milliseconds of silence after which a linked peer is asked for a sign of life; 0: never.",
    )
    heartbeat_timeout_ms: _Option[int] = _Option(
        "llm.HeartbeatTimeoutMs",
        _number_in(1, utils.INT32_MAX, int),
        60_000,
        "Milliseconds without that sign of life after which the link is given up. A background thread of the peer "
        "answers, so a busy interpreter does not matter, but one that an extension holds for so long does.",
    )

    def __init__(self) -> None:
        self.stored: dict[str, Any] = {}
        self._generated: dict[str, str] = {}
        self.ge_options = {}
        self.mem_utilization = 0.95

    @property
    def options(self) -> dict[str, str]:
        """The dict that :meth:`generate_options` fills and returns."""
        return self._generated

    def generate_options(self) -> dict[str, str]:
        """Bring the option dict up to date and return it: the same dict each time.

        A key stays in it once written, even if its property is set to None later.
        """
        for option in vars(LlmConfig).values():
            if isinstance(option, _Option):
                self._generated.update(option.entries(self))
        return self._generated

    def gen_options(self) -> dict[str, str]:
        """As :meth:`generate_options`."""
        return self.generate_options()


LLMConfig = LlmConfig


class LLMClusterInfo:
    """One peer, for ``link_clusters`` and ``unlink_clusters``."""

    def __init__(self) -> None:
        self._remote_cluster_id: int | None = None
        self._remote_role_type: LLMRole | int | None = None
        self._local_ip_info_list: list[Address] = []
        self._remote_ip_info_list: list[Address] = []

    @property
    def remote_cluster_id(self) -> int | None:
        """Cluster id of the peer, unsigned 64 bits; must be set. TypeError or ValueError when it is not one."""
        return self._remote_cluster_id

    @remote_cluster_id.setter
    def remote_cluster_id(self, value: int) -> None:
        utils.check_uint64("remote_cluster_id", value)
        self._remote_cluster_id = value

    @property
    def remote_role_type(self) -> LLMRole | int | None:
        """Role of the peer; accepted, not used. TypeError unless LLMRole, int or None."""
        return self._remote_role_type

    @remote_role_type.setter
    def remote_role_type(self, value: LLMRole | int | None) -> None:
        utils.check_isinstance("remote_role_type", value, (LLMRole, int))
        self._remote_role_type = value

    @property
    def local_ip_info_list(self) -> list[Address]:
        """The live list of (ip, port) of this side: ip as :func:`trans_str_ip` gives it."""
        return self._local_ip_info_list

    @property
    def remote_ip_info_list(self) -> list[Address]:
        """The live list of (ip, port) of the peer: ip as :func:`trans_str_ip` gives it."""
        return self._remote_ip_info_list

    def append_local_ip_info(self, ip: str | int, port: int) -> None:
        """Add an address of this side; see :meth:`append_remote_ip_info`. Port 0 is usual."""
        self._local_ip_info_list.append(_address(ip, port))

    def append_remote_ip_info(self, ip: str | int, port: int) -> None:
        """Add an address the peer listens on.

        Args:
            ip: an IPv4 or IPv6 literal, or the little-endian int of an IPv4 address.
            port: 0 to 65535.

        Raises:
            TypeError: wrong type of ip or port.
            ValueError: port out of range.
            RuntimeError: ip is text but no IP literal.
        """
        self._remote_ip_info_list.append(_address(ip, port))


def _address(ip: str | int, port: int) -> Address:
    utils.check_isinstance("ip", ip, (str, int))
    utils.check_uint16("port", port)
    return trans_str_ip(ip), port
