"""Verified transfers: after the bytes have moved, both sides' digests of them are compared.

The side that asked for the transfer names the spans to its peer in a control message, computes the digest of its own
side meanwhile, and compares. Large transfers are compared in parts, several at a time.
"""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING, Final

from llm_datadist.engine.errors import failure
from llm_datadist.engine.service import refuse
from llm_datadist.memory import digests, iovec
from llm_datadist.memory.iovec import Side
from llm_datadist.memory.move import MemoryFaultError
from llm_datadist.memory.regions import RegionError, UnknownRegionError
from llm_datadist.net.channel import ReplyTimeoutError
from llm_datadist.paths.base import PathFaultError, PathTimeoutError
from llm_datadist.paths.parallel import Checkpoint, run
from llm_datadist.status import LLMException, LLMStatusCode, code_2_status
from llm_datadist.utils import log
from llm_datadist.utils.deadline import Deadline
from llm_datadist.wire import data, messages
from llm_datadist.wire.framing import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm_datadist.engine.core import Core
    from llm_datadist.engine.link import PeerLink
    from llm_datadist.layout.spans import Spans
    from llm_datadist.memory.regions import RegionTable
    from llm_datadist.net.workers import Workers

_PARALLEL_BYTES: Final = 4 << 20
_PARTS_PER_THREAD: Final = 4
_MAX_ASKED: Final = 32
"""Digests that one engine asks for at a time."""
_MAX_ANSWERED: Final = 2 * _MAX_ASKED
"""Digests that one link may wait for at a time: what its peer asks for, also if both ends are one engine's."""
_LONGEST_MS: Final = 2**32 - 1
_CHANGED_HINT: Final = (
    "the bytes of one side were changed during the transfer, or memory or network are faulty; the destination's "
    "contents are undefined, transfer it again"
)


