"""One call of ``transfer_cache_async``: its plan, the thread that carries it out, and the task the caller holds."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import threading
from concurrent.futures import Future, InvalidStateError
from typing import TYPE_CHECKING

from llm_datadist.cache.keys import destination_key, peer_of
from llm_datadist.engine.requests import PushRequest
from llm_datadist.layerwise.configs import TransferConfig
from llm_datadist.layerwise.ranges import NUM_TENSORS_PER_LAYER, check_equal_length
from llm_datadist.status import (
    LLMException,
    LLMFailedError,
    LLMParamInvalidError,
    LLMStatusCode,
    exception_for,
    raise_if_false,
    raise_if_true,
)
from llm_datadist.utils import limits, log, utils
from llm_datadist.utils.completion import Completion

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from llm_datadist.cache.types import Cache
    from llm_datadist.layerwise.configs import AnyConfig, LayerSynchronizer, TransferWithCacheKeyConfig

OPERATION = "transfer_cache_async"


@dataclasses.dataclass(frozen=True, slots=True)
class BlockLists:
    """The block arguments of a call."""

    src: tuple[int, ...] | None
    """Local blocks; None when there are none."""
    dst: tuple[int, ...] | None
    """The peer's blocks; None when there are none."""
    dst_size: int
    """Bytes of one of the peer's blocks; 0 for "as the local ones"."""


@dataclasses.dataclass(frozen=True, slots=True)
class LayerPlan:
    """One config as it was when the call was made."""

    request: PushRequest
    """All layers in one request."""

    def covers(self, layer: int) -> bool:
        """Whether this local layer is to be sent."""
        return layer in self.request.src_layers

    def ends_with(self, layer: int) -> bool:
        """Whether this local layer is the last to be sent."""
        return layer == self.request.src_layers[-1]

    def request_of(self, layer: int) -> PushRequest:
        """The request for one local layer."""
        position = self.request.src_layers.index(layer)
        target = self.request.dst_layers[position]
        addrs = self.request.dst_addrs
        if addrs is not None:
            addrs = addrs[NUM_TENSORS_PER_LAYER * position : NUM_TENSORS_PER_LAYER * (position + 1)]
        return dataclasses.replace(
            self.request, src_layers=range(layer, layer + 1), dst_layers=range(target, target + 1), dst_addrs=addrs
        )


def plan_config(cache: Cache, config: AnyConfig, blocks: BlockLists) -> LayerPlan:
    """Check one config against the cache and freeze it; the config itself is not changed.

    Raises:
        TypeError: an id of the key is no unsigned 64-bit int.
        LLMException: LLM_PARAM_INVALID: a batch index with blocks, layers the cache does not have, a wrong number of
            addresses, no key, or layer ranges of different length.
    """
    num_layers = cache.cache_desc.num_tensors // NUM_TENSORS_PER_LAYER
    layers = range(num_layers) if config.src_layer_range is None else config.src_layer_range
    raise_if_true(
        blocks.src and config.src_batch_index != 0,
        "src_batch_index must be 0 with src_block_indices, but is {}",
        config.src_batch_index,
    )
    raise_if_false(
        0 <= layers.start < layers.stop <= num_layers,
        "src_layer_range {!r} is outside the {} layers of the cache",
        layers,
        num_layers,
    )
    common = PushRequest(
        operation=OPERATION,
        cluster_id=0,
        key=None,
        cache_id=int(cache.cache_id),
        src_layers=layers,
        dst_layers=layers,
        tensors_per_layer=NUM_TENSORS_PER_LAYER,
        batch_index=int(config.src_batch_index),
        src_blocks=blocks.src,
        dst_blocks=blocks.dst,
        dst_block_size=blocks.dst_size,
    )
    if isinstance(config, TransferConfig):
        return LayerPlan(_to_addresses(common, config))
    return LayerPlan(_to_key(common, config))


