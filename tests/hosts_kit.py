"""Several hosts on one machine: network namespaces, with routers between them that can be shaped and cut.

``Network`` makes hosts and links; a test's peers run in them (``Network.process``). A host has a boot id of its own, as
another machine would, so the paths within one host are not for it. Everything is taken down by ``close``, whatever
happens, and what a killed run has left behind goes with the next one.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import secrets
import shutil
import subprocess
import tempfile
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from until import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from peers import Peers, Process

TIMEOUT_S = 20.0
_PREFIX = "llmdd"
_NEW_NET, _NEW_MOUNTS = 0x40000000, 0x00020000  # CLONE_NEWNET, CLONE_NEWNS
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18
_BOOT_ID = b"/proc/sys/kernel/random/boot_id"


def run(*command: str) -> str:
    """Its output; an error says what it complained of."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise OSError(done.returncode, f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


class Host:
    """One network namespace with a loopback interface."""

    def __init__(self, name: str, boot_id: Path) -> None:
        self.name = name
        self.boot_id = boot_id
        boot_id.write_text(f"{uuid.uuid4()}\n")
        run("ip", "netns", "add", name)
        self.ip("link", "set", "lo", "up")

    def ip(self, *command: str) -> str:
        return run("ip", "-n", self.name, *command)

    def tc(self, *command: str) -> str:
        return run("tc", "-n", self.name, *command)

    def sysctl(self, **settings: str) -> None:
        """Set ``net.ipv4`` settings of this namespace."""
        for name, value in settings.items():
            run("ip", "netns", "exec", self.name, "sysctl", "-qw", f"net.ipv4.{name}={value}")


def _mac_when_up(host: Host, interface: str) -> str:
    """The hardware address of an interface, once it takes packets: the kernel starts it some time after "up"."""

    def link() -> dict[str, str]:
        (found,) = json.loads(host.ip("-json", "link", "show", interface))
        return dict(found)

    until(lambda: link()["operstate"] == "UP")
    return link()["address"]


class Wire:
    """What connects a host to the router: interface ``inside`` at the host, ``outside`` at the router."""

    def __init__(self, host: Host, router: Host, number: int, inside: str) -> None:
        self.host, self.router, self.inside, self.outside = host, router, inside, f"to{number}"
        self.address, gateway = f"10.77.{number}.2", f"10.77.{number}.1"
        self.address6, gateway6 = f"fd77:{number}::2", f"fd77:{number}::1"
        self._subnets = (f"10.77.{number}.0/24", f"fd77:{number}::/64")
        host.ip("link", "add", inside, "type", "veth", "peer", "name", self.outside, "netns", router.name)
        ends = ((host, inside), (router, self.outside))
        for end, interface in ends:
            end.ip("link", "set", interface, "up")
        macs = [_mac_when_up(end, interface) for end, interface in ends]
        for (end, interface), four, six in zip(ends, (self.address, gateway), (self.address6, gateway6), strict=True):
            end.ip("address", "add", f"{four}/24", "dev", interface)
            end.ip("-6", "address", "add", f"{six}/64", "dev", interface, "nodad")
        # Nobody asks who has an address: on a busy machine the answer may come too late, which is "no route to host".
        for (end, interface), mac, *addresses in zip(
            ends, reversed(macs), (gateway, self.address), (gateway6, self.address6), strict=True
        ):
            for address in addresses:
                end.ip("neighbour", "replace", address, "lladdr", mac, "dev", interface, "nud", "permanent")
        host.ip("route", "add", "10.77.0.0/16", "via", gateway, "metric", str(number))
        host.ip("-6", "route", "add", "fd77::/16", "via", gateway6, "metric", str(number))

    def shape(self, rate: str, *, burst: str = "64kb") -> None:
        """Let no more than ``rate`` through in either direction, with a queue of up to a second."""
        for end, interface in ((self.host, self.inside), (self.router, self.outside)):
            end.tc("qdisc", "replace", "dev", interface, "root", "tbf", "rate", rate, "burst", burst, "latency", "1s")

    def unplug(self) -> None:
        """Both ends see that the cable has gone."""
        self.router.ip("link", "set", self.outside, "down")

    def plug(self) -> None:
        """Undo ``unplug``."""
        self.router.ip("link", "set", self.outside, "up")
        self.router.ip("-6", "address", "replace", f"fd77:{self.outside[2:]}::1/64", "dev", self.outside, "nodad")

    def cut(self) -> None:
        """The router drops what it should forward to this host, in silence: nobody sees anything."""
        self.router.ip("route", "replace", "blackhole", f"{self.address}/32")

    def heal(self) -> None:
        """Undo ``cut``."""
        self.router.ip("route", "del", "blackhole", f"{self.address}/32")


