"""Mutated frames for the sockets of a running engine: it must serve its peers as before when the storm is over.

The engine runs in a child process, so that its memory, descriptors and threads can be counted from outside.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import select
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from fuzz import examples
from fuzz.mutate import Mutator
from llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    DataType,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
)
from llm_datadist.wire import data, messages
from llm_datadist.wire.auth import NO_KEY, handover_request
from llm_datadist.wire.framing import Kind, preamble

if TYPE_CHECKING:
    from collections.abc import Iterator

    from llm_datadist import CacheManager

MAX_GROWTH_BYTES: Final = 96 << 20
MAX_MORE_FDS: Final = 4
_BLOCKS: Final = 16
_BLOCK_BYTES: Final = 256
_OWNER: Final = 1
_SETTLE_S: Final = 60.0
_IO_S: Final = 30.0
_SPELL: Final = 40
"""Frames on one connection, at most."""


@dataclass
class Report:
    """What the engine looked like before and after."""

    frames: int
    seconds: float = 0.0
    rss: tuple[int, int] = (0, 0)
    fds: tuple[int, int] = (0, 0)
    threads: tuple[int, int] = (0, 0)
    connections: dict[str, int] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.connections.items())
        facts = (
            f"memory {self.rss[0] >> 20} -> {self.rss[1] >> 20} MiB, descriptors {self.fds[0]} -> {self.fds[1]}, "
            f"threads {self.threads[0]} -> {self.threads[1]}"
        )
        lines = [f"live engine: {self.frames} frames in {self.seconds:.1f} s over {kinds} connections", facts]
        return "\n".join(lines + [f"FINDING: {finding}" for finding in self.findings])


# The engine in the child


def _config(**properties: object) -> LLMConfig:
    config = LLMConfig()
    config.enable_cache_manager = True
    config.enable_remote_cache_accessible = True
    config.sync_kv_timeout = 20_000
    config.huge_pages = False
    for name, value in properties.items():
        setattr(config, name, value)
    return config


def _pattern() -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(5).integers(0, 256, (2, _BLOCKS, _BLOCK_BYTES), dtype=np.uint8)


def serve() -> None:
    """An engine with a pool and a cache; tells its port and ends with its input."""
    datadist = LLMDataDist(LLMRole.PROMPT, _OWNER)
    pool = f'{{"memory_size": {1 << 22}, "page_shift": 12}}'
    datadist.init(_config(listen_ip_info="127.0.0.1:0", mem_pool_cfg=pool).generate_options())
    desc = CacheDesc(2, [_BLOCKS, _BLOCK_BYTES], DataType.DT_UINT8)
    manager: CacheManager = datadist.cache_manager
    memory = _pattern()
    manager.register_blocks_cache(desc, [tensor.ctypes.data for tensor in memory], BlocksCacheKey(_OWNER, 0))
    assert datadist.listen_address is not None
    print(f"port {datadist.listen_address[1]}", flush=True)
    sys.stdin.read()
    intact = (memory == _pattern()).all()
    datadist.finalize()
    print("intact" if intact else "CHANGED", flush=True)


class _Owner:
    """The child, seen from here."""

    def __init__(self, log: Path) -> None:
        environment = {**os.environ, "ASCEND_GLOBAL_LOG_LEVEL": "3"}
        self._log = log.open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fuzz.storm"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            cwd=Path(__file__).parent.parent,
        )
        assert self._process.stdout is not None
        port = 0
        while not port:
            line = self._process.stdout.readline()
            assert line, "the engine did not start"
            port = int(line.split()[1]) if line.startswith(b"port ") else 0
        self.address = ("127.0.0.1", port)

    def facts(self) -> tuple[int, int, int]:
        """Resident bytes, descriptors, threads."""
        status = Path(f"/proc/{self._process.pid}/status").read_text(encoding="ascii")
        rss, threads = (int(re.search(rf"{name}:\s+(\d+)", status)[1]) for name in ("VmRSS", "Threads"))  # type: ignore[index]
        return rss << 10, len(list(Path(f"/proc/{self._process.pid}/fd").iterdir())), threads

    def end(self) -> str:
        """Finalize it; what it has logged since it began, with its last words."""
        out, _ = self._process.communicate(b"", timeout=60)
        self._log.close()
        return out.decode(errors="replace")

    def kill(self) -> None:
        """If it did not end."""
        self._process.kill()
        self._process.wait()
        self._log.close()


# The storm


class Storm:
    """Sends frames; the same ones for the same seed."""

    def __init__(self, address: tuple[str, int], seed: int, report: Report) -> None:
        self._address = address
        self._rng = random.Random(seed)
        self._report = report
        self._control = iter(Mutator([*examples.envelopes()], "msgpack", seed))
        self._data = iter(Mutator([*examples.exchanges()], "bytes", seed))
        self._welcomed: tuple[bytes, str | None] | None = None
        self._lives = 0

    def frames(self) -> Iterator[int]:
        """Send without end; how many frames have just been sent."""
        while True:
            kind = self._rng.choice(("control", "control", "control", "data", "data", "hand-over", "stranger"))
            self._report.connections[kind] = self._report.connections.get(kind, 0) + 1
            try:
                if kind == "control":
                    yield from self._talk()
                elif kind == "data":
                    yield from self._ask()
                elif kind == "hand-over":
                    yield self._show_token()
                else:
                    yield self._say(next(self._data))
            except TimeoutError:
                self._report.findings.append(f"a {kind} connection was neither served nor closed within {_IO_S:.0f} s")
            except OSError:  # dropped in the middle
                yield 1

    def _connect(self) -> socket.socket:
        return socket.create_connection(self._address, timeout=_IO_S)

    def _talk(self) -> Iterator[int]:
        """A control connection: often introduced, so that everything else is dispatched, too."""
        with self._connect() as sock:
            sock.sendall(preamble(Kind.CONTROL))
            if self._rng.random() < 0.8:  # noqa: PLR2004
                yield self._introduce(sock)
            sent = 0
            for _ in range(self._rng.randrange(_SPELL)):
                payload = next(self._control)
                length = len(payload) if self._rng.random() < 0.97 else self._rng.choice((0, 1, 2**24, 2**32 - 1))  # noqa: PLR2004
                sock.sendall(length.to_bytes(4, "big") + payload)
                sent += 1
                if not self._drained(sock):
                    break
            _hang_up(sock)
            yield sent

    def _introduce(self, sock: socket.socket) -> int:
        self._lives += 1
        hello = examples.hello(1000 + self._lives % 50, self._lives.to_bytes(16, "big"))
        payload = messages.encode(messages.Envelope(body=hello, id=1))
        sock.sendall(len(payload).to_bytes(4, "big") + payload)
        size = int.from_bytes(_exactly(sock, 4), "big")
        with contextlib.suppress(msgspec.MsgspecError):
            reply = messages.decode(_exactly(sock, size)).body
            if isinstance(reply, messages.Welcome):
                self._welcomed = reply.link_token, reply.offer.handover
        return 1

    @staticmethod
    def _drained(sock: socket.socket) -> bool:
        """Read replies, so that nobody waits; whether the connection still stands."""
        ready, _, _ = select.select([sock], [], [], 0)
        return not ready or bool(sock.recv(1 << 16))

    def _ask(self) -> Iterator[int]:
        """A data connection: mostly of a link that is just being made."""
        token = self._welcomed[0] if self._welcomed and self._rng.random() < 0.9 else bytes(16)  # noqa: PLR2004
        serve = self._rng.random() < 0.9  # noqa: PLR2004
        greeting = data.Greeting.make(NO_KEY, token, self._rng.randrange(1 << 20), serve=serve)
        with self._connect() as sock:
            sock.sendall(preamble(Kind.DATA) + greeting.encode())
            sent = 1
            for _ in range(self._rng.randrange(_SPELL // 4)):
                sock.sendall(next(self._data))
                sent += 1
                if not self._drained(sock):
                    break
            if serve:  # else it is kept for the owner to ask on, until its link is given up
                _hang_up(sock)
            yield sent

    def _show_token(self) -> int:
        if self._welcomed is None or self._welcomed[1] is None:
            return 0
        right = handover_request(NO_KEY, self._welcomed[0])
        token = self._rng.choice((right, right[:-1], bytes(len(right)), b"", bytes(17), bytes(5000)))
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(_IO_S)
            sock.connect(b"\0" + self._welcomed[1].encode())
            sock.send(token)
        return 1

    def _say(self, raw: bytes) -> int:
        with self._connect() as sock:
            sock.sendall(self._rng.choice((b"", preamble(Kind.CONTROL), preamble(Kind.DATA)))[: len(raw)] + raw)
        return 1


def _hang_up(sock: socket.socket) -> None:
    """Say no more and wait until everything has been dealt with."""
    sock.shutdown(socket.SHUT_WR)
    while sock.recv(1 << 16):
        pass


def _exactly(sock: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        more = sock.recv(size - len(received))
        if not more:
            message = "closed"
            raise ConnectionError(message)
        received += more
    return received


def run(seed: int, count: int, scratch: Path = Path("/tmp")) -> Report:  # noqa: S108 - for what the engine says at its end
    """Send ``count`` frames to an engine, then see whether it is as before."""
    report = Report(count)
    owner = _Owner(scratch / f"fuzz-storm-{os.getpid()}.log")
    try:
        _serves(owner, report)  # what is made once, is made now
        before = owner.facts()
        begin = time.monotonic()
        sent = 0
        for more in Storm(owner.address, seed, report).frames():
            sent += more
            if sent >= count:
                break
        report.seconds = time.monotonic() - begin
        after = _settled(owner, before)
        report.rss, report.fds, report.threads = zip(before, after, strict=True)  # type: ignore[assignment]
        if after[0] - before[0] > MAX_GROWTH_BYTES:
            report.findings.append(f"memory grew by {after[0] - before[0] >> 20} MiB")
        if after[1] - before[1] > MAX_MORE_FDS:
            report.findings.append(f"{after[1] - before[1]} descriptors were left")
        _serves(owner, report)
        said = owner.end()
        if "intact" not in said.split():
            report.findings.append("the memory of the engine was changed")
        if "Traceback" in said:
            report.findings.append(f"unexpected errors in the engine:\n{said[-4000:]}")
    finally:
        owner.kill()
    return report


def _settled(owner: _Owner, before: tuple[int, int, int]) -> tuple[int, int, int]:
    """The facts once strangers and half-made links have been given up."""
    end = time.monotonic() + _SETTLE_S
    while owner.facts()[1] - before[1] > MAX_MORE_FDS and time.monotonic() < end:
        time.sleep(0.2)
    return owner.facts()


def _serves(owner: _Owner, report: Report) -> None:
    """Link, pull everything, compare, unlink."""
    datadist = LLMDataDist(LLMRole.DECODER, 2)
    datadist.init(_config(allow_multiple_instances=True).generate_options())
    try:
        info = LLMClusterInfo()
        info.remote_cluster_id = _OWNER
        info.append_local_ip_info("127.0.0.1", 0)
        info.append_remote_ip_info(*owner.address)
        status = datadist.link_clusters([info], 20_000)[1][0]
        if status is not LLMStatusCode.LLM_SUCCESS:
            report.findings.append(f"the engine cannot be linked: {status}")
            return
        memory = np.zeros_like(_pattern())
        desc = CacheDesc(2, [_BLOCKS, _BLOCK_BYTES], DataType.DT_UINT8)
        manager = datadist.cache_manager
        cache = manager.register_blocks_cache(desc, [tensor.ctypes.data for tensor in memory])
        blocks = list(range(_BLOCKS))
        manager.pull_blocks(BlocksCacheKey(_OWNER, 0), cache, blocks, blocks)
        if not (memory == _pattern()).all():
            report.findings.append("a pull brought wrong bytes")
        datadist.unlink_clusters([info], 20_000)
    finally:
        datadist.finalize()


if __name__ == "__main__":
    serve()
