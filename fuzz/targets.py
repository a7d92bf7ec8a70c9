"""What is fuzzed: one function a decoder, which raises only if the decoder does what is not documented.

A target takes any bytes. It swallows the documented exceptions and asserts what must hold of everything that was
accepted. To add one, write the function and its examples, and enter it in ``TARGETS``.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fuzz import examples
from llm_datadist.configs import LLMConfig, parse_listen_ip_info
from llm_datadist.engine.catalogue import CacheEntry, geometry_of
from llm_datadist.engine.options import EngineOptions
from llm_datadist.engine.peer_catalogue import PeerCache, PeerCatalogue, peer_cache
from llm_datadist.engine.planning import BlockIds, plan_pull, plan_push
from llm_datadist.engine.ranktable import RankTableError, addresses
from llm_datadist.engine.requests import BlocksKey, CacheKind, CacheSpec, IdKey, PullRequest, PushRequest, RequestKey
from llm_datadist.layout.spans import LayoutError
from llm_datadist.memory.regions import CAPACITY, RegionError, RegionView
from llm_datadist.status import LLMException
from llm_datadist.wire import data, handover, messages
from llm_datadist.wire.framing import MAX_CONTROL_FRAME, FrameDecoder, ProtocolError, parse_preamble

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from llm_datadist.engine.requests import Key
    from llm_datadist.layout.spans import Spans

_U64: Final = 1 << 64
_LIMITS: Final = (0, 1, 64, 4096, 64 << 10, MAX_CONTROL_FRAME)


def framing(raw: bytes) -> None:
    """Frames cut anywhere: nothing beyond the limit is kept, whole frames come out as they were sent."""
    with contextlib.suppress(ProtocolError):
        parse_preamble(raw[:8])
    if len(raw) < 2:  # noqa: PLR2004 - the limit and the size of the pieces
        return
    limit, piece, stream = _LIMITS[raw[0] % len(_LIMITS)], raw[1] or 256, raw[2:]
    decoder, payloads = FrameDecoder(limit), []
    with contextlib.suppress(ProtocolError):
        for start in range(0, len(stream), piece):
            payloads += decoder.feed(stream[start : start + piece])
            assert len(decoder._buffer) < 4 + limit + piece  # noqa: SLF001 - what is kept is what is to be bounded
    again = b"".join(len(payload).to_bytes(4, "big") + payload for payload in payloads)
    assert stream.startswith(again)
    assert all(len(payload) <= limit for payload in payloads)


def control(raw: bytes) -> None:
    """A control message: accepted ones survive another round; a catalogue in it is understood or refused."""
    try:
        envelope = messages.decode(raw)
    except ProtocolError:
        return
    assert messages.decode(messages.encode(envelope)) == envelope
    body = envelope.body
    if isinstance(body, messages.Hello):
        version = messages.agree_on_version(body.versions)
        assert version is None or messages.VERSION_MIN <= version <= messages.VERSION_MAX
    if isinstance(body, messages.Catalogue):
        _use_catalogue(body)
    if isinstance(body, messages.Found):
        with contextlib.suppress(ValueError):
            _plan_with(peer_cache(body.cache), body.batch_index)


def catalogue(raw: bytes) -> None:
    """A peer's catalogue, without the envelope around it: finding and planning with it never reach out of bounds."""
    control(b"\x81\xa4body" + raw)


def _use_catalogue(body: messages.Catalogue) -> None:
    try:
        known = PeerCatalogue(body)
    except ValueError:
        return
    keys: list[Key] = [IdKey(info.cache_id) for info in body.caches[:8]]
    keys += [
        BlocksKey(info.model_id) if info.req_id is None else RequestKey(info.req_id, info.model_id)
        for info in body.keys[:8]
    ]
    for key in keys:
        try:
            remote, batch_index = known.find(key, pull=True)
        except KeyError:
            continue
        _plan_with(remote, batch_index)


@functools.cache
def _local(kind: CacheKind) -> CacheEntry:
    spec = CacheSpec(2, (4, 16), 1, "DT_UINT8", on_device=True, kind=kind)
    regions = np.array([1 << 16 | 1, 2 << 16 | 2], dtype=np.uint64)
    addrs = np.array([1 << 20, 1 << 21], dtype=np.uint64)
    return CacheEntry(1, spec, geometry_of(spec), addrs, regions, accessible=True, owned=False)


