"""The first token of a completion from the prefill engine (P): when it is the answer's, and how D goes on behind it.

P computes the first token anyway. Where it is the client's, the decode engine (D) gets the prompt with that token
behind it, loads the KV of the prompt, and computes the second token: what a single engine would do next. Otherwise D
computes the last prompt token again, to have the first one from it, and the client waits for that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from llm_datadist.cli.route.messages import prompts

if TYPE_CHECKING:
    from llm_datadist.cli.route.messages import Fields

_MAX_TOKENS: Final = 16
"""What vLLM takes for ``max_tokens`` of a completion that has none."""
_ALIKE: Final = frozenset(
    (
        "add_special_tokens",
        "allowed_token_ids",
        "cache_salt",
        "ignore_eos",
        "kv_transfer_params",
        "logit_bias",
        "max_tokens",
        "min_p",
        "min_tokens",
        "model",
        "priority",
        "prompt",
        "repetition_penalty",
        "request_id",
        "return_token_ids",
        "session_id",
        "skip_special_tokens",
        "stop",
        "stop_token_ids",
        "stream",
        "stream_interval",
        "stream_options",
        "temperature",
        "top_k",
        "top_p",
        "user",
    )
)
"""Fields that ask the same for each token, wherever the prompt ends, or that are looked after here."""
_NEUTRAL: Final[dict[str, Any]] = {
    "bad_words": [],
    "best_of": 1,
    "echo": False,
    "frequency_penalty": 0,
    "include_stop_str_in_output": False,
    "length_penalty": 1,
    "n": 1,
    "presence_penalty": 0,
    "response_format": {"type": "text"},
    "return_tokens_as_token_ids": False,
    "spaces_between_special_tokens": True,
    "use_beam_search": False,
}
"""What other fields may say, besides null."""
_NOT_NULL: Final = ("n", "use_beam_search")
"""P does not get them as they are, and D refuses null."""
_UNREADABLE: Final = "\N{REPLACEMENT CHARACTER}"


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Wishes(msgspec.Struct):
    """What is read of a completion's body; all else is passed on."""

    max_tokens: int | None = None
    min_tokens: int = 0
    stop: str | list[str] | None = None
    temperature: float | None = None
    top_k: int | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    return_token_ids: bool | None = None

    @property
    def tokens(self) -> int:
        """How many are wanted."""
        return _MAX_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def greedy(self) -> bool:
        """Whether each token is the likeliest: one that is drawn must not be drawn again if it does not please."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def stops(self) -> list[str]:
        """Texts that end the answer."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


def wishes(body: bytes, fields: Fields) -> Wishes | str:
    """What a completion wants; text says why its first token has to be D's."""
    try:
        others = {name: msgspec.json.decode(fields[name]) for name in fields.keys() - _ALIKE}
        found = msgspec.json.decode(body, type=Wishes)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:  # the engines say what they think of it
        return str(error)
    for name, value in others.items():
        if value is None and name not in _NOT_NULL:
            continue
        if name not in _NEUTRAL or value != _NEUTRAL[name]:
            return f"it has {name}"
    if not found.greedy:
        return "its tokens are drawn: temperature is not 0"
    if len(prompts(fields)) > 1:
        return "it has several prompts"
    if not 0 <= found.min_tokens <= found.tokens:
        return "min_tokens is out of range"
    return found if found.tokens > 1 else "it wants no more than one token"


class _Choice(msgspec.Struct):
    text: str
    finish_reason: str | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class _Description(msgspec.Struct):
    tokens: int = 0


class _Params(msgspec.Struct):
    llm_datadist: _Description | None = None


