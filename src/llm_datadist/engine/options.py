"""The options that ``init`` gets, checked and turned into values with units in their names."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from msgspec import Meta

from llm_datadist.engine.errors import invalid
from llm_datadist.memory import digests
from llm_datadist.net.security import TlsFiles
from llm_datadist.paths import registry
from llm_datadist.paths.nixl import Nixl
from llm_datadist.paths.nixl_options import DEFAULT_BACKEND, NixlOptions
from llm_datadist.utils import environment
from llm_datadist.utils.numbers import small_number
from llm_datadist.utils.secret import Secret

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llm_datadist.status import LLMException

DEFAULT_MAX_ADDRS: Final = 240
DEFAULT_SYNC_TIMEOUT_MS: Final = 1000
DEFAULT_LINK_TIME_S: Final = 120
DEFAULT_HEARTBEAT_INTERVAL_MS: Final = 10_000
DEFAULT_HEARTBEAT_TIMEOUT_MS: Final = 60_000
DEFAULT_SWITCH_INTERVAL_US: Final = 500
_MAX_SWITCH_INTERVAL_US: Final = 1_000_000
_MAX_ADDRS_LIMIT: Final = 65_000
_INT32_MAX: Final = 2**31 - 1
_UINT32_MAX: Final = 2**32 - 1
_MAX_PORT: Final = 65_535
_MAX_HOST_POOL: Final = 20 << 30
_SECRET: Final = "llm.Secret"  # noqa: S105 - the name of the option
_HIDDEN: Final = "hidden here"


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """A memory pool: ``size_bytes`` in pages of ``1 << page_shift`` bytes."""

    size_bytes: int
    page_shift: int


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Everything the engine can be told at ``init``."""

    remote_accessible: bool = False
    """One-sided mode: peers find caches in a published catalogue. Both peers of a link must agree."""
    sync_timeout_ms: int = DEFAULT_SYNC_TIMEOUT_MS
    listen: tuple[str, int] | None = None
    hixl: bool = False
    has_comm_res: bool = False
    device_id: int = 0
    link_total_time_s: int = DEFAULT_LINK_TIME_S
    device_pool: PoolOptions | None = None
    host_pool: PoolOptions | None = None
    max_registered_addrs: int = DEFAULT_MAX_ADDRS
    paths: tuple[str, ...] = field(default_factory=registry.names)
    huge_pages: bool = True
    """Whether the kernel is asked for huge pages under the memory of caches."""
    strict_constraints: bool = False
    """Whether documented constraints of the original are errors."""
    metrics: bool = False
    """Whether transfers are counted."""
    verify_transfers: bool = False
    """Whether both sides' bytes are compared after each transfer that this side has asked for."""
    secret: Secret | None = None
    """What both sides of a link have to know."""
    tls: TlsFiles | None = None
    """Certificates; None is no TLS."""
    allow_insecure_remote: bool = False
    """Whether peers on other hosts are linked without a secret and without TLS."""
    heartbeat_interval_ms: int = DEFAULT_HEARTBEAT_INTERVAL_MS
    """After so long a silence a peer is asked for a sign of life; 0: never."""
    heartbeat_timeout_ms: int = DEFAULT_HEARTBEAT_TIMEOUT_MS
    """The link of a peer that gives none for so long is given up."""
    switch_interval_us: int = DEFAULT_SWITCH_INTERVAL_US
    """How long threads of this process wait for the interpreter before they get it; 0: as Python has it."""
    nixl: NixlOptions = field(default_factory=NixlOptions)
    """How NIXL is used, if it is."""

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> EngineOptions:
        """Check the option dictionary of ``init``; unknown keys are ignored.

        Raises:
            TypeError: a key or value is not a str.
            LLMException: LLM_PARAM_INVALID, naming the option, its value and what it should be.
        """
        for key, value in options.items():
            if not isinstance(key, str) or not isinstance(value, str):
                shown = _HIDDEN if key == _SECRET else repr(value)
                message = f"option {key!r} is {shown}: only support str keys and values"
                raise TypeError(message)
        reader = _Reader(options)
        reader.require("llm.Role")
        hixl = reader.choice("llm.TransferBackend", ("hixl",), default="") == "hixl"
        accessible = reader.choice("llm.EnableRemoteCacheAccessible", ("0", "1"), default="0") == "1"
        if hixl and not accessible:
            raise reader.error("llm.EnableRemoteCacheAccessible", '"1" with the transfer backend hixl')
        reader.number("llm.LinkRetryCount", 1, 100, default=1)
        strict = reader.choice("llm.StrictConstraints", ("0", "1"), default="0") == "1"
        _check_rdma(reader, strict=hixl or strict)
        if hixl:
            reader.json_object("llm.GlobalResourceConfig")
        parsed = cls(
            remote_accessible=accessible,
            sync_timeout_ms=reader.number("llm.SyncKvCacheWaitTime", 0, _INT32_MAX, default=DEFAULT_SYNC_TIMEOUT_MS),
            listen=_listen(reader),
            hixl=hixl,
            has_comm_res=bool(options.get("llm.LocalCommRes")),
            device_id=reader.number("ge.exec.deviceId", 0, _INT32_MAX, default=0),
            link_total_time_s=reader.number("llm.LinkTotalTime", 0, _INT32_MAX, default=0) or DEFAULT_LINK_TIME_S,
            device_pool=_pool(reader, "llm.MemPoolConfig"),
            host_pool=_pool(reader, "llm.HostMemPoolConfig"),
            max_registered_addrs=reader.number(
                "llm.MaxRegisteredAddrs", 1, _MAX_ADDRS_LIMIT, default=DEFAULT_MAX_ADDRS
            ),
            paths=_paths(reader)[0],
            strict_constraints=strict,
            huge_pages=_flag(reader, "llm.HugePages", "LLM_DATADIST_HUGE_PAGES", environment.huge_pages(), default="1"),
            metrics=_flag(reader, "llm.Metrics", "LLM_DATADIST_METRICS", environment.metrics(), default="0"),
            verify_transfers=_verify_transfers(reader),
            secret=_secret(reader),
            tls=_tls(reader),
            allow_insecure_remote=_flag(
                reader,
                "llm.AllowInsecureRemote",
                "LLM_DATADIST_ALLOW_INSECURE_REMOTE",
                environment.allow_insecure_remote(),
                default="0",
            ),
            heartbeat_interval_ms=reader.number(
                "llm.HeartbeatIntervalMs", 0, _INT32_MAX, default=DEFAULT_HEARTBEAT_INTERVAL_MS
            ),
            heartbeat_timeout_ms=reader.number(
                "llm.HeartbeatTimeoutMs", 1, _INT32_MAX, default=DEFAULT_HEARTBEAT_TIMEOUT_MS
            ),
            switch_interval_us=_switch_interval_us(reader),
        )
        parsed = replace(parsed, nixl=_nixl(reader, encrypted=parsed.tls is not None))
        if strict:
            _check_constraints(reader, parsed)
        return parsed


