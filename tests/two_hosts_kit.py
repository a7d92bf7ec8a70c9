"""Two hosts, as far as the network goes: two network namespaces with a cable between them."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from net_helpers import WAIT_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_numbers = itertools.count()
CLONE_NEWNET = 0x40000000


class Host:
    """A network namespace with one address, besides loopback."""

    def __init__(self, name: str, ip: str) -> None:
        self.name = name
        self.ip = ip

    @property
    def enter(self) -> Callable[[], None]:
        """What a child has to do first to live there."""
        return functools.partial(enter, self.name)


def enter(name: str) -> None:
    """Move this process, which has one thread, into a network namespace."""
    fd = os.open(f"/run/netns/{name}", os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(fd, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
    os.close(fd)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=WAIT_S)


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """They reach each other, and nothing else."""
    if shutil.which("ip") is None:
        pytest.skip("there is no ip command")
    number = f"{os.getpid()}-{next(_numbers)}"
    left, right = Host(f"datadist-{number}-a", "10.77.0.1"), Host(f"datadist-{number}-b", "10.77.0.2")
    with contextlib.ExitStack() as undo:
        for host in (left, right):
            try:
                _ip("netns", "add", host.name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"network namespaces are not permitted here: {error.stderr.decode().strip()}")
            undo.callback(_ip, "netns", "del", host.name)
        try:
            _ip("link", "add", "eth0", "netns", left.name, "type", "veth", "peer", "name", "eth0", "netns", right.name)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"a cable between them is not permitted here: {error.stderr.decode().strip()}")
        for host in (left, right):
            _ip("-n", host.name, "address", "add", f"{host.ip}/24", "dev", "eth0")
            _ip("-n", host.name, "address", "add", f"fd00:77::{host.ip[-1]}/64", "dev", "eth0", "nodad")
            _ip("-n", host.name, "link", "set", "eth0", "up")
            _ip("-n", host.name, "link", "set", "lo", "up")
        yield left, right
