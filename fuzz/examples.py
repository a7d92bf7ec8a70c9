"""Valid inputs of every decoder: what the mutator begins with, and what the corpus was made of."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from llm_datadist.wire import data, handover, messages
from llm_datadist.wire.framing import Kind, preamble

if TYPE_CHECKING:
    from collections.abc import Iterator

TOKEN: Final = bytes(range(16))
OPTION_KEYS: Final = (
    "llm.Role",
    "llm.TransferBackend",
    "llm.EnableRemoteCacheAccessible",
    "llm.SyncKvCacheWaitTime",
    "llm.ListenIp",
    "llm.ListenPort",
    "llm.LocalCommRes",
    "ge.exec.deviceId",
    "llm.LinkTotalTime",
    "llm.LinkRetryCount",
    "llm.MemPoolConfig",
    "llm.HostMemPoolConfig",
    "llm.MaxRegisteredAddrs",
    "llm.Paths",
    "llm.HugePages",
    "llm.RdmaTrafficClass",
    "llm.RdmaServiceLevel",
    "llm.GlobalResourceConfig",
)


def identity(cluster_id: int = 7, incarnation: bytes = TOKEN) -> messages.Identity:
    """Somebody on another host."""
    return messages.Identity(
        cluster_id=cluster_id, incarnation=incarnation, boot_id="another", pid_namespace=1, pid=42, start_time=4711
    )


def offer() -> messages.Offer:
    """What nobody can use."""
    return messages.Offer(probe_region=1 << 16 | 1, nonce=bytes(64), table_fd=3, paths=["tcp"], handover="nobody")


def hello(cluster_id: int = 7, incarnation: bytes = TOKEN) -> messages.Hello:
    """An introduction."""
    versions = messages.VERSION_MIN, messages.VERSION_MAX
    return messages.Hello(
        versions=versions,
        identity=identity(cluster_id, incarnation),
        remote_accessible=True,
        timeout_ms=1000,
        offer=offer(),
    )


def catalogue() -> messages.Catalogue:
    """Caches of every kind, and their keys."""
    caches = [
        messages.CacheInfo(
            cache_id=number,
            kind=kind,
            tensor_size=64,
            entries=4,
            dtype="DT_FLOAT16",
            accessible=True,
            regions=[number << 17 | 5, number << 18 | 6],
            device=0 if kind == "mixed" else None,
        )
        for number, kind in enumerate(("contiguous", "blocks", "mixed"), 1)
    ]
    keys = [
        messages.KeyInfo(cache_id=1, model_id=0, req_id=9, batch_index=3),
        messages.KeyInfo(cache_id=2, model_id=2**64 - 1),
    ]
    return messages.Catalogue(epoch=3, caches=caches, keys=keys)


def bodies() -> list[messages.Body]:
    """One of each control message."""
    told = catalogue()
    return [
        hello(),
        messages.Welcome(version=1, identity=identity(), offer=offer(), link_token=TOKEN),
        messages.Refuse(code=5012001, reason="no"),
        messages.Confirm(path="tcp"),
        messages.Ok(),
        messages.Fetch(),
        told,
        messages.Lookup(key=messages.KeyRef(model_id=0, req_id=9), timeout_ms=1000),
        messages.Lookup(key=messages.KeyRef(cache_id=1, batch_index=3), timeout_ms=1000),
        messages.Lookup(key=messages.KeyRef(model_id=1, blocks=True), timeout_ms=0),
        messages.Found(hold=1, cache=told.caches[0], batch_index=3),
        messages.Finish(hold=1, success=True, start=0, stop=2),
        messages.Resolve(addresses=[1 << 40, 1 << 41], size=64),
        messages.Resolved(regions=[1 << 16 | 1], offsets=[64]),
        messages.Drain(),
        messages.Ping(link_token=TOKEN),
        messages.Join(comm="group"),
        messages.OpenData(count=2),
        messages.Fence(connections=[1, 2]),
        messages.AskAgent(backend="UCX", regions=[1 << 16 | 1], on_devices=True),
        messages.Agent(
            name="agent",
            metadata=b"keys",
            table=1 << 40,
            generation=1,
            regions=[1 << 16 | 1],
            ranges=[(1 << 41, 1 << 42)],
        ),
        messages.Digest(spans=b"spans"),
        messages.Digested(value=7),
        messages.Notify(message=b"42 done"),
        messages.Bye(reason="unlinked"),
    ]


def envelopes() -> Iterator[bytes]:
    """Payloads of control frames."""
    for number, body in enumerate(bodies()):
        yield messages.encode(messages.Envelope(body=body, id=number))
    yield messages.encode(messages.Envelope(body=messages.Ok(), reply_to=2**64 - 1))


def catalogues() -> Iterator[bytes]:
    """Bare catalogues."""
    yield msgspec.msgpack.encode(catalogue())
    yield msgspec.msgpack.encode(messages.Catalogue(epoch=0, caches=[], keys=[]))


def frames() -> Iterator[bytes]:
    """How to cut it, then a stream of frames."""
    stream = b"".join(len(one).to_bytes(4, "big") + one for one in envelopes())
    for limit, piece in ((5, 0), (4, 7), (3, 200), (1, 1)):
        yield bytes((limit, piece)) + stream
    yield from (preamble(kind) for kind in Kind)


def exchanges() -> Iterator[bytes]:
    """Greetings, replies, requests with their tables."""
    for serve in (True, False):
        yield data.Greeting.make(b"", TOKEN, 3, serve=serve).encode()
    yield data.Reply(data.Result.OK).encode()
    yield data.Reply(data.Result.STALE, 4).encode() + b"late"
    for op in data.Op:
        request = data.Request(op, 2, 3, 5, 2 * 96, 1000)
        regions = np.array([1 << 16 | 1, 1 << 17 | 2], dtype=np.uint64)
        offsets = np.arange(3, dtype=np.int64) * 64
        lengths = np.full(3, 32, dtype=np.int64)
        yield request.encode() + data.encode_spans(regions, np.zeros(2, dtype=np.int64), offsets, lengths)
        yield data.encode_few(data.Request(op, 1, 1, 0, 64, 1), [1 << 16 | 1], [128], 64)


def hand_overs() -> Iterator[bytes]:
    """Packets with one and with several areas."""
    for count in (1, 3):
        areas = [handover.SharedArea(base=number << 30, length=1 << 21) for number in range(count)]
        yield handover.encode(handover.Handover(areas=areas))


def region_tables() -> Iterator[bytes]:
    """A question and some rows."""
    region = 1 << 16 | 1
    rows = [(region, 1 << 30, 4096, 1), (2 << 16 | 2, 1 << 31, 64, 1), (3 << 16 | 3, 1 << 32, 2**63, 0)]
    for question in ((region, 0, 0, 64, 2 << 16 | 2, 0), (3 << 16 | 3, 5, 0, 1, 0, 0)):
        yield struct.pack("<6Q", *question) + b"".join(struct.pack("<4Q", *row) for row in rows)


def region_files() -> Iterator[bytes]:
    """What a file may hold."""
    yield b""
    yield struct.pack("<4Q", 0x5644_4B4C_4C4D_0001, 1, 1, 1 << 16)


def rank_tables() -> Iterator[bytes]:
    """Two members on one server, and on two."""
    devices = [{"rank_id": str(rank), "device_id": rank, "device_ip": f"10.0.0.{rank}"} for rank in range(2)]
    one = {"server_count": "1", "server_list": [{"server_id": "host", "host_ip": "127.0.0.1", "device": devices}]}
    two = {
        "server_list": [
            {"server_id": "::1", "device": [{"rank_id": "0", "port": "26000"}]},
            {"host_ip": "10.1.2.3", "device": [{"rank_id": 1, "device_port": 1}]},
        ]
    }
    yield from (json.dumps(table).encode() for table in (one, two))


def option_lines() -> Iterator[bytes]:
    """Lines of options, by number and by name."""
    yield b"\x02=1\n\x04=127.0.0.1\n\x05=26000\n\x0d=tcp,process_vm\n\x0e=0"
    yield b'\x0a={"memory_size": 67108864, "page_shift": 16}\n\x03=1000\n\x08=30\n\x0c=65000'
    yield b"\x01=hixl\n\x02=1\n\x0f=132\n\x10=4\n\x11={}\nllm.Unknown=x"


def listen_addresses() -> Iterator[bytes]:
    """Of both families."""
    yield from (b"127.0.0.1:26000", b"[fd00::2]:0", b"[fe80::1%eth0]:65535", b"host:1")


def cluster_infos() -> Iterator[bytes]:
    """With addresses as text and as number."""
    yield b'{"cluster_id": 1, "listen_ip_info": [{"ip": "127.0.0.1", "port": 26000}, {"ip": 16777343}]}'
    yield b"{}"
