"""The bridge that the C++ library calls: statuses instead of exceptions, on real engines of this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llm_datadist.native import NativeEngine, build
from llm_datadist.native.descriptors import cache_spec
from llm_datadist.native.options import engine_options
from llm_datadist.native.selections import block_ids, layers
from llm_datadist.native.statuses import RefusedError, failed, public
from llm_datadist.status import EXCEPTIONS, LLMException
from llm_datadist.status import LLMStatusCode as Code

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BASIC = {"llm.DeviceId": "0", "llm.SyncKvCacheWaitTime": "5000"}
LISTENING = {**BASIC, "llm.ListenIpInfo": "127.0.0.1:0"}
INT32, DEVICE, HOST = 3, 1, 0
LOCAL = [("127.0.0.1", 0)]


class Member:
    """An engine with a cache of 4 tensors of (8, 16) int32."""

    def __init__(self, cluster_id: int, options: dict[str, str], first: int) -> None:
        self.engine = NativeEngine(cluster_id, 3)
        assert self.engine.initialize(options) == Code.LLM_SUCCESS
        self.memory = np.arange(first, first + 512, dtype=np.int32).reshape(4, 8, 16)
        status, self.cache_id = self.register()
        assert status == Code.LLM_SUCCESS

    def register(self, placement: int = DEVICE) -> tuple[int, int]:
        addrs = [tensor.ctypes.data for tensor in self.memory]
        return self.engine.register(placement, 4, INT32, [8, 16], addrs)


@pytest.fixture
def here() -> Iterator[Member]:
    member = Member(1, BASIC, 0)
    yield member
    member.engine.finalize()


@pytest.fixture
def there() -> Iterator[Member]:
    member = Member(2, LISTENING, 10_000)
    yield member
    member.engine.finalize()


def peer(member: Member, cluster_id: int = 2) -> tuple[int, list[tuple[str, int]], list[tuple[str, int]]]:
    address = member.engine.listen_address()
    assert address is not None
    return cluster_id, LOCAL, [address]


@pytest.fixture
def linked(here: Member, there: Member) -> tuple[Member, Member]:
    assert here.engine.link([peer(there)], 5000) == (0, [0])
    return here, there


# ---------------------------------------------------------------- life


def test_nothing_works_before_initialize() -> None:
    engine = NativeEngine(1, 1)
    failed_code, disabled = int(Code.LLM_FAILED), int(Code.LLM_FEATURE_NOT_ENABLED)
    assert engine.set_role(1, {}) == failed_code
    assert engine.link([(2, LOCAL, LOCAL)], 1000) == (failed_code, None)
    assert engine.unlink([(2, LOCAL, LOCAL)], 1000, 1) == (failed_code, None)
    assert engine.register(DEVICE, 1, INT32, [1], [1]) == (failed_code, -1)
    assert engine.unregister(1) == failed_code
    assert engine.pull_cache((2, 1, 0), 1, 0, -1) == failed_code
    assert engine.pull_blocks((2, 1, 0), 1, [1], [1]) == failed_code
    assert engine.push_cache(1, (2, 1, 0), 0, -1) == failed_code
    assert engine.push_blocks(1, (2, 1, 0), [1], [1]) == failed_code
    assert engine.allocate(DEVICE, 1, INT32, [1]) == (disabled, -1, [])
    assert engine.deallocate(1) == disabled
    assert engine.copy_cache(1, 1, 0, 0, 0, -1) == disabled
    assert engine.copy_blocks(1, 1, [0], [[1]]) == disabled
    assert engine.listen_address() is None
    assert "not initialized" in engine.explain(2)
    engine.finalize()


def test_options() -> None:
    parsed = engine_options(2, {**LISTENING, "llm.MaxRegisteredAddrs": "300", "llm.EnableRemoteCacheAccessible": "0"})
    assert (parsed.remote_accessible, parsed.listen, parsed.max_registered_addrs) == (True, ("127.0.0.1", 0), 300)
    assert engine_options(1, {**BASIC, "llm.ListenIpInfo": "[::1]:7"}).listen == ("::1", 7)
    assert engine_options(1, {"llm.DeviceId": "3"}).device_id == 3
    files = {"llm.TlsCert": "cert", "llm.TlsKey": "key", "llm.TlsCa": "ca"}
    parsed = engine_options(1, {**BASIC, "llm.Secret": "x" * 16, "llm.AllowInsecureRemote": "1", **files})
    assert (parsed.secret is not None, parsed.tls is not None, parsed.allow_insecure_remote) == (True, True, True)


@pytest.mark.parametrize(
    ("role", "changed"),
    [
        (0, {}),
        (4, {}),
        (1, {"llm.DeviceId": ""}),
        (1, {"llm.DeviceId": "0;1"}),
        (1, {"llm.DeviceId": "-1"}),
        (1, {"llm.ListenIpInfo": "127.0.0.1"}),
        (1, {"llm.ListenIpInfo": "::1:5"}),
        (1, {"llm.ListenIpInfo": "[127.0.0.1]:5"}),
        (1, {"llm.ListenIpInfo": "127.0.0.1:65536"}),
        (1, {"llm.SyncKvCacheWaitTime": ""}),
        (1, {"llm.SyncKvCacheWaitTime": "1s"}),
        (1, {"llm.TransferBackend": ""}),
        (1, {"llm.TransferBackend": "hixl"}),
        (1, {"llm.TransferBackend": "hixl", "llm.ListenIpInfo": "127.0.0.1:0", "llm.LocalCommRes": "[]"}),
    ],
)
def test_wrong_options(role: int, changed: dict[str, str]) -> None:
    engine = NativeEngine(1, role)
    assert engine.initialize({**BASIC, **changed}) == Code.LLM_PARAM_INVALID
    assert engine.listen_address() is None


def test_the_device_is_mandatory() -> None:
    assert NativeEngine(1, 1).initialize({}) == Code.LLM_PARAM_INVALID


def test_initialize_twice_and_again(here: Member) -> None:
    assert here.engine.initialize({}) == Code.LLM_SUCCESS
    here.engine.finalize()
    here.engine.finalize()
    assert here.engine.initialize(BASIC) == Code.LLM_SUCCESS
    assert here.register() == (0, 1)


# ---------------------------------------------------------------- links and roles


def test_link_and_unlink(linked: tuple[Member, Member]) -> None:
    here, there = linked
    already = int(Code.LLM_ALREADY_LINK)
    assert here.engine.link([peer(there)], 5000) == (already, [already])
    assert "cluster 2" in here.engine.explain(2)
    assert here.engine.set_role(2, {}) == Code.LLM_EXIST_LINK
    assert here.engine.unlink([peer(there)], 5000, 0) == (0, [0])
    assert here.engine.unlink([peer(there)], 5000, 0) == (0, [0])
    assert here.engine.set_role(2, {"llm.ListenIpInfo": "127.0.0.1:0"}) == Code.LLM_SUCCESS
    assert here.engine.listen_address() is not None


@pytest.mark.parametrize("clusters", [[], [(2, [], [("localhost", 1)])], [(2, [("", 0)], [("127.0.0.1", 1)])]])
def test_calls_that_are_refused_as_a_whole(here: Member, clusters: Any) -> None:
    assert here.engine.link(clusters, 1000) == (Code.LLM_PARAM_INVALID, None)
    assert here.engine.unlink(clusters, 1000, 1) == (Code.LLM_PARAM_INVALID, None)
    assert here.engine.link([(2, LOCAL, LOCAL)], 0) == (Code.LLM_PARAM_INVALID, None)


def test_wrong_role_and_address(here: Member) -> None:
    assert here.engine.set_role(0, {}) == Code.LLM_PARAM_INVALID
    assert here.engine.set_role(1, {"llm.ListenIpInfo": "x"}) == Code.LLM_PARAM_INVALID


# ---------------------------------------------------------------- caches


def test_register_takes_what_is_registered(here: Member) -> None:
    wrong = (int(Code.LLM_PARAM_INVALID), -1)
    register = here.engine.register
    assert register(DEVICE, 1, INT32, [4], []) == wrong
    assert register(DEVICE, 2, INT32, [4], [16]) == wrong
    assert register(DEVICE, 1, INT32, [4], [0]) == wrong
    assert register(DEVICE, 1, INT32, [], [16]) == wrong
    assert register(DEVICE, 1, INT32, [1] * 32, [16]) == wrong
    assert register(DEVICE, 1, INT32, [0], [16]) == wrong
    assert register(DEVICE, 1, 28, [4], [16]) == wrong
    assert register(2, 1, INT32, [4], [16]) == wrong
    assert here.engine.unregister(99) == Code.LLM_SUCCESS


def test_elements_smaller_than_a_byte() -> None:
    spec = cache_spec(DEVICE, 1, 29, [4, 6])
    assert (spec.shape, spec.item_size) == ((4, 3), 1)
    assert cache_spec(DEVICE, 1, 29, [1, 3]).shape == (1, 2)
    with pytest.raises(RefusedError):
        cache_spec(DEVICE, 1, 29, [2, 3])


# ---------------------------------------------------------------- transfers


def test_pull_and_push(linked: tuple[Member, Member]) -> None:
    here, there = linked
    assert here.engine.pull_cache((2, 1, 5), 1, 3, -1) == Code.LLM_SUCCESS
    assert np.array_equal(here.memory[:, 3], there.memory[:, 5])
    ids = np.array([1, 2], dtype=np.uint64)
    assert here.engine.pull_blocks((2, 1, 0), 1, memoryview(ids), ids.tobytes()) == Code.LLM_SUCCESS
    assert np.array_equal(here.memory[:, 1:3], there.memory[:, 1:3])
    assert here.engine.push_cache(1, (2, 1, 0), 7, -1, (0, 0), (1, 1)) == Code.LLM_SUCCESS
    assert np.array_equal(there.memory[2:, 0], here.memory[:2, 7])
    assert there.memory[0, 0, 0] == 10_000
    assert here.engine.push_blocks(1, (2, 1, 0), [4], [6], (3, 3), (-1, -1), 1) == Code.LLM_SUCCESS
    assert np.array_equal(there.memory[3, 6], here.memory[3, 4])


def test_what_is_known_of_caches_that_are_gone_is_not_kept(linked: tuple[Member, Member]) -> None:
    """A peer's new cache has a new id; a link may live for weeks."""
    here, there = linked
    engine: Any = here.engine
    pairings = engine._engine._core.table.get(2).pairings
    for _ in range(10):
        status, cache_id = there.register()
        assert status == Code.LLM_SUCCESS
        for _ in range(2):
            assert here.engine.pull_blocks((2, cache_id, 0), 1, [1], [1]) == Code.LLM_SUCCESS
        assert len(pairings) == 1
        assert there.engine.unregister(cache_id) == Code.LLM_SUCCESS