def _plan_with(remote: PeerCache, batch_index: int) -> None:
    """Pull from and push to what a peer has told of: refused, or within its tensors and ours."""
    blocks = [0, 3]
    for local in map(_local, CacheKind):
        for here in (blocks, None):
            for there in (blocks, None):
                ids = BlockIds.of(here, there)
                pull = PullRequest("pull", 2, IdKey(1), 1, src_blocks=there, dst_blocks=here)
                push = PushRequest("push", 2, IdKey(1), 1, range(1), range(1), src_blocks=here, dst_blocks=there)
                for plan, request in ((plan_pull, pull), (plan_push, push)):
                    if plan is plan_pull and here is None and there is not None:
                        continue  # no public call pulls blocks into a batch entry
                    with contextlib.suppress(LayoutError, KeyError):
                        _check_spans(plan(local, remote, batch_index, request, ids), remote)  # type: ignore[operator]


def _check_spans(spans: Spans, remote: PeerCache) -> None:
    runs, size = spans.runs, 4 * 16
    assert (runs.lengths > 0).all()
    assert (runs.local >= 0).all()
    assert (runs.remote >= 0).all()
    assert (runs.local + runs.lengths <= size).all()
    assert runs.extent[1] <= remote.geometry.tensor_size
    assert len(spans.bases) == len(spans.regions)


def exchange(raw: bytes) -> None:
    """Headers and tables of data connections; both readers of a table agree, and what they accept adds up."""
    with contextlib.suppress(ProtocolError):
        greeting = data.Greeting.decode(raw[: data.GREETING_BYTES])
        assert data.Greeting.decode(greeting.encode()) == greeting
    with contextlib.suppress(ProtocolError):
        reply = data.Reply.decode(raw[: data.REPLY_BYTES])
        assert reply.reason_bytes <= data.MAX_REASON
    try:
        request = data.Request.decode(raw[: data.REQUEST_BYTES])
    except ProtocolError:
        return
    assert request.encode() == raw[: data.REQUEST_BYTES]
    assert request.table_bytes <= 2 * data.ROW_BYTES * data.MAX_SPANS
    table = memoryview(raw)[data.REQUEST_BYTES :]
    if len(table) < request.table_bytes:
        return
    table = table[: request.table_bytes]
    outcomes = [_or_refused(lambda: _tables(table, request)), _or_refused(lambda: _few_tables(table, request))]
    assert outcomes[0] == outcomes[1]
    if outcomes[0] is not None:
        lengths = [length for _, length in outcomes[0][1]]
        assert request.tensors * sum(lengths) == request.total <= data.MAX_TOTAL


_Tables = tuple[list[tuple[int, int]], list[tuple[int, int]]]


def _or_refused(read: Callable[[], _Tables]) -> _Tables | None:
    try:
        return read()
    except ProtocolError:
        return None


def _tables(table: memoryview, request: data.Request) -> _Tables:
    regions, starts, offsets, lengths = (array.tolist() for array in data.decode_spans(table, request))
    return list(zip(regions, starts, strict=True)), list(zip(offsets, lengths, strict=True))


def _few_tables(table: memoryview, request: data.Request) -> _Tables:
    return data.decode_few(table, request)


def hand_over(raw: bytes) -> None:
    """The packet that names the descriptors of shared memory."""
    with contextlib.suppress(ProtocolError):
        found = handover.decode(raw)
        assert handover.decode(handover.encode(found)) == found
        assert 0 < len(found.areas) <= handover.MAX_AREAS


_ROWS: Final = 32


