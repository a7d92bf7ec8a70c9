"""The path over NIXL where there is no NIXL, or no RDMA: nothing imports it, and it is told how to get it."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from expect import PI, expect
from llm_datadist import LLMConfig, LLMStatusCode
from llm_datadist.engine.options import EngineOptions
from llm_datadist.paths import nixl_options
from llm_datadist.paths.nixl_options import NixlOptions, NixlUnavailableError, load, rdma_devices
from peers import TIMEOUT_S
from test_links import explain, pull_one, with_caches

if TYPE_CHECKING:
    from pathlib import Path

    from llm_datadist.paths.ladder import Attempt
    from peers import Peer, Peers

OK = LLMStatusCode.LLM_SUCCESS
TWO_LINKED = """
import importlib, pkgutil, sys
import llm_datadist
from llm_datadist import LLMClusterInfo, LLMConfig, LLMDataDist, LLMRole
for module in pkgutil.walk_packages(llm_datadist.__path__, "llm_datadist."):
    if not module.name.endswith("__main__") and ".integrations." not in module.name:
        importlib.import_module(module.name)

def make(cluster_id, **properties):
    config = LLMConfig()
    config.allow_multiple_instances = True
    config.enable_cache_manager = True
    config.paths = "tcp,nixl"
    for name, value in properties.items():
        setattr(config, name, value)
    made = LLMDataDist(LLMRole.MIX, cluster_id)
    made.init(config.generate_options())
    return made