def test_refused_transfers(linked: tuple[Member, Member]) -> None:
    engine = linked[0].engine
    wrong, missing = Code.LLM_PARAM_INVALID, Code.LLM_KV_CACHE_NOT_EXIST
    assert engine.pull_cache((2, 1, 0), 1, 0, 0) == wrong
    assert engine.pull_cache((2, 1, 0), 1, 8, -1) == wrong
    assert engine.pull_cache((1, 1, 0), 1, 0, -1) == wrong
    assert engine.pull_cache((2, 1, 0), 9, 0, -1) == missing
    assert engine.pull_cache((2, 9, 0), 1, 0, -1) == missing
    assert engine.pull_cache((2, 0, 0), 1, 0, -1) == missing
    assert engine.pull_cache((3, 1, 0), 1, 0, -1) == Code.LLM_NOT_YET_LINK
    assert engine.pull_blocks((2, 1, 1), 1, [1], [1]) == wrong
    assert engine.pull_blocks((2, 1, 0), 1, [], []) == wrong
    assert engine.pull_blocks((2, 1, 0), 1, [1], [2**64 - 1]) == wrong
    beyond = np.full(500, 2**64 - 1, dtype=np.uint64).tobytes()
    assert engine.pull_blocks((2, 1, 0), 1, beyond, beyond) == wrong
    assert engine.pull_cache((2, 1, 0), 1, 0, -1, (0, 0), (0, 0), 0) == wrong
    assert engine.push_cache(1, (2, 1, 0), 0, 64) == wrong
    assert engine.push_cache(1, (2, 1, 0), 0, -1, (0, 0), (0, 1)) == wrong
    assert engine.push_cache(1, (2, 1, 0), 0, -1, (-2, -2), (0, 0)) == wrong
    assert engine.push_cache(9, (2, 1, 0), 0, -1) == missing
    assert engine.push_blocks(1, (2, 1, 1), [1], [1]) == wrong
    assert engine.push_blocks(1, (2, 1, 0), [1], [1, 2]) == wrong


