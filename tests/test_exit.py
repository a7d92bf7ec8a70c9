"""The end of the interpreter in every way, while everything is under way; and ends that come twice or too early."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from expect import expect
from llm_datadist import LLMConfig, LLMDataDist, LLMRole, LLMStatusCode
from peers import TIMEOUT_S, Node
from test_lifecycle import PROGRAM

if TYPE_CHECKING:
    from collections.abc import Iterator

UNDER_WAY = """
def transfer(method, caller, cache, peer):
    blocks, key = list(range(8)), BlocksCacheKey(peer, 0)
    while True:
        try:
            getattr(caller.cache_manager, method)(key, cache, blocks, blocks)
        except RuntimeError:  # also LLMException: it has come to an end
            return

def under_way(daemon):
    for work in (("pull_blocks", one, cache_one, 2), ("push_blocks", two, cache_two, 1)):
        for _ in range(2):
            threading.Thread(target=transfer, args=work, daemon=daemon).start()

def fork_and_exit(code):
    import warnings
    warnings.simplefilter("ignore")  # of Python 3.12
    pid = os.fork()
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) if pid else code)

def on_sigterm(*_):
    sys.exit(5)

import signal
pool = LLMConfig()
pool.enable_cache_manager = pool.allow_multiple_instances = True
pool.mem_pool_cfg = '{"memory_size": 4194304}'
three = LLMDataDist(LLMRole.MIX, 3)
three.init(pool.generate_options())
three.cache_manager.allocate_cache(CacheDesc(2, [8, 4096], DataType.DT_UINT8))
"""
# In slices: of a signal just before it begins to wait, Python hears only when the wait is over.
WAIT = "\nprint('under way', flush=True)\nfor _ in range(600):\n    threading.Event().wait(0.1)"
ENDINGS = {
    "end": ("under_way(True)", 0),
    "exit": ("under_way(True); sys.exit(3)", 3),
    "exit of many": ("under_way(True); sys.exit('a reason')", 1),
    "exception": ("under_way(True); raise ValueError('on purpose')", 1),
    "os._exit": ("under_way(True); os._exit(4)", 4),
    "finalized by a thread": (
        "under_way(True); end = threading.Thread(target=one.finalize); end.start(); two.finalize(); end.join()",
        0,
    ),
    "threads that go on until finalize": ("under_way(False); one.finalize(); two.finalize()", 0),
    "exit in a thread": ("under_way(True); threading.Thread(target=sys.exit, args=(9,)).start()", 0),
    "exit of a child": (
        "under_way(True); fork_and_exit(6)",
        6,
    ),
}


def start(ending: str, paths: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-X", "faulthandler", "-c", PROGRAM, UNDER_WAY + ending, paths]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("paths", ["auto", "mapped,tcp", "tcp"])
@pytest.mark.parametrize("ending", ENDINGS)
def test_the_interpreter_ends_while_transfers_run(ending: str, paths: str) -> None:
    """The exit code is kept, nothing crashes or complains, and it does not last until a timeout."""
    program, code = ENDINGS[ending]
    with start(program, paths) as process:
        try:
            output, errors = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert process.returncode == code, (output, errors)
    errors = re.sub("ValueError: on purpose|a reason", "", errors)
    assert not re.search("Error|Fatal|Exception ignored", errors), errors


@pytest.mark.parametrize(
    ("program", "number", "code"),
    [
        ("under_way(True)", signal.SIGTERM, -signal.SIGTERM),
        ("under_way(True)", signal.SIGKILL, -signal.SIGKILL),
        ("under_way(True); signal.signal(signal.SIGTERM, on_sigterm)", signal.SIGTERM, 5),
        ("under_way(True)", signal.SIGINT, -signal.SIGINT),
    ],
    ids=["sigterm", "sigkill", "sigterm handled", "ctrl-c"],
)
@pytest.mark.parametrize("paths", ["auto", "tcp"])
def test_a_signal_ends_it_while_transfers_run(program: str, number: int, code: int, paths: str) -> None:
    """By default at once; a handler may end it in good order."""
    with start(program + WAIT, paths) as process:
        assert process.stdout is not None
        try:
            while process.stdout.readline() not in ("under way\n", ""):
                pass
            process.send_signal(number)
            _, errors = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert process.returncode == code, errors
    assert not re.search("Fatal|Exception ignored", errors), errors


@pytest.mark.parametrize("ending", ["os._exit(0)", "os.kill(os.getpid(), 9)", "three.finalize(); os._exit(0)"])
def test_no_socket_outlives_a_process_that_does_not_clean_up(ending: str) -> None:
    """The name of the one that hands over the pools; what is in shared memory has no name."""
    tell = "under_way(True); print(three._engine._core.handover.name, flush=True); sys.stdin.readline(); "
    before = set(Path("/dev/shm").iterdir())
    with start(tell + ending, "mapped,tcp") as process:
        assert process.stdout is not None
        name = next(line.strip() for line in process.stdout if line != "ready\n")
        assert name in Path("/proc/net/unix").read_text()
        assert not {path for path in set(Path("/dev/shm").iterdir()) - before if "datadist" in path.name}
        process.communicate("\n", timeout=TIMEOUT_S)
    assert name not in Path("/proc/net/unix").read_text()


# Ends that come twice, too early, or at the same time


@pytest.fixture
def node() -> Iterator[Node]:
    """Cluster 1 with a blocks cache, linked to nobody."""
    made = Node()
    made.init(1, listen_ip_info="127.0.0.1:0")
    made.register_blocks("mine", 2, 4, 512, model_id=0)
    yield made
    made.finalize()


def hold_finalize(node: Node, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Hold whoever finalizes it; what tells that somebody has come so far, and what lets him go on."""
    entered, gate = threading.Event(), threading.Event()
    loop = node.manager._engine._core.loop
    real = loop.close

    def held() -> None:
        entered.set()
        assert gate.wait(TIMEOUT_S)
        real()

    monkeypatch.setattr(loop, "close", held)
    return entered, gate


