"""What the threads of a member do, and what must hold whenever a call returns."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from llm_datadist.engine.requests import BlocksKey, PullRequest, PushRequest
from llm_datadist.status import LLMException
from simulation.cluster import BLOCKS, POISON, SINK, SOURCE, TARGET, TENSORS, Frozen, Member, Memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from simulation.world import World

SLACK_S = 1.0
"""What a call may take beyond its time: fences, goodbyes, and threads that are late."""

_ADDRESS = re.compile(r"0x[0-9a-f]+")


class Trial:
    """What happens in one schedule, and what was wrong."""

    def __init__(self, world: World, members: list[Member]) -> None:
        self.world = world
        self.members = members
        self.violations: list[str] = []
        self.outcomes: dict[str, int] = {}
        self.frozen: list[Frozen] = []
        self.trace: list[str] = []

    def violated(self, what: str) -> None:
        self.violations.append(f"{self.world.scheduler.now - 1000:.6f}: {what}")

    def call(self, member: Member, name: str, limit_s: float, work: Callable[[], object]) -> tuple[str, Any]:
        """Run one public call; its outcome, and its result or exception."""
        scheduler = self.world.scheduler
        begin = scheduler.now
        self.trace.append(f"{begin - 1000:.4f} cluster {member.cluster_id}: {name}")
        result: Any = None
        try:
            result = work()
            outcome = "ok" if not isinstance(result, list) else result[0].name
        except LLMException as error:
            result, outcome = error, error.status_code.name
        except Exception as error:  # noqa: BLE001 - not documented
            self.violated(f"{name} of cluster {member.cluster_id} raised {error!r}")
            result, outcome = error, "unexpected"
        took = scheduler.now - begin
        told = _ADDRESS.sub("an address", str(result))  # the same seed tells the same, wherever memory is
        self.trace.append(f"{scheduler.now - 1000:.4f} cluster {member.cluster_id}: {name} -> {outcome} {told}")
        if took > limit_s + SLACK_S:
            self.violated(f"{name} of cluster {member.cluster_id} took {took:.3f} s, at most {limit_s} were allowed")
        kind = f"{name.split(maxsplit=1)[0]} {outcome}"
        self.outcomes[kind] = self.outcomes.get(kind, 0) + 1
        return outcome, result


class Caller:
    """One thread of a member."""

    def __init__(self, trial: Trial, member: Member) -> None:
        self._trial = trial
        self._member = member
        self._rng = trial.world.scheduler.rng
        self._limit_s = member.plan.timeout_ms / 1000

    def run(self, count: int, *, link_all: bool) -> None:
        """So many operations; before them ``link_all`` links everybody, as the others may do at the same time."""
        self._wait_ready()
        if link_all:
            for peer in self._others():
                self._link(peer)
        for _ in range(count):
            self._wait_ready()
            if self._member.closing and self._rng.random() < 0.5:
                return
            self._one()
            if self._rng.random() < 0.5:
                self._trial.world.scheduler.sleep(self._rng.random() * 0.2)

    def _wait_ready(self) -> None:
        while not self._member.ready and not self._member.closing:
            self._trial.world.scheduler.sleep(0.01)

    def _one(self) -> None:
        peer = self._rng.choice(self._others())
        what = self._rng.choices(
            (
                self._link,
                self._pull,
                self._push,
                self._unlink,
                self._renew_source,
                self._renew_sink,
                self._switch_role,
                self._group,
                self._finalize,
            ),
            (6, 12, 12, 2, 2, 2, 1, 1, 0.3),
        )[0]
        what(peer)

    def _others(self) -> list[Member]:
        return [member for member in self._trial.members if member is not self._member]

    @property
    def _engine(self) -> Any:
        return self._member.engine

    # Links

    def _link(self, peer: Member) -> None:
        timeout = self._rng.choice((300, 1000, 3000))
        engine = self._engine
        self._trial.call(
            self._member,
            f"link {peer.cluster_id}",
            timeout / 1000,
            lambda: engine.link_clusters([peer.address], timeout),
        )

    def _unlink(self, peer: Member) -> None:
        timeout, force = self._rng.choice((300, 1000, 3000)), self._rng.random() < 0.5
        engine = self._engine
        self._trial.call(
            self._member,
            f"unlink {peer.cluster_id} {'by force' if force else ''}",
            timeout / 1000,
            lambda: engine.unlink_clusters([peer.address], timeout, force=force),
        )

    def _switch_role(self, _peer: Member) -> None:
        listen = self._rng.choice((None, ("127.0.0.1", self._member.port)))
        engine = self._engine
        self._trial.call(self._member, "switch_role", 2.0, lambda: engine.switch_role(listen))

    def _group(self, peer: Member) -> None:
        pair = sorted((self._member.cluster_id, peer.cluster_id))
        ranks = {cluster: rank for rank, cluster in enumerate(pair)}
        devices = [
            {"rank_id": str(rank), "device_ip": "127.0.0.1", "device_port": 26_000 + cluster}
            for cluster, rank in ranks.items()
        ]
        table = json.dumps({"server_list": [{"device": devices}]})
        engine, name = self._engine, f"group {pair}"
        outcome, comm = self._trial.call(
            self._member, f"group {peer.cluster_id}", 1.0, lambda: engine.link(name, ranks, table)
        )
        if outcome != "ok":
            return
        self._trial.world.scheduler.sleep(self._rng.random() * 0.5)
        self._trial.call(self._member, "query", 0.0, lambda: engine.query_register_mem_status(comm))
        self._trial.call(self._member, "ungroup", engine.options.link_total_time_s + 6.0, lambda: engine.unlink(comm))

    def _finalize(self, _peer: Member) -> None:
        self._trial.call(self._member, "finalize", 8.0, self._member.finalize)

    # Transfers

    def _blocks(self, busy: set[int]) -> list[int]:
        """Blocks that no other call uses; they are taken."""
        free = [block for block in range(BLOCKS) if block not in busy]
        self._rng.shuffle(free)
        taken = free[: self._rng.choice((1, 2, 4))]
        busy.update(taken)
        return taken

    def _pull(self, peer: Member) -> None:
        member, trial = self._member, self._trial
        engine, target = self._engine, member.present(TARGET)
        busy = member.busy_targets
        here = self._blocks(busy)
        if not here:
            return
        there = [self._rng.randrange(BLOCKS) for _ in here]
        begin = trial.world.scheduler.now

        def work() -> None:
            deadline = engine.deadline()
            if engine.short.pull(peer.cluster_id, SOURCE, target.cache_id, here, there, deadline):
                return
            request = PullRequest(
                "pull_blocks",
                peer.cluster_id,
                BlocksKey(SOURCE),
                target.cache_id,
                src_blocks=there,
                dst_blocks=here,
            )
            engine.pull(request, deadline)

        outcome, error = trial.call(member, f"pull {peer.cluster_id}", self._limit_s, work)
        if outcome == "ok":
            self._check_content(f"a pull from cluster {peer.cluster_id}", peer, target, here, there, begin)
        self._watch(target, here, busy, error, f"after a pull: {outcome}")

    def _watch(self, memory: Memory, blocks: list[int], busy: set[int], error: Any, why: str) -> None:
        """Let nobody change these bytes from now on, unless the error says that this may happen."""
        unsure = "did not confirm" in str(error) or getattr(error, "quiescent", True) is False
        if isinstance(error, LLMException) and unsure:
            return  # they are lost for this life: ``busy`` keeps them
        frozen = Frozen.of(memory, blocks, why)
        patience = self._rng.choice((0.0, 0.1) if error is None else (0.05, 1.0, 5.0))

        def look() -> None:
            self._trial.world.scheduler.sleep(patience)
            if memory.ending is None and frozen.changed():
                self._trial.violated(f"bytes have changed {why}")
            busy.difference_update(blocks)

        self._trial.world.watcher.run(f"watcher {why}", look)

    def _check_content(
        self, what: str, owner: Member, memory: Memory, blocks: list[int], sources: list[int], begin: float
    ) -> None:
        known = {
            source.serial: source for source in owner.memories[SOURCE] if source.until is None or source.until >= begin
        }
        words = [np.unique(tensor[block]) for tensor in memory.tensors for block in blocks]
        expected = [(tensor, source) for tensor in range(TENSORS) for source in sources]
        serials = set()
        for found, (tensor, source) in zip(words, expected, strict=True):
            if len(found) != 1 or int(found[0]) & 0xFFFF != tensor << 8 | source or int(found[0]) == POISON:
                self._trial.violated(f"{what} gave {[hex(word) for word in found[:4].tolist()]} for {tensor}, {source}")
                return
            serials.add(int(found[0]) >> 16)
        if len(serials) > 1 or not serials <= set(known):
            self._trial.violated(f"{what} gave bytes of {sorted(serials)}, there were {sorted(known)}")

    def _push(self, peer: Member) -> None:
        member, trial = self._member, self._trial
        if not peer.ready:
            return
        engine, source, sink = self._engine, member.present(SOURCE), peer.present(SINK)
        busy = peer.busy
        there = self._blocks(busy)
        if not there:
            return
        here = [self._rng.randrange(BLOCKS) for _ in there]

        def work() -> None:
            deadline = engine.deadline()
            plain = member.plan.remote_accessible
            if plain and engine.short.push(peer.cluster_id, SINK, source.cache_id, here, there, deadline):
                return
            request = PushRequest(
                "push_blocks",
                peer.cluster_id,
                BlocksKey(SINK) if plain else None,
                source.cache_id,
                range(TENSORS // 2),
                range(TENSORS // 2),
                src_blocks=here,
                dst_blocks=there,
                dst_addrs=None if plain else sink.addrs,
            )
            engine.push(request, deadline)

        outcome, error = trial.call(member, f"push {peer.cluster_id}", self._limit_s, work)
        if outcome == "ok" and sink.ending is None and sink.until is None:
            for number, tensor in enumerate(sink.tensors):
                for block, origin in zip(there, here, strict=True):
                    if not (tensor[block] == source.word(number, origin)).all():
                        trial.violated(f"a push to cluster {peer.cluster_id} is not in place")
        self._watch(sink, there, busy, error, f"after a push: {outcome}")

    # Caches

    def _renew_source(self, _peer: Member) -> None:
        self._renew(SOURCE)

    def _renew_sink(self, _peer: Member) -> None:
        self._renew(SINK)

    def _renew(self, role: int) -> None:
        """Take a cache back, use its memory for something else, and register another one."""
        member, trial, engine = self._member, self._trial, self._engine
        if not member.lock.acquire(blocking=False):
            return
        try:
            memory = member.present(role)
            if memory.until is not None:
                return
            memory.ending = memory.ending if memory.ending is not None else trial.world.scheduler.now
            limit = max(1.0, self._limit_s) + 1.0
            outcome, _ = trial.call(member, "unregister", limit, lambda: engine.unregister(memory.cache_id))
            if outcome != "ok":
                return
            memory.until = trial.world.scheduler.now
            memory.poison()
            trial.frozen.append(Frozen.of(memory, list(range(BLOCKS)), "after it was unregistered"))
            trial.call(member, "register", 0.0, lambda: member.register(role) and None)
        finally:
            member.lock.release()