class _PrefillAnswer(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[_Choice]
    kv_transfer_params: _Params | None = None


@dataclass(frozen=True, slots=True)
class FirstToken:
    """A first token that is the client's."""

    fields: Fields
    """What is left to do, as the body of a completion."""
    wishes: Wishes
    answer: _PrefillAnswer
    prompt: list[int]
    token: int

    def event(self) -> bytes:
        """Of the client's stream, as vLLM has it."""
        choice: dict[str, Any] = {"index": 0, "text": self.answer.choices[0].text, "logprobs": None}
        choice |= {"finish_reason": None, "stop_reason": None, "prompt_token_ids": None, "token_ids": None}
        if self.wishes.return_token_ids:
            choice |= {"prompt_token_ids": self.prompt, "token_ids": [self.token]}
        event: dict[str, Any] = {"id": self.answer.id, "object": "text_completion", "created": self.answer.created}
        event |= {"model": self.answer.model, "choices": [choice]}
        options = self.wishes.stream_options
        if options and options.include_usage and options.continuous_usage_stats:
            count = len(self.prompt)
            event["usage"] = {"prompt_tokens": count, "total_tokens": count + 1, "completion_tokens": 1}
        return _event(event)

    def rest(self) -> Rest:
        """What becomes of D's stream."""
        return Rest(self)

    def before(self, body: bytes) -> bytes:
        """D's whole answer with this token before it.

        Raises:
            ValueError: it is no answer of one text.
        """
        try:
            answer = msgspec.json.decode(body, type=dict[str, Any])
            choice = answer["choices"][0]
            choice["text"] = self.answer.choices[0].text + choice["text"]
            if self.wishes.return_token_ids:
                choice |= {"prompt_token_ids": self.prompt, "token_ids": [self.token, *choice["token_ids"]]}
            self.correct(answer)
        except (msgspec.DecodeError, UnicodeDecodeError, LookupError, TypeError) as error:
            message = f"{type(error).__name__}: {error}"
            raise ValueError(message) from error
        return msgspec.json.encode(answer)

    def correct(self, answer: dict[str, Any]) -> None:
        """Count the token as one of the answer's, not of the prompt's."""
        usage = answer.get("usage")
        if usage:
            usage["prompt_tokens"] -= 1
            usage["completion_tokens"] += 1


class Rest:
    """D's stream, so that it goes on behind the first token."""

    def __init__(self, first: FirstToken) -> None:
        self._first = first
        self._begun = b""
        """Of an event that has not ended yet."""

    def feed(self, chunk: bytes) -> bytes:
        """What the client gets for it."""
        *events, self._begun = (self._begun + chunk).split(b"\n\n")
        return b"".join(self._go_on(event) for event in events)

    def end(self) -> bytes:
        """What is left when D's answer has ended."""
        return self._begun

    def _go_on(self, event: bytes) -> bytes:
        try:
            found = msgspec.json.decode(event.removeprefix(b"data: "), type=dict[str, Any])
            for choice in found["choices"]:
                if choice.get("prompt_token_ids"):
                    choice["prompt_token_ids"] = None  # the client has got them
            self._first.correct(found)
        except (msgspec.DecodeError, UnicodeDecodeError, LookupError, TypeError):  # none with tokens
            return event + b"\n\n"
        return _event(found | {"created": self._first.answer.created})


def first_token(fields: Fields, wishes: Wishes, body: bytes, context: int) -> FirstToken | str:
    """The first token in P's answer; text says why it has to be D's, which takes ``context`` tokens a request."""
    try:
        answer = msgspec.json.decode(body, type=_PrefillAnswer)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return f"the prefill engine's answer is another one: {error}"
    choice = answer.choices[0] if len(answer.choices) == 1 else _Choice("")
    prompt, tokens = choice.prompt_token_ids or [], choice.token_ids or []
    owned = answer.kv_transfer_params and answer.kv_transfer_params.llm_datadist
    obstacles = (
        (len(answer.choices) != 1, "the prefill engine has not given one answer"),
        (choice.finish_reason != "length" or len(tokens) != 1 or not prompt, "the answer may end with it"),
        (not choice.text or _UNREADABLE in choice.text, "it is no text by itself"),
        (any(_may_begin(stop, choice.text) for stop in wishes.stops), "a text of stop may begin with it"),
        (not owned or owned.tokens != len(prompt), "the KV that is handed over is not that of the whole prompt"),
        (len(prompt) + wishes.tokens > context, "the decode engine may not take so many tokens"),
    )
    for obstacle, reason in obstacles:
        if obstacle:
            return reason
    changed: dict[str, Any] = {"prompt": [*prompt, tokens[0]], "max_tokens": wishes.tokens - 1}
    if wishes.min_tokens:
        changed["min_tokens"] = wishes.min_tokens - 1
    raw = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in changed.items()}
    return FirstToken({**fields, **raw}, wishes, answer, prompt, tokens[0])


def _may_begin(stop: str, text: str) -> bool:
    """Whether ``stop`` may be found from somewhere in ``text`` on."""
    return any(stop.startswith(text[at:]) for at in range(len(text))) or stop in text


def _event(found: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(found) + b"\n\n"
