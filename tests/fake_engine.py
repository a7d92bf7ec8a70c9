"""An engine that does nothing but remember what it was asked."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from llm_datadist import LLMStatusCode
from llm_datadist.engine.requests import MemStatus
from llm_datadist.utils.deadline import Deadline

DEADLINE = Deadline.after(3600)
"""Of every transfer."""


class FakeShort:
    """No small transfer is known: all go the long way."""

    def pull(self, *_: Any) -> bool:
        return False

    push = pull


class FakeEngine:
    """Records calls as (method, arguments); ``failures`` maps a method to what it raises."""

    def __init__(self, cluster_id: int = 0, options: object = None) -> None:
        self.cluster_id = cluster_id
        self.options = options
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.failures: dict[str, BaseException] = {}
        self.statuses: list[LLMStatusCode] | None = None
        self.mem_status = MemStatus.OK
        self.listen_address: tuple[str, int] | None = ("127.0.0.1", 26000)
        self.closed = 0
        self.short = FakeShort()
        self._next_id = 0

    def _record(self, method: str, *args: Any) -> None:
        self.calls.append((method, args))
        if method in self.failures:
            raise self.failures[method]

    def deadline(self) -> Deadline:
        return DEADLINE

    def requests(self, method: str) -> list[Any]:
        """The first argument of each call of a method."""
        return [args[0] for name, args in self.calls if name == method]

    def begin(self, request: Any, deadline: Deadline) -> Future[None]:
        """Ends at once, as ``failures`` says."""
        ended: Future[None] = Future()
        try:
            self._record("begin", request, deadline)
        except BaseException as error:  # noqa: BLE001 - whoever waits for it gets it
            ended.set_exception(error)
        else:
            ended.set_result(None)
        return ended

    def close(self) -> None:
        self.closed += 1
        self._record("close")

    def register(self, spec: Any, addrs: Any, keys: Any, accessible: bool) -> int:
        self._record("register", spec, addrs, keys, accessible)
        self._next_id += 1
        return self._next_id

    def allocate(self, spec: Any, keys: Any) -> tuple[int, list[int]]:
        self._record("allocate", spec, keys)
        self._next_id += 1
        return self._next_id, [4096 * (index + 1) for index in range(spec.num_tensors)]

    def link_clusters(self, peers: Any, timeout_ms: int) -> list[LLMStatusCode]:
        self._record("link_clusters", peers, timeout_ms)
        return self.statuses or [LLMStatusCode.LLM_SUCCESS] * len(peers)

    def unlink_clusters(self, peers: Any, timeout_ms: int, force: bool) -> list[LLMStatusCode]:
        self._record("unlink_clusters", peers, timeout_ms, force)
        return self.statuses or [LLMStatusCode.LLM_SUCCESS] * len(peers)

    def link(self, comm_name: str, ranks: Any, rank_table: Any) -> int:
        self._record("link", comm_name, ranks, rank_table)
        return 1

    def query_register_mem_status(self, comm_id: int) -> MemStatus:
        self._record("query_register_mem_status", comm_id)
        return self.mem_status

    def explain(self, cluster_id: int) -> str:
        self._record("explain", cluster_id)
        return f"link to {cluster_id}"

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        return lambda *args: self._record(method, *args)