class Verifier:
    """Compares what transfers of one engine have moved. Thread-safe."""

    def __init__(self, core: Core) -> None:
        self._copiers = core.copiers
        self._threads = core.copy_threads
        self._changed = threading.Condition()
        self._asking: set[object] = set()
        self._mismatches = itertools.count(1)

    def require(self, link: PeerLink, operation: str, spans: Spans) -> None:
        """Nothing is moved that could not be verified.

        Raises:
            LLMException: LLM_FEATURE_NOT_ENABLED: the peer cannot compute digests, or GPU memory takes part.
        """
        code = LLMStatusCode.LLM_FEATURE_NOT_ENABLED
        if spans.devices.any:
            context = f"verify_transfers is on, but does not look into GPU memory ({spans.devices})"
            hint = "turn verify_transfers off on this side"
            raise failure(code, operation, context, peer=link.cluster_id, phase="check", hint=hint)
        if link.digest != digests.ALGORITHM:
            context = (
                f"verify_transfers is on, but cluster {link.cluster_id} cannot compute {digests.ALGORITHM} digests"
            )
            hint = f"{digests.INSTALL} there, or turn verify_transfers off here"
            raise failure(code, operation, context, peer=link.cluster_id, phase="check", hint=hint)

    def confirm(self, link: PeerLink, operation: str, path: str, spans: Spans, deadline: Deadline) -> None:
        """Return if both sides hold the same bytes.

        Raises:
            LLMException: LLM_FAILED: they differ.
            UnknownRegionError: the peer has unregistered its side meanwhile.
            PathError: the memory of one side cannot be read, or the deadline passed.
            ChannelClosedError: the link is gone.
        """
        total, spans = spans.total, spans.cut()
        threads = self._threads if total >= _PARALLEL_BYTES else 1
        size = min(iovec.MAX_PIECE, max(_PARALLEL_BYTES, total // (threads * _PARTS_PER_THREAD)))
        parts = iter(list(iovec.parts(len(spans.bases), spans.runs.lengths, data.MAX_SPANS, size)))
        checkpoint = Checkpoint(deadline)

        def work() -> None:
            for part in parts:  # shared: each thread takes the next one
                checkpoint()
                there = self._ask(link, spans[part], deadline)
                here = digests.digest(spans.here.iovecs(spans.runs.lengths, part), checkpoint)
                if here != there:
                    raise self._mismatch(link, operation, path, spans[part], (here, there))

        try:
            run([work] * threads, self._copiers, checkpoint)
        except ReplyTimeoutError as error:
            raise PathTimeoutError(str(error)) from error
        except MemoryFaultError as error:
            raise PathFaultError(str(error)) from error

    def _ask(self, link: PeerLink, spans: Spans, deadline: Deadline) -> int:
        runs = spans.runs
        timeout_ms = min(max(1, int(deadline.remaining() * 1000)), _LONGEST_MS)
        header = data.Request(data.Op.READ, len(spans.bases), len(runs), 0, spans.total, timeout_ms)
        tables = data.encode_spans(spans.regions, spans.starts, runs.remote, runs.lengths)
        reply = self._request(link, messages.Digest(spans=header.encode() + tables), deadline)
        if isinstance(reply, messages.Digested):
            return reply.value
        if not isinstance(reply, messages.Refuse):
            message = f"the peer answered a request for a digest with {type(reply).__name__}"
            raise PathFaultError(message)
        if code_2_status(reply.code) is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST:
            raise UnknownRegionError(reply.reason)
        message = f"no digest from the peer: {reply.reason}"
        raise PathFaultError(message)

    def _request(self, link: PeerLink, ask: messages.Digest, deadline: Deadline) -> messages.Body:
        """Ask when it is this one's turn."""
        ticket = object()
        try:
            with self._changed:
                if not self._changed.wait_for(lambda: len(self._asking) < _MAX_ASKED, deadline.remaining()):
                    message = f"{_MAX_ASKED} digests were being asked for until the deadline"
                    raise PathTimeoutError(message)
                self._asking.add(ticket)
            return link.request(ask, deadline)
        finally:
            self._asking.discard(ticket)  # in one step: Ctrl-C may come between any two
            with self._changed:
                self._changed.notify()

    def _mismatch(self, link: PeerLink, operation: str, path: str, part: Spans, found: tuple[int, int]) -> LLMException:
        here, there = found
        context = (
            f"peer cluster {link.cluster_id}: among {part.total} transferred bytes some differ "
            f"({digests.ALGORITHM} {here:#018x} here, {there:#018x} there)"
        )
        log.error("[%s] %s; mismatch %d of this engine", operation, context, next(self._mismatches))
        code = LLMStatusCode.LLM_FAILED
        return failure(
            code,
            operation,
            context,
            peer=link.cluster_id,
            path=path,
            phase="confirm",
            retryable=True,
            hint=_CHANGED_HINT,
        )


class DigestService:
    """Tells peers the digests of this engine's registered memory. Thread-safe."""

    def __init__(self, regions: RegionTable, workers: Workers) -> None:
        self._regions = regions
        self._view = regions.view
        self._workers = workers
        self._lock = threading.Lock()
        self._running: dict[bytes, int] = {}

    def answer(self, token: bytes, ask: messages.Digest, reply: Callable[[messages.Body], object]) -> None:
        """Compute on a worker, then reply; ``token`` names the link that asks."""
        with self._lock:
            running = self._running.get(token, 0)
            if running < _MAX_ANSWERED:
                self._running[token] = running + 1
        if running >= _MAX_ANSWERED:
            reply(refuse(LLMStatusCode.LLM_FAILED, f"{running} digests are being computed for this link"))
            return

        def done() -> None:
            with self._lock:
                self._running[token] -= 1
                if not self._running[token]:
                    del self._running[token]

        def work() -> None:
            try:
                answer = self.compute(ask)
            finally:
                done()
            reply(answer)

        self._workers.run(work, done)

    def close(self) -> None:
        """Look at the table no more; idempotent."""
        self._view.close()

    def compute(self, ask: messages.Digest) -> messages.Body:
        """The digest, or a refusal."""
        try:
            request, (regions, starts, offsets, lengths) = data.decode_whole(ask.spans)
            checkpoint = Checkpoint(Deadline.after(request.timeout_ms / 1000))
            with self._regions.lease(regions.tolist()):
                bases = self._view.bases(regions, starts, (int(offsets.min()), int((offsets + lengths).max())))
                return messages.Digested(value=digests.digest(Side(bases, offsets).iovecs(lengths), checkpoint))
        except UnknownRegionError as error:
            return refuse(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, str(error))
        except (ProtocolError, RegionError) as error:
            log.warn("request for a digest refused: %s", error)
            return refuse(LLMStatusCode.LLM_PARAM_INVALID, str(error))
        except PathTimeoutError as error:
            return refuse(LLMStatusCode.LLM_TIMEOUT, str(error))
        except (MemoryFaultError, OSError, ImportError) as error:
            log.error("request for a digest refused: %s", error)
            return refuse(LLMStatusCode.LLM_FAILED, str(error))