def test_the_registered_placement_decides_about_pushes(linked: tuple[Member, Member]) -> None:
    here, _ = linked
    status, cache_id = here.register(HOST)
    assert status == Code.LLM_SUCCESS
    assert here.engine.push_cache(cache_id, (2, 1, 0), 0, -1) == Code.LLM_PARAM_INVALID
    assert here.engine.pull_cache((2, 1, 0), cache_id, 0, -1) == Code.LLM_SUCCESS


def test_layer_ranges() -> None:
    assert layers((-1, -1), (-1, -1)) is None
    assert layers((1, 2), (-1, -1)) == (range(1, 3), range(1, 3))
    assert layers((-1, -1), (0, 0)) == (range(1), range(1))


def test_block_indices_beyond_signed_numbers_stay_out_of_range() -> None:
    many = np.array([2**64 - 1, 2**63, *range(500)], dtype=np.uint64)
    assert list(block_ids(many.tobytes()))[:3] == [2**63 - 1, 2**63 - 1, 0]
    assert list(block_ids(many[:3].tobytes())) == [2**64 - 1, 2**63, 0]
    assert list(block_ids(memoryview(many[2:5]))) == [0, 1, 2]


# ---------------------------------------------------------------- pools


def test_pool() -> None:
    engine = NativeEngine(1, 1)
    pool = '{"memory_size": 1048576, "page_shift": 12}'
    assert engine.initialize({**BASIC, "llm.MemPoolConfig": pool}) == Code.LLM_SUCCESS
    status, first, addrs = engine.allocate(DEVICE, 2, INT32, [4, 8])
    assert (status, first, len(addrs)) == (0, 1, 2)
    _, second, _ = engine.allocate(DEVICE, 2, INT32, [4, 8])
    assert engine.allocate(HOST, 1, INT32, [4])[0] == Code.LLM_PARAM_INVALID
    assert engine.allocate(DEVICE, 0, INT32, [4])[0] == Code.LLM_PARAM_INVALID
    assert engine.allocate(DEVICE, 1, INT32, [1 << 20])[0] == Code.LLM_OUT_OF_MEMORY
    assert engine.copy_cache(first, second, 1, 2, 0, -1) == Code.LLM_SUCCESS
    assert engine.copy_blocks(first, second, [0, 1], [[1, 2], [3]]) == Code.LLM_SUCCESS
    assert engine.copy_blocks(first, first, [0], [[1]]) == Code.LLM_SUCCESS
    assert engine.copy_blocks(first, second, [0], []) == Code.LLM_PARAM_INVALID
    assert engine.copy_blocks(first, second, [4], [[1]]) == Code.LLM_PARAM_INVALID
    assert engine.copy_blocks(first, 99, [0], [[1]]) == Code.LLM_KV_CACHE_NOT_EXIST
    assert engine.deallocate(first) == Code.LLM_SUCCESS
    assert engine.copy_cache(first, second, 0, 0, 0, -1) == Code.LLM_KV_CACHE_NOT_EXIST
    assert engine.copy_blocks(first, second, [0], [[1]]) == Code.LLM_KV_CACHE_NOT_EXIST
    engine.finalize()


