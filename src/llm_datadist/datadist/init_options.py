"""The option dictionary of ``init``: what must be there, and what options imply for each other."""

from __future__ import annotations

from llm_datadist.configs import LLMRole, parse_listen_ip_info
from llm_datadist.status import raise_if_false, raise_if_true
from llm_datadist.utils import utils

_ROLE_NAMES = {LLMRole.PROMPT: "Prompt", LLMRole.DECODER: "Decoder", LLMRole.MIX: "Mix"}


def role_name(role: LLMRole) -> str:
    """The name of a role among the options.

    Raises:
        KeyError: None.
    """
    if role not in _ROLE_NAMES:
        message = f"role {role!r}: pass an LLMRole"
        raise KeyError(message)
    return _ROLE_NAMES[role]


def effective_options(options: dict[str, str], role: LLMRole) -> dict[str, str]:
    """A copy of the options with what they imply written out.

    Raises:
        TypeError, AttributeError, ValueError, LLMException, ModuleNotFoundError: as :meth:`LLMDataDist.init`.
    """
    utils.check_isinstance("options", options, dict)
    utils.require("options", options, "the dict of LLMConfig.generate_options()")
    _check_flow_graph_memory(options.get("ge.flowGraphMemMaxSize"))
    effective = {**options, "llm.Role": role_name(role)}
    if "llm.LocalCommRes" in effective:
        effective.setdefault("llm.EnableCacheManager", "1")
        effective.setdefault("llm.EnableRemoteCacheAccessible", "1")
    managed = effective.get("llm.EnableCacheManager") == "1"
    raise_if_true(
        "llm.LocalCommRes" in effective and not managed,
        "option llm.LocalCommRes needs llm.EnableCacheManager to be '1', but it is {!r}",
        effective.get("llm.EnableCacheManager"),
    )
    if "llm.TransferBackend" in effective:
        _check_transfer_backend(effective, managed=managed)
    if not managed:
        message = (
            "without the cache manager LLMDataDist needs the package llm_datadist_v1, which this library does not use: "
            "set LLMConfig.enable_cache_manager = True (option llm.EnableCacheManager = '1') before generate_options()"
        )
        raise ModuleNotFoundError(message, name="llm_datadist_v1")
    if "llm.listenIpInfo" in effective:
        host, port = parse_listen_ip_info(effective["llm.listenIpInfo"])
        effective.update({"llm.ListenIp": host, "llm.ListenPort": str(port)})
    return effective


def _check_flow_graph_memory(size: str | None) -> None:
    utils.check_isinstance("ge.flowGraphMemMaxSize", size, str)
    if size is not None:
        raise_if_true("," in size, "option ge.flowGraphMemMaxSize must be one number, but is {!r}", size)
        raise_if_false(
            size.isascii() and size.isdecimal(), "option ge.flowGraphMemMaxSize must be digits, but is {!r}", size
        )


def _check_transfer_backend(effective: dict[str, str], *, managed: bool) -> None:
    text = "option llm.TransferBackend needs {} to be {}: set LLMConfig.{}"
    raise_if_false(managed, text, "llm.EnableCacheManager", "'1'", "enable_cache_manager = True")
    accessible = effective.setdefault("llm.EnableRemoteCacheAccessible", "1")
    remedy = "enable_remote_cache_accessible = True"
    raise_if_false(accessible == "1", text, "llm.EnableRemoteCacheAccessible", "'1'", remedy)
    raise_if_false("llm.listenIpInfo" in effective, text, "llm.listenIpInfo", "given", "listen_ip_info = 'ip:port'")
