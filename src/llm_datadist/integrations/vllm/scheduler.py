"""The scheduler's half of the connector: decides what is loaded, kept and released, and tells the workers."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.request import RequestStatus

from llm_datadist.integrations.vllm import params as contract
from llm_datadist.integrations.vllm.logs import logger
from llm_datadist.integrations.vllm.metadata import Address, Orders
from llm_datadist.integrations.vllm.orders import Hold, Load, Open, Part, Renewal
from llm_datadist.integrations.vllm.worker_leases import SLOTS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from llm_datadist.integrations.vllm.options import Options
    from llm_datadist.integrations.vllm.orders import Blocks
    from llm_datadist.integrations.vllm.params import Facts, Remote

_RENEWALS_PER_LEASE: Final = 6
_MOST_SEEN: Final = 8192
_DELIVERED: Final = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


@dataclasses.dataclass
class _Serving:
    """A request of this prefill engine whose KV another engine gets."""

    slot: int = -1
    generation: int = 0
    transfer: str = ""
    prompt: int = 0
    digest: str = ""
    sent: int = 0
    """Tokens whose blocks have been ordered to be pushed."""


class Scheduler:
    """State of the requests that take part in a transfer; used by one thread.

    Steps are ``overlapping`` if one begins while another computes, and in ``lockstep`` if other engines wait for them.
    """

    def __init__(
        self,
        options: Options,
        engine_id: str,
        kv_cache_config: KVCacheConfig,
        *,
        overlapping: bool = False,
        lockstep: bool = False,
    ) -> None:
        self._options = options
        self._overlapping, self._lockstep = overlapping, lockstep
        self._was_idle = False
        self._engine_id = engine_id
        self._config = kv_cache_config
        specs = [group.kv_cache_spec for group in kv_cache_config.transfer_groups]
        self._block_tokens = [spec.block_size for spec in specs]
        self._backoff = int(any(isinstance(spec, SlidingWindowSpec) for spec in specs))
        """Prompt tokens that a prefill engine leaves to the decode engine. That one computes the last prompt token
        again, and so needs its window, of which the prefill engine may free the first block after that token."""
        self._facts: Facts | None = None
        self._workers: tuple[contract.Worker, ...] = ()
        self._orders = Orders()
        self._serving: dict[str, _Serving] = {}
        self._slots: deque[int] = deque(range(SLOTS))
        self._remotes: dict[str, Remote] = {}
        """Where the KV of requests is that have no blocks here yet."""
        self._seen: dict[tuple[str, str], str] = {}
        """Which request came first for which KV, the latest last."""
        self._loading: set[str] = set()
        self._waiting: dict[str, Renewal] = {}
        """What others keep for requests that have not been loaded yet."""
        self._renewed = 0.0

    def set_workers(self, metadata: Mapping[int, object]) -> None:
        """Learn where the workers of this engine are."""
        addresses = [metadata[rank] for rank in sorted(metadata)]
        ours = [each for each in addresses if isinstance(each, Address)]
        if not ours or len(ours) != len(addresses):
            raise TypeError("the workers of this engine do not run LLMDataDistConnector: use it on all ranks")
        self._workers = tuple(each.worker for each in ours)
        self._facts = ours[0].facts

    # ------------------------------------------------------------ arrival

    def arrived(self, request: Request) -> None:
        """A request is new: make links early, and keep its lease alive."""
        params = request.kv_transfer_params
        if not params:
            return
        if params.get("do_remote_decode"):
            if not params.get("describe"):
                self._shorten(request)
            if params.get("do_remote_prefill"):
                logger.warning("Request %s is computed here: it asks both to load and to hand over", request.request_id)
            return
        remote = _remote(request, params) if params.get("do_remote_prefill") else None
        if remote is not None and self._is_of(request, remote) and self._is_first(request.request_id, remote, params):
            self._remotes[request.request_id] = remote
            self._orders.links.append(remote)
            name, seconds = _transfer(request, remote), remote.seconds
            if remote.lease is not None:
                name, seconds = remote.lease.request, remote.lease.seconds
            if seconds and (remote.lease is not None or not self._misfit(remote)):
                self._waiting[request.request_id] = Renewal(remote, name, seconds)

    def _is_of(self, request: Request, remote: Remote) -> bool:
        """Whether it is the KV of this prompt: a client may send several in one request.

        One that the server has refused comes with another prompt, and only so that its KV is given back.
        """
        same = request.abort_immediately or not remote.digest or _digest(request, remote.tokens) in {"", remote.digest}
        if not same:
            logger.warning(
                "Request %s is computed here: the KV that came with it is of another prompt", request.request_id
            )
        return same

    def _is_first(self, request_id: str, remote: Remote, params: Mapping[str, Any]) -> bool:
        """Whether no other request has come for the same KV, which is handed over once: one of several sequences."""
        engine, name = "", str(params.get("transfer_id"))  # workers know a push by its id alone
        if remote.lease is not None:
            engine, name = remote.engine, remote.lease.request
        first = self._seen.setdefault((engine, name), request_id)
        if len(self._seen) > _MOST_SEEN:
            del self._seen[next(iter(self._seen))]
        if first != request_id:
            logger.info("Request %s is computed here: request %s gets the KV of %s", request_id, first, name)
        return first == request_id

    def _shorten(self, request: Request) -> None:
        if self._options.mode == "push":
            request.max_tokens = 1  # it ends with its prompt, so that no preemption frees what is still being pushed
        count = self._backoff
        if not count or request.num_prompt_tokens <= count or request.prompt_token_ids is None:
            return
        del request.prompt_token_ids[-count:]
        del request._all_token_ids[-count:]  # noqa: SLF001 - vLLM's own connectors shorten a request in the same way
        request.num_prompt_tokens -= count
        request.max_tokens = 1

    def matched(self, request: Request, computed: int) -> int:
        """How many tokens beyond ``computed`` will be loaded. No side effects."""
        remote = self._remotes.get(request.request_id)
        return 0 if remote is None else max(0, self._claimed(request, remote) - computed)

    def _claimed(self, request: Request, remote: Remote) -> int:
        prompt = int(request.num_prompt_tokens)
        most = prompt - (self._backoff if prompt > self._backoff else 0)
        return min(remote.tokens or most, most)

    # ------------------------------------------------------------ blocks

    def allocated(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """A request has got its blocks: order the load, or begin to serve it."""
        params = request.kv_transfer_params
        if not params:
            return
        if params.get("do_remote_decode"):
            self._begin_serving(request, params)
        elif (remote := self._remotes.pop(request.request_id, None)) is not None:  # once, also after a preemption
            self._order_load(request, remote, blocks.get_block_ids(), external)

    def _begin_serving(self, request: Request, params: Mapping[str, Any]) -> None:
        if request.request_id in self._serving or params.get("describe"):
            return
        serving = _Serving(prompt=request.num_prompt_tokens, digest=_digest(request, request.num_prompt_tokens))
        if self._options.mode == "push":
            serving.transfer = str(params.get("transfer_id") or "")
            if not serving.transfer or self._pushes(serving.transfer):
                return
        elif self._slots:
            serving.slot, serving.generation = self._slots.popleft(), secrets.randbits(63) | 1
            self._orders.opened.append(Open(request.request_id, serving.slot, serving.generation))
        else:
            logger.warning("%d requests wait to be read: request %s cannot be handed over", SLOTS, request.request_id)
            return
        self._serving[request.request_id] = serving

    def _order_load(self, request: Request, remote: Remote, block_ids: Sequence[list[int]], external: int) -> None:
        tokens = self._claimed(request, remote)
        first = tokens - external
        request_id = request.request_id
        if external == 0:  # all of it was cached here
            self._waiting.pop(request_id, None)
            self._order_nothing(request, remote)
            return
        wanted = self._wanted(self._config.select_transfer_block_ids(block_ids), first, tokens)
        transfer, error = _transfer(request, remote), self._misfit(remote)
        digest = _digest(request, tokens) if transfer else ""
        self._orders.loads.append(Load(request_id, remote, first, tokens, wanted, transfer, digest, error))
        self._loading.add(request_id)

    def _misfit(self, remote: Remote) -> str:
        problems = [] if self._facts is None else contract.differences(self._facts, remote.facts)
        return f"the engines do not fit together: {'; '.join(problems)}" if problems else ""

    def _order_nothing(self, request: Request, remote: Remote) -> None:
        """Have the prefill engine know that nobody needs the KV of a request."""
        if remote.lease is not None:
            self._orders.releases.append(remote)
            return
        if not self._misfit(remote):  # otherwise it frees the blocks in its own time
            nothing = tuple(() for _ in self._block_tokens)
            load = Load(request.request_id, remote, 0, 0, nothing, _transfer(request, remote), reported=False)
            self._orders.loads.append(load)

    def _wanted(self, block_ids: Sequence[Sequence[int]], first: int, tokens: int) -> Blocks:
        """For each group the blocks from token ``first`` on; 0 for those before, and those behind a sliding window."""
        found = []
        for blocks, size in zip(block_ids, self._block_tokens, strict=True):
            low, high = first // size, -(-tokens // size)
            found.append(tuple(block if low <= at < high else 0 for at, block in enumerate(blocks[:high])))
        return tuple(found)

    # ------------------------------------------------------------ the step

    def orders(self, output: SchedulerOutput, manager: KVCacheManager | None) -> Orders:
        """The orders of this step."""
        made, self._orders = self._orders, Orders()
        idle = output.total_num_scheduled_tokens == 0
        made.may_wait = idle and not self._lockstep and (self._was_idle or not self._overlapping)
        self._was_idle = idle
        if self._waiting:
            self._renew(made)
        if self._serving and self._options.mode == "push" and manager is not None:
            self._order_parts(made, output, manager)
        return made

    def _renew(self, made: Orders) -> None:
        now = time.monotonic()
        shortest = min(each.seconds for each in self._waiting.values())
        if now - self._renewed >= shortest / _RENEWALS_PER_LEASE:
            self._renewed = now
            made.renewals.extend(self._waiting.values())

    def _order_parts(self, made: Orders, output: SchedulerOutput, manager: KVCacheManager) -> None:
        computed = {each.req_id: each.num_computed_tokens for each in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        begun = computed.keys() | cached.resumed_req_ids
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id, before in computed.items():
            serving = self._serving.get(request_id)
            if serving is None:
                continue
            if request_id in begun:
                serving.sent = 0  # also after a preemption: it has other blocks now, also for what was cached meanwhile
            if serving.sent >= serving.prompt:
                continue
            first, tokens = serving.sent, min(before + output.num_scheduled_tokens[request_id], serving.prompt)
            blocks = self._config.select_transfer_block_ids(manager.get_block_ids(request_id))
            last = tokens >= serving.prompt
            owned = tuple(tuple(each) for each in blocks)
            made.parts.append(Part(request_id, serving.transfer, first, tokens, last, owned, serving.digest))
            serving.sent = tokens

    # ------------------------------------------------------------ the end

    def finished(self, request: Request, block_ids: Sequence[list[int]]) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended: whether its blocks must be kept, and what the client is told."""
        params = request.kv_transfer_params
        request_id = request.request_id
        if not params:
            return False, None
        if params.get("do_remote_decode"):
            if params.get("describe"):
                return False, self._answer(self._described())
            serving = self._serving.get(request_id)
            if serving is not None:
                return self._end_serving(request, serving, block_ids)
            return False, self._end_unserved(request, params)
        self._waiting.pop(request_id, None)
        if (remote := self._remotes.pop(request_id, None)) is not None:  # it never got blocks
            self._order_nothing(request, remote)
        elif request_id in self._loading:
            self._orders.cancelled.append(request_id)
        return False, None

    def _end_serving(
        self, request: Request, serving: _Serving, block_ids: Sequence[list[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        request_id = request.request_id
        delivered = request.status in _DELIVERED
        if serving.transfer:
            if delivered and serving.sent >= serving.prompt:
                self._orders.holds.append(Hold(request_id, self._options.lease_seconds, serving.transfer))
                return True, self._answer(self._described())
            del self._serving[request_id]
            self._drop(serving.transfer, request)
            return False, None
        if not delivered:
            self._orders.closed.append(request_id)
            self._forget(request_id)
            return False, None
        tokens = min(request.num_computed_tokens, serving.prompt)
        self._orders.holds.append(Hold(request_id, self._options.lease_seconds))
        lease = contract.Lease(request_id, serving.slot, f"{serving.generation:x}", self._options.lease_seconds)
        blocks = tuple(tuple(each) for each in self._config.select_transfer_block_ids(block_ids))
        digest = serving.digest if tokens == serving.prompt else _digest(request, tokens)
        return True, self._answer(self._described(tokens=tokens, blocks=blocks, lease=lease, digest=digest))

    def _end_unserved(self, request: Request, params: Mapping[str, Any]) -> dict[str, Any] | None:
        """One that never got blocks, has no id to be pushed under, or one of another; what the client is told."""
        if self._options.mode != "push":
            return None
        if request.status in _DELIVERED:
            return self._answer(self._described())
        transfer = str(params.get("transfer_id") or "")
        if transfer and not self._pushes(transfer):
            self._drop(transfer, request)
        return None

    def _pushes(self, transfer: str) -> bool:
        return any(each.transfer == transfer for each in self._serving.values())

    def _drop(self, transfer: str, request: Request) -> None:
        self._orders.dropped.append((transfer, f"the prefill ended with {request.status.name}"))

    def _described(self, **more: Any) -> Remote:
        if self._facts is None:
            raise RuntimeError("the workers have not registered their KV caches yet")
        if self._options.mode == "push":
            more["seconds"] = self._options.lease_seconds
        return contract.Remote(contract.VERSION, self._engine_id, self._facts, self._workers, **more)

    def _answer(self, remote: Remote) -> dict[str, Any]:
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._engine_id,
            contract.KEY: contract.encode(remote),
        }

    def done(self, output: KVConnectorOutput) -> None:
        """Workers have finished with requests."""
        for request_id in output.finished_recving or ():
            self._loading.discard(request_id)
            self._waiting.pop(request_id, None)
        for request_id in output.finished_sending or ():
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        serving = self._serving.pop(request_id, None)
        if serving is not None and serving.slot >= 0:
            self._slots.append(serving.slot)


def _digest(request: Request, count: int) -> str:
    """Of the first tokens of its prompt; empty if it has none."""
    tokens = request.prompt_token_ids
    return "" if tokens is None else contract.digest(tokens[:count])


def _transfer(request: Request, remote: Remote) -> str:
    """Under which id a request's KV is pushed; empty if it is pulled."""
    return "" if remote.lease is not None else str((request.kv_transfer_params or {}).get("transfer_id"))


def _remote(request: Request, params: Mapping[str, Any]) -> Remote | None:
    """From where a request's KV comes; None, with a warning, if what came with it cannot be used."""
    try:
        remote = contract.decode(params.get(contract.KEY))
        if remote.lease is None and not params.get("transfer_id"):
            raise ValueError("neither a lease to read under, nor a transfer_id to wait for")
    except ValueError as error:
        logger.warning("Request %s is computed here, nothing is loaded: %s", request.request_id, error)
        return None
    return remote
