"""Threads that call everything that is public, in any order, and look at every outcome and every byte.

- A *generation* is a cache that a thread registers under its own model id, all bytes alike. Whoever pulls one must get
  bytes that are all alike and none that its owner wrote after it had taken the cache back.
- Each thread has some blocks in the peer's *landing* cache, which nobody else writes to: what it has pushed there it
  must find there.
"""

from __future__ import annotations

import collections
import contextlib
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    DataType,
    LayerSynchronizer,
    LLMException,
    LLMRole,
    LLMStatusCode,
    TransferWithCacheKeyConfig,
)
from llm_datadist.utils.deadline import Deadline
from peers import GUARD, POISON, TIMEOUT_S, Arena, Node

if TYPE_CHECKING:
    from collections.abc import Sequence

S = LLMStatusCode
OK = S.LLM_SUCCESS
THREADS = 8
CALLS = 60
"""Of each thread at least before, and again after the storm is told to go on."""
TENSORS, BLOCKS, BLOCK_BYTES = 2, 4, 1500
LANDING = 1000
"""Model id of the landing cache."""
FINALIZED = {S.LLM_PARAM_INVALID, S.LLM_FAILED}
"""What calls answer once their own side has been finalized, besides RuntimeError."""
MOVED = {OK, S.LLM_NOT_YET_LINK, S.LLM_KV_CACHE_NOT_EXIST, S.LLM_FAILED}
DOCUMENTED: dict[str, set[LLMStatusCode]] = {
    "renew": {OK, S.LLM_LINK_BUSY},
    "link": {OK, S.LLM_ALREADY_LINK, S.LLM_PROCESSING_LINK, S.LLM_LINK_FAILED, S.LLM_TIMEOUT},
    "unlink": {OK, S.LLM_UNLINK_FAILED, S.LLM_TIMEOUT},
    "pull": MOVED,
    "push": MOVED,
    "layerwise": MOVED,
    "switch_role": {OK, S.LLM_EXIST_LINK, S.LLM_FAILED},
    "explain": {OK, S.LLM_NOT_YET_LINK},
    "copy": {OK},
}
"""What each call may answer."""
OFTEN = ("pull", "pull", "pull", "pull", "push", "push", "push", "layerwise", "renew", "link")
CALLED = (*DOCUMENTED, *OFTEN)


class Ready(LayerSynchronizer):
    """Every layer is ready at once."""

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        return True


class Storm:
    """In the child: the threads of one side."""

    def __init__(self, node: Node, other: int, address: tuple[str, int], *, use_pool: bool) -> None:
        self.use_pool = use_pool
        """Whether what the peer reads and writes is pool memory, which goes when this side is finalized."""
        self.renewing = threading.Semaphore(THREADS)
        self.node, self.datadist, self.manager = node, node.datadist, node.manager
        self.other = other
        self.peer = node.cluster(other, address)
        self.listen = "{}:{}".format(*node.datadist.listen_address)
        self.outcomes: collections.Counter[tuple[str, str]] = collections.Counter()
        self.wrong: list[str] = []
        self.halfway = threading.Semaphore(0)
        self.go_on = threading.Event()
        self.enough = Deadline.after(TIMEOUT_S / 2)
        """When the first half ends even if chance did not let every call succeed."""
        self._lock = threading.Lock()
        self.callers = [Caller(self, number) for number in range(THREADS)]
        self.threads = [threading.Thread(target=caller.run, daemon=True) for caller in self.callers]
        for thread in self.threads:
            thread.start()

    def note(self, call: str, outcome: LLMStatusCode | None, text: str) -> None:
        """Count an outcome, None being RuntimeError, and look whether it is allowed."""
        finalized = not self.datadist.is_initialized
        if outcome not in DOCUMENTED[call] and not (finalized and (outcome is None or outcome in FINALIZED)):
            self.wrong.append(f"{call}: {text}")
        with self._lock:
            self.outcomes[call, str(outcome)] += 1

    def all_succeeded(self) -> bool:
        """Whether each call has succeeded here at least once."""
        with self._lock:
            return all(self.outcomes[call, str(OK)] for call in DOCUMENTED)

    def wait_halfway(self) -> bool:
        """Wait until all threads have made half of their calls, or something is wrong."""
        return all(self.halfway.acquire(timeout=TIMEOUT_S) for _ in self.threads)

    def finalize(self) -> None:
        """While all threads go on; but nobody may be writing to pool memory."""
        taken = THREADS if self.use_pool else 0
        for _ in range(taken):
            self.renewing.acquire()
        self.datadist.finalize()
        for _ in range(taken):
            self.renewing.release()

    def end(self) -> tuple[dict[tuple[str, str], int], list[str]]:
        """Wait for the end; all outcomes, and what was wrong."""
        for thread in self.threads:
            thread.join(TIMEOUT_S)
            if thread.is_alive():
                self.wrong.append("a call hangs")
        for caller in self.callers:
            caller.look_at_guards()
        return dict(self.outcomes), self.wrong


