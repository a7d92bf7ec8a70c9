"""The log: nothing at import, one handler on stdout, level from the environment, the caller's place in the record."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from llm_datadist.utils import log
from net_helpers import logged


def run(code: str, level: str | None = None) -> str:
    """Standard output of a fresh interpreter."""
    env = {name: value for name, value in os.environ.items() if name != "ASCEND_GLOBAL_LOG_LEVEL"}
    if level is not None:
        env["ASCEND_GLOBAL_LOG_LEVEL"] = level
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    return done.stdout


def test_import_installs_nothing() -> None:
    code = "import llm_datadist, logging; l = logging.getLogger('LLM_DATADIST'); print(l.handlers, l.level)"
    assert run(code, "0").strip() == "[] 0"


EMIT = (
    "from llm_datadist.utils import log\n"
    "log.get_logger().debug('a debug')\nlog.info('an %s', 'info')\nlog.warn('a warning')\nlog.error('an error')\n"
)


@pytest.mark.parametrize(
    ("level", "shown"),
    [
        ("0", ["DEBUG", "INFO", "WARNING", "ERROR"]),
        ("1", ["INFO", "WARNING", "ERROR"]),
        ("2", ["WARNING", "ERROR"]),
        ("3", ["ERROR"]),
        ("4", ["ERROR"]),
        ("", ["ERROR"]),
        ("INFO", ["ERROR"]),
        (None, ["ERROR"]),
    ],
)
def test_level_comes_from_the_environment(level: str | None, shown: list[str]) -> None:
    assert re.findall(r"^\[(\w+)\]", run(EMIT, level), re.MULTILINE) == shown


def test_level_is_read_once_at_first_use() -> None:
    code = (
        "import os\nfrom llm_datadist.utils import log\n"
        "os.environ['ASCEND_GLOBAL_LOG_LEVEL'] = '1'\nlog.info('one')\n"
        "os.environ['ASCEND_GLOBAL_LOG_LEVEL'] = '3'\nlog.info('two')\nprint(len(log.get_logger().handlers))"
    )
    out = run(code, "3")
    assert "one" in out
    assert "two" in out
    assert out.endswith("\n1\n")


def test_a_program_keeps_its_own_handler_and_level() -> None:
    code = (
        "import logging, sys\nl = logging.getLogger('LLM_DATADIST')\nl.setLevel(logging.INFO)\n"
        "h = logging.StreamHandler(sys.stdout)\nh.setFormatter(logging.Formatter('mine %(message)s'))\n"
        "l.addHandler(h)\n"
        "from llm_datadist.utils import log\nlog.info('hello')"
    )
    assert run(code) == "mine hello\n"


def test_record_format_and_caller(capsys: pytest.CaptureFixture[str]) -> None:
    log.error("seen from %s", "here")
    line = capsys.readouterr().out
    pattern = (
        r"^\[ERROR\] LLM_DATADIST\(\d+,MainProcess\):\d{4}-\d\d-\d\d-\d\d:\d\d:\d\d\.\d{3} "
        r"\[test_log\.py:\d+\]\d+ test_record_format_and_caller: seen from here\n$"
    )
    assert re.match(pattern, line)


def test_exception_can_be_shown(capsys: pytest.CaptureFixture[str]) -> None:
    log.error("failed", exc_info=ValueError("the reason"))
    assert "ValueError: the reason" in capsys.readouterr().out


def test_get_logger_is_one_logger() -> None:
    assert log.get_logger() is log.get_logger()
    assert log.get_logger().name == "LLM_DATADIST"
    assert "%(levelname)s" in log.LOG_FORMAT


def test_what_can_be_caused_at_will_is_logged_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(log, "time", SimpleNamespace(monotonic=lambda: now))
    with logged() as records:
        for second in (0, 1, 59.9, 60, 61):
            now = 1000.0 + second
            log.warn_rarely("test topic", "at %s", second)
        log.warn_rarely("another topic", "besides")
    assert [record.getMessage() for record in records] == ["at 0", "at 60", "besides"]


def test_topics_are_forgotten_when_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    with logged():
        for number in range(3000):
            log.warn_rarely(f"topic {number}", "once")
    assert len(log._last) <= 1024
