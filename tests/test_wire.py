"""The wire: frames, control messages and data headers, whole, cut anywhere, and broken in every way."""

from __future__ import annotations

import itertools
import re
import struct
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from llm_datadist.wire import data, framing, messages
from llm_datadist.wire.data import MAX_REASON, MAX_SPANS, MAX_TOTAL, Greeting, Op, Reply, Request, Result
from llm_datadist.wire.framing import (
    CACHE_LINE,
    MAX_CONTROL_FRAME,
    MAX_GREETING,
    PREAMBLE_SIZE,
    FrameDecoder,
    Kind,
    ProtocolError,
    frame,
    parse_preamble,
    preamble,
)

USUAL = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
U32_MAX, U64_MAX = 2**32 - 1, 2**64 - 1


# Preamble


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("kind", Kind)
def test_preamble_round_trip(kind: Kind, tls: bool) -> None:
    made = preamble(kind, tls=tls)
    assert len(made) == PREAMBLE_SIZE
    assert made[:4] == b"LLMD"
    for view in (made, bytearray(made), memoryview(made)):
        assert parse_preamble(view) == (kind, tls)


def test_preambles_of_the_kinds_differ() -> None:
    assert preamble(Kind.CONTROL) != preamble(Kind.DATA)


@pytest.mark.parametrize(
    ("head", "match"),
    [
        (b"GET / HT", "not an llm-datadist connection: it starts with b'GET / HT'"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01", "not an llm-datadist connection"),
        (bytes(8), "not an llm-datadist connection"),
        (b"LLMDC\x02\0\0", "format 2 is not supported, this side speaks format 1"),
        (b"LLMDC\0\0\0", "format 0 is not supported"),
        (b"LLMDC\x01\x02\0", "connection security 2 is not supported"),
        (b"LLMDX\x01\0\0", "unknown connection kind b'X'"),
        (b"llmdC\x01\0\0", "not an llm-datadist connection"),
    ],
)
def test_strangers_are_known_by_their_preamble(head: bytes, match: str) -> None:
    with pytest.raises(ProtocolError, match=match):
        parse_preamble(head)


@USUAL
@given(head=st.binary(max_size=12))
@example(head=b"")
@example(head=b"LLMD")
@example(head=b"LLMDC")
@example(head=b"LLMDC\x01")
def test_preamble_of_any_bytes(head: bytes) -> None:
    try:
        kind, tls = parse_preamble(head)
    except ProtocolError:
        return
    assert head[:7] == preamble(kind, tls=tls)[:7]
    assert len(head) >= PREAMBLE_SIZE


# Frames


@USUAL
@given(payloads=st.lists(st.binary(max_size=40), max_size=8), cuts=st.lists(st.integers(0, 400), max_size=12))
def test_frames_cut_anywhere(payloads: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(frame(payload) for payload in payloads)
    decoder = FrameDecoder()
    received: list[bytes] = []
    marks = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    for start, stop in itertools.pairwise(marks):
        received += decoder.feed(stream[start:stop])
        complete, size = 0, 0
        for payload in payloads:
            size += 4 + len(payload)
            complete += size <= stop
        assert received == payloads[:complete]
    assert received == payloads


def test_frames_byte_by_byte() -> None:
    decoder = FrameDecoder()
    stream = frame(b"one") + frame(b"") + frame(b"three")
    received = [decoder.feed(stream[n : n + 1]) for n in range(len(stream))]
    assert [payload for payloads in received for payload in payloads] == [b"one", b"", b"three"]
    assert received[6] == [b"one"]
    assert received[10] == [b""]


def test_a_frame_is_a_big_endian_length_and_the_payload() -> None:
    assert frame(b"abc") == b"\x00\x00\x00\x03abc"


@pytest.mark.parametrize("limit", [0, 1, 100, MAX_GREETING])
def test_the_limit_is_exact(limit: int) -> None:
    assert FrameDecoder(limit).feed(frame(bytes(limit))) == [bytes(limit)]
    with pytest.raises(ProtocolError, match=f"announces {limit + 1} bytes, the limit is {limit}"):
        FrameDecoder(limit).feed(frame(bytes(limit + 1))[:4])


def test_strangers_get_the_small_limit() -> None:
    decoder = FrameDecoder()
    with pytest.raises(ProtocolError, match=f"the limit is {MAX_GREETING}"):
        decoder.feed((MAX_GREETING + 1).to_bytes(4, "big"))
    decoder = FrameDecoder()
    decoder.limit = MAX_CONTROL_FRAME
    assert decoder.feed(frame(bytes(MAX_GREETING + 1))) == [bytes(MAX_GREETING + 1)]


def test_a_limit_that_grows_between_two_frames() -> None:
    decoder = FrameDecoder(4)
    assert decoder.feed(frame(b"1234")) == [b"1234"]
    decoder.limit = 8
    assert decoder.feed(frame(b"12345678")) == [b"12345678"]


def test_an_oversized_frame_after_a_good_one_is_refused() -> None:
    with pytest.raises(ProtocolError):
        FrameDecoder(8).feed(frame(b"ok") + b"\xff\xff\xff\xff")


def test_a_payload_beyond_the_limit_is_not_sent() -> None:
    assert len(frame(bytes(MAX_CONTROL_FRAME))) == 4 + MAX_CONTROL_FRAME
    with pytest.raises(ProtocolError, match="exceeds the limit"):
        frame(bytes(MAX_CONTROL_FRAME + 1))


# Version negotiation


@pytest.mark.parametrize("low", range(4))
@pytest.mark.parametrize("high", range(5))
@pytest.mark.parametrize("ours", [(1, 1), (1, 3), (2, 2), (2, 4)])
def test_the_newest_common_version_wins(
    monkeypatch: pytest.MonkeyPatch, low: int, high: int, ours: tuple[int, int]
) -> None:
    monkeypatch.setattr(messages, "VERSION_MIN", ours[0])
    monkeypatch.setattr(messages, "VERSION_MAX", ours[1])
    common = set(range(low, high + 1)) & set(range(ours[0], ours[1] + 1))
    assert messages.agree_on_version((low, high)) == (max(common) if common else None)


def test_this_version_speaks_with_itself_and_with_a_newer_one() -> None:
    ours = (messages.VERSION_MIN, messages.VERSION_MAX)
    assert messages.agree_on_version(ours) == messages.VERSION_MAX
    assert messages.agree_on_version((messages.VERSION_MIN, U32_MAX)) == messages.VERSION_MAX
    assert messages.agree_on_version((messages.VERSION_MAX + 1, U32_MAX)) is None


# Data headers


@USUAL
@given(
    key=st.binary(max_size=40),
    token=st.binary(min_size=16, max_size=16),
    connection=st.integers(0, U64_MAX),
    serve=st.booleans(),
)
def test_greeting_round_trip(key: bytes, token: bytes, connection: int, serve: bool) -> None:
    greeting = Greeting.make(key, token, connection, serve=serve)
    assert len(greeting.encode()) == data.GREETING_BYTES
    assert Greeting.decode(greeting.encode()) == greeting


@USUAL
@given(raw=st.one_of(st.binary(max_size=80), st.binary(min_size=data.GREETING_BYTES, max_size=data.GREETING_BYTES)))
def test_greeting_of_any_bytes(raw: bytes) -> None:
    valid = len(raw) == data.GREETING_BYTES and raw[24] in (0, 1)
    if valid:
        greeting = Greeting.decode(raw)
        assert (greeting.link_token, greeting.serve) == (raw[:16], raw[24] == 1)
    else:
        with pytest.raises(ProtocolError, match="a data greeting"):
            Greeting.decode(raw)


requests = st.builds(
    Request,
    op=st.sampled_from(Op),
    tensors=st.integers(1, 90),
    runs=st.integers(1, 90),
    epoch=st.integers(0, U64_MAX),
    total=st.integers(0, MAX_TOTAL),
    timeout_ms=st.integers(0, U32_MAX),
    transfer_id=st.integers(0, U64_MAX),
)


@USUAL
@given(request=requests)
def test_request_round_trip(request: Request) -> None:
    assert len(request.encode()) == data.REQUEST_BYTES
    for raw in (request.encode(), bytearray(request.encode()), memoryview(request.encode())):
        assert Request.decode(raw) == request
    assert request.spans == request.tensors * request.runs


@pytest.mark.parametrize(("tensors", "runs"), [(1, MAX_SPANS), (MAX_SPANS, 1), (64, MAX_SPANS // 64)])
def test_the_largest_requests(tensors: int, runs: int) -> None:
    request = Request(Op.WRITE, tensors, runs, 0, MAX_TOTAL, 5)
    assert Request.decode(request.encode()) == request
    assert (request.spans, request.table_bytes) == (MAX_SPANS, 16 * (tensors + runs))


def request_bytes(**changes: int) -> bytes:
    fields = {"magic": 0x4C4C4451, "op": 1, "tensors": 2, "runs": 7, "timeout": 5, "epoch": 3, "total": 8}
    fields |= {"transfer_id": 6} | changes
    return struct.pack("<IHHIIQQQ", *fields.values())


def test_the_bytes_of_a_request_are_these() -> None:
    assert Request(Op.READ, 2, 7, 3, 8, 5, 6).encode() == request_bytes()


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        request_bytes()[:-1],
        request_bytes() + b"\0",
        request_bytes(magic=0x4C4C4452),
        request_bytes(op=0),
        request_bytes(op=3),
        request_bytes(op=65535),
        request_bytes(tensors=0),
        request_bytes(runs=0),
        request_bytes(tensors=1, runs=MAX_SPANS + 1),
        request_bytes(tensors=MAX_SPANS + 1, runs=1),
        request_bytes(tensors=3, runs=MAX_SPANS // 3 + 1),
        request_bytes(tensors=65535, runs=U32_MAX),
        request_bytes(tensors=1 << 15, runs=1 << 31),
        request_bytes(total=MAX_TOTAL + 1),
        request_bytes(total=2**63),
        request_bytes(total=U64_MAX),
        b"GET / HTTP/1.1\r\nHost: example.or",
    ],
    ids=lambda raw: raw.hex(),
)
def test_requests_that_nobody_sends(raw: bytes) -> None:
    with pytest.raises(ProtocolError, match="data request"):
        Request.decode(raw)


@pytest.mark.parametrize("result", Result)
@pytest.mark.parametrize("size", [0, 1, MAX_REASON])
def test_reply_round_trip(result: Result, size: int) -> None:
    reply = Reply(result, size)
    assert len(reply.encode()) == data.REPLY_BYTES
    assert data.REPLY_BYTES % CACHE_LINE == 0
    assert Reply.decode(reply.encode()) == reply


def reply_bytes(magic: int = 0x4C4C4451, result: int = 0, size: int = 0) -> bytes:
    return struct.pack("<IHHI", magic, result, 0, size)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        reply_bytes()[:-1],
        reply_bytes() + b"\0",
        reply_bytes(magic=1),
        reply_bytes(result=max(Result) + 1),
        reply_bytes(result=65535),
        reply_bytes(size=MAX_REASON + 1),
        reply_bytes(size=U32_MAX),
    ],
    ids=lambda raw: raw.hex(),
)
def test_replies_that_nobody_sends(raw: bytes) -> None:
    with pytest.raises(ProtocolError, match="data reply"):
        Reply.decode(raw)


@USUAL
@given(raw=st.binary(min_size=data.REQUEST_BYTES, max_size=data.REQUEST_BYTES), keep_magic=st.booleans())
def test_headers_of_any_bytes(raw: bytes, keep_magic: bool) -> None:
    if keep_magic:
        raw = request_bytes()[:4] + raw[4:]
    for decode, size in ((Request.decode, data.REQUEST_BYTES), (Reply.decode, data.REPLY_BYTES)):
        try:
            header = decode(raw[:size])
        except ProtocolError:
            continue
        assert decode(header.encode()) == header


# Span tables


def u64(values: list[int]) -> Any:
    return np.array(values, dtype=np.uint64)


def i64(values: list[int]) -> Any:
    return np.array(values, dtype=np.int64)


TENSORS = st.lists(st.tuples(st.integers(0, U64_MAX), st.integers(0, 2**62 - 1)), min_size=1, max_size=20)
RUNS = st.lists(st.tuples(st.integers(0, 2**62 - 1), st.integers(0, 2**50)), min_size=1, max_size=20)
Rows = list[tuple[int, int]]


def table_of(tensors: Rows, runs: Rows) -> memoryview:
    return memoryview(b"".join(struct.pack("<QQ", *row) for row in (*tensors, *runs)))


def request_for(tensors: Rows, runs: Rows, difference: int = 0) -> Request:
    total = len(tensors) * sum(length for _, length in runs)
    return Request(Op.READ, len(tensors), len(runs), 0, total + difference, 5)


def decode_both(tensors: Rows, runs: Rows, difference: int = 0) -> tuple[Rows, Rows]:
    """What both decoders make of the same tables, which must be the same; or the error that both raise."""
    raw, request = table_of(tensors, runs), request_for(tensors, runs, difference)
    try:
        few = data.decode_few(raw, request)
    except ProtocolError as error:
        with pytest.raises(ProtocolError, match=f"^{re.escape(str(error))}$"):
            data.decode_spans(raw, request)
        raise
    columns = [column.tolist() for column in data.decode_spans(raw, request)]
    many = list(zip(*columns[:2], strict=True)), list(zip(*columns[2:], strict=True))
    assert few == many
    return few


@USUAL
@given(tensors=TENSORS, runs=RUNS)
def test_tables_round_trip(tensors: Rows, runs: Rows) -> None:
    columns = [[row[side] for row in rows] for rows in (tensors, runs) for side in (0, 1)]
    raw = data.encode_spans(u64(columns[0]), i64(columns[1]), i64(columns[2]), i64(columns[3]))
    assert len(raw) == request_for(tensors, runs).table_bytes
    assert raw == table_of(tensors, runs).tobytes()
    assert decode_both(tensors, runs) == (tensors, runs)
    decoded = data.decode_spans(memoryview(raw), request_for(tensors, runs))
    assert [column.dtype for column in decoded] == [np.uint64, np.int64, np.int64, np.int64]


@USUAL
@given(
    regions=st.lists(st.integers(0, U64_MAX), min_size=1, max_size=20),
    offsets=st.lists(st.integers(0, 2**62 - 1), min_size=1, max_size=20),
    length=st.integers(0, MAX_TOTAL // 20**2),
)
def test_a_request_of_few_spans_is_like_any_other(regions: list[int], offsets: list[int], length: int) -> None:
    tensors, runs = [(region, 0) for region in regions], [(offset, length) for offset in offsets]
    request = request_for(tensors, runs)
    raw = data.encode_few(request, regions, offsets, length)
    assert raw == request.encode() + table_of(tensors, runs).tobytes() + bytes(request.padding)
    assert len(raw) % CACHE_LINE == 0
    assert Request.decode(raw[: data.REQUEST_BYTES]) == request


@USUAL
@given(tensors=TENSORS, runs=RUNS, difference=st.integers(-(2**61), 2**61).filter(bool))
def test_tables_add_up_to_what_was_announced(tensors: Rows, runs: Rows, difference: int) -> None:
    with pytest.raises(ProtocolError, match="do not add up"):
        decode_both(tensors, runs, difference)


@pytest.mark.parametrize(("row", "column"), [(1, 1), (2, 0), (2, 1), (3, 0), (3, 1)])
@pytest.mark.parametrize("value", [2**62, 2**63, U64_MAX])
def test_tables_with_numbers_beyond_all_memory(row: int, column: int, value: int) -> None:
    rows = [[7, 8], [7, 8], [8, 9], [8, 9]]
    rows[row][column] = value
    tensors, runs = [(a, b) for a, b in rows[:2]], [(a, b) for a, b in rows[2:]]
    with pytest.raises(ProtocolError, match=r"beyond 2\^62"):
        decode_both(tensors, runs)


@pytest.mark.parametrize(("tensors", "runs"), [(1, 8), (8, 1), (2, 4)])
def test_lengths_that_would_wrap_around_do_not_add_up(tensors: int, runs: int) -> None:
    """Eight lengths of 2**61 are 2**64, which is 0 in 64 bits."""
    with pytest.raises(ProtocolError, match="do not add up"):
        decode_both([(1, 0)] * tensors, [(0, 2**61)] * runs, -(2**64))


def test_tables_are_copied_out_of_the_receive_buffer() -> None:
    raw = bytearray(table_of([(7, 8)], [(9, 10)]))
    many = data.decode_spans(memoryview(raw), request_for([(7, 8)], [(9, 10)]))
    few = data.decode_few(memoryview(raw), request_for([(7, 8)], [(9, 10)]))
    raw[:] = bytes(len(raw))
    assert [column.tolist() for column in many] == [[7], [8], [9], [10]]
    assert few == ([(7, 8)], [(9, 10)])


# Control messages that are not any


def test_a_message_is_a_map_with_names() -> None:
    payload = messages.encode(messages.Envelope(body=messages.Bye(reason="done"), id=7))
    fields = msgspec.msgpack.decode(payload)
    assert not any(fields.pop("pad"))
    assert fields == {"body": {"type": "bye", "reason": "done"}, "id": 7, "reply_to": 0}


def test_fields_of_a_newer_version_are_ignored() -> None:
    newer = {"body": {"type": "ok", "since": 2, "more": [{"a": b"b"}]}, "id": 0, "reply_to": 3, "trace": None}
    assert messages.decode(msgspec.msgpack.encode(newer)) == messages.Envelope(body=messages.Ok(), reply_to=3)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\x81\xa4body" + b"\x91" * 100_000,
        b"\x81\xa4body\x82\xa4type\xa2ok\xa4more" + b"\x91" * 100_000,
        b"\xdf\xff\xff\xff\xff",
        b"\xc1",
        msgspec.msgpack.encode([1, 2]),
        msgspec.msgpack.encode({"body": {"type": "no such message"}}),
        msgspec.msgpack.encode({"body": {}}),
        msgspec.msgpack.encode({"body": {"type": "ok"}}) + b"\0",
        b"\x81\xa4body\x82\xa4type\xa3bye\xa6reason\xa3\xff\xff\xff",
        msgspec.json.encode({"body": {"type": "ok"}}),
    ],
    ids=lambda payload: payload[:24].hex(),
)
def test_payloads_that_are_no_message(payload: bytes) -> None:
    with pytest.raises(ProtocolError, match="malformed control message"):
        messages.decode(payload)


@pytest.mark.parametrize("where", ["id", "reply_to"])
@pytest.mark.parametrize("value", [-1, "1", None, 1.5])
def test_envelopes_with_a_bad_number(where: str, value: object) -> None:
    with pytest.raises(ProtocolError):
        messages.decode(msgspec.msgpack.encode({"body": {"type": "ok"}, where: value}))


def test_framing_and_messages_together() -> None:
    sent = [messages.Envelope(body=messages.Fetch(), id=n) for n in range(1, 4)]
    frames = [framing.frame(messages.encode(envelope)) for envelope in sent]
    assert all(len(each) % CACHE_LINE == 0 for each in frames)
    stream = b"".join(frames)
    assert [messages.decode(payload) for payload in FrameDecoder().feed(stream)] == sent