class Network:
    """Hosts around one router."""

    def __init__(self) -> None:
        """Make the router.

        Raises:
            OSError: that is not permitted, or not possible, here.
        """
        self._stem = f"{_PREFIX}-{os.getpid()}-{secrets.token_hex(3)}"
        self._hosts: list[Host] = []
        self._wires = 0
        self._files = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}-"))
        try:
            self.router = self.host("router")
            self.router.sysctl(ip_forward="1")
            run("ip", "netns", "exec", self.router.name, "sysctl", "-qw", "net.ipv6.conf.all.forwarding=1")
        except BaseException:
            self.close()
            raise

    def host(self, name: str) -> Host:
        """One more host, without a cable."""
        made = Host(f"{self._stem}-{name}", self._files / name)
        self._hosts.append(made)
        return made

    def wire(self, host: Host, interface: str = "eth0") -> Wire:
        """Connect a host to the router; the default route is that of its first cable."""
        self._wires += 1
        return Wire(host, self.router, self._wires, interface)

    def pair(self) -> tuple[Wire, Wire]:
        """Two more hosts, connected."""
        first, second = (self.wire(self.host(f"h{self._wires + number}")) for number in (1, 2))
        return first, second

    def close(self) -> None:
        """Remove everything; processes that still run in a host keep its namespace, but nothing else."""
        for host in self._hosts:
            with contextlib.suppress(OSError):
                run("ip", "netns", "delete", host.name)
        self._hosts.clear()
        shutil.rmtree(self._files, ignore_errors=True)


def process_in(peers: Peers, host: Host, *, permit: bool = True) -> Process:
    """A child process in a host; unless told otherwise it permits links to other hosts without protection."""
    return peers.process(functools.partial(enter, host.name, str(host.boot_id), permit=permit))


def enter(namespace: str, boot_id: str, *, permit: bool = True) -> None:
    """In a child, before it has threads: go to a host."""
    libc = ctypes.CDLL(None, use_errno=True)

    def check(result: int, what: str) -> None:
        if result:
            raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")

    with Path(f"/run/netns/{namespace}").open("rb") as file:
        check(libc.setns(file.fileno(), _NEW_NET), "setns")
    check(libc.unshare(_NEW_MOUNTS), "unshare")
    check(libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None), "mount")
    check(libc.mount(boot_id.encode(), _BOOT_ID, None, _MS_BIND, None), "mount")
    if permit:
        os.environ["LLM_DATADIST_ALLOW_INSECURE_REMOTE"] = "1"


def _sweep() -> None:
    """Remove the namespaces of test runs that were killed."""
    for line in run("ip", "netns", "list").splitlines():
        name = line.split()[0]
        prefix, *rest = name.split("-")
        if prefix == _PREFIX and not Path(f"/proc/{rest[0]}").exists():
            with contextlib.suppress(OSError):
                run("ip", "netns", "delete", name)


@contextlib.contextmanager
def network() -> Iterator[Network]:
    """A network for a test; skips it where namespaces are not permitted."""
    try:
        _sweep()
        made = Network()
    except (OSError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"no network namespaces here: {error}")
    try:
        yield made
    finally:
        made.close()