def region_table(raw: bytes) -> None:
    """A region table that a hostile owner has written, and spans that a hostile asker names in a good one."""
    words = np.frombuffer(raw[: len(raw) // 8 * 8], dtype="<u8").astype(np.uint64)
    if len(words) < 6:  # noqa: PLR2004 - a question is six words
        return
    question, told = words[:6].tolist(), words[6:]
    rows = _rows()
    rows[: _ROWS + 1] = 0
    told = told[: len(told) // 4 * 4].reshape(-1, 4)[:_ROWS]
    rows[1 : 1 + len(told)] = told
    view = RegionView(rows)
    region, start, low, high = question[0], question[1] % (1 << 62), question[2] % (1 << 62), question[3] % (1 << 62)
    with contextlib.suppress(RegionError):
        address = view.base(region, start, (low, high))
        base, size = view.find(region)
        assert base <= address <= base + size
        assert start + high <= size
    with contextlib.suppress(RegionError):
        regions = np.array([region, question[4]], dtype=np.uint64)
        starts = np.array([start, question[5] % (1 << 62)], dtype=np.int64)
        bases = view.bases(regions, starts, (low, high))
        assert bases.shape == (2,)
        for at, offset in zip(regions.tolist(), starts.tolist(), strict=True):
            assert offset + high <= view.find(at)[1]
    view.edges([region, question[4]])
    view.still_live(np.array([region], dtype=np.uint64))


@functools.cache
def _rows() -> np.ndarray[Any, np.dtype[np.uint64]]:
    return np.zeros((CAPACITY, 4), dtype=np.uint64)


def region_file(raw: bytes) -> None:
    """A descriptor that is said to be a region table: mapped only if it cannot be truncated, read only if it is one."""
    fd = os.memfd_create("fuzz", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.write(fd, raw)
        with contextlib.suppress(RegionError, OSError):
            RegionView.of_descriptor(fd, "a descriptor").close()
            message = "a file that is not sealed was mapped"
            raise AssertionError(message)
    finally:
        os.close(fd)


def rank_table(raw: bytes) -> None:
    """A rank table of anybody: only addresses that can be connected to come out."""
    text = raw.decode("utf-8", "surrogateescape")
    with contextlib.suppress(RankTableError):
        found = addresses(text, {1: 0, 2: 1})
        assert set(found) == {1, 2}
        assert all(0 < port < 1 << 16 and host for where in found.values() for host, port in where)


def options(raw: bytes) -> None:
    """The option dictionary of ``init``: lines of key and value."""
    given = {"llm.Role": "Mix"}
    for line in raw.split(b"\n")[:32]:
        key, _, value = line.partition(b"=")
        name = examples.OPTION_KEYS[key[0] % len(examples.OPTION_KEYS)] if len(key) == 1 else _text(key)
        given[name] = _text(value)
    with contextlib.suppress(LLMException):
        parsed = EngineOptions.parse(given)
        assert parsed.listen is None or 0 <= parsed.listen[1] < 1 << 16
        assert parsed.paths


def listen_address(raw: bytes) -> None:
    """``parse_listen_ip_info``."""
    with contextlib.suppress(LLMException, ValueError):
        host, port = parse_listen_ip_info(_text(raw))
        assert host
        assert 0 <= port < 1 << 16


def cluster_info(raw: bytes) -> None:
    """``LLMConfig.cluster_info``: what it takes is JSON afterwards."""
    config = LLMConfig()
    try:
        config.cluster_info = _text(raw)
    except RecursionError:
        raise
    except (LLMException, ValueError, TypeError, RuntimeError):  # RuntimeError: no address, as ``trans_str_ip`` says
        return
    assert isinstance(json.loads(config.cluster_info), dict)


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


@dataclass(frozen=True)
class Target:
    """A decoder and what it is fed with."""

    run: Callable[[bytes], None]
    examples: Callable[[], Iterator[bytes]]
    """Valid inputs, to begin with."""
    form: str
    """``msgpack``, ``json`` or ``bytes``: how the mutator looks into an input."""


TARGETS: Final[dict[str, Target]] = {
    "framing": Target(framing, examples.frames, "bytes"),
    "control": Target(control, examples.envelopes, "msgpack"),
    "catalogue": Target(catalogue, examples.catalogues, "msgpack"),
    "exchange": Target(exchange, examples.exchanges, "bytes"),
    "hand_over": Target(hand_over, examples.hand_overs, "msgpack"),
    "region_table": Target(region_table, examples.region_tables, "bytes"),
    "region_file": Target(region_file, examples.region_files, "bytes"),
    "rank_table": Target(rank_table, examples.rank_tables, "json"),
    "options": Target(options, examples.option_lines, "bytes"),
    "listen_address": Target(listen_address, examples.listen_addresses, "bytes"),
    "cluster_info": Target(cluster_info, examples.cluster_infos, "json"),
}
