"""LLMDataDist: construction, init step by step, the state rule, finalize."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

import llm_datadist.engine
from datadist_kit import FAILED, MANAGED, SEVERAL, engine_of
from expect import PI, expect
from llm_datadist import LLMConfig, LLMDataDist, LLMRole
from llm_datadist.cache_manager import CacheManager
from llm_datadist.status import exception_for
from llm_datadist.v2.llm_datadist import _shutdown_handler

pytestmark = pytest.mark.usefixtures("fake_engines")


# ------------------------------------------------------------ construction


@pytest.mark.parametrize("role", [*LLMRole, None])
@pytest.mark.parametrize("cluster_id", [0, 2**64 - 1])
def test_construction_does_nothing_else(role: Any, cluster_id: int) -> None:
    made = LLMDataDist(role, cluster_id)
    assert made.cluster_id == cluster_id
    assert LLMDataDist.llm_engine_instance is None


@pytest.mark.parametrize(
    ("role", "cluster_id", "failure"),
    [
        (1, 0, TypeError),
        ("Prompt", 0, TypeError),
        (LLMRole.PROMPT, None, TypeError),
        (LLMRole.PROMPT, "1", TypeError),
        (LLMRole.PROMPT, -1, ValueError),
        (LLMRole.PROMPT, 2**64, ValueError),
        (1, -1, TypeError),
    ],
)
def test_construction_refuses(role: Any, cluster_id: Any, failure: type[Exception]) -> None:
    expect(failure, lambda: LLMDataDist(role, cluster_id))


# ------------------------------------------------------------ init


@pytest.mark.parametrize(
    ("options", "failure", "match"),
    [
        ("options", TypeError, "options only support dict"),
        ([("a", "b")], TypeError, "options only support dict"),
        (None, AttributeError, "options is None"),
        ({**MANAGED, "ge.flowGraphMemMaxSize": 1}, TypeError, "only support str"),
        ({**MANAGED, "ge.flowGraphMemMaxSize": "1,2"}, PI, "one number"),
        ({**MANAGED, "ge.flowGraphMemMaxSize": "-1"}, PI, "digits"),
        ({**MANAGED, "ge.flowGraphMemMaxSize": "1.23"}, PI, "digits"),
        ({**MANAGED, "ge.flowGraphMemMaxSize": ""}, PI, "digits"),
        ({"llm.LocalCommRes": "", "llm.EnableCacheManager": "0"}, PI, "EnableCacheManager"),
        ({"llm.LocalCommRes": "", "llm.EnableCacheManager": True}, PI, "EnableCacheManager"),
        ({"llm.TransferBackend": "hixl"}, PI, "EnableCacheManager"),
        ({"llm.TransferBackend": ""}, PI, "EnableCacheManager"),
        (
            {**MANAGED, "llm.TransferBackend": "hixl", "llm.EnableRemoteCacheAccessible": "0"},
            PI,
            "EnableRemoteCacheAccessible",
        ),
        ({**MANAGED, "llm.TransferBackend": "hixl"}, PI, "listenIpInfo"),
        ({**MANAGED, "llm.TransferBackend": ""}, PI, "listenIpInfo"),
        ({**MANAGED, "llm.listenIpInfo": "1.2.3.4"}, PI, "host and one port"),
        ({**MANAGED, "llm.listenIpInfo": "::1:1"}, PI, "IPv6"),
        ({**MANAGED, "llm.listenIpInfo": "a:1;b:2"}, PI, "host and one port"),
        ({**MANAGED, "llm.listenIpInfo": ""}, PI, "host and one port"),
        ({**MANAGED, "llm.listenIpInfo": "1.2.3.4:x"}, ValueError, "not a number"),
        ({**MANAGED, "llm.listenIpInfo": 1}, TypeError, "only support str"),
        ({**MANAGED, "llm.listenIpInfo": None}, AttributeError, "None"),
        ({**MANAGED, "some.option": 1}, TypeError, "only support str"),
        ({}, ModuleNotFoundError, "enable_cache_manager = True"),
        ({"llm.EnableCacheManager": "0"}, ModuleNotFoundError, "enable_cache_manager = True"),
        ({"llm.EnableCacheManager": True}, ModuleNotFoundError, "enable_cache_manager = True"),
        ({"llm.EnableCacheManager": "true"}, ModuleNotFoundError, "enable_cache_manager = True"),
        # order of the checks
        ({"ge.flowGraphMemMaxSize": "x", "llm.TransferBackend": "hixl"}, PI, "flowGraphMemMaxSize"),
        ({"llm.LocalCommRes": "", "llm.EnableCacheManager": "0", "llm.TransferBackend": "x"}, PI, "LocalCommRes"),
        ({"llm.TransferBackend": "hixl", "llm.EnableRemoteCacheAccessible": "0"}, PI, "EnableCacheManager"),
        ({"llm.listenIpInfo": "1.2.3.4"}, ModuleNotFoundError, "llm_datadist_v1"),
    ],
)
def test_init_refuses_and_may_be_tried_again(options: Any, failure: Any, match: str) -> None:
    made = LLMDataDist(LLMRole.DECODER, 1)
    expect(failure, lambda: made.init(options), match=match)
    assert LLMDataDist.llm_engine_instance is None
    expect(RuntimeError, lambda: made.cache_manager)
    made.init(MANAGED)
    assert LLMDataDist.llm_engine_instance is made


def test_init_without_a_role() -> None:
    made = LLMDataDist(None, 1)  # type: ignore[arg-type]
    expect(KeyError, lambda: made.init(MANAGED))


@pytest.mark.parametrize(
    ("options", "added"),
    [
        (MANAGED, {}),
        ({**MANAGED, "ge.flowGraphMemMaxSize": "10"}, {}),
        (
            {"llm.LocalCommRes": ""},
            {"llm.EnableCacheManager": "1", "llm.EnableRemoteCacheAccessible": "1"},
        ),
        ({"llm.LocalCommRes": "x", "llm.EnableRemoteCacheAccessible": "0"}, {"llm.EnableCacheManager": "1"}),
        (
            {**MANAGED, "llm.TransferBackend": "hixl", "llm.listenIpInfo": "1.2.3.4:5"},
            {"llm.EnableRemoteCacheAccessible": "1", "llm.ListenIp": "1.2.3.4", "llm.ListenPort": "5"},
        ),
        ({**MANAGED, "llm.listenIpInfo": "[::1]:0"}, {"llm.ListenIp": "::1", "llm.ListenPort": "0"}),
    ],
)
@pytest.mark.parametrize(
    ("role", "name"), [(LLMRole.PROMPT, "Prompt"), (LLMRole.DECODER, "Decoder"), (LLMRole.MIX, "Mix")]
)
def test_effective_options(options: dict[str, str], added: dict[str, str], role: LLMRole, name: str) -> None:
    made = LLMDataDist(role, 7)
    given = dict(options)
    assert made.init(given) is None
    assert given == options
    assert engine_of(made).cluster_id == 7
    assert engine_of(made).options.parsed == {**options, **added, "llm.Role": name}  # type: ignore[attr-defined]
    assert isinstance(made.cache_manager, CacheManager)
    accessible = {**options, **added}.get("llm.EnableRemoteCacheAccessible") == "1"
    assert made.cache_manager._accessible is accessible


def test_second_init_of_one_object_looks_at_nothing(datadist: LLMDataDist) -> None:
    engine, manager = engine_of(datadist), datadist.cache_manager
    assert datadist.init(None) is None  # type: ignore[arg-type]
    assert datadist.init("options") is None  # type: ignore[arg-type]
    assert engine_of(datadist) is engine
    assert datadist.cache_manager is manager


@pytest.mark.parametrize(
    "options",
    [MANAGED, None, "options", {}, {**MANAGED, "llm.AllowMultipleInstances": "0"}, {"llm.TransferBackend": ""}],
)
def test_second_object_is_refused_before_its_options_are_looked_at(datadist: LLMDataDist, options: Any) -> None:
    other = LLMDataDist(LLMRole.DECODER, 4)
    expect(FAILED, lambda: other.init(options), match="allow_multiple_instances = True")
    assert LLMDataDist.llm_engine_instance is datadist
    datadist.finalize()
    other.init(MANAGED)
    assert LLMDataDist.llm_engine_instance is other


def test_second_object_is_allowed_by_its_own_option(datadist: LLMDataDist) -> None:
    config = LLMConfig()
    config.enable_cache_manager = True
    config.allow_multiple_instances = True
    second, third = LLMDataDist(LLMRole.DECODER, 4), LLMDataDist(LLMRole.DECODER, 5)
    second.init(config.generate_options())
    expect(FAILED, lambda: third.init(MANAGED))
    third.init(SEVERAL)
    assert LLMDataDist.llm_engine_instance is datadist
    datadist.finalize()
    assert LLMDataDist.llm_engine_instance is second
    expect(FAILED, lambda: datadist.init(MANAGED))
    second.finalize()
    third.finalize()
    assert LLMDataDist.llm_engine_instance is None


def test_options_of_a_second_object_are_checked_too(datadist: LLMDataDist) -> None:
    other = LLMDataDist(LLMRole.DECODER, 4)
    expect(PI, lambda: other.init({**SEVERAL, "llm.listenIpInfo": "x"}))
    expect(ModuleNotFoundError, lambda: other.init({"llm.AllowMultipleInstances": "1"}))
    assert LLMDataDist.llm_engine_instance is datadist


def test_engine_failure_leaves_the_object_uninitialised(monkeypatch: pytest.MonkeyPatch) -> None:
    made = LLMDataDist(LLMRole.PROMPT, 1)

    def refuse(cluster_id: int, options: object) -> None:
        message = "port in use"
        raise exception_for(FAILED, message)

    with monkeypatch.context() as patch:
        patch.setitem(vars(llm_datadist.engine), "Engine", refuse)
        expect(FAILED, lambda: made.init(MANAGED), match="port in use")
    assert not made.is_initialized
    made.init(MANAGED)
    assert made.is_initialized


# ------------------------------------------------------------ the state rule


MEMBERS: list[Any] = [
    lambda d: d.cache_manager,
    lambda d: d.kv_cache_manager,
    lambda d: d.listen_address,
    lambda d: d.link(None, None, 1),
    lambda d: d.unlink("x"),
    lambda d: d.query_register_mem_status("x"),
    lambda d: d.link_clusters("x", "x"),
    lambda d: d.unlink_clusters("x", "x"),
    lambda d: d.switch_role(1),
    lambda d: d.explain_link("x"),
    lambda d: d.is_reached_by("x"),
    lambda d: d.explain_memory(),
    lambda d: d.check_link_status("x"),
]


@pytest.mark.parametrize("member", MEMBERS)
def test_uninitialised_use_is_a_plain_runtime_error_before_any_check(member: Any) -> None:
    made = LLMDataDist(LLMRole.PROMPT, 1)
    expect(RuntimeError, lambda: member(made), match="call init")
    made.init(MANAGED)
    made.finalize()
    expect(RuntimeError, lambda: member(made), match="call init")
    assert made.cluster_id == 1
    assert made.finalize() is None


@pytest.mark.parametrize("member", [lambda d: d.kv_cache_manager, lambda d: d.check_link_status(2)])
def test_members_of_the_older_mode(datadist: LLMDataDist, member: Any) -> None:
    expect(PI, lambda: member(datadist))


# ------------------------------------------------------------ finalize


def test_finalize_closes_and_allows_another_init(datadist: LLMDataDist) -> None:
    engine, manager = engine_of(datadist), datadist.cache_manager
    assert datadist.finalize() is None
    assert datadist.finalize() is None
    assert engine.closed == 1
    assert LLMDataDist.llm_engine_instance is None
    expect(FAILED, lambda: manager.unregister_cache(1))
    datadist.init(MANAGED)
    assert engine_of(datadist) is not engine
    assert datadist.cache_manager is not manager
    assert LLMDataDist.llm_engine_instance is datadist


def test_shutdown_handler_finalizes_all_and_logs_failures(
    datadist: LLMDataDist, capsys: pytest.CaptureFixture[str]
) -> None:
    other = LLMDataDist(LLMRole.DECODER, 4)
    other.init(SEVERAL)
    engines = [engine_of(datadist), engine_of(other)]
    engines[0].failures["close"] = exception_for(FAILED, "stuck")
    _shutdown_handler()
    assert [engine.closed for engine in engines] == [1, 1]
    assert LLMDataDist.llm_engine_instance is None
    assert "stuck" in capsys.readouterr().out
    _shutdown_handler()
    assert [engine.closed for engine in engines] == [1, 1]


def test_shutdown_handler_swallows_only_the_librarys_exception(datadist: LLMDataDist) -> None:
    engine_of(datadist).failures["close"] = ValueError("a bug")
    with pytest.raises(ValueError, match="a bug"):
        _shutdown_handler()
    assert not datadist.is_initialized


def test_exit_finalizes_what_is_initialised() -> None:
    code = (
        "import llm_datadist.engine, llm_datadist as l\n"
        "class Engine:\n"
        "    def __init__(self, *args): pass\n"
        "    def close(self): print('closed')\n"
        "class Options:\n"
        "    parse = staticmethod(lambda options: None)\n"
        "vars(llm_datadist.engine).update(Engine=Engine, EngineOptions=Options)\n"
        "l.LLMDataDist(l.LLMRole.PROMPT, 1).init({'llm.EnableCacheManager': '1'})\n"
        "print('end')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "end\nclosed\n"
    assert done.stderr == ""