one, two = make(1, listen_ip_info="127.0.0.1:0"), make(2)
info = LLMClusterInfo()
info.remote_cluster_id = 1
info.append_local_ip_info("127.0.0.1", 0)
info.append_remote_ip_info(*one.listen_address)
assert two.link_clusters([info], 10_000)[1][0].name == "LLM_SUCCESS"
two.finalize()
one.finalize()
print(*(name for name in sys.modules if name.startswith("nixl")), end="")
"""


def test_nothing_imports_it_unless_it_is_used() -> None:
    """All modules imported, and a link on which the path is permitted, but not needed."""
    done = subprocess.run(
        [sys.executable, "-c", TWO_LINKED], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def without_nixl() -> None:
    """In a child: it is not installed."""
    nixl_options.PACKAGES = ("no_such_nixl",)  # type: ignore[misc]


def with_broken_nixl(folder: str) -> None:
    """In a child: it is installed, but cannot be loaded."""
    sys.path.insert(0, folder)
    nixl_options.PACKAGES = ("broken_nixl",)  # type: ignore[misc]


def attempt(peer: Peer, cluster_id: int) -> Attempt:
    """What became of the path."""
    (found,) = [each for each in peer.call(explain, cluster_id).attempts if each.name == "nixl"]
    return found


@pytest.fixture
def broken(tmp_path: Path) -> str:
    """A folder with a NIXL whose libraries are missing."""
    package = tmp_path / "broken_nixl"
    package.mkdir()
    (package / "__init__.py").write_text("", encoding="utf-8")
    (package / "_bindings.py").write_text("raise ImportError('libcudart.so.12: cannot open')", encoding="utf-8")
    return str(tmp_path)


@pytest.mark.parametrize("lacking", ["client", "server"])
def test_where_one_side_has_none(peers: Peers, lacking: str) -> None:
    """The link takes the next path, and says what would help."""
    properties = {"paths": "nixl,tcp"}
    there, here = peers.process(without_nixl), peers.process(without_nixl if lacking == "client" else None)
    server = peers.make(1, process=there, **properties)
    client = peers.make(2, process=here, listen=False, **properties)
    with_caches(server, client)
    assert client.link(server) == OK
    assert client.call("path", 1) == server.call("path", 2) == "tcp"
    client.call(pull_one, 1)
    ours = attempt(server, 2)
    assert ours.reason == "NIXL is not installed"
    assert ours.hint == nixl_options.INSTALL
    assert "NIXL is not installed" in attempt(client, 1).reason
    assert "pip install" in str(attempt(client, 1))


def test_where_it_is_broken(peers: Peers, broken: str) -> None:
    process = functools.partial(peers.process, functools.partial(with_broken_nixl, broken))
    server = peers.make(1, process=process(), paths="nixl,tcp")
    client = peers.make(2, process=process(), listen=False, paths="nixl,tcp")
    with_caches(server, client)
    assert client.link(server) == OK
    client.call(pull_one, 1)
    told = attempt(client, 1)
    assert "installed (broken_nixl), but cannot be loaded: libcudart.so.12: cannot open" in told.reason
    assert "install it anew" in str(told.hint)


def test_alone_it_is_no_link(peers: Peers) -> None:
    server = peers.make(1, process=peers.process(without_nixl), paths="nixl")
    client = peers.make(2, process=peers.process(without_nixl), listen=False, paths="nixl")
    assert client.link(server) == LLMStatusCode.LLM_LINK_FAILED


def test_by_default_it_needs_rdma_on_both_sides(peers: Peers) -> None:
    """Where there is none, it is not tried, and nobody is warned."""
    assert rdma_devices() == [] or pytest.skip("this host has RDMA")
    server = peers.make(1, paths="auto")
    client = peers.make(2, listen=False, paths="auto")
    assert client.link(server) == OK
    assert attempt(client, 1).reason == "not needed"


def test_devices_with_an_active_port(tmp_path: Path) -> None:
    for name, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN"), ("efa_0", "4: ACTIVE")):
        port = tmp_path / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(state, encoding="utf-8")
    assert rdma_devices(tmp_path) == ["efa_0", "mlx5_0"]
    assert rdma_devices(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("options", "devices", "words"),
    [
        (NixlOptions(), [], "no active RDMA device.*paths names it"),
        (NixlOptions(), ["mlx5_0"], None),
        (NixlOptions(encrypted=True), ["mlx5_0"], "does not encrypt"),
        (NixlOptions(wanted=True), [], None),
        (NixlOptions(wanted=True, encrypted=True), [], None),
    ],
)
def test_when_it_is_used(
    monkeypatch: pytest.MonkeyPatch, options: NixlOptions, devices: list[str], words: str | None
) -> None:
    monkeypatch.setattr(nixl_options, "rdma_devices", lambda: devices)
    objection = options.objection()
    if words is None:
        assert objection is None
    else:
        assert re.search(words, str(objection))


def test_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_options, "PACKAGES", ("no_such_nixl",))
    with pytest.raises(NixlUnavailableError, match="not installed") as caught:
        load(NixlOptions(wanted=True))
    assert "pip install" in str(caught.value.hint)
    monkeypatch.setattr(nixl_options, "rdma_devices", list)
    assert "pip install" in str(NixlOptions().objection())


def parsed(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], **properties: object) -> NixlOptions:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    config = LLMConfig()
    for name, value in properties.items():
        setattr(config, name, value)
    return EngineOptions.parse({"llm.Role": "Mix", **config.generate_options()}).nixl


def test_options(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parsed(monkeypatch, {}) == NixlOptions("UCX", (), wanted=False)
    assert parsed(monkeypatch, {}, paths="nixl,tcp").wanted
    assert not parsed(monkeypatch, {}, paths="tcp").wanted
    variables = {"LLM_DATADIST_NIXL_BACKEND": "POSIX", "LLM_DATADIST_NIXL_PARAMS": '{"a": "1"}'}
    assert parsed(monkeypatch, variables) == NixlOptions("POSIX", (("a", "1"),), wanted=False)
    ours = parsed(monkeypatch, variables, nixl_backend="LIBFABRIC", nixl_params={"c": "3", "b": "2"})
    assert ours == NixlOptions("LIBFABRIC", (("b", "2"), ("c", "3")), wanted=False)


@pytest.mark.parametrize("text", ["no JSON", "[]", '{"num_workers": 2}'])
def test_wrong_parameters(text: str) -> None:
    options = {"llm.Role": "Mix", "llm.NixlParams": text}
    expect(PI, lambda: EngineOptions.parse(options), "llm.NixlParams.*JSON object of strings")
