"""Options of the vLLM connector, and their description."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from llm_datadist.integrations.vllm.options import Options


def test_defaults_make_options_of_the_library() -> None:
    made = Options.parse({"somebody": "else's"}).generate(3, 400)
    assert made["llm.listenIpInfo"] == "127.0.0.1:0"
    assert made["llm.MaxRegisteredAddrs"] == "800"


def test_ranks_have_ports_of_their_own() -> None:
    made = Options.parse({"host": "fd00::1", "port": 26000}).generate(3, 1)
    assert made["llm.listenIpInfo"] == "[fd00::1]:26003"


def test_properties_of_the_library_can_be_set() -> None:
    assert Options.parse({"config": {"paths": "tcp"}}).generate(0, 1)["llm.Paths"] == "tcp"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"mode": "both"}, "'mode'] is 'both', but must be 'pull' or 'push'"),
        ({"host": ""}, "'host'"),
        ({"port": 65536}, "'port'"),
        ({"port": True}, "'port'"),
        ({"lease_seconds": 0}, "'lease_seconds'] is 0, but must be a positive number"),
        ({"lease_seconds": True}, "'lease_seconds'"),
        ({"lease_seconds": float("inf")}, "'lease_seconds'"),
        ({"transfer_timeout_ms": "1"}, "'transfer_timeout_ms'"),
        ({"transfer_timeout_ms": 0.5}, "'transfer_timeout_ms'] is 0.5, but must be a positive integer"),
        ({"populate": 1}, "'populate'"),
        ({"config": []}, "'config'"),
        ({"config": {"no_such": 1}}, "'no_such'"),
        ({"config": {"listen_ip_info": "x"}}, "'listen_ip_info'"),
    ],
)
def test_wrong_options_are_named(given: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        Options.parse(given)


def test_the_documentation_names_all_options_with_their_defaults() -> None:
    text = (Path(__file__).parent.parent / "docs" / "vllm.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| `([^`]*)` \|", text, re.MULTILINE))
    fields = dataclasses.fields(Options)
    assert set(rows) == {field.name for field in fields}
    for field in fields:
        default = field.default if field.default is not dataclasses.MISSING else {}
        shown = str(default).lower() if isinstance(default, bool) else str(default)
        assert rows[field.name].replace('"', "") == shown
