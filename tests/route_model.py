"""A model behind the stand-ins for engines, answering as vLLM does: its words after a prompt are always the same."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from aiohttp import web

if TYPE_CHECKING:
    from route_kit import Engine, Leg

PROMPT_IDS = [11, 12, 13]
WORDS = {21: " one", 22: " two", 23: " three", 24: " four", 25: " five"}
"""Tokens in the order in which they follow every prompt."""
LEASE = {"request": "cmpl-1-0", "slot": 3, "generation": "7b", "seconds": 30.0}


def prompt_ids(body: dict[str, Any]) -> list[int]:
    """The prompt, as the tokenizer has it."""
    prompt: list[int] = body["prompt"] if isinstance(body["prompt"], list) else PROMPT_IDS
    return prompt


def next_tokens(body: dict[str, Any]) -> list[int]:
    """The tokens behind it."""
    prompt, tokens = prompt_ids(body), list(WORDS)
    begun = tokens.index(prompt[-1]) + 1 if prompt[-1] in tokens else 0
    return tokens[begun : begun + body.get("max_tokens", 16)]


def whole(body: dict[str, Any], created: int = 1, **choice: Any) -> dict[str, Any]:
    """An answer of vLLM that is no stream."""
    prompt, tokens = prompt_ids(body), next_tokens(body)
    said = {"index": 0, "text": "".join(WORDS[token] for token in tokens), "logprobs": None, "finish_reason": "length"}
    said |= {"stop_reason": None, "prompt_token_ids": None, "token_ids": None}
    if body.get("return_token_ids"):
        said |= {"prompt_token_ids": prompt, "token_ids": tokens}
    usage = _usage(prompt, len(tokens))
    answer = {"id": "cmpl-1", "object": "text_completion", "created": created, "model": body["model"]}
    return {**answer, "choices": [said | choice], "usage": usage, "kv_transfer_params": None}


def events(body: dict[str, Any], created: int = 1) -> list[dict[str, Any]]:
    """A stream of vLLM, but for the ``[DONE]`` at its end."""
    prompt, tokens = prompt_ids(body), next_tokens(body)
    options = body.get("stream_options") or {}
    head = {"id": "cmpl-1", "object": "text_completion", "created": created, "model": body["model"]}
    found: list[dict[str, Any]] = []
    for at, token in enumerate(tokens):
        said = {"index": 0, "text": WORDS[token], "logprobs": None, "finish_reason": None, "stop_reason": None}
        said |= {"prompt_token_ids": None, "token_ids": None}
        if body.get("return_token_ids"):
            said |= {"prompt_token_ids": None if at else prompt, "token_ids": [token]}
        if at == len(tokens) - 1:
            said["finish_reason"] = "length"
        found.append({**head, "choices": [said]})
        if options.get("continuous_usage_stats"):
            found[-1]["usage"] = _usage(prompt, at + 1)
    if options.get("include_usage"):
        found.append({**head, "choices": [], "usage": _usage(prompt, len(tokens))})
    return found


def _usage(prompt: list[int], completion: int) -> dict[str, int]:
    return {"prompt_tokens": len(prompt), "total_tokens": len(prompt) + completion, "completion_tokens": completion}


def encoded(stream: list[dict[str, Any]]) -> bytes:
    """As it is sent."""
    return b"".join(b"data: " + json.dumps(each).encode() + b"\n\n" for each in stream) + b"data: [DONE]\n\n"


def decoded(stream: bytes) -> list[dict[str, Any]]:
    """As it was made; it must end as vLLM's does."""
    *parts, done, rest = stream.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    return [json.loads(part.removeprefix(b"data: ")) for part in parts]


def prefills(engine: Engine, *, tokens: int | None = None, **choice: Any) -> None:
    """Have an engine answer as P with the connector in pull mode, which hands over ``tokens``."""

    async def behave(leg: Leg) -> web.StreamResponse:
        count = len(prompt_ids(leg.body)) if tokens is None else tokens
        answer = whole(leg.body, created=5, **choice)
        description = {"engine": "p", "tokens": count, "blocks": [[1, 2]], "lease": LEASE}
        return web.json_response({**answer, "kv_transfer_params": {"remote": "p", "llm_datadist": description}})

    engine.behave = behave


def decodes(engine: Engine) -> None:
    """Have an engine answer as D."""

    async def behave(leg: Leg) -> web.StreamResponse:
        if not leg.body.get("stream"):
            return web.json_response(whole(leg.body, created=9))
        response = await leg.stream()
        await response.write(encoded(events(leg.body, created=9)))
        return response

    engine.behave = behave
