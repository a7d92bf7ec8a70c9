"""LLMDataDist: construction, init step by step, the state rule, and every argument row of its calls."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from expect import PI, expect
from fake_engine import FakeEngine

import llm_datadist.engine
from llm_datadist import LLMClusterInfo, LLMConfig, LLMDataDist, LLMException, LLMRole, LLMStatusCode, RegisterMemStatus
from llm_datadist.cache_manager import CacheManager
from llm_datadist.engine.requests import MemStatus, PeerAddress
from llm_datadist.v2.llm_datadist import _shutdown_handler

if TYPE_CHECKING:
    from collections.abc import Iterator

FAILED = LLMStatusCode.LLM_FAILED
SUCCESS = LLMStatusCode.LLM_SUCCESS
MANAGED = {"llm.EnableCacheManager": "1"}
SEVERAL = {**MANAGED, "llm.AllowMultipleInstances": "1"}


class FakeOptions:
    """Takes any options whose values are str, as the real one does first."""

    parsed: dict[str, str]

    @classmethod
    def parse(cls, options: dict[str, str]) -> FakeOptions:
        if not all(isinstance(value, str) for value in options.values()):
            message = "only support str"
            raise TypeError(message)
        made = cls()
        made.parsed = dict(options)
        return made


@pytest.fixture(autouse=True)
def fake_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Objects of this module get the fake engine, and are all finalized afterwards."""
    names = vars(llm_datadist.engine)
    monkeypatch.setitem(names, "Engine", FakeEngine)
    monkeypatch.setitem(names, "EngineOptions", FakeOptions)
    yield
    _shutdown_handler()
    assert LLMDataDist.llm_engine_instance is None


def engine_of(datadist: LLMDataDist) -> FakeEngine:
    return datadist._engine  # type: ignore[return-value]


@pytest.fixture
def datadist() -> LLMDataDist:
    made = LLMDataDist(LLMRole.PROMPT, 3)
    made.init(MANAGED)
    return made


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
    "options", [MANAGED, None, "options", {}, {**MANAGED, "llm.AllowMultipleInstances": "0"}, {"llm.TransferBackend": ""}]
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
        raise LLMException(message, status_code=FAILED)

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
    engines[0].failures["close"] = LLMException("stuck", status_code=FAILED)
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


# ------------------------------------------------------------ link


LINK: dict[str, Any] = {"comm_name": "link", "cluster_rank_info": {3: 0, 1: 1}, "rank_table": "{}"}


@pytest.mark.parametrize(
    ("change", "failure"),
    [
        ({"comm_name": None}, TypeError),
        ({"comm_name": 1}, TypeError),
        ({"comm_name": ""}, PI),
        ({"comm_name": "x" * 128}, PI),
        ({"cluster_rank_info": [(3, 0), (1, 1)]}, TypeError),
        ({"cluster_rank_info": None}, AttributeError),
        ({"cluster_rank_info": {"3": 0, 1: 1}}, TypeError),
        ({"cluster_rank_info": {3: "0", 1: 1}}, TypeError),
        ({"cluster_rank_info": {3: None, 1: 1}}, TypeError),
        ({"cluster_rank_info": dict(enumerate(range(5)))}, PI),
        ({"cluster_rank_info": {-1: 0, 1: 1}}, ValueError),
        ({"cluster_rank_info": {2**64: 0, 1: 1}}, ValueError),
        ({"cluster_rank_info": {3: -1, 1: 1}}, ValueError),
        ({"cluster_rank_info": {3: 0, 1: 2**32}}, ValueError),
        ({"rank_table": 1}, TypeError),
        ({"rank_table": {}}, TypeError),
        ({"cluster_rank_info": {3: 0}}, PI),
        ({"cluster_rank_info": {}}, PI),
        ({"cluster_rank_info": {3: 1, 1: 0}}, PI),
        # order of the checks
        ({"comm_name": "", "cluster_rank_info": []}, PI),
        ({"cluster_rank_info": {-1: 0, **dict(enumerate(range(5)))}}, PI),
        ({"cluster_rank_info": {-1: 0}, "rank_table": 1}, ValueError),
        ({"cluster_rank_info": {3: 0}, "rank_table": 1}, TypeError),
    ],
)
def test_link_refuses(datadist: LLMDataDist, change: dict[str, Any], failure: Any) -> None:
    expect(failure, lambda: datadist.link(**{**LINK, **change}))
    assert engine_of(datadist).calls == []
    assert not datadist.cache_manager._is_call_linked


@pytest.mark.parametrize(
    "change", [{}, {"comm_name": "x" * 127}, {"rank_table": None}, {"cluster_rank_info": {1: 5, 2: 5, 4: 6, 3: 7}}]
)
def test_link_passes_everything_on_and_marks_the_manager(datadist: LLMDataDist, change: dict[str, Any]) -> None:
    arguments = {**LINK, **change}
    assert datadist.link(**arguments) == 1
    assert engine_of(datadist).calls == [("link", tuple(arguments.values()))]
    assert list(engine_of(datadist).calls[0][1][1]) == list(arguments["cluster_rank_info"])
    assert datadist.cache_manager._is_call_linked


