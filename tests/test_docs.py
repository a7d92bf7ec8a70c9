"""The documentation: what is generated is up to date, every name is in the reference, every Python snippet runs."""

from __future__ import annotations

import ast
import importlib.util
import re
import socket
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import llm_datadist
from llm_datadist import LLMDataDist, cache_manager

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
WAIT_S = 100
_FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NOT_RUN = re.compile(r"<!-- not run: (.+?) -->\n+$")
_PROGRAM = re.compile(r"# (\w+\.py)\n")

PREPARATION = """
import threading
import numpy as np
import llm_datadist, llm_datadist.testing
from llm_datadist import *
loop = llm_datadist.testing.loopback()
loop.__enter__()
"""
"""What every page may use: the public names, numpy, threading, and links that lead to the process itself."""

_CACHE = """
    config = LLMConfig()
    config.enable_cache_manager = config.enable_remote_cache_accessible = config.allow_multiple_instances = True
    first = LLMDataDist(LLMRole.PROMPT, 1)
    first.init(config.generate_options())
    peer = LLMClusterInfo()
    peer.remote_cluster_id = 2
    peer.append_local_ip_info("127.0.0.1", 0)
    peer.append_remote_ip_info("127.0.0.1", 26000)
    first.link_clusters([peer])
    manager = first.cache_manager
    memory = np.zeros((64, 8, 128), dtype=np.uint8)
    desc = CacheDesc(64, [8, 128], DataType.DT_UINT8)
    cache = manager.register_blocks_cache(desc, [tensor.ctypes.data for tensor in memory], BlocksCacheKey(1, 0))
    src_blocks, dst_blocks = [1, 2], [3, 4]
    layer_done = [threading.Event() for _ in range(32)]
    for event in layer_done:
        event.set()
    """
PREPARATIONS = {
    "guide.md": _CACHE,
    "observing.md": _CACHE,
    "errors.md": _CACHE + "    key, src, dst = BlocksCacheKey(2, 0), src_blocks, dst_blocks\n",
}
"""What each snippet of a page takes for granted beyond that. On other pages they build on each other."""


@dataclass(frozen=True)
class Snippet:
    """A block of Python on a page."""

    line: int
    code: str
    not_run: str | None
    """Why, if it is not."""

    @property
    def program(self) -> str | None:
        """The file that it is the content of, if it says so."""
        found = _PROGRAM.match(self.code)
        return found[1] if found else None


def snippets(page: Path) -> list[Snippet]:
    """All of a page."""
    text = page.read_text(encoding="utf-8")
    return list(_snippets(text))


def _snippets(text: str) -> Iterator[Snippet]:
    for found in _FENCE.finditer(text):
        before = text[: found.start()]
        reason = _NOT_RUN.search(before)
        yield Snippet(before.count("\n") + 2, found[1], reason[1] if reason else None)


PAGES = [page for page in (ROOT / "README.md", *sorted(DOCS.glob("*.md"))) if snippets(page)]
TOGETHER = [page for page in PAGES if any(not each.program for each in snippets(page))]
PROGRAMS = [page for page in PAGES if any(each.program for each in snippets(page))]
NOT_RUN = [(page, each) for page in PAGES for each in snippets(page) if each.not_run]


def script_of(page: Path) -> str:
    """The snippets of a page, one after the other, each at its line of the page."""
    script = PREPARATION + textwrap.dedent(PREPARATIONS.get(page.name, ""))
    names = "dict(globals())" if page.name in PREPARATIONS else "globals()"
    for snippet in snippets(page):
        if not snippet.program and not snippet.not_run:
            source = "\n" * (snippet.line - 1) + snippet.code
            script += f"exec(compile({source!r}, {str(page)!r}, 'exec'), {names})\n"
    return script


