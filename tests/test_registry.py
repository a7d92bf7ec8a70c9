"""Paths that other packages add through the entry point group: found, tried, told about, never a crash."""

from __future__ import annotations

import sys
import textwrap
from typing import TYPE_CHECKING, Any

import pytest

from expect import PI, expect
from llm_datadist import LLMStatusCode
from llm_datadist.engine.options import EngineOptions
from llm_datadist.paths import registry
from llm_datadist.paths.base import PathRejectedError
from net_helpers import logged
from peers import Node
from test_links import pull_one

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

OK = LLMStatusCode.LLM_SUCCESS
MODULE = """
    from llm_datadist.paths.base import Path, PathRejectedError, Transport
    from llm_datadist.paths.inprocess import InProcess

    class Pigeon(Transport):
        name = "pigeon"

        def connect(self, peer, context, deadline):
            path = InProcess().connect(peer, context, deadline)
            path.name = "pigeon"
            return path

    class Raven(Transport):
        name = "raven"

        def connect(self, peer, context, deadline):
            raise ZeroDivisionError("no raven today")

    class Lost(Pigeon):
        name = "lost"

        def connect(self, peer, context, deadline):
            path = super().connect(peer, context, deadline)
            path.read = self.get_lost
            return path

        def get_lost(self, spans, deadline, epoch=0):
            raise ZeroDivisionError("lost at sea")

    raven = Raven()
    number = 5
"""
ENTRIES = """
    [llm_datadist.paths]
    broken = birds:nothing
    lost = birds:Lost
    missing = no_such_module:Bird
    number = birds:number
    pigeon = birds:Pigeon
    raven = birds:raven
    sparrow = birds:Pigeon
    tcp = birds:Pigeon
    auto = birds:Pigeon
"""
ADDED = ("broken", "lost", "missing", "number", "pigeon", "raven", "sparrow")


@pytest.fixture
def birds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed package that adds paths, good ones and bad ones."""
    information = tmp_path / "birds-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: birds\nVersion: 1.0\n", encoding="utf-8")
    (information / "entry_points.txt").write_text(textwrap.dedent(ENTRIES), encoding="utf-8")
    (tmp_path / "birds.py").write_text(textwrap.dedent(MODULE), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "transports", dict(registry.transports))
    registry._additions.cache_clear()
    yield
    registry._additions.cache_clear()
    sys.modules.pop("birds", None)


def test_without_additions_there_are_ours() -> None:
    assert registry.names() == registry.BUILT_IN == ("inprocess", "process_vm", "mapped", "nixl", "tcp")


def test_added_names_come_before_tcp_and_load_nothing(birds: None) -> None:
    with logged() as records:
        assert registry.names() == ("inprocess", "process_vm", "mapped", "nixl", *ADDED, "tcp")
        assert EngineOptions.parse({"llm.Role": ""}).paths == registry.names()
    assert "birds" not in sys.modules
    texts = [record.getMessage() for record in records]
    assert sum("tcp = birds:Pigeon" in text and "is ignored" in text for text in texts) == 1
    assert sum("auto = birds:Pigeon" in text and "is ignored" in text for text in texts) == 1


def test_the_option_takes_added_names(birds: None) -> None:
    assert EngineOptions.parse({"llm.Role": "", "llm.Paths": "pigeon,tcp"}).paths == ("pigeon", "tcp")
    expect(PI, lambda: EngineOptions.parse({"llm.Role": "", "llm.Paths": "dodo"}), match="pigeon, raven, sparrow, tcp")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("broken", r"birds:nothing cannot be loaded: AttributeError"),
        ("missing", r"no_such_module:Bird cannot be loaded: ModuleNotFoundError"),
        ("number", r"birds:number cannot be loaded: TypeError"),
        ("sparrow", r"birds:Pigeon gives <birds.Pigeon .*>, which is no Transport of the name 'sparrow'"),
        ("dodo", r"this side has no such path"),
    ],
)
def test_broken_ones_have_a_reason(birds: None, name: str, reason: str) -> None:
    with pytest.raises(PathRejectedError, match=reason) as caught:
        registry.get(name)
    assert "package" in str(caught.value.hint)


def linked(paths: str) -> tuple[Node, Node]:
    """Two nodes of this process that are linked over these paths."""
    server, client = Node(), Node()
    properties: dict[str, Any] = {"paths": paths, "listen_ip_info": "127.0.0.1:0"}
    address = server.init(1, **properties)
    client.init(2, **properties)
    assert address is not None
    server.register_blocks("src", 2, 4, 512, model_id=0, seed=1)
    client.register_blocks("dst", 2, 4, 512)
    assert client.link(1, address) == OK
    return server, client


def test_a_link_takes_an_added_path(birds: None) -> None:
    """Those before it say why they are not used, and unregister_cache waits for its users as for those of ours."""
    server, client = linked("broken,raven,lost,pigeon,tcp")
    try:
        report = client.datadist.explain_link(1)
        reasons = {attempt.name: attempt.reason for attempt in report.attempts}
        assert report.path == "pigeon"
        assert "cannot be loaded" in reasons["broken"]
        assert reasons["raven"] == "it cannot connect: ZeroDivisionError: no raven today"
        assert reasons["lost"] == "the probe failed: lost at sea"
        assert reasons["missing"] == "not permitted by this side's configuration"
        pull_one(client, 1)
        server.unregister("src")
        expect(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, lambda: pull_one(client, 1))
    finally:
        client.finalize()
        server.finalize()