class _Reader:
    """Reads typed values out of the dictionary; every refusal has the same shape."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._options = options

    def error(self, key: str, wanted: str) -> LLMException:
        return _refused(key, self._options.get(key), wanted)

    def get(self, key: str) -> str | None:
        return self._options.get(key)

    def require(self, key: str) -> str:
        value = self._options.get(key)
        if value is None:
            raise self.error(key, "given")
        return value

    def choice(self, key: str, allowed: tuple[str, ...], default: str) -> str:
        value = self._options.get(key)
        if value is None:
            return default
        if value not in allowed:
            raise self.error(key, " or ".join(f'"{text}"' for text in allowed))
        return value

    def number(self, key: str, low: int, high: int, default: int) -> int:
        value = self._options.get(key)
        return default if value is None else _number(key, value, low, high)

    def json_object(self, key: str) -> dict[str, object] | None:
        value = self._options.get(key)
        if not value:
            return None
        try:
            parsed = json.loads(value)
        except (ValueError, RecursionError):
            parsed = None
        if not isinstance(parsed, dict):
            raise self.error(key, "a JSON object")
        return parsed


def _number(key: str, value: str, low: int, high: int) -> int:
    number = small_number(value)
    if number is None or not low <= number <= high:
        raise _refused(key, value, f"a whole number from {low} to {high}")
    return number


def _refused(key: str, value: str | None, wanted: str) -> LLMException:
    return invalid("init", f"option {key} is {value!r}, it must be {wanted}")


def _listen(reader: _Reader) -> tuple[str, int] | None:
    host = reader.get("llm.ListenIp")
    if host is None:
        return None
    reader.require("llm.ListenPort")
    return host, reader.number("llm.ListenPort", 0, _MAX_PORT, default=0)


class _PoolConfig(msgspec.Struct, frozen=True):
    memory_size: Annotated[int, Meta(gt=0, lt=2**62)]
    page_shift: Annotated[int, Meta(ge=10, le=30)] = 16


def _pool(reader: _Reader, key: str) -> PoolOptions | None:
    text = reader.get(key)
    if not text:
        return None
    wanted = (
        'a JSON object like {"memory_size": 67108864, "page_shift": 16}: page_shift from 10 to 30, one page or more'
    )
    try:
        config = msgspec.json.decode(text, type=_PoolConfig)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise reader.error(key, f"{wanted} ({error})") from error
    if config.memory_size < 1 << config.page_shift:
        raise reader.error(key, wanted)
    return PoolOptions(config.memory_size, config.page_shift)


def _paths(reader: _Reader) -> tuple[tuple[str, ...], bool]:
    """The permitted paths, and whether the user has named them."""
    key, text = "llm.Paths", reader.get("llm.Paths")
    if text is None:
        key, text = "LLM_DATADIST_PATHS", environment.paths() or "auto"
    names = tuple(name.strip() for name in text.split(","))
    if names == ("auto",):
        return registry.names(), False
    if not set(names) <= set(registry.names()) or len(set(names)) != len(names):
        raise _refused(key, text, f'"auto" or a comma list, in order of preference, of {", ".join(registry.names())}')
    return names, True


def _nixl(reader: _Reader, *, encrypted: bool) -> NixlOptions:
    paths, named = _paths(reader)
    backend = reader.get("llm.NixlBackend") or environment.nixl_backend() or DEFAULT_BACKEND
    key, text = "llm.NixlParams", reader.get("llm.NixlParams")
    if text is None:
        key, text = "LLM_DATADIST_NIXL_PARAMS", environment.nixl_params() or "{}"
    try:
        params = msgspec.json.decode(text, type=dict[str, str])
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise _refused(key, text, f'a JSON object of strings, as {{"num_workers": "2"}} ({error})') from error
    return NixlOptions(backend, tuple(sorted(params.items())), wanted=named and Nixl.name in paths, encrypted=encrypted)


def _flag(reader: _Reader, key: str, variable: str, fallback: str | None, *, default: str) -> bool:
    text = reader.get(key)
    if text is None:
        key, text = variable, fallback or default
    if text not in ("0", "1"):
        raise _refused(key, text, '"0" or "1"')
    return text == "1"


def _switch_interval_us(reader: _Reader) -> int:
    key, text = "llm.SwitchIntervalUs", reader.get("llm.SwitchIntervalUs")
    if text is None:
        key, text = "LLM_DATADIST_SWITCH_INTERVAL_US", environment.switch_interval_us()
    if text is None:
        return DEFAULT_SWITCH_INTERVAL_US
    return _number(key, text, 0, _MAX_SWITCH_INTERVAL_US)


def _check_constraints(reader: _Reader, options: EngineOptions) -> None:
    """What the original allows of values that it knows, too; see docs/compatibility.md."""
    why = "with strict constraints"
    if options.listen is not None and ":" in options.listen[0]:
        raise reader.error("llm.ListenIp", f"an IPv4 address {why}")
    if options.listen is not None and not options.listen[1]:
        raise reader.error("llm.ListenPort", f"from 1 to {_MAX_PORT} {why}")
    if options.max_registered_addrs > DEFAULT_MAX_ADDRS:
        raise reader.error("llm.MaxRegisteredAddrs", f"at most {DEFAULT_MAX_ADDRS} {why}")
    if options.host_pool is not None and options.host_pool.size_bytes > _MAX_HOST_POOL:
        raise reader.error("llm.HostMemPoolConfig", f"a pool of at most {_MAX_HOST_POOL} bytes {why}")
    if reader.get("llm.AllowMultipleInstances") == "1":
        raise reader.error("llm.AllowMultipleInstances", f'"0" {why}')


def _verify_transfers(reader: _Reader) -> bool:
    fallback = environment.verify_transfers()
    wanted = _flag(reader, "llm.VerifyTransfers", "LLM_DATADIST_VERIFY_TRANSFERS", fallback, default="0")
    if wanted and not digests.available():
        context = "llm.VerifyTransfers (LLMConfig.verify_transfers) is on, but the package xxhash is not installed"
        raise invalid("init", context, hint=f"{digests.INSTALL}, or turn it off")
    return wanted


def _secret(reader: _Reader) -> Secret | None:
    """The shared secret: from the option, its file, the environment, its file."""
    for key, file_key, text, path in (
        (_SECRET, "llm.SecretFile", reader.get(_SECRET), reader.get("llm.SecretFile")),
        ("LLM_DATADIST_SECRET", "LLM_DATADIST_SECRET_FILE", environment.secret(), environment.secret_file()),
    ):
        if text is not None and path is not None:
            raise invalid("init", f"{key} and {file_key} are both set", hint="set one of them")
        try:
            if text is not None:
                return Secret(text.encode())
            if path is not None:
                key = file_key  # noqa: PLW2901 - for the message
                return Secret.from_file(path)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            shown = _HIDDEN if path is None else repr(path)
            raise invalid("init", f"option {key} is {shown}: {reason}") from None
    return None


def _tls(reader: _Reader) -> TlsFiles | None:
    names = ("cert", "key", "ca")
    given = [reader.get(f"llm.Tls{name.capitalize()}") for name in names]
    if not any(given):
        given = [environment.tls_file(name) for name in names]
    if not any(given):
        return None
    cert, key, ca = given
    if not cert or not key or not ca:
        missing = ", ".join(f"tls_{name}" for name, path in zip(names, given, strict=True) if not path)
        hint = "give LLMConfig.tls_cert, tls_key and tls_ca (LLM_DATADIST_TLS_CERT, _KEY, _CA), or none of them"
        raise invalid("init", f"of the three files that TLS needs, {missing} is not given", hint=hint)
    return TlsFiles(cert, key, ca)


def _check_rdma(reader: _Reader, *, strict: bool) -> None:
    """Accepted for compatibility; only the hixl backend of the original restricts the values."""
    traffic = reader.number("llm.RdmaTrafficClass", 0, _UINT32_MAX, default=132)
    level = reader.number("llm.RdmaServiceLevel", 0, _UINT32_MAX, default=4)
    if strict and not (traffic <= 255 and traffic % 4 == 0):  # noqa: PLR2004 - the field has eight bits
        raise reader.error(
            "llm.RdmaTrafficClass", "a multiple of 4 from 0 to 255 with the transfer backend hixl, or strict"
        )
    if strict and level > 7:  # noqa: PLR2004 - the field has three bits
        raise reader.error("llm.RdmaServiceLevel", "from 0 to 7 with the transfer backend hixl, or strict")
