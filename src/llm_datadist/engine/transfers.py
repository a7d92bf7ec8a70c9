"""One pull or push, from request to result.

Both are the same in the end: find the two caches, let ``layout`` turn them and the selection into spans, and let the
link's path move the spans. In remote-accessible mode the remote cache comes from the peer's catalogue, known already
or fetched; what turns out to be out of date is fetched once more. In message mode the peer looks it up and holds it
until the transfer has ended.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

import numpy as np

from llm_datadist.engine import notifications
from llm_datadist.engine.compatibility import misfit, note_data_types
from llm_datadist.engine.errors import failure, finished_blocks, invalid, path_failure, transfer_failure
from llm_datadist.engine.peer_catalogue import peer_cache
from llm_datadist.engine.planning import (
    BlockIds,
    check_destination,
    plan_pull,
    plan_push,
    plan_to_addresses,
    source_tensors,
)
from llm_datadist.engine.requests import BlocksKey, IdKey, PrefixKey, PullRequest, PushRequest
from llm_datadist.engine.short import ShortTransfers, short_name
from llm_datadist.engine.verify import Verifier
from llm_datadist.layout.spans import LayoutError, Spans
from llm_datadist.memory.devices import Devices
from llm_datadist.memory.regions import RegionError, StaleEpochError, UnknownRegionError
from llm_datadist.net.channel import ChannelClosedError, ReplyTimeoutError
from llm_datadist.observe.events import FallbackReason, Phase
from llm_datadist.paths.base import OutOfReachError, PathDeniedError, PathError, PathTimeoutError
from llm_datadist.status import LLMStatusCode, code_2_status
from llm_datadist.wire import messages

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from llm_datadist.engine.catalogue import CacheEntry
    from llm_datadist.engine.core import Core
    from llm_datadist.engine.link import PeerLink
    from llm_datadist.engine.network import Links
    from llm_datadist.engine.peer_catalogue import PeerCache, PeerCatalogue
    from llm_datadist.engine.requests import Key
    from llm_datadist.observe.recorder import Watch
    from llm_datadist.paths.base import Path
    from llm_datadist.status import LLMException
    from llm_datadist.utils.deadline import Deadline

    Plan = Callable[[PeerCache, int], Spans]

T = TypeVar("T")
_MAX_ATTEMPTS: Final = 64


class Request(Protocol):
    """What pull and push requests have in common."""

    @property
    def operation(self) -> str:
        """Name of the public call."""

    @property
    def cluster_id(self) -> int:
        """The peer."""

    @property
    def dst_blocks(self) -> Sequence[int] | None:
        """Destination blocks."""

    @property
    def notify(self) -> bytes | None:
        """For the peer, once the bytes are in place."""


@dataclass(frozen=True, slots=True)
class _Call:
    """One pull or push that runs."""

    request: PullRequest | PushRequest
    local: CacheEntry
    link: PeerLink
    deadline: Deadline
    watch: Watch


class Transfers:
    """Runs transfers of one engine. Thread-safe; many may run at once."""

    def __init__(self, core: Core, links: Links) -> None:
        self._core = core
        self._links = links
        self._verifier = Verifier(core) if core.options.verify_transfers else None

    def pull(self, request: PullRequest, deadline: Deadline, watch: Watch) -> None:
        """Copy from a peer's cache into a local one; the bytes are in place when it returns.

        Raises:
            LLMException: see the public calls.
            TypeError: a negative block index.
        """
        watch.enter(Phase.PLAN)
        ids = BlockIds.of(request.dst_blocks, request.src_blocks)
        if request.cluster_id == self._core.identity.cluster_id:
            raise invalid(request.operation, f"cluster {request.cluster_id} is this cluster itself")
        local = self._local(request)
        try:
            self._hold(local, request, deadline)
            check_destination(local, request)
            link = self._links.require(request.cluster_id, request.operation)

            def spans(remote: PeerCache, batch_index: int) -> Spans:
                return plan_pull(local, remote, batch_index, request, ids)

            call = _Call(request, local, link, deadline, watch)
            if self._core.options.remote_accessible:
                _check_accessible(local, request)
                self._with_catalogue(call, request.key, spans, pull=True)
            else:
                self._with_lookup(call, request.key, spans)
            _notify(call)
        finally:
            try:
                local.holders.discard(deadline)  # in one step: Ctrl-C may come between any two
            finally:
                self._core.catalogue.let_go(local, deadline)

    def push(self, request: PushRequest, deadline: Deadline, watch: Watch) -> None:
        """Copy from a local cache to a peer; the bytes are in place *there* when it returns.

        Raises:
            LLMException: see the public calls.
            TypeError: a negative block index.
        """
        watch.enter(Phase.PLAN)
        ids = BlockIds.of(request.src_blocks, request.dst_blocks)
        local = self._local(request)
        try:
            self._hold(local, request, deadline)
            link = self._links.require(request.cluster_id, request.operation)
            call = _Call(request, local, link, deadline, watch)
            if request.key is None:
                self._to_addresses(call, request, ids)
            elif request.src_layers:
                self._to_cache(call, request, request.key, ids)
            _notify(call)
        finally:
            try:
                local.holders.discard(deadline)  # in one step: Ctrl-C may come between any two
            finally:
                self._core.catalogue.let_go(local, deadline)

    def _local(self, request: PullRequest | PushRequest) -> CacheEntry:
        entry = self._core.catalogue.get(request.cache_id)
        if entry is None:
            raise missing(request, f"there is no local cache {request.cache_id}")
        return entry

    def _hold(self, local: CacheEntry, request: Request, deadline: Deadline) -> None:
        """Hold a cache for this call, whose deadline, an object that no other call has, is its ticket.

        A call in the background holds it already, and may go on when the cache has been hidden meanwhile.
        """
        if deadline not in local.holders and not self._core.catalogue.hold(local, deadline):
            raise missing(request, f"there is no local cache {local.cache_id}")

    def _with_catalogue(self, call: _Call, key: Key, spans: Plan, *, pull: bool) -> None:
        """Plan with the peer's catalogue, which may be out of date.

        Where planning fails it is fetched anew and looked at again, once. A catalogue that turns out to be old while
        the bytes are about to move is fetched as often as that happens.
        """
        request, local, link, deadline = call.request, call.local, call.link, call.deadline
        call.watch.enter(Phase.LOOKUP)
        catalogue = _asking(call, lambda: link.catalogue(deadline))
        refreshed = False
        for _ in range(_MAX_ATTEMPTS):
            call.watch.enter(Phase.PLAN)
            try:
                remote, batch_index = _find(request, catalogue, key, pull=pull)
                planned = spans(remote, batch_index)
                note_data_types(link, local, remote)
                path = self._move(call, planned, catalogue.epoch, pull=pull)
            except (StaleEpochError, UnknownRegionError):
                pass
            except LayoutError as error:
                if refreshed:
                    raise misfit(request, local, remote, error) from error
            except KeyError as error:
                if refreshed:
                    raise missing(request, f"cluster {request.cluster_id} has no cache for {key}") from error
            else:
                name = short_name(key)
                if self._verifier is not None:
                    return  # the short way does not verify
                if name is not None and request.src_blocks is not None and request.dst_blocks is not None:
                    ShortTransfers.remember(link, path, name, local, remote, catalogue.epoch)
                return
            old, refreshed = catalogue, True
            call.watch.enter(Phase.LOOKUP)
            catalogue = _asking(call, functools.partial(link.catalogue, deadline, old))
        raise missing(request, f"the cache for {key} of cluster {request.cluster_id} does not stay registered")

    def _with_lookup(self, call: _Call, key: Key, spans: Plan) -> None:
        """Let the peer look the source up; it holds the cache until ``Finish``."""
        request, local, link, deadline = call.request, call.local, call.link, call.deadline
        call.watch.enter(Phase.LOOKUP)
        ask = messages.Lookup(key=_key_ref(key), timeout_ms=max(1, int(deadline.remaining() * 1000)))
        found = _asking(call, lambda: link.request(ask, deadline))
        if not isinstance(found, messages.Found):
            raise _refused(found, request)
        moved = False
        call.watch.enter(Phase.PLAN)
        try:
            remote = _understood(found.cache, request)
            if remote.has_blocks != (request.src_blocks is not None):
                kind = "a" if remote.has_blocks else "not a"
                message = f"cache {remote.cache_id} of cluster {request.cluster_id} is {kind} blocks cache"
                raise LayoutError(message)
            planned = spans(remote, found.batch_index)
            note_data_types(link, local, remote)
            self._move(call, planned, 0, pull=True)
            moved = True
        except LayoutError as error:
            raise misfit(request, local, remote, error) from error
        except (RegionError, KeyError) as error:
            raise missing(request, f"cluster {request.cluster_id} released the source meanwhile: {error}") from error
        finally:
            if not moved:
                link.notify(messages.Finish(hold=found.hold, success=False))
        layers, per_layer = request.src_layers, request.tensors_per_layer
        tensors = (
            range(remote.num_tensors) if layers is None else range(layers.start * per_layer, layers.stop * per_layer)
        )
        finish = messages.Finish(hold=found.hold, success=True, start=tensors.start, stop=tensors.stop)
        call.watch.enter(Phase.CONFIRM)
        ended = _asking(call, lambda: link.request(finish, deadline), "confirm")
        if not isinstance(ended, messages.Ok):
            raise _refused(ended, request, "confirm")

    def _to_cache(self, call: _Call, request: PushRequest, key: Key, ids: BlockIds) -> None:
        """Push to a cache of the peer."""
        _check_accessible(call.local, request)

        def spans(remote: PeerCache, batch_index: int) -> Spans:
            return plan_push(call.local, remote, batch_index, request, ids)

        self._with_catalogue(call, key, spans, pull=False)

    def _to_addresses(self, call: _Call, request: PushRequest, ids: BlockIds) -> None:
        """Push to raw addresses of the peer, which says in which of its regions they are."""
        local = call.local
        try:
            runs = plan_to_addresses(local, request, ids)
        except LayoutError as error:
            raise invalid(request.operation, str(error), peer=request.cluster_id) from error
        ask = messages.Resolve(addresses=list(request.dst_addrs or ()), size=int((runs.remote + runs.lengths).max()))
        call.watch.enter(Phase.LOOKUP)
        where = _asking(call, lambda: call.link.request(ask, call.deadline))
        call.watch.enter(Phase.PLAN)
        if not isinstance(where, messages.Resolved) or len(where.regions) != len(ask.addresses):
            raise _refused(where, request)
        tensors = source_tensors(local, request)
        spans = Spans(
            bases=local.addrs[tensors.start : tensors.stop],
            regions=np.array(where.regions, dtype=np.uint64),
            starts=np.array(where.offsets, dtype=np.int64),
            runs=runs,
            devices=Devices(local.device, where.device),
        )
        try:
            self._move(call, spans, 0, pull=False)
        except RegionError as error:
            raise invalid(
                request.operation, f"the destination was unregistered: {error}", peer=request.cluster_id
            ) from error

    def _move(self, call: _Call, spans: Spans, epoch: int, *, pull: bool) -> Path:
        """Move spans over the link's path, or the one for memory beyond its reach; the path that did it.

        Down the ladder if the system no longer permits a path.

        Raises:
            RegionError: as the path raises it.
            LLMException: any other failure.
        """
        request, link, deadline = call.request, call.link, call.deadline
        name: str | None = None
        beyond: Path | None = None
        call.watch.enter(Phase.COPY)
        try:
            link.begin(deadline)
            if self._verifier is not None:
                self._verifier.require(link, request.operation, spans)
            while True:
                path = link.path(deadline, beyond, spans.devices)
                name = path.name
                call.watch.over(name, spans.total)
                try:
                    (path.read if pull else path.write)(spans, deadline, epoch)
                except PathDeniedError as error:
                    call.watch.leave(name, FallbackReason.DENIED)
                    link.demote(path, str(error), error.hint)
                except OutOfReachError:
                    call.watch.leave(name, FallbackReason.OUT_OF_REACH)
                    beyond = path
                else:
                    if self._verifier is not None:
                        call.watch.enter(Phase.CONFIRM)
                        self._verifier.confirm(link, request.operation, name, spans, deadline)
                    return path
        except (PathError, ChannelClosedError) as error:
            done = _finished_blocks(error, request, call.local)
            raise path_failure(error, request.operation, link, name, deadline, done) from error
        except RegionError as error:
            if isinstance(error, (StaleEpochError, UnknownRegionError)) and not deadline.expired():
                raise
            late = PathTimeoutError(str(error)) if deadline.expired() else error
            raise transfer_failure(late, request.operation, request.cluster_id, name, deadline) from error
        finally:
            try:
                link.running.discard(deadline)
            finally:
                link.end(deadline)


def _notify(call: _Call) -> None:
    """The bytes are in place: tell the peer, if that is wanted."""
    if call.request.notify is not None:
        call.watch.enter(Phase.CONFIRM)
        notifications.confirm(call.link, call.request.notify, call.request, call.deadline)


def _asking(call: _Call, ask: Callable[[], T], phase: str = "lookup") -> T:
    """What the peer answers."""
    try:
        return ask()
    except (ChannelClosedError, ReplyTimeoutError) as error:
        request = call.request
        raise transfer_failure(error, request.operation, request.cluster_id, None, call.deadline, phase) from error


def _find(request: Request, catalogue: PeerCatalogue, key: Key, *, pull: bool) -> tuple[PeerCache, int]:
    remote, batch_index = catalogue.find(key, pull=pull)
    if not remote.accessible:
        context = f"cache {remote.cache_id} of cluster {request.cluster_id} is not remote accessible"
        raise invalid(
            request.operation, context, peer=request.cluster_id, hint="register it with remote_accessible=True"
        )
    return remote, batch_index


def _check_accessible(local: CacheEntry, request: Request) -> None:
    if not local.accessible:
        context = f"local cache {local.cache_id} is not remote accessible"
        raise invalid(request.operation, context, hint="register it with remote_accessible=True")


def missing(request: Request, context: str) -> LLMException:
    """The exception for a cache or key that does not exist."""
    code = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    return failure(code, request.operation, context, peer=request.cluster_id, phase="lookup")


def _understood(cache: messages.CacheInfo, request: Request) -> PeerCache:
    try:
        return peer_cache(cache)
    except ValueError as error:
        raise invalid(request.operation, str(error), peer=request.cluster_id) from error


def _finished_blocks(error: Exception, request: PullRequest | PushRequest, local: CacheEntry) -> tuple[int, ...] | None:
    """The destination blocks that a transfer which failed has filled, as far as that is known."""
    ids, size = request.dst_blocks, local.geometry.stride
    if isinstance(request, PushRequest) and request.src_blocks is None:
        size = request.dst_block_size
    if ids is None or not size:
        return None
    return finished_blocks(error, ids, size, local=isinstance(request, PullRequest))


def _refused(reply: messages.Body, request: Request, phase: str = "lookup") -> LLMException:
    """The exception for a look-up that the peer refused."""
    if not isinstance(reply, messages.Refuse):
        context = f"cluster {request.cluster_id} answered with {type(reply).__name__}"
        return failure(LLMStatusCode.LLM_FAILED, request.operation, context, peer=request.cluster_id, phase=phase)
    context = f"cluster {request.cluster_id}: {reply.reason}"
    return failure(code_2_status(reply.code), request.operation, context, peer=request.cluster_id, phase=phase)


def _key_ref(key: Key) -> messages.KeyRef:
    if isinstance(key, IdKey):
        return messages.KeyRef(cache_id=key.cache_id, batch_index=key.batch_index)
    if isinstance(key, BlocksKey):
        return messages.KeyRef(model_id=key.model_id, blocks=True)
    if isinstance(key, PrefixKey):
        return messages.KeyRef(model_id=key.model_id, prefix_id=key.prefix_id)
    return messages.KeyRef(model_id=key.model_id, req_id=key.req_id)