def test_failed_link_does_not_mark_the_manager(datadist: LLMDataDist) -> None:
    engine_of(datadist).failures["link"] = LLMException("not a member", status_code=PI)
    expect(PI, lambda: datadist.link(**LINK), match="not a member")
    assert not datadist.cache_manager._is_call_linked


def test_new_init_forgets_that_link_was_called(datadist: LLMDataDist) -> None:
    datadist.link(**LINK)
    datadist.finalize()
    datadist.init(MANAGED)
    assert not datadist.cache_manager._is_call_linked


@pytest.mark.parametrize("method", ["unlink", "query_register_mem_status", "explain_link"])
@pytest.mark.parametrize(
    ("number", "failure"),
    [(None, TypeError), ("1", TypeError), (1.0, TypeError), (-1, ValueError), (2**64, ValueError)],
)
def test_numbers_are_checked(datadist: LLMDataDist, method: str, number: Any, failure: type[Exception]) -> None:
    expect(failure, lambda: getattr(datadist, method)(number))
    assert engine_of(datadist).calls == []


def test_unlink_query_and_explain(datadist: LLMDataDist) -> None:
    assert datadist.unlink(1) is None
    engine_of(datadist).failures["unlink"] = LLMException("none", status_code=LLMStatusCode.LLM_NOT_YET_LINK)
    expect(LLMStatusCode.LLM_NOT_YET_LINK, lambda: datadist.unlink(2))
    for status in MemStatus:
        engine_of(datadist).mem_status = status
        assert datadist.query_register_mem_status(comm_id=1) is RegisterMemStatus[status.name]
    assert str(datadist.explain_link(2**64 - 1)) == f"link to {2**64 - 1}"
    assert datadist.listen_address == ("127.0.0.1", 26000)


# ------------------------------------------------------------ link_clusters and unlink_clusters


def cluster(remote_id: Any = 2, *, local: Any = ("127.0.0.1", 0), remote: Any = ("127.0.0.1", 26000)) -> LLMClusterInfo:
    info = LLMClusterInfo()
    if remote_id is not None:
        info.remote_cluster_id = remote_id
    if local:
        info.append_local_ip_info(*local)
    if remote:
        info.append_remote_ip_info(*remote)
    return info


CLUSTERS_REFUSED: list[tuple[dict[str, Any], Any]] = [
    ({"timeout": None}, TypeError),
    ({"timeout": "1"}, TypeError),
    ({"timeout": 1.0}, TypeError),
    ({"timeout": 2**31}, ValueError),
    ({"timeout": 0}, PI),
    ({"timeout": -1}, PI),
    ({"clusters": cluster()}, TypeError),
    ({"clusters": None}, TypeError),
    ({"clusters": "clusters"}, TypeError),
    ({"clusters": [cluster(), "cluster"]}, TypeError),
    ({"clusters": [None]}, TypeError),
    ({"clusters": [cluster(None)]}, TypeError),
    ({"clusters": [cluster(remote=(-1, 1))]}, TypeError),
    ({"clusters": [cluster(remote=(None, 1))]}, TypeError),
    ({"clusters": [cluster(remote=(2**32, 1))]}, TypeError),
    # order of the checks
    ({"timeout": 0, "clusters": "clusters"}, PI),
    ({"timeout": "1", "clusters": "clusters"}, TypeError),
]


@pytest.mark.parametrize("method", ["link_clusters", "unlink_clusters"])
@pytest.mark.parametrize(("change", "failure"), CLUSTERS_REFUSED)
def test_cluster_calls_refuse(datadist: LLMDataDist, method: str, change: dict[str, Any], failure: Any) -> None:
    expect(failure, lambda: getattr(datadist, method)(**{"clusters": [cluster()], **change}))
    assert engine_of(datadist).calls == []


@pytest.mark.parametrize("options", [MANAGED, {"llm.LocalCommRes": ""}])
def test_link_clusters_needs_a_local_address_first(options: dict[str, str]) -> None:
    made = LLMDataDist(LLMRole.PROMPT, 3)
    made.init(options)
    for clusters in ([cluster(local=None)], [cluster(), cluster(None, local=None)]):
        expect(PI, lambda clusters=clusters: made.link_clusters(clusters), match="local_ip_info_list is empty")
    expect(TypeError, lambda: made.link_clusters([cluster(local=(-1, 1))]))
    assert engine_of(made).calls == []
    assert made.unlink_clusters([cluster(local=None)]) == (SUCCESS, [SUCCESS])
    assert made.unlink_clusters([cluster(local=(-1, 1))]) == (SUCCESS, [SUCCESS])


def test_link_clusters_needs_no_local_address_with_local_comm_res() -> None:
    made = LLMDataDist(LLMRole.PROMPT, 3)
    made.init({"llm.LocalCommRes": "{}"})
    assert made.link_clusters([cluster(local=None)]) == (SUCCESS, [SUCCESS])
    expect(TypeError, lambda: made.link_clusters([cluster(None, local=None)]))


