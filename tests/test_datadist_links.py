"""LLMDataDist: every argument row of the link calls and of switch_role."""

from __future__ import annotations

from typing import Any

import pytest

from datadist_kit import MANAGED, SUCCESS, engine_of
from expect import PI, expect
from llm_datadist import LLMClusterInfo, LLMConfig, LLMDataDist, LLMRole, LLMStatusCode, RegisterMemStatus
from llm_datadist.engine.requests import MemStatus, PeerAddress
from llm_datadist.status import exception_for

pytestmark = pytest.mark.usefixtures("fake_engines")


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
    engine_of(datadist).failures["link"] = exception_for(PI, "not a member")
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
    engine_of(datadist).failures["unlink"] = exception_for(LLMStatusCode.LLM_NOT_YET_LINK, "none")
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
    engine_of(datadist).failures["switch_role"] = exception_for(LLMStatusCode.LLM_EXIST_LINK, "linked")
    expect(LLMStatusCode.LLM_EXIST_LINK, lambda: datadist.switch_role(LLMRole.DECODER))
    assert datadist._role is LLMRole.PROMPT
