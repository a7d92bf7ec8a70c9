"""The command ``top``: against real endpoints, and what it makes of expositions."""

from __future__ import annotations

import contextlib
import http.server
import math
import os
import pty
import signal
import socket
import subprocess
import threading
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli_kit import MODULE, environment, line_with, run, running
from llm_datadist.cli.top.rates import quantile, rows
from llm_datadist.cli.top.scrape import EndpointError, Snapshot, parse, url_of
from net_helpers import WAIT_S
from short_kit import BLOCK_BYTES, TENSORS, attempt, make_pair

if TYPE_CHECKING:
    from collections.abc import Iterator

    from peers import Node, Peer, Peers

BLOCKS = list(range(32))


def serve_metrics(node: Node) -> str:
    """In the child: expose what its ``LLMDataDist`` counts, as an operator would; the endpoint."""
    from prometheus_client import CollectorRegistry, start_http_server  # noqa: PLC0415 - in the child only

    from llm_datadist.observe.prometheus import Collector  # noqa: PLC0415

    registry = CollectorRegistry()
    registry.register(Collector(node.datadist))
    server, _ = start_http_server(0, addr="127.0.0.1", registry=registry)
    node.extra["server"] = server
    return f"127.0.0.1:{server.server_port}"


def keep_pulling(node: Node, cluster_id: int, stop: str) -> int:
    """In the child: pull until ``stop_pulling``; how often."""
    node.extra[stop] = threading.Event()
    count = 0
    while not node.extra[stop].is_set():
        attempt(node, "pull_blocks", cluster_id, BLOCKS, BLOCKS, forbid=False)
        count += 1
    return count


def stop_pulling(node: Node, stop: str) -> None:
    node.extra[stop].set()


def fail_once(node: Node, cluster_id: int) -> None:
    """In the child: a pull that the peer refuses."""
    attempt(node, "pull_blocks", cluster_id, [10**6], [0], forbid=False)


@pytest.fixture
def pair(peers: Peers) -> tuple[Peer, Peer]:
    client, server = make_pair(peers, "tcp", metrics=True)
    return client, server


def test_rates_of_two_running_processes(pair: tuple[Peer, Peer]) -> None:
    client, server = pair
    endpoints = [each.call(serve_metrics) for each in pair]
    client.call(fail_once, 2)
    pulling = client.begin(keep_pulling, 2, "stop")
    try:
        seen = run("top", "--once", "--interval", "1", *endpoints)
    finally:
        client.call(stop_pulling, "stop")
    assert pulling.result(WAIT_S) > 0
    assert seen.returncode == 0, seen.stderr
    lines = seen.stdout.splitlines()
    assert lines[0].startswith("llm-datadist top: 2 of 2 endpoints, rates over ")
    engines = {line.split()[0]: line for line in lines if "linked 1" in line}
    assert set(engines) == {str(client.cluster_id), str(server.cluster_id)}
    assert "tcp 1" in engines["1"]
    assert "B/s" in engines["2"]
    (pulls,) = [line.split() for line in lines if line.split()[:3] == ["1", "pull_blocks", "tcp"]]
    assert float(pulls[3].replace(",", "")) > 0
    assert "-" not in pulls, "quantiles are known"
    (failed,) = [line.split() for line in lines if "LLM_PARAM_INVALID" in line]
    assert failed == ["1", "pull_blocks", "LLM_PARAM_INVALID", "0", "1"]


def test_it_goes_on_until_it_is_interrupted(pair: tuple[Peer, Peer]) -> None:
    endpoint = pair[1].call(serve_metrics)
    with running("top", "--interval", "0.1", endpoint) as process:
        line_with(process, "llm-datadist top: 1 of 1")
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=WAIT_S)
        assert (process.returncode, "Traceback" in errors) == (130, False), rest + errors


def test_on_a_terminal_it_draws_over_what_was(pair: tuple[Peer, Peer]) -> None:
    endpoint = pair[1].call(serve_metrics)
    ours, theirs = pty.openpty()
    variables = {**environment(), "TERM": "xterm", "COLUMNS": "160", "LINES": "40"}
    command = [*MODULE, "top", "--interval", "0.1", endpoint]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=variables) as process:
        os.close(theirs)
        watchdog = threading.Timer(WAIT_S * 3, process.kill)
        watchdog.start()
        try:
            seen = b""
            while seen.count(b"llm-datadist top: 1 of 1") < 3:
                seen += os.read(ours, 65536)
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(OSError):  # EIO: nobody writes any more
                while more := os.read(ours, 65536):
                    seen += more
            assert process.wait(WAIT_S) == 130
        finally:
            watchdog.cancel()
            process.kill()
            os.close(ours)
    assert seen.count(b"\x1b[?1049h") == seen.count(b"\x1b[?1049l") == 1  # the other screen, and back
    assert b"linked 1" in seen


def test_without_the_option_it_says_that_nothing_is_counted(peers: Peers) -> None:
    client, _ = make_pair(peers, "tcp")
    seen = run("top", "--once", "--interval", "0.1", client.call(serve_metrics))
    assert seen.returncode == 0
    assert "LLMConfig.metrics is not True" in seen.stdout


def test_an_endpoint_that_is_not_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    seen = run("top", "--once", f"127.0.0.1:{port}")
    assert seen.returncode == 1
    for words in ("Connection refused", "start_http_server(9400", "Collector(datadist)", "LLMConfig.metrics = True"):
        assert words in seen.stderr