class Caller:
    """One thread of a storm, with a cache that only this side uses and memory for two generations."""

    def __init__(self, storm: Storm, number: int) -> None:
        self._storm, self._number = storm, number
        self._rng = np.random.default_rng(100 * storm.node.datadist.cluster_id + number)
        self._arena = self._new_arena(use_pool=False)
        self._cache = self._register(self._arena, None)
        self._blocks = [tensor[GUARD:-GUARD].reshape(BLOCKS, -1) for tensor in self._arena.memory]
        self._arenas = [self._new_arena(use_pool=storm.use_pool) for _ in range(2)]
        self._generation: Any = None
        self._own_blocks = list(range(BLOCKS * number, BLOCKS * (number + 1)))
        """Of the landing cache, unless a failed push may still be writing to them."""

    def _new_arena(self, *, use_pool: bool) -> Arena:
        self._storm.node.use_pool(use_pool)
        arena = self._storm.node.arena(TENSORS, BLOCKS * BLOCK_BYTES, None)
        for tensor in arena.memory:
            tensor[:] = POISON
        return arena

    def _register(self, arena: Arena, model_id: int | None) -> Any:
        node = self._storm.node
        desc = CacheDesc(TENSORS, [BLOCKS, BLOCK_BYTES], DataType.DT_UINT8)
        key = None if model_id is None else BlocksCacheKey(node.datadist.cluster_id, model_id)
        return self._storm.manager.register_blocks_cache(desc, arena.addrs, key)

    def run(self) -> None:
        """Make all calls, in two halves."""
        storm = self._storm
        try:
            self._make_calls()
            while not storm.all_succeeded() and not storm.enough.expired():
                self._make_calls()
            storm.halfway.release()
            assert storm.go_on.wait(TIMEOUT_S)
            self._make_calls()
        except BaseException as error:  # noqa: BLE001 - the test must hear of it
            storm.wrong.append(repr(error))
            storm.halfway.release()

    def _make_calls(self) -> None:
        for name in self._rng.choice(CALLED, CALLS).tolist():
            outcome, text = None, ""
            try:
                outcome = getattr(self, name)()
            except LLMException as error:
                outcome, text = error.status_code, str(error)
            except RuntimeError as error:  # the own side has been finalized
                text = repr(error)
            self._storm.note(name, outcome, text)

    def _some(self, of: Sequence[int]) -> list[int]:
        return self._rng.permutation(of)[: int(self._rng.integers(1, BLOCKS + 1))].tolist()

    def _value(self) -> int:
        return int(self._rng.integers(1, POISON))

    # Calls

    def renew(self) -> LLMStatusCode:
        """Take the generation back, poison its memory, and register a newer one."""
        with self._storm.renewing:
            if self._storm.use_pool and not self._storm.datadist.is_initialized:
                message = "its memory has gone"
                raise RuntimeError(message)
            return self._renew()

    def _renew(self) -> LLMStatusCode:
        manager = self._storm.manager
        if self._generation is not None:
            manager.unregister_cache(self._generation.cache_id)
            self._generation = None
            for tensor in self._arenas[0].memory:
                tensor[:] = POISON
            self._arenas.reverse()
        if not all((tensor == POISON).all() for tensor in self._arenas[0].memory):
            self._storm.wrong.append("somebody has written to memory that was taken back")
        value = self._value()
        for tensor in self._arenas[0].memory:
            tensor[GUARD:-GUARD] = value
        try:
            self._generation = self._register(self._arenas[0], self._number)
        finally:
            if self._generation is None:  # the own side has been finalized
                for tensor in self._arenas[0].memory:
                    tensor[:] = POISON
        return OK

    def link(self) -> LLMStatusCode:
        """Any outcome but a wrong one."""
        return self._storm.datadist.link_clusters([self._storm.peer], 10_000)[1][0]

    def unlink(self) -> LLMStatusCode:
        """With and without force."""
        force = bool(self._rng.integers(2))
        return self._storm.datadist.unlink_clusters([self._storm.peer], 10_000, force)[1][0]

    def pull(self) -> LLMStatusCode:
        """Of somebody's generation."""
        src, dst = self._some(range(BLOCKS)), self._some(range(BLOCKS))
        count = min(len(src), len(dst))
        key = BlocksCacheKey(self._storm.other, int(self._rng.integers(THREADS)))
        for tensor in self._blocks:
            tensor[:] = 0
        self._storm.manager.pull_blocks(key, self._cache, src[:count], dst[:count])
        values = {int(value) for tensor in self._blocks for value in np.unique(tensor[dst[:count]])}
        if len(values) != 1 or values & {0, POISON}:
            self._storm.wrong.append(f"a pull brought {values}")
        return OK

    def push(self) -> LLMStatusCode:
        """To the own landing blocks."""
        src, dst, value = self._prepare()
        key = BlocksCacheKey(self._storm.other, LANDING)
        try:
            self._storm.manager.push_blocks(key, self._cache, src, dst)
        except LLMException as error:
            self._give_up(dst, str(error))
            raise
        self._look_at_landing(dst, value)
        return OK

    def layerwise(self) -> LLMStatusCode:
        """As ``push``."""
        src, dst, value = self._prepare()
        config = TransferWithCacheKeyConfig(BlocksCacheKey(self._storm.other, LANDING), range(1), range(1))
        task = self._storm.manager.transfer_cache_async(self._cache, Ready(), [config], src, dst)
        status: LLMStatusCode = task.synchronize(int(1000 * TIMEOUT_S))
        if status is OK:
            self._look_at_landing(dst, value)
        return status

    def _prepare(self) -> tuple[list[int], list[int], int]:
        dst, value = self._some(self._own_blocks), self._value()
        src = self._rng.permutation(BLOCKS)[: len(dst)].tolist()
        for tensor in self._blocks:
            tensor[:] = value
        return src, dst, value

    def _give_up(self, dst: list[int], text: str) -> None:
        if "did not confirm" in text:
            self._own_blocks = [block for block in self._own_blocks if block not in dst] or self._own_blocks
            self._storm.note("unlink", OK, text)

    def _look_at_landing(self, dst: list[int], value: int) -> None:
        for tensor in self._blocks:
            tensor[:] = 0
        with contextlib.suppress(LLMException, RuntimeError):  # the link or a side may have gone meanwhile
            key, here = BlocksCacheKey(self._storm.other, LANDING), list(range(len(dst)))
            self._storm.manager.pull_blocks(key, self._cache, dst, here)
            if not all((tensor[here] == value).all() for tensor in self._blocks):
                self._storm.wrong.append(f"not {value} was pushed to {dst}")

    def switch_role(self) -> LLMStatusCode:
        """Stop to listen, or listen where it did."""
        role = LLMRole(int(self._rng.integers(1, 4)))
        options = {"llm.listenIpInfo": self._storm.listen} if self._rng.integers(4) else None
        self._storm.datadist.switch_role(role, options)
        return OK

    def explain(self) -> LLMStatusCode:
        """Reports can be read."""
        assert "in huge pages" in str(self._storm.datadist.explain_memory())
        assert f"cluster {self._storm.other}" in str(self._storm.datadist.explain_link(self._storm.other))
        return OK

    def copy(self) -> LLMStatusCode:
        """Within the own cache."""
        for tensor in self._blocks:
            tensor[:] = [[self._value()] for _ in range(BLOCKS)]
        self._storm.manager.copy_blocks(self._cache, {0: [2, 1]})
        if not all((tensor[[1, 2]] == tensor[0]).all() for tensor in self._blocks):
            self._storm.wrong.append("a copy is wrong")
        return OK

    def look_at_guards(self) -> None:
        """Nobody has written beside any tensor."""
        gone = self._storm.use_pool and not self._storm.datadist.is_initialized
        for arena in (self._arena, *([] if gone else self._arenas)):
            for tensor in arena.memory:
                if not ((tensor[:GUARD] == POISON).all() and (tensor[-GUARD:] == POISON).all()):
                    self._storm.wrong.append("somebody has written beside a tensor")
