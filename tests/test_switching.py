"""The interpreter's switch interval from init to finalize; each case in a process of its own, whose only one it is."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from expect import expect
from llm_datadist import LLMConfig, LLMStatusCode
from llm_datadist.engine import EngineOptions

TIMEOUT_S = 60
BEGIN = """
import os, sys
from llm_datadist import LLMConfig, LLMDataDist, LLMRole

def interval():
    return round(sys.getswitchinterval() * 1e6)

def engine(cluster_id, **properties):
    config = LLMConfig()
    config.enable_cache_manager = config.allow_multiple_instances = True
    for name, value in properties.items():
        setattr(config, name, value)
    made = LLMDataDist(LLMRole.DECODER, cluster_id)
    made.init(config.generate_options())
    return made
"""


def printed(body: str, **environment: str) -> list[str]:
    """The lines that a process prints which does ``body``."""
    ended = subprocess.run(
        [sys.executable, "-c", BEGIN + body],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=os.environ | environment,
        check=False,
    )
    assert not ended.returncode, ended.stderr
    return ended.stdout.split("\n")[:-1]


ONCE = "one = engine(1{})\nprint(interval())\none.finalize()\nprint(interval())"


@pytest.mark.parametrize(
    ("given", "environment", "during"),
    [
        ("", {}, "500"),
        (", switch_interval_us=200", {}, "200"),
        (", switch_interval_us=0", {}, "5000"),
        (", switch_interval_us=20_000", {}, "5000"),
        ("", {"LLM_DATADIST_SWITCH_INTERVAL_US": "1000"}, "1000"),
        ("", {"LLM_DATADIST_SWITCH_INTERVAL_US": "0"}, "5000"),
        (", switch_interval_us=300", {"LLM_DATADIST_SWITCH_INTERVAL_US": "0"}, "300"),
    ],
)
def test_it_is_shorter_until_finalize(given: str, environment: dict[str, str], during: str) -> None:
    assert printed(ONCE.format(given), **environment) == [during, "5000"]


def test_a_shorter_one_is_kept() -> None:
    assert printed("sys.setswitchinterval(0.0001005)\n" + ONCE.format("")) == ["100", "100"]


def test_who_sets_it_meanwhile_keeps_it() -> None:
    body = """
one = engine(1)
sys.setswitchinterval(0.002)
two = engine(2, switch_interval_us=100)
print(interval())
one.finalize()
two.finalize()
print(interval())
one = engine(1)
print(interval())
one.finalize()
print(interval())
"""
    assert printed(body) == ["2000", "2000", "500", "2000"]


def test_of_several_engines_the_shortest_counts() -> None:
    body = """
one, two, three = engine(1), engine(2, switch_interval_us=100), engine(3, switch_interval_us=0)
print(interval())
two.finalize()
print(interval())
one.finalize()
print(interval())
three.finalize()
print(interval())
"""
    assert printed(body) == ["100", "500", "5000", "5000"]


def test_an_init_that_fails_leaves_it() -> None:
    body = """
import socket
taken = socket.create_server(("127.0.0.1", 0))
try:
    engine(1, listen_ip_info=f"127.0.0.1:{taken.getsockname()[1]}")
except Exception as error:
    print(type(error).__name__, interval())
"""
    assert printed(body) == ["LLMFailedError 5000"]


def test_a_forked_child_has_it_as_it_was() -> None:
    body = """
one = engine(1)
child = os.fork()
if not child:
    os.write(1, b"%d\\n" % interval())
    os._exit(0)
os.waitpid(child, 0)
os.write(1, b"%d\\n" % interval())
one.finalize()
"""
    assert printed(body) == ["5000", "500"]


def test_bad_values_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for bad in (-1, 1_000_001):
        error = expect(LLMStatusCode.LLM_PARAM_INVALID, lambda bad=bad: setattr(LLMConfig(), "switch_interval_us", bad))
        assert "switch_interval_us" in str(error)
        assert str(bad) in str(error)
    role = {"llm.Role": "Mix"}
    for bad in ("soon", "-1", "1000001", ""):
        options = role | {"llm.SwitchIntervalUs": bad}
        error = expect(LLMStatusCode.LLM_PARAM_INVALID, lambda options=options: EngineOptions.parse(options))
        assert f"llm.SwitchIntervalUs is {bad!r}, it must be a whole number from 0 to 1000000" in str(error)
    monkeypatch.setenv("LLM_DATADIST_SWITCH_INTERVAL_US", "5ms")
    error = expect(LLMStatusCode.LLM_PARAM_INVALID, lambda: EngineOptions.parse(role))
    assert "LLM_DATADIST_SWITCH_INTERVAL_US is '5ms'" in str(error)