def _to_addresses(request: PushRequest, config: TransferConfig) -> PushRequest:
    wanted = NUM_TENSORS_PER_LAYER * len(request.src_layers)
    raise_if_false(
        len(config.dst_addrs) == wanted,
        "dst_addrs has {} addresses, but {} layers need {}",
        len(config.dst_addrs),
        len(request.src_layers),
        wanted,
    )
    return dataclasses.replace(
        request,
        cluster_id=int(config.dst_cluster_id),
        dst_addrs=tuple(int(addr) for addr in config.dst_addrs),
    )


def _to_key(request: PushRequest, config: TransferWithCacheKeyConfig) -> PushRequest:
    if config.cache_key is None:
        message = "cache_key of a transfer config is None: set the key of the destination cache"
        raise LLMParamInvalidError(message, operation=OPERATION, phase="check")
    check_equal_length(request.src_layers, config.dst_layer_range)
    return dataclasses.replace(
        request,
        cluster_id=peer_of(config.cache_key),
        key=destination_key(config.cache_key),
        dst_layers=config.dst_layer_range or request.dst_layers,
    )


class LayerTransfer:
    """Carries out the plans of one call, layer by layer, in a thread of its own.

    The first failure ends it: later configs and layers are not attempted. Results are kept per config: None until its
    last layer arrived or it failed.
    """

    def __init__(
        self, synchronizer: LayerSynchronizer, plans: Sequence[LayerPlan], push: Callable[[PushRequest], None]
    ) -> None:
        self._synchronizer = synchronizer
        self._plans = plans
        self._push = push
        self._results: list[LLMStatusCode | None] = [None] * len(plans)
        self._errors: list[LLMException | None] = [None] * len(plans)
        self._lock = threading.RLock()  # a signal handler may cancel
        self._pushing = False
        self._cancelled = False
        self._done = threading.Event()
        self.end: Future[None] = Future()
        """Ends right after the task has, outside of its lock: callbacks may take their time."""
        self.end.set_running_or_notify_cancel()
        self._pid = os.getpid()

    def start(self) -> None:
        """Start the thread.

        Raises:
            LLMException: LLM_FAILED: the system gives no thread.
        """
        thread = threading.Thread(target=self._run, name=f"llm_datadist-{OPERATION}", daemon=False)
        try:
            thread.start()
        except RuntimeError as error:
            reason, hint = limits.explain(error)
            failed = _failed(f"no thread could be started: {reason}; {hint}")
            failed.retryable, failed.hint = True, hint
            raise failed from error

    def wait(self, timeout_in_millis: int | None) -> list[LLMStatusCode | None] | None:
        """The results once the task has ended; None when it still runs after the timeout (None: no timeout).

        Raises:
            LLMException: LLM_FAILED: in a forked child, where its end will never be known.
        """
        if os.getpid() != self._pid and not self._done.is_set():
            status = LLMStatusCode.LLM_FAILED
            context = f"the task runs in process {self._pid}, not in its forked child {os.getpid()}"
            message = f"[{OPERATION}] failed, error code is {status}, {context}: wait for it there."
            raise LLMException(message, status_code=status, operation=OPERATION, phase="check")
        seconds = None if timeout_in_millis is None else timeout_in_millis / 1000
        return list(self._results) if self._done.wait(seconds) else None

    def cancel(self) -> bool:
        """See ``CacheTask.cancel``."""
        with self._lock:
            if self._done.is_set():
                return self._cancelled
            self._cancelled = True
            if self._pushing:
                return True
            self._settle()
        self._tell()
        return True

    @property
    def cancelled(self) -> bool:
        """See ``CacheTask.cancelled``."""
        return self._done.is_set() and self._cancelled

    def errors(self) -> list[LLMException | None]:
        """See ``CacheTask.get_errors``."""
        with self._lock:
            return list(self._errors)

    def __len__(self) -> int:
        return len(self._plans)

    def _run(self) -> None:
        layers = sorted({layer for plan in self._plans for layer in plan.request.src_layers})
        try:
            for layer in layers:
                if self._cancelled or not self._send_layer(layer):
                    break
        finally:
            with self._lock:
                if not self._done.is_set():
                    self._settle()
            self._tell()

    def _tell(self) -> None:
        """It has ended; who has cancelled it may have said so already."""
        with contextlib.suppress(InvalidStateError):
            self.end.set_result(None)

    def _settle(self) -> None:
        """End it: nothing is sent any more. Under the lock."""
        unfinished = [index for index, result in enumerate(self._results) if result is None]
        failed = any(result not in {None, LLMStatusCode.LLM_SUCCESS} for result in self._results)
        self._cancelled = self._cancelled and bool(unfinished) and not failed
        if self._cancelled:
            self._fail(unfinished, _failed("the task was cancelled"))
        self._done.set()

    def _send_layer(self, layer: int) -> bool:
        """Send one layer to every config that wants it; False ends the task."""
        wanting = [index for index, plan in enumerate(self._plans) if plan.covers(layer)]
        try:
            ready = self._synchronizer.synchronize_layer(layer, None)
        except BaseException as error:  # noqa: BLE001 - also of SystemExit in the callback the caller must learn
            log.error("layer %d of %s failed: the transfer stops: %r", layer, OPERATION, error, exc_info=error)
            self._fail(wanting, _failed(f"synchronize_layer({layer}) raised {error!r}", layer))
            return False
        if not ready and not self._cancelled:
            log.error("synchronize_layer(%d) returned a false value: the transfer stops", layer)
            context = f"synchronize_layer({layer}) returned {ready!r}"
            self._fail(wanting, _failed(context, layer, LLMStatusCode.LLM_PARAM_INVALID))
            return False
        return all(self._send(index, layer) for index in wanting)

    def _send(self, index: int, layer: int) -> bool:
        """Send one layer to one config; False ends the task."""
        with self._lock:
            if self._cancelled:
                return False
            self._pushing = True
        plan = self._plans[index]
        sent = self._pushed(index, layer)
        with self._lock:
            self._pushing = False
            if sent and plan.ends_with(layer):
                self._results[index] = LLMStatusCode.LLM_SUCCESS
        return sent

    def _pushed(self, index: int, layer: int) -> bool:
        plan = self._plans[index]
        try:
            self._push(plan.request_of(layer))
        except LLMException as error:
            log.error("layer %d to cluster %d failed: %s", layer, plan.request.cluster_id, error)
            self._fail([index], _kept(error, layer))
            return False
        except BaseException as error:  # noqa: BLE001 - the caller must learn of it
            log.error("layer %d of %s failed: the transfer stops: %r", layer, OPERATION, error, exc_info=error)
            wanting = [index for index, plan in enumerate(self._plans) if plan.covers(layer)]
            self._fail(wanting, _failed(f"layer {layer} to cluster {plan.request.cluster_id}: {error!r}", layer))
            return False
        return True

    def _fail(self, indices: Sequence[int], error: LLMException) -> None:
        with self._lock:
            for index in indices:
                if self._results[index] is None and not self._done.is_set():
                    self._results[index] = error.status_code
                    self._errors[index] = error