@pytest.mark.parametrize("force", [1, "True", 0])
def test_unlink_clusters_force_is_a_bool(datadist: LLMDataDist, force: Any) -> None:
    expect(TypeError, lambda: datadist.unlink_clusters([cluster()], 1000, force))
    expect(TypeError, lambda: datadist.unlink_clusters("clusters", 1000, force))  # type: ignore[arg-type]
    assert engine_of(datadist).calls == []


def test_cluster_calls_pass_everything_on(datadist: LLMDataDist) -> None:
    both = cluster(2**64 - 1, remote=("[fe80::1%lo]", 1))
    both.append_remote_ip_info(16777343, 2)
    given = (cluster(0), both)
    assert datadist.link_clusters(given) == (SUCCESS, [SUCCESS, SUCCESS])
    assert datadist.unlink_clusters(list(given)) == (SUCCESS, [SUCCESS, SUCCESS])
    datadist.unlink_clusters([cluster(remote=None)], timeout=5, force=True)
    datadist.unlink_clusters([cluster(remote=None)], 5, None)  # type: ignore[arg-type]
    remotes = [(("127.0.0.1", 26000),), (("fe80::1%lo", 1), ("127.0.0.1", 2))]
    assert engine_of(datadist).calls == [
        ("link_clusters", ([PeerAddress(0, remotes[0], 1), PeerAddress(2**64 - 1, remotes[1], 1)], 3000)),
        ("unlink_clusters", ([PeerAddress(0, remotes[0]), PeerAddress(2**64 - 1, remotes[1])], 3000, False)),
        ("unlink_clusters", ([PeerAddress(2, ())], 5, True)),
        ("unlink_clusters", ([PeerAddress(2, ())], 5, False)),
    ]


@pytest.mark.parametrize("method", ["link_clusters", "unlink_clusters"])
def test_cluster_statuses_are_returned_and_the_last_failure_is_the_overall_one(
    datadist: LLMDataDist, method: str
) -> None:
    call = getattr(datadist, method)
    assert call([]) == (PI, [])
    assert call(()) == (PI, [])
    assert engine_of(datadist).calls == []
    refused, late = LLMStatusCode.LLM_LINK_FAILED, LLMStatusCode.LLM_TIMEOUT
    for statuses, overall in (
        ([SUCCESS, SUCCESS], SUCCESS),
        ([refused, SUCCESS], refused),
        ([refused, late], late),
        ([late, refused, SUCCESS], refused),
        ([LLMStatusCode.LLM_ALREADY_LINK], LLMStatusCode.LLM_ALREADY_LINK),
    ):
        engine_of(datadist).statuses = statuses
        result = call([cluster()] * len(statuses))
        assert result == (overall, statuses)
        assert all(type(each) is LLMStatusCode for each in [result[0], *result[1]])


# ------------------------------------------------------------ switch_role


@pytest.mark.parametrize(
    ("role", "options", "failure"),
    [
        (1, None, TypeError),
        ("Prompt", None, TypeError),
        (None, None, KeyError),
        (LLMRole.PROMPT, "options", TypeError),
        (LLMRole.PROMPT, [], TypeError),
        (LLMRole.PROMPT, {"llm.listenIpInfo": "1.2.3.4"}, PI),
        (LLMRole.PROMPT, {"llm.listenIpInfo": "1.2.3.4:x"}, ValueError),
        (LLMRole.PROMPT, {"llm.listenIpInfo": 1}, TypeError),
        (LLMRole.PROMPT, {"llm.listenIpInfo": None}, AttributeError),
        (None, "options", TypeError),
    ],
)
def test_switch_role_refuses(datadist: LLMDataDist, role: Any, options: Any, failure: Any) -> None:
    expect(failure, lambda: datadist.switch_role(role, options))
    assert engine_of(datadist).calls == []
    assert datadist._role is LLMRole.PROMPT


def test_switch_role(datadist: LLMDataDist) -> None:
    config = LLMConfig()
    config.listen_ip_info = "[::1]:26001"
    options = config.generate_options()
    before = dict(options)
    assert datadist.switch_role(LLMRole.DECODER) is None
    datadist.switch_role(LLMRole.DECODER, {})
    datadist.switch_role(LLMRole.MIX, options)
    assert options == before
    assert engine_of(datadist).calls == [
        ("switch_role", (None,)),
        ("switch_role", (None,)),
        ("switch_role", (("::1", 26001),)),
    ]
    assert datadist._role is LLMRole.MIX


def test_failed_switch_role_keeps_the_role(datadist: LLMDataDist) -> None:
    engine_of(datadist).failures["switch_role"] = LLMException("linked", status_code=LLMStatusCode.LLM_EXIST_LINK)
    expect(LLMStatusCode.LLM_EXIST_LINK, lambda: datadist.switch_role(LLMRole.DECODER))
    assert datadist._role is LLMRole.PROMPT