def test_one_of_two_endpoints_is_not_there(pair: tuple[Peer, Peer]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    seen = run("top", "--once", "--interval", "0.1", pair[0].call(serve_metrics), f"127.0.0.1:{port}")
    assert seen.returncode == 1
    assert "1 of 2 endpoints" in seen.stdout
    assert "Connection refused" in seen.stdout
    assert "linked 1" in seen.stdout


class _Other(http.server.BaseHTTPRequestHandler):
    """Endpoints of others."""

    def do_GET(self) -> None:
        found = {"/metrics": b"up 1\n", "/page": b"<html>hello</html>\n"}.get(self.path)
        self.send_response(200 if found else 404)
        self.end_headers()
        self.wfile.write(found or b"")

    def log_message(self, *_args: Any) -> None:
        pass


@pytest.fixture
def other() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Other)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join(WAIT_S)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("{}", "has no llm_datadist_* metrics"),
        ("http://{}/page", "is no Prometheus exposition"),
        ("http://{}/nothing", "answers 404"),
    ],
)
def test_an_endpoint_of_somebody_else(other: str, target: str, words: str) -> None:
    seen = run("top", "--once", target.format(other))
    assert seen.returncode == 1
    assert words in seen.stderr
    assert "REGISTRY.register(Collector(datadist))" in seen.stderr


@pytest.mark.parametrize("target", ["x", "ftp://host/metrics", "host:port", "http://", ":1", "host:99999"])
def test_what_is_no_endpoint_is_wrong_usage(target: str) -> None:
    with pytest.raises(ValueError, match="give HOST:PORT"):
        url_of(target)


def test_wrong_usage_on_the_command_line() -> None:
    seen = run("top", "--once", "x")
    assert seen.returncode == 2
    assert "HOST:PORT" in seen.stderr


def test_short_targets_become_urls() -> None:
    assert url_of("127.0.0.1:9400") == "http://127.0.0.1:9400/metrics"
    assert url_of("[::1]:9400") == "http://[::1]:9400/metrics"
    assert url_of("https://host/path") == "https://host/path"


# Arithmetic

EXPOSITION = """
llm_datadist_transfer_phase_duration_seconds_sum{cluster="1",operation="pull_blocks",phase="queue"} %d
llm_datadist_transfer_phase_duration_seconds_sum{cluster="1",operation="pull_blocks",phase="copy"} %d
llm_datadist_transfers_in_progress{cluster="1"} 3
llm_datadist_transfers_total{cluster="1",operation="pull_blocks",path="tcp",status="LLM_SUCCESS"} %d
llm_datadist_transferred_bytes_total{cluster="1",operation="pull_blocks",path="tcp"} %d
"""


def snapshot(at: float, count: int, size: int) -> Snapshot:
    return Snapshot(at, parse("http://here", EXPOSITION % (count, size, count, size)).values)


def test_rates_are_differences_by_time() -> None:
    seen = rows(snapshot(10, 100, 1000), snapshot(12, 150, 5000))
    (operation,) = seen.operations
    assert (operation.per_s, operation.bytes_per_s, operation.total) == (25, 2000, 150)
    assert math.isnan(operation.p50_s)
    assert (seen.engines[0].in_progress, seen.engines[0].waiting) == (3, 25)


def test_a_process_that_was_started_anew_counts_from_zero() -> None:
    seen = rows(snapshot(10, 100, 1000), snapshot(12, 50, 500))
    (operation,) = seen.operations
    assert (operation.per_s, operation.bytes_per_s) == (25, 250)


def test_what_is_no_exposition() -> None:
    with pytest.raises(EndpointError, match="no Prometheus exposition"):
        parse("http://here", "{{{")


def test_quantiles_of_nothing() -> None:
    assert math.isnan(quantile(0.5, []))
    assert math.isnan(quantile(0.5, [(1.0, 0.0), (math.inf, 0.0)]))


def test_quantiles_within_a_bucket_are_linear() -> None:
    buckets = [(1.0, 0.0), (2.0, 10.0), (math.inf, 10.0)]
    assert quantile(0.5, buckets) == pytest.approx(1.5)
    assert quantile(0.99, [(1.0, 1.0), (math.inf, 2.0)]) == 1.0


@given(st.lists(st.floats(0, 12), min_size=1), st.floats(0.01, 1))
def test_a_quantile_lies_in_the_bucket_that_holds_it(times: list[float], share: float) -> None:
    bounds = [1.0, 2.0, 5.0, 10.0, math.inf]
    buckets = [(bound, float(sum(each <= bound for each in times))) for bound in bounds]
    found = quantile(share, buckets)
    true = sorted(times)[max(0, math.ceil(share * len(times)) - 1)]
    low = max([0.0, *(bound for bound in bounds if bound < true)])
    high = min(bound for bound in bounds if bound >= true)
    assert low <= found <= (high if math.isfinite(high) else low)


def test_bytes_of_a_pull_are_those_of_the_blocks(pair: tuple[Peer, Peer]) -> None:
    """What top divides by the time is what was moved."""
    client, _ = pair
    endpoint = client.call(serve_metrics)
    from llm_datadist.cli.top.scrape import scrape  # noqa: PLC0415 - beside its use

    before = scrape(url_of(endpoint), WAIT_S)
    client.call(attempt, "pull_blocks", 2, BLOCKS, BLOCKS, forbid=False)
    now = scrape(url_of(endpoint), WAIT_S)
    (operation,) = [each for each in rows(before, now).operations if each.operation == "pull_blocks"]
    moved = operation.bytes_per_s * (now.at - before.at)
    assert moved == pytest.approx(TENSORS * BLOCK_BYTES * len(BLOCKS))