def _failed(context: str, layer: int | None = None, status: LLMStatusCode = LLMStatusCode.LLM_FAILED) -> LLMException:
    message = f"[{OPERATION}] failed, error code is {status}, {context}."
    return exception_for(status, message, operation=OPERATION, layer=layer)


def _kept(error: LLMException, layer: int) -> LLMException:
    """A copy that can be kept: it holds no frames, and through them nobody's memory."""
    if error.status_code is LLMStatusCode.LLM_SUCCESS:  # "no status": never a success
        return _failed(str(error), layer)
    kept = copy.copy(error)
    kept.layer = layer
    return kept


class CacheTask:
    """A running or finished layer-wise transfer. Its methods may be called from any thread, any number of times."""

    def __init__(self, transfer: LayerTransfer) -> None:
        self._transfer = transfer
        self._completion = Completion(transfer.end, LLMFailedError)

    def __await__(self) -> Generator[object, None, LLMStatusCode]:
        """What :meth:`synchronize` returns. A coroutine that is cancelled while it waits leaves the task alone."""
        yield from self._completion.__await__()
        return self.synchronize()

    def done(self) -> bool:
        """Whether the task has ended."""
        return self._transfer.wait(0) is not None

    def add_done_callback(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` once the task has ended, on the thread that ends it; at once, on this one, if it has.

        It should return soon. What it raises is logged and has no effect.
        """
        self._completion.add_done_callback(callback)

    def fileno(self) -> int:
        """A descriptor that is readable from the end of the task on, for select, poll and epoll.

        It is made at the first call. Do not read or close it: ``close`` does that, or the end of this object.

        Raises:
            OSError: no descriptor is left.
            ValueError: it has been closed.
        """
        return self._completion.fileno()

    def close(self) -> None:
        """Give the descriptor of ``fileno`` back; idempotent, no effect on the task."""
        self._completion.close()

    def synchronize(self, timeout_in_millis: int | None = None) -> LLMStatusCode:
        """Wait for the end of the task; failures of the transfer are returned, not raised.

        Args:
            timeout_in_millis: how long to wait, unsigned 32 bits; 0 only looks, None waits for the end, which can last
                as long as ``synchronize_layer`` does.

        Returns:
            LLM_TIMEOUT when the task still runs (it goes on), else the first failure in the order of the configs, else
            LLM_SUCCESS: every layer of every config is in place at its peer.

        Raises:
            TypeError: the timeout is not an int.
            ValueError: the timeout does not fit unsigned 32 bits.
        """
        results = self._wait(timeout_in_millis)
        if results is None:
            return LLMStatusCode.LLM_TIMEOUT
        failures = (each for each in results if each not in {None, LLMStatusCode.LLM_SUCCESS})
        return next(failures, None) or LLMStatusCode.LLM_SUCCESS

    def get_results(self, timeout_in_millis: int | None = None) -> list[LLMStatusCode | None]:
        """Wait for the end of the task and tell how each config ended, in the order of the configs.

        Returns:
            LLM_TIMEOUT for each config when the task still runs. Else, per config: LLM_SUCCESS when all its layers are
            in place, the status of its failure, or None when the task ended before it was complete because another
            config failed.

        Raises:
            TypeError: the timeout is not an int.
            ValueError: the timeout does not fit unsigned 32 bits.
        """
        results = self._wait(timeout_in_millis)
        return [LLMStatusCode.LLM_TIMEOUT] * len(self._transfer) if results is None else results

    def get_errors(self) -> list[LLMException | None]:
        """What is known of the failures now, without waiting: one exception or None per config, never raised here.

        Their ``layer`` is the local layer that could not be sent; ``quiescent`` tells whether its destination is quiet.
        """
        return self._transfer.errors()

    def cancel(self) -> bool:
        """Stop the task. Returns at once, from any thread, also from within ``synchronize_layer``.

        A layer that is being sent to a peer is sent to its end, or fails by its deadline (``sync_kv_timeout``); nothing
        is sent after it. Then the task ends: configs that are not complete get LLM_FAILED, and ``get_errors`` says that
        the task was cancelled. If no layer is being sent, it ends before this returns, even if ``synchronize_layer``
        still blocks: that call is not interrupted, but nothing is sent when it returns.

        Once the task has ended, which is when ``synchronize`` returns something else than LLM_TIMEOUT, no byte of any
        destination changes any more because of it, unless ``get_errors`` has an exception with ``quiescent`` False.

        Returns:
            True if the task ends, or has ended, because it was cancelled; False if it had ended before. A task whose
            last layer was being sent may still end as if nothing had happened: ``cancelled`` tells afterwards.
        """
        return self._transfer.cancel()

    @property
    def cancelled(self) -> bool:
        """Whether the task has ended because it was cancelled."""
        return self._transfer.cancelled

    def _wait(self, timeout_in_millis: int | None) -> list[LLMStatusCode | None] | None:
        if timeout_in_millis is not None:
            utils.check_uint32("timeout_in_millis", timeout_in_millis)
        return self._transfer.wait(timeout_in_millis)
