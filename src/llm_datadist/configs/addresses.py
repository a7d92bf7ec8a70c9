"""IP addresses as the original stores them, and the address to listen on."""

from __future__ import annotations

import ipaddress
import socket
from typing import TYPE_CHECKING, TypeVar, overload

from llm_datadist.status import raise_if_false
from llm_datadist.utils import utils

if TYPE_CHECKING:
    from typing import TypeAlias

    Address: TypeAlias = tuple[int | str | None, int]

_T = TypeVar("_T")
_MAX_PORT = utils.UINT16_MAX


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
