"""The first token from a real prefill engine: through ``llm-datadist route`` answers are those of one engine."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from routers import Router
    from serving_kit import Pair

pytestmark = pytest.mark.parametrize("pair", ["pull"], indirect=True)
PROMPTS = ("Once upon a time", "东京は日本の", "😀😃😄😁 ", "naïve café, Ångström, «œuvre»", "1, 2, 3, ", "x" * 200)
"""Some whose next token is a part of a character."""
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"max_tokens": 2},
    {"max_tokens": 1},
    {"stop": ["the", ".", ",", " "]},
    {"stop": "e", "min_tokens": 3},
    {"repetition_penalty": 1.3, "skip_special_tokens": False},
    {"logit_bias": {"0": 100.0}},  # the end of the text, at once
    {"logit_bias": {"0": 100.0}, "min_tokens": 3},
    {"logit_bias": {"0": 100.0}, "min_tokens": 3, "ignore_eos": True, "skip_special_tokens": False},
    {"seed": 3, "top_p": 0.5},
)


@pytest.fixture(scope="module")
def router(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    from routers import our_router  # noqa: PLC0415 - of the example, which needs vLLM's environment

    made = our_router([pair.prefill.url], [pair.decode.url], tmp_path_factory.mktemp("router"), "pull")
    yield made
    made.stop()


def ask(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """The answer, a stream's events as one."""
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        text: bytes = response.read()
    if not body["stream"]:
        events = [json.loads(text)]
    else:
        *parts, done, rest = text.split(b"\n\n")
        assert (done, rest) == (b"data: [DONE]", b"")
        events = [json.loads(part.removeprefix(b"data: ")) for part in parts]
        assert len({(event["id"], event["created"], event["model"]) for event in events}) == 1
    choices = [choice for event in events for choice in event["choices"]]
    asked = [choice["prompt_token_ids"] for choice in choices]
    assert asked[1:] == [None] * (len(asked) - 1)
    return {
        "text": "".join(choice["text"] for choice in choices),
        "tokens": [token for choice in choices for token in choice["token_ids"]],
        "prompt": asked[0],
        "end": [(choice["finish_reason"], choice["stop_reason"]) for choice in choices if choice["finish_reason"]],
        "usage": events[-1].get("usage"),
    }


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_answers_are_those_of_one_engine(pair: Pair, router: Router, options: dict[str, Any]) -> None:
    body: dict[str, Any] = {"model": "model", "max_tokens": 6, "temperature": 0, "return_token_ids": True, **options}
    for prompt in PROMPTS:
        for stream in ({"stream": True, "stream_options": {"include_usage": True}}, {"stream": False}):
            asked = {**body, "prompt": prompt, **stream}
            assert ask(router.url, asked) == ask(pair.prefill.url, asked)


def test_it_is_the_prefill_engine_s(pair: Pair, router: Router) -> None:
    """Where nothing is in the way; a request that both engines may refuse is refused."""
    body = {"model": "model", "prompt": "A request", "max_tokens": 4, "stream": True, "return_token_ids": True}
    body["temperature"] = 0
    before = counted(router)
    ask(router.url, body)
    assert counted(router) == before + 1
    with pytest.raises(urllib.error.HTTPError, match="400"):
        ask(router.url, {**body, "max_tokens": 5000})


def counted(router: Router) -> float:
    """First tokens of the prefill engine."""
    with urllib.request.urlopen(f"{router.url}/metrics", timeout=20) as response:
        text = response.read().decode()
    (line,) = (line for line in text.splitlines() if line.startswith("llm_datadist_route_first_tokens_total{"))
    return float(line.split()[-1])
