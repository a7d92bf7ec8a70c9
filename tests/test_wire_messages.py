"""Control messages: each type there and back, the limits of each field, and any bytes at all."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llm_datadist.wire import messages
from llm_datadist.wire.framing import ProtocolError

BASE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
I64_MAX, U64_MAX = 2**63 - 1, 2**64 - 1

u32 = st.integers(0, 2**32 - 1)
u64 = st.one_of(st.integers(0, U64_MAX), st.sampled_from([0, 2**63 - 1, 2**63, U64_MAX]))
i64 = st.one_of(st.integers(-(2**63), I64_MAX), st.sampled_from([-(2**63), -1, I64_MAX]))
size = st.integers(0, I64_MAX)
positive = st.integers(1, I64_MAX)
characters = st.characters(exclude_categories=["Cs"])
name = st.text(characters, max_size=12)
text = st.one_of(name, st.just("x" * 4096))
token = st.binary(min_size=16, max_size=16)

identities = st.builds(
    messages.Identity,
    cluster_id=u64,
    incarnation=token,
    boot_id=name,
    pid_namespace=size,
    pid=st.integers(0, 2**31 - 1),
    start_time=size,
)
offers = st.builds(
    messages.Offer,
    probe_region=u64,
    nonce=st.binary(min_size=16, max_size=64),
    table_fd=st.integers(0, 2**31 - 1),
    paths=st.lists(name, max_size=4),
    handover=st.none() | name,
    digest=st.none() | name,
    dumpable=st.booleans(),
)
caches = st.builds(
    messages.CacheInfo,
    cache_id=i64,
    kind=name,
    tensor_size=positive,
    entries=positive,
    dtype=name,
    accessible=st.booleans(),
    regions=st.lists(u64, max_size=4),
)
keys = st.builds(messages.KeyInfo, cache_id=i64, model_id=u64, req_id=st.none() | u64, batch_index=u32)
key_refs = st.builds(
    messages.KeyRef,
    model_id=u64,
    req_id=st.none() | u64,
    prefix_id=st.none() | u64,
    cache_id=st.none() | i64,
    batch_index=u32,
    blocks=st.booleans(),
)
nonce = st.binary(min_size=32, max_size=32)
BODIES: dict[type, st.SearchStrategy[Any]] = {
    messages.Greet: st.builds(messages.Greet, nonce=nonce),
    messages.Challenge: st.builds(messages.Challenge, nonce=nonce),
    messages.Sealed: st.builds(messages.Sealed, payload=st.binary(max_size=64), proof=nonce),
    messages.Hello: st.builds(
        messages.Hello,
        versions=st.tuples(u32, u32),
        identity=identities,
        remote_accessible=st.booleans(),
        timeout_ms=u32,
        offer=offers,
        comm=st.none() | name,
    ),
    messages.Welcome: st.builds(messages.Welcome, version=u32, identity=identities, offer=offers, link_token=token),
    messages.Refuse: st.builds(messages.Refuse, code=u32, reason=text),
    messages.Confirm: st.builds(messages.Confirm, path=name),
    messages.Ok: st.builds(messages.Ok),
    messages.Fetch: st.builds(messages.Fetch),
    messages.Catalogue: st.builds(
        messages.Catalogue, epoch=u64, caches=st.lists(caches, max_size=3), keys=st.lists(keys, max_size=3)
    ),
    messages.Lookup: st.builds(messages.Lookup, key=key_refs, timeout_ms=u32),
    messages.Found: st.builds(messages.Found, hold=u64, cache=caches, batch_index=u32),
    messages.Finish: st.builds(messages.Finish, hold=u64, success=st.booleans(), start=size, stop=size),
    messages.Resolve: st.builds(messages.Resolve, addresses=st.lists(u64, max_size=4), size=positive),
    messages.Resolved: st.builds(
        messages.Resolved, regions=st.lists(u64, max_size=4), offsets=st.lists(size, max_size=4)
    ),
    messages.Digest: st.builds(messages.Digest, spans=st.binary(max_size=64)),
    messages.Digested: st.builds(messages.Digested, value=u64),
    messages.Drain: st.builds(messages.Drain),
    messages.Ping: st.builds(messages.Ping, link_token=token),
    messages.Join: st.builds(messages.Join, comm=name),
    messages.OpenData: st.builds(messages.OpenData, count=st.integers(1, 64)),
    messages.AskAgent: st.builds(messages.AskAgent, backend=name, regions=st.lists(u64, max_size=64)),
    messages.Agent: st.builds(
        messages.Agent,
        name=name,
        metadata=st.binary(max_size=64),
        device_metadata=st.binary(max_size=64),
        table=u64,
        generation=u64,
        regions=st.lists(u64, max_size=64),
        ranges=st.lists(st.tuples(u64, u64), max_size=64),
    ),
    messages.Fence: st.builds(messages.Fence, connections=st.lists(u64, max_size=64)),
    messages.Digest: st.builds(messages.Digest, spans=st.binary(max_size=64)),
    messages.Digested: st.builds(messages.Digested, value=u64),
    messages.Notify: st.builds(messages.Notify, message=st.binary(max_size=64)),
    messages.Bye: st.builds(messages.Bye, reason=text),
}
envelopes = st.builds(messages.Envelope, body=st.one_of(*BODIES.values()), id=u64, reply_to=u64)


def test_every_message_type_is_here() -> None:
    assert set(BODIES) == set(get_args(messages.Body))


@pytest.mark.parametrize("kind", list(BODIES), ids=lambda kind: kind.__name__)
def test_round_trip(kind: type) -> None:
    @settings(BASE, max_examples=40)
    @given(body=BODIES[kind], request_id=u64, reply_to=u64)
    def check(body: Any, request_id: int, reply_to: int) -> None:
        envelope = messages.Envelope(body=body, id=request_id, reply_to=reply_to)
        assert messages.decode(messages.encode(envelope)) == envelope

    check()


def example(kind: type) -> dict[str, Any]:
    """A valid message as plain data."""
    identity = {
        "cluster_id": 1,
        "incarnation": bytes(16),
        "boot_id": "b",
        "pid_namespace": 2,
        "pid": 3,
        "start_time": 4,
    }
    offer = {"probe_region": 1, "nonce": bytes(64), "table_fd": 5, "paths": ["tcp"]}
    cache = {
        "cache_id": 1,
        "kind": "blocks",
        "tensor_size": 64,
        "entries": 4,
        "dtype": "f",
        "accessible": True,
        "regions": [1],
    }
    return {
        messages.Hello: {
            "versions": [1, 1],
            "identity": identity,
            "remote_accessible": True,
            "timeout_ms": 5,
            "offer": offer,
        },
        messages.Welcome: {"version": 1, "identity": identity, "offer": offer, "link_token": bytes(16)},
        messages.Refuse: {"code": 1, "reason": "no"},
        messages.Catalogue: {"epoch": 1, "caches": [cache], "keys": [{"cache_id": 1, "model_id": 0}]},
        messages.Lookup: {"key": {}, "timeout_ms": 1},
        messages.Found: {"hold": 1, "cache": cache, "batch_index": 0},
        messages.Finish: {"hold": 1, "success": True},
        messages.Resolve: {"addresses": [1], "size": 8},
        messages.Resolved: {"regions": [1], "offsets": [0]},
        messages.Ping: {"link_token": bytes(16)},
        messages.Join: {"comm": "c"},
        messages.OpenData: {"count": 1},
        messages.AskAgent: {"backend": "UCX", "regions": [1]},
        messages.Agent: {
            "name": "a",
            "metadata": b"m",
            "table": 1,
            "generation": 1,
            "regions": [1],
            "ranges": [[1, 2]],
        },
        messages.Fence: {"connections": [1]},
        messages.Confirm: {"path": "tcp"},
        messages.Digest: {"spans": b""},
        messages.Digested: {"value": 1},
        messages.Notify: {"message": bytes(messages.MAX_NOTIFICATION)},
        messages.Greet: {"nonce": bytes(32)},
        messages.Challenge: {"nonce": bytes(32)},
        messages.Sealed: {"payload": b"p", "proof": bytes(32)},
    }[kind]


def tampered(kind: type, path: str, value: object) -> bytes:
    """The payload of a valid message with one value replaced."""
    body = example(kind)
    target: Any = body
    *way, last = path.split(".")
    for step in way:
        target = target[int(step) if step.isdigit() else step]
    target[int(last) if last.isdigit() else last] = value
    tag = kind.__struct_config__.tag  # type: ignore[attr-defined]
    return msgspec.msgpack.encode({"body": {"type": tag, **body}})


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        (messages.Greet, "nonce", bytes(31)),
        (messages.Digest, "spans", bytes((1 << 18) + 1)),
        (messages.Digested, "value", -1),
        (messages.Notify, "message", bytes(messages.MAX_NOTIFICATION + 1)),
        (messages.Challenge, "nonce", bytes(33)),
        (messages.Sealed, "proof", bytes(31)),
        (messages.Sealed, "proof", bytes(33)),
        (messages.Sealed, "payload", bytes(messages.MAX_INTRODUCTION + 1)),
        (messages.Hello, "versions", [1]),
        (messages.Hello, "versions", [1, 2, 3]),
        (messages.Hello, "versions.0", -1),
        (messages.Hello, "versions.1", 2**32),
        (messages.Hello, "timeout_ms", 2**32),
        (messages.Hello, "timeout_ms", -1),
        (messages.Hello, "remote_accessible", 1),
        (messages.Hello, "comm", "x" * 129),
        (messages.Hello, "identity", None),
        (messages.Hello, "identity.cluster_id", -1),
        (messages.Hello, "identity.incarnation", bytes(15)),
        (messages.Hello, "identity.incarnation", bytes(17)),
        (messages.Hello, "identity.incarnation", "x" * 16),
        (messages.Hello, "identity.boot_id", "x" * 129),
        (messages.Hello, "identity.pid", -1),
        (messages.Hello, "identity.pid", 2**31),
        (messages.Hello, "identity.start_time", 2**63),
        (messages.Hello, "offer.nonce", bytes(15)),
        (messages.Hello, "offer.nonce", bytes(257)),
        (messages.Hello, "offer.table_fd", -1),
        (messages.Hello, "offer.table_fd", 2**31),
        (messages.Hello, "offer.paths", ["tcp"] * 33),
        (messages.Hello, "offer.paths.0", 5),
        (messages.Welcome, "link_token", b""),
        (messages.Welcome, "version", 2**32),
        (messages.Refuse, "code", -1),
        (messages.Refuse, "code", 2**32),
        (messages.Refuse, "reason", "x" * 4097),
        (messages.Confirm, "path", "x" * 129),
        (messages.Catalogue, "caches.0.tensor_size", 0),
        (messages.Catalogue, "caches.0.tensor_size", 2**63),
        (messages.Catalogue, "caches.0.entries", 0),
        (messages.Catalogue, "caches.0.entries", -1),
        (messages.Catalogue, "caches.0.cache_id", 2**63),
        (messages.Catalogue, "caches.0.regions", [1] * ((1 << 16) + 1)),
        (messages.Catalogue, "caches.0.regions.0", -1),
        (messages.Catalogue, "caches.0.accessible", None),
        (messages.Catalogue, "keys.0.req_id", -1),
        (messages.Catalogue, "keys.0.batch_index", 2**32),
        (messages.Catalogue, "epoch", -1),
        (messages.Lookup, "key.batch_index", -1),
        (messages.Lookup, "key.cache_id", 2**63),
        (messages.Lookup, "key.req_id", 1.0),
        (messages.Found, "cache.entries", 0),
        (messages.Found, "hold", -1),
        (messages.Finish, "start", -1),
        (messages.Finish, "stop", 2**63),
        (messages.Finish, "success", None),
        (messages.Resolve, "size", 0),
        (messages.Resolve, "addresses.0", -1),
        (messages.Resolve, "addresses", [0] * ((1 << 16) + 1)),
        (messages.Resolved, "offsets.0", -1),
        (messages.Resolved, "offsets.0", 2**63),
        (messages.Ping, "link_token", bytes(17)),
        (messages.Join, "comm", "x" * 129),
        (messages.OpenData, "count", 0),
        (messages.OpenData, "count", 65),
        (messages.Fence, "connections", [1] * 4097),
        (messages.Fence, "connections.0", -1),
        (messages.Hello, "offer.digest", "x" * 129),
        (messages.Digest, "spans", "x"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else repr(value)[:40],
)
def test_fields_have_limits(kind: type, path: str, value: object) -> None:
    good = example(kind)
    assert messages.decode(msgspec.msgpack.encode({"body": {"type": kind.__struct_config__.tag, **good}}))  # type: ignore[attr-defined]
    with pytest.raises(ProtocolError, match="malformed control message"):
        messages.decode(tampered(kind, path, value))


@pytest.mark.parametrize(
    "kind",
    [kind for kind in BODIES if any(field.required for field in msgspec.structs.fields(kind))],
    ids=lambda kind: kind.__name__,
)
def test_required_fields_are_required(kind: type) -> None:
    for field in msgspec.structs.fields(kind):
        body = {key: value for key, value in example(kind).items() if key != field.name}
        payload = msgspec.msgpack.encode({"body": {"type": kind.__struct_config__.tag, **body}})  # type: ignore[attr-defined]
        if field.required:
            with pytest.raises(ProtocolError, match=f"missing required field `{field.name}`"):
                messages.decode(payload)
        else:
            messages.decode(payload)


def decodes_or_refuses(payload: bytes) -> None:
    """The only two ends: a valid envelope, which goes there and back, or ProtocolError."""
    try:
        envelope = messages.decode(payload)
    except ProtocolError:
        return
    assert isinstance(envelope, messages.Envelope)
    assert messages.decode(messages.encode(envelope)) == envelope


@settings(BASE, max_examples=1000)
@given(payload=st.binary(max_size=200))
def test_any_bytes(payload: bytes) -> None:
    decodes_or_refuses(payload)


@settings(BASE, max_examples=500)
@given(
    envelope=envelopes,
    changes=st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), max_size=4),
    cut=st.none() | st.integers(0, 2**16),
    extra=st.binary(max_size=3),
)
def test_messages_with_broken_bytes(
    envelope: messages.Envelope, changes: list[tuple[int, int]], cut: int | None, extra: bytes
) -> None:
    payload = bytearray(messages.encode(envelope))
    for at, value in changes:
        payload[at % len(payload)] = value
    decodes_or_refuses(bytes(payload[: None if cut is None else cut % len(payload)] + extra))


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), U64_MAX) | st.floats() | name | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(name, inner, max_size=3),
    max_leaves=6,
)
FIELDS = sorted({field.name for kind in BODIES for field in msgspec.structs.fields(kind)})


@settings(BASE, max_examples=500)
@given(
    tag=st.sampled_from([kind.__struct_config__.tag for kind in BODIES]),  # type: ignore[attr-defined]
    fields=st.dictionaries(st.sampled_from(FIELDS), plain, max_size=6),
    around=st.dictionaries(st.sampled_from(["id", "reply_to", "x"]), plain, max_size=2),
)
def test_messages_with_values_of_other_types(tag: str, fields: dict[str, Any], around: dict[str, Any]) -> None:
    decodes_or_refuses(msgspec.msgpack.encode({"body": {"type": tag, **fields}, **around}))
