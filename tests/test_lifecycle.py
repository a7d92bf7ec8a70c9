"""Ends: interpreter exit in every way, forks, leftovers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from expect import expect
from llm_datadist import LLMConfig, LLMDataDist, LLMException, LLMRole, LLMStatusCode

if TYPE_CHECKING:
    from collections.abc import Iterator

TIMEOUT_S = 30

PROGRAM = """
import os, sys, threading
import numpy as np
from llm_datadist import (
    BlocksCacheKey, CacheDesc, DataType, LayerSynchronizer, LLMClusterInfo, LLMConfig, LLMDataDist, LLMRole,
    TransferWithCacheKeyConfig,
)

def start(cluster_id):
    config = LLMConfig()
    config.enable_cache_manager = True
    config.enable_remote_cache_accessible = True
    config.allow_multiple_instances = True
    config.listen_ip_info = "127.0.0.1:0"
    config.paths = sys.argv[2]
    datadist = LLMDataDist(LLMRole.MIX, cluster_id)
    datadist.init(config.generate_options())
    memory = np.zeros((2, 8, 4096), dtype=np.uint8)
    desc = CacheDesc(2, [8, 4096], DataType.DT_UINT8)
    key = BlocksCacheKey(cluster_id, 0)
    cache = datadist.cache_manager.register_blocks_cache(desc, [m.ctypes.data for m in memory], key)
    return datadist, memory, cache

class Slow(LayerSynchronizer):
    def synchronize_layer(self, layer_index, timeout_in_millis):
        threading.Event().wait(0.2)
        return True

one, memory_one, cache_one = start(1)
two, memory_two, cache_two = start(2)
info = LLMClusterInfo()
info.remote_cluster_id = 2
info.append_local_ip_info("127.0.0.1", 0)
info.append_remote_ip_info(*two.listen_address)
assert one.link_clusters([info], 5000)[0] == 0
one.cache_manager.pull_blocks(BlocksCacheKey(2, 0), cache_one, [1], [2])
config = TransferWithCacheKeyConfig(BlocksCacheKey(2, 0), range(1), range(1))
task = one.cache_manager.transfer_cache_async(cache_one, Slow(), [config], [0], [0])
print("ready", flush=True)
exec(sys.argv[1])
"""


@pytest.mark.parametrize("paths", ["auto", "tcp"])
@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("pass", 0),
        ("sys.exit(3)", 3),
        ("raise RuntimeError('on purpose')", 1),
        ("os._exit(4)", 4),
        ("one.finalize(); two.finalize(); one.finalize()", 0),
        ("del one, two, task", 0),
        ("threading.Thread(target=threading.Event().wait, args=(60,), daemon=True).start()", 0),
    ],
)
def test_exit_with_links_up_and_a_task_running(ending: str, code: int, paths: str) -> None:
    """The exit code is kept, and it does not take long."""
    begin = time.monotonic()
    program = subprocess.run(
        [sys.executable, "-c", PROGRAM, ending, paths], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert program.returncode == code, program.stderr
    assert "ready" in program.stdout
    errors = program.stderr.replace("RuntimeError: on purpose", "")
    assert "Error" not in errors
    assert time.monotonic() - begin < 15


def test_sigterm_ends_it() -> None:
    """The default action: no handler of ours is in the way."""
    command = [sys.executable, "-c", PROGRAM, "threading.Event().wait(60)", "auto"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        program.send_signal(signal.SIGTERM)
        assert program.wait(TIMEOUT_S) == -signal.SIGTERM


def test_nothing_is_left_in_shared_memory() -> None:
    """Pools and tables are anonymous: killed processes leave no file."""
    before = set(Path("/dev/shm").iterdir())
    command = [sys.executable, "-c", PROGRAM, "os.kill(os.getpid(), 9)", "auto"]
    subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, check=False)
    assert set(Path("/dev/shm").iterdir()) <= before


@pytest.fixture
def datadist() -> Iterator[LLMDataDist]:
    """An initialised object that listens."""
    config = LLMConfig()
    config.enable_cache_manager = True
    config.listen_ip_info = "127.0.0.1:0"
    made = LLMDataDist(LLMRole.MIX, 1)
    made.init(config.generate_options())
    yield made
    made.finalize()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # Python 3.12 warns of what is tested here
def test_forked_child_gets_an_error_and_does_no_harm(datadist: LLMDataDist) -> None:
    """Every call in the child fails with a clear message; its exit leaves the parent's engine alone."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        text = b"no error"
        try:
            datadist.cache_manager.unregister_cache(1)
        except LLMException as error:
            text = str(error).encode()
        datadist.finalize()
        os.write(writer, text)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read().decode()
    assert "LLM_FAILED" in text
    assert "fork" in text
    datadist.cache_manager.unregister_cache(1)
    expect(LLMStatusCode.LLM_NOT_YET_LINK, lambda: datadist.explain_link(7))


KEPT = """
from pathlib import Path
from peers import Node
kept = []

def live():
    node = Node()
    node.init(1)
    node.register_blocks("kept", 1, 1, 64)
    node.finalize()
    kept.append(node)
    return len(list(Path("/proc/self/fd").iterdir()))

print(*(live() for _ in range(4)))
"""


def test_finalize_gives_descriptors_back_although_caches_are_kept() -> None:
    """A handle of a cache may outlive its engine; the region table behind it does not.

    In a process of its own: here, what earlier tests have left to the collector may be closed between two counts.
    """
    command = [sys.executable, "-c", KEPT]
    here = Path(__file__).parent
    ended = subprocess.run(command, cwd=here, check=True, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S)
    first, *later = ended.stdout.split()
    assert later == [first] * 3