def test_a_second_finalize_returns_when_the_first_has_ended(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also from another thread: afterwards nothing touches memory any more."""
    entered, gate = hold_finalize(node, monkeypatch)
    first, second = (threading.Thread(target=node.datadist.finalize) for _ in range(2))
    first.start()
    assert entered.wait(TIMEOUT_S)
    second.start()
    second.join(0.3)
    returned_early = not second.is_alive()
    gate.set()
    for thread in (first, second):
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()
    assert not returned_early


def test_finalize_after_an_init_that_failed() -> None:
    """It does nothing, and the next init works; what the failed one has begun is given back."""
    config = LLMConfig()
    config.enable_cache_manager = config.allow_multiple_instances = True
    datadist = LLMDataDist(LLMRole.MIX, 1)
    datadist.finalize()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config.listen_ip_info = f"127.0.0.1:{taken.getsockname()[1]}"
        config.mem_pool_cfg = '{"memory_size": 1048576}'
        threads, descriptors = threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))
        for _ in range(5):
            expect(LLMStatusCode.LLM_FAILED, lambda: datadist.init(config.generate_options()))
            datadist.finalize()
        assert threading.active_count() == threads
        assert len(list(Path("/proc/self/fd").iterdir())) == descriptors
    config.listen_ip_info = "127.0.0.1:0"
    datadist.init(config.generate_options())
    datadist.finalize()
    datadist.finalize()
    assert not datadist.is_initialized


def test_init_from_many_threads(node: Node) -> None:
    """Of several at once on one object, one starts the engine and the others find it, or are told."""
    datadist = LLMDataDist(LLMRole.MIX, 2)
    outcomes: list[str] = []

    def begin() -> None:
        try:
            datadist.init(node.config.generate_options())
        except RuntimeError as error:
            outcomes.append(str(error))
        else:
            outcomes.append("ok")

    threads = [threading.Thread(target=begin) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    datadist.finalize()
    assert len(outcomes) == 8
    assert "ok" in outcomes
    assert all(outcome == "ok" or "cluster 2 is initialised" in outcome for outcome in outcomes)
