"""What real transfers tell: metrics of both sides, one trace over two processes, ids in exceptions and logs."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest

from llm_datadist import BlocksCacheKey, LLMException, LLMStatusCode
from llm_datadist.observe import Histogram, TraceFile, TransferLog
from llm_datadist.observe.trace_file import join
from short_kit import BLOCK_BYTES, BLOCKS, TARGET, TENSORS, attempt, make_pair
from stopping import go_on, stop
from until import until

if TYPE_CHECKING:
    from pathlib import Path

    from peers import Node, Peer, Peers

PATHS = ("process_vm", "tcp")
MANY = list(range(64))
FEW = [5, 7]


def read(node: Node, name: str, labels: dict[str, str] | None = None) -> Any:
    """In the child: one metric."""
    family = next(each for each in node.datadist.metrics() if each.name == f"llm_datadist_{name}")
    return family.value(**(labels or {}))


def of(path: str, operation: str = "pull_blocks", **more: str) -> dict[str, str]:
    return {"operation": operation, "path": path, **more}


def wait_until_served(peer: Peer, count: int) -> None:
    """The asker has its bytes a little earlier than the owner has counted them."""
    until(lambda: (peer.call(read, "served_requests", {"operation": "read", "status": "ok"}) or 0) >= count)


@pytest.mark.parametrize("path", PATHS)
def test_transfers_are_counted_the_long_and_the_short_way(peers: Peers, path: str) -> None:
    client, _ = make_pair(peers, path, metrics=True)
    success = of(path, status="LLM_SUCCESS")
    transfers = client.call(read, "transfers", success)
    moved = client.call(read, "transferred_bytes", of(path))
    for blocks, short in ((MANY, False), (FEW, True)):
        outcome = client.call(attempt, "pull_blocks", 2, blocks, blocks, forbid=not short)
        assert (outcome.error, outcome.short) == (None, short)
        transfers += 1
        moved += TENSORS * BLOCK_BYTES * len(blocks)
        assert client.call(read, "transfers", success) == transfers
        assert client.call(read, "transferred_bytes", of(path)) == moved
    copies = client.call(read, "transfer_phase_duration_seconds", {"operation": "pull_blocks", "phase": "copy"})
    assert isinstance(copies, Histogram)
    assert copies.count == transfers


def test_the_owner_counts_what_it_serves(peers: Peers) -> None:
    client, server = make_pair(peers, "tcp", metrics=True)
    before = server.call(read, "served_requests", {"operation": "read", "status": "ok"})
    client.call(attempt, "pull_blocks", 2, FEW, FEW)
    wait_until_served(server, before + 1)
    assert server.call(read, "data_connections") > 0


def test_gauges_need_no_option(peers: Peers) -> None:
    client, server = make_pair(peers, "process_vm")
    for peer in (client, server):
        assert peer.call(read, "links", {"state": "linked"}) == 1
        assert peer.call(read, "link_paths", {"path": "process_vm"}) == 1
        assert peer.call(read, "caches") == 2
        assert peer.call(read, "transfers_in_progress") == 0
    with pytest.raises(StopIteration):
        client.call(read, "transfers", of("process_vm", status="LLM_SUCCESS"))


def test_failures_are_counted_by_status(peers: Peers) -> None:
    client, _ = make_pair(peers, "process_vm", metrics=True)
    outcome = client.call(attempt, "pull_blocks", 2, [BLOCKS], [0])
    assert outcome.status is LLMStatusCode.LLM_PARAM_INVALID
    seen = client.call(read, "transfers", {**of(""), "status": "LLM_PARAM_INVALID"})
    assert seen == 1


def begin_trace(node: Node, name: str) -> None:
    """In the child."""
    node.extra["trace"] = TraceFile(name)
    node.datadist.observe(node.extra["trace"])


def end_trace(node: Node, path: Path) -> None:
    """In the child."""
    node.datadist.unobserve(node.extra["trace"])
    node.extra["trace"].write(path)


def test_one_trace_over_both_processes(peers: Peers, tmp_path: Path) -> None:
    client, server = make_pair(peers, "tcp", metrics=True)
    served = server.call(read, "served_requests", {"operation": "read", "status": "ok"})
    for peer, name in ((client, "decode"), (server, "prefill")):
        peer.call(begin_trace, name)
    assert client.call(attempt, "pull_blocks", 2, MANY, MANY, forbid=True).error is None
    wait_until_served(server, served + 1)
    files = [tmp_path / name for name in ("decode.json", "prefill.json")]
    for peer, file in zip((client, server), files, strict=True):
        peer.call(end_trace, file)
    join(files, tmp_path / "both.json")
    events = json.loads((tmp_path / "both.json").read_bytes())["traceEvents"]
    whole = next(event for event in events if event["name"] == "pull_blocks")
    serve = next(event for event in events if event["name"] == "serve read")
    assert whole["pid"] != serve["pid"]
    assert whole["args"]["transfer_id"] == serve["args"]["transfer_id"] != f"{0:016x}"
    assert whole["ts"] <= serve["ts"] <= whole["ts"] + whole["dur"]
    steps = [event for event in events if event["ph"] == "X" and event["pid"] == whole["pid"] and event is not whole]
    assert {event["name"] for event in steps} >= {"lookup", "plan", "copy"}
    assert sum(event["dur"] for event in steps) == pytest.approx(whole["dur"], rel=0.05)


def failure_of(node: Node, cluster_id: int) -> tuple[int | None, str]:
    """In the child: a pull that fails; id and text of the exception."""
    with pytest.raises(LLMException) as caught:
        node.manager.pull_blocks(BlocksCacheKey(cluster_id, 0), node.caches[TARGET], [0], [0])
    return caught.value.transfer_id, str(caught.value)


def test_the_id_stands_in_the_exception_and_its_text(peers: Peers) -> None:
    client, server = make_pair(peers, "tcp", sync_kv_timeout=500)
    stop(server.process.pid)
    try:
        identity, text = client.call(failure_of, 2)
    finally:
        go_on(server.process.pid)
    assert identity
    assert f"(transfer {identity:016x})" in text
    again, _ = client.call(failure_of, 99)
    assert again not in (None, identity)


def test_a_line_in_the_log_for_each_transfer_where_that_is_wanted(peers: Peers) -> None:
    process = peers.process(verbose)
    server = peers.make(2, process=process, paths="process_vm")
    client = peers.make(1, listen=False, paths="process_vm")
    for peer, wanted in ((server, True), (client, False)):
        assert peer.call(logs_transfers) == wanted


def verbose() -> None:
    """In a child, before it logs anything."""
    os.environ["ASCEND_GLOBAL_LOG_LEVEL"] = "0"


def logs_transfers(node: Node) -> bool:
    """In the child."""
    return any(isinstance(each, TransferLog) for each in node.datadist._engine._core.recorder.observers)