@pytest.mark.parametrize("page", TOGETHER, ids=lambda page: page.name)
def test_snippets_run_one_after_the_other(page: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script_of(page)],
        cwd=tmp_path,  # some write files
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("page", "snippet"), NOT_RUN, ids=lambda value: getattr(value, "name", None))
def test_snippets_that_are_not_run_are_python(page: Path, snippet: Snippet) -> None:
    ast.parse(snippet.code, f"{page.name}:{snippet.line}")
    pytest.skip(f"{page.name}, line {snippet.line}: {snippet.not_run}")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@pytest.mark.parametrize("page", PROGRAMS, ids=lambda page: page.name)
def test_programs_run_together(page: Path, tmp_path: Path) -> None:
    """The first one serves until it gets a line, the others run to their end, one after the other."""
    port = str(free_port())
    names = []
    for snippet in snippets(page):
        if snippet.program:
            (tmp_path / snippet.program).write_text(snippet.code.replace("26000", port), encoding="utf-8")
            names.append(snippet.program)
    first, *others = names
    command = [sys.executable, "-W", "error"]
    pipe = subprocess.PIPE
    with subprocess.Popen([*command, first], cwd=tmp_path, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline().startswith("ready"), server.communicate(timeout=WAIT_S)
            for name in others:
                done = subprocess.run(
                    [*command, name], cwd=tmp_path, capture_output=True, text=True, timeout=WAIT_S, check=False
                )
                assert done.returncode == 0, done.stderr
                assert f"link to cluster 1 at 127.0.0.1:{port}" in done.stdout
            _, errors = server.communicate("\n", timeout=WAIT_S)
            assert (server.returncode, errors) == (0, "")
        finally:
            server.kill()


def test_options_page_is_up_to_date() -> None:
    script = DOCS / "generate_options.py"
    done = subprocess.run([sys.executable, str(script), "--check"], timeout=WAIT_S, check=False)
    assert done.returncode == 0, f"run: python {script.relative_to(ROOT)}"


def test_options_page_that_is_not(tmp_path: Path) -> None:
    """The check notices a changed table, keeps what stands outside, and says which mark is missing."""
    page = (DOCS / "options.md").read_text(encoding="utf-8")
    script = (DOCS / "generate_options.py").read_text(encoding="utf-8")
    copy, program = tmp_path / "options.md", tmp_path / "generate_options.py"
    program.write_text(script, encoding="utf-8")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(program), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)

    changed = page.replace("`llm.Paths`", "`llm.Roads`", 1).replace("# Options", "# All options", 1)
    copy.write_text(changed, encoding="utf-8")
    assert run("--check").returncode == 1
    assert run().returncode == 0
    assert copy.read_text(encoding="utf-8") == page.replace("# Options", "# All options", 1)
    copy.write_text(page.replace("<!-- end options", "<!-- END options"), encoding="utf-8")
    assert "has no lines '<!-- begin options" in run().stderr


def test_table_of_operations_is_what_their_tests_show() -> None:
    script = DOCS / "make_matrix.py"
    done = subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_public_name_is_in_the_reference() -> None:
    named = set(re.findall(r"auto\w+:: llm_datadist\.(?:\w+\.)*(\w+)", (DOCS / "api.md").read_text(encoding="utf-8")))
    assert set(llm_datadist.__all__) - {"LLMConfig"} <= named


def test_every_call_of_the_compatibility_matrix_exists() -> None:
    matrix = (DOCS / "migration.md").read_text(encoding="utf-8").partition("## Compatibility matrix")[2]
    parts = re.findall(r"^\| (.+?) \|", matrix, re.MULTILINE)
    places = [llm_datadist, cache_manager, LLMDataDist, cache_manager.CacheManager]
    for name in re.findall(r"`([a-zA-Z_.]+)`", " ".join(parts)):
        module = importlib.util.find_spec(name) if name.startswith("llm_datadist") else None
        assert module or any(hasattr(place, name) for place in places), name


def test_every_page_is_in_the_table_of_contents() -> None:
    trees = re.findall(r"```\{toctree\}.*?\n\n(.*?)```", (DOCS / "index.md").read_text(encoding="utf-8"), re.DOTALL)
    assert sorted(" ".join(trees).split()) == sorted({page.stem for page in DOCS.glob("*.md")} - {"index"})
