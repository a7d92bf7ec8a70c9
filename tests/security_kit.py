"""What the security tests share: certificates, a middleman between two peers, the log of a child process."""

from __future__ import annotations

import contextlib
import functools
import shutil
import socket
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from llm_datadist import BlocksCacheKey
from net_helpers import WAIT_S, logged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from peers import Node, Peer

SECRET = "0123456789abcdef-secret"
BLOCKS, BLOCK_BYTES = 64, 1 << 16

EXTENSIONS = "keyUsage=critical,digitalSignature\nextendedKeyUsage=serverAuth,clientAuth\n"


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=WAIT_S)


def _key(path: Path) -> None:
    _openssl("genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", str(path))


@functools.cache
def certificates(name: str = "cluster") -> dict[str, str]:
    """Options of ``LLMConfig`` for a member of the CA of this name; made as SECURITY.md says."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl command to make certificates with")
    folder = Path(tempfile.mkdtemp(prefix="llm-datadist-certificates-"))
    ca_key, ca, key, request, cert = (str(folder / file) for file in ("ca.key", "ca", "key", "request", "cert"))
    _key(Path(ca_key))
    constraints = ("-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=critical,keyCertSign")
    _openssl("req", "-x509", "-new", "-key", ca_key, "-days", "2", "-subj", f"/CN={name}", *constraints, "-out", ca)
    _key(Path(key))
    _openssl("req", "-new", "-key", key, "-subj", "/CN=node", "-out", request)
    (folder / "extensions").write_text(EXTENSIONS)
    signing = ("-CA", ca, "-CAkey", ca_key, "-CAcreateserial", "-days", "2", "-extfile", str(folder / "extensions"))
    _openssl("x509", "-req", "-in", request, *signing, "-out", cert)
    return {"tls_cert": cert, "tls_key": key, "tls_ca": ca}


def protection(kind: str) -> dict[str, Any]:
    """Options of ``LLMConfig`` by a short name."""
    options: dict[str, Any] = {}
    if "secret" in kind:
        options["secret"] = SECRET
    if "tls" in kind:
        options |= certificates()
    return options


# In a child process


def watch_log(node: Node) -> None:
    """Keep what is logged from now on."""
    node.extra["stack"] = contextlib.ExitStack()
    node.extra["log"] = node.extra["stack"].enter_context(logged())


def log_lines(node: Node, level: str = "WARNING") -> list[str]:
    """What was logged at a level."""
    return [record.getMessage() for record in node.extra["log"] if record.levelname == level]


def whole_log(node: Node) -> str:
    """Everything that was logged."""
    return "\n".join(record.getMessage() for record in node.extra["log"])


def open_descriptors(_node: Node) -> int:
    """How many descriptors this process has."""
    return len(list(Path("/proc/self/fd").iterdir()))


def pull(node: Node, cluster_id: int, blocks: list[int]) -> None:
    """Pull blocks of the peer's "src" into those of "dst"."""
    node.manager.pull_blocks(BlocksCacheKey(cluster_id, 0), node.caches["dst"], blocks, blocks)


def push(node: Node, cluster_id: int, blocks: list[int]) -> None:
    """Push blocks of "src" into those of the peer's "dst"."""
    node.manager.push_blocks(BlocksCacheKey(cluster_id, 1), node.caches["src"], blocks, blocks)


# In the test


def with_caches(*some: Peer, blocks: int = BLOCKS, block_bytes: int = BLOCK_BYTES) -> None:
    """Give each peer a cache to be read and one to be written."""
    for peer in some:
        peer.call("register_blocks", "src", 2, blocks, block_bytes, model_id=0, seed=peer.cluster_id)
        peer.call("register_blocks", "dst", 2, blocks, block_bytes, model_id=1)


def same(left: list[Any], right: list[Any]) -> bool:
    """Whether two caches hold the same bytes, guards included."""
    return all((a == b).all() for a, b in zip(left, right, strict=True))


class Middleman:
    """Stands between two peers: passes on, records, and alters if it is told to."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._server.getsockname()
        self.said: list[bytearray] = []
        """What came from the connecting side, for each connection in order."""
        self.answered: list[bytearray] = []
        self.alter: Callable[[int, str, int, bytes], bytes] = lambda _connection, _side, _offset, data: data
        """Gets the connection, "said" or "answered", how much went before, and the bytes."""
        self._socks: list[socket.socket] = [self._server]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._server.accept()
                far = socket.create_connection(self._target, WAIT_S)
                far.settimeout(None)
                self._socks += [near, far]
                number = len(self.said)
                self.said.append(bytearray())
                self.answered.append(bytearray())
                for side, source, target, record in (
                    ("said", near, far, self.said[number]),
                    ("answered", far, near, self.answered[number]),
                ):
                    arguments = (number, side, source, target, record)
                    threading.Thread(target=self._pump, args=arguments, daemon=True).start()

    def _pump(self, number: int, side: str, source: socket.socket, target: socket.socket, record: bytearray) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                offset = len(record)
                record += data
                target.sendall(self.alter(number, side, offset, data))
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for sock in self._socks:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


@contextlib.contextmanager
def middleman(target: tuple[str, int] | None) -> Iterator[Middleman]:
    """One that is closed afterwards."""
    assert target is not None
    made = Middleman(target)
    try:
        yield made
    finally:
        made.close()