# ---------------------------------------------------------------- failures


def test_only_documented_numbers_leave() -> None:
    assert public(Code.LLM_TIMEOUT) == 0x5010B01A
    assert public(507053) == public(-1) == public(12) == 0xFFFFFFFF


def test_whatever_goes_wrong_is_a_status(here: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("llm_datadist.engine.Engine.pull", lambda _, request: broken(request))
    assert here.engine.pull_cache((2, 1, 0), 1, 0, -1) == Code.LLM_FAILED
    raw = LLMException("device", status_code=Code.LLM_DEVICE_MEM_ERROR)
    assert failed("PullKvCache", raw) == Code.LLM_FAILED


@pytest.mark.parametrize("code", EXCEPTIONS)
def test_every_exception_becomes_its_status(code: Code) -> None:
    """Python's own are LLM_FAILED, those of the library that are both are not."""
    assert failed("PullKvCache", EXCEPTIONS[code]("text")) == code
    for kind in (TimeoutError, ConnectionError, ValueError, LookupError, MemoryError):
        assert failed("PullKvCache", kind("text")) == Code.LLM_FAILED


# ---------------------------------------------------------------- the library for pip users


def test_config_names_the_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert build.main(["config", "--prefix", str(tmp_path)]) == 1
    assert "build first" in capsys.readouterr().err
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libllm_datadist.so").touch()
    assert build.main(["config", "--prefix", str(tmp_path), "--cflags"]) == 0
    assert capsys.readouterr().out == f"-I{tmp_path}/include\n"
    assert build.main(["config", "--prefix", str(tmp_path), "--cflags", "--libs"]) == 0
    assert capsys.readouterr().out.endswith(f"-L{tmp_path}/lib -Wl,-rpath,{tmp_path}/lib -lllm_datadist\n")


def test_build_without_cmake_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build.main(["build", "--prefix", str(tmp_path)]) == 1
    assert "cmake" in capsys.readouterr().err
    assert (build.sources() / "CMakeLists.txt").is_file()
