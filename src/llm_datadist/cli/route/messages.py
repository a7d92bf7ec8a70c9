"""What is said over HTTP: the bodies of both legs, the headers that are passed on, errors in OpenAI's form."""

from __future__ import annotations

import re
import uuid
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from multidict import CIMultiDict, CIMultiDictProxy

Fields: TypeAlias = "dict[str, msgspec.Raw]"
"""A JSON object whose values are passed on as they came, byte for byte."""

REQUEST_ID: Final = "X-Request-Id"
_HOP_BY_HOP: Final = (
    "Connection",
    "Keep-Alive",
    "Proxy-Authenticate",
    "Proxy-Authorization",
    "Proxy-Connection",
    "TE",
    "Trailer",
    "Transfer-Encoding",
    "Upgrade",
)
_OF_THE_CLIENT_S_BODY: Final = ("Content-Encoding", "Content-Length", "Expect", "Host")
_READ: Final = ("request_id", "use_beam_search", "stream", "min_tokens", "n")
"""Fields whose values are looked at: a raw one may be a number or a text that cannot be read."""
_PROMPTS: Final = ("prompt", "prompt_embeds")
_LIST_OF_PROMPTS: Final = re.compile(rb'\s*\[\s*["\[]')
"""How the value of one of these begins where it is one."""
_ERROR_EVENT: Final = re.compile(rb'(?:\A|\n\n)data: (\{"error":.*)')
_MOST_OF_A_MESSAGE: Final = 300
_ID: Final = re.compile(r"[!-~]{1,256}")
_ONE: Final = msgspec.Raw(b"1")
_FALSE: Final = msgspec.Raw(b"false")


def parse_fields(body: bytes) -> Fields:
    """The fields of a request; those that are looked at here can be read.

    Raises:
        ValueError: the body is no JSON object.
    """
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        for name in _READ:
            _value(fields, name)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        message = f"the body is no JSON object: {error}"
        raise ValueError(message) from None
    return fields


def prompts(fields: Fields, name: str = "prompt") -> list[msgspec.Raw]:
    """Those of a completion that has a list of them; else none."""
    given = fields.get(name, b"")
    return msgspec.json.decode(given, type=list[msgspec.Raw]) if _LIST_OF_PROMPTS.match(given) else []


def _value(fields: Fields, name: str) -> object:
    """What a field says; None also if it is not there."""
    return msgspec.json.decode(fields[name]) if name in fields else None


def is_for_decode_alone(fields: Fields) -> bool:
    """Whether it is one for which vLLM loads no KV: for beam search."""
    return bool(_value(fields, "use_beam_search"))


def prefill_body(
    fields: Fields, transfer_id: str | None = None, *, chat: bool, more: Mapping[str, Any] | None = None
) -> bytes:
    """What P gets: the same prompt, for one token, whose KV cache is pushed under the transfer id, or kept.

    ``stream_options`` without a stream and null where vLLM allows none stay, so that P refuses them before it computes.
    """
    leg: dict[str, Any] = dict(fields)
    if _value(fields, "stream"):
        leg.pop("stream_options", None)
    if _value(fields, "min_tokens") is not None:
        del leg["min_tokens"]
    leg |= {"stream": _FALSE, "max_tokens": _ONE}
    for name in _PROMPTS:
        if several := prompts(fields, name):  # only the first one's KV can be handed over
            leg[name] = several[:1]
    if chat or "max_completion_tokens" in leg:
        leg["max_completion_tokens"] = _ONE
    if _value(fields, "n") is not None:
        leg["n"] = _ONE
    leg |= more or {}
    params = {"do_remote_decode": True, "do_remote_prefill": False}
    leg["kv_transfer_params"] = {**params, "transfer_id": transfer_id} if transfer_id else params
    return msgspec.json.encode(leg)


def decode_body(fields: Fields, transfer_id: str, description: bytes) -> bytes:
    """What D gets: the client's request, and where its KV cache comes from."""
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": transfer_id,
        "llm_datadist": msgspec.Raw(description),
    }
    return msgspec.json.encode({**fields, "kv_transfer_params": params})


def pull_body(fields: Fields, params: Fields) -> bytes:
    """What D gets where it pulls: the client's request, and P's ``kv_transfer_params`` as they are, if any."""
    own = {name: value for name, value in fields.items() if name != "kv_transfer_params"}
    return msgspec.json.encode({**own, "kv_transfer_params": params} if params else own)


def describe_body(model: str) -> bytes:
    """The one-token request whose answer has P's description."""
    params = {"do_remote_decode": True, "do_remote_prefill": False, "describe": True}
    return msgspec.json.encode({"model": model, "prompt": [1], "max_tokens": 1, "kv_transfer_params": params})


class _Model(msgspec.Struct):
    id: str | None = None
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


def _models(answer: bytes) -> list[_Model]:
    try:
        return msgspec.json.decode(answer, type=_Models).data
    except (msgspec.DecodeError, UnicodeDecodeError):
        return []


def first_model(answer: bytes) -> str | None:
    """The first id of ``/v1/models``, None if it has none."""
    models = _models(answer)
    return models[0].id if models else None


def longest_context(answer: bytes) -> int:
    """How many tokens ``/v1/models`` allows, 0 if it does not tell."""
    return max((model.max_model_len or 0 for model in _models(answer)), default=0)


class _PrefillAnswer(msgspec.Struct):
    kv_transfer_params: dict[str, msgspec.Raw] | None = None


class _Description(msgspec.Struct):
    lease: dict[str, msgspec.Raw] | None = None


def params_in(answer: bytes) -> Fields:
    """The ``kv_transfer_params`` in an answer of P; empty if it has none."""
    try:
        return msgspec.json.decode(answer, type=_PrefillAnswer).kv_transfer_params or {}
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}


def description_in(params: Fields) -> bytes | None:
    """P's description: a JSON object; None if there is none."""
    description = bytes(params.get("llm_datadist", b""))
    return description if description.startswith(b"{") else None


def is_leased(description: bytes) -> bool:
    """Whether a description offers KV to be pulled."""
    try:
        return msgspec.json.decode(description, type=_Description).lease is not None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False


def error_body(status: int, message: str) -> bytes:
    """An error as OpenAI's clients expect it."""
    kind = HTTPStatus(status).phrase.title().replace(" ", "").replace("-", "") + "Error"
    return msgspec.json.encode({"error": {"message": message, "type": kind, "code": status}})


class _Error(msgspec.Struct):
    message: str
    code: int | str | None = None


class _ErrorAnswer(msgspec.Struct):
    error: _Error


def error_message(answer: bytes) -> str:
    """What an engine's error says: its message, or how the body begins."""
    try:
        return msgspec.json.decode(answer, type=_ErrorAnswer).error.message[:_MOST_OF_A_MESSAGE]
    except (msgspec.DecodeError, UnicodeDecodeError):
        return " ".join(answer[:_MOST_OF_A_MESSAGE].decode(errors="replace").split())


def failure_in(events: bytes) -> str | None:
    """What an engine says in a stream of its own failure (5xx), None if it does not.

    Of a piece of the stream that begins with an event. No text can look like one: JSON has no line ends in it.
    """
    found = _ERROR_EVENT.search(events)
    try:
        error = msgspec.json.decode(found[1], type=_ErrorAnswer).error if found else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    failed = error and isinstance(error.code, int) and error.code >= HTTPStatus.INTERNAL_SERVER_ERROR
    return error.message[:_MOST_OF_A_MESSAGE] if error and failed else None


def end_to_end(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """The headers that are not for the next hop alone (RFC 9110, 7.6.1)."""
    passed = headers.copy()
    named = [name.strip() for value in headers.getall("Connection", []) for name in value.split(",")]
    for name in (*_HOP_BY_HOP, *named):
        passed.popall(name, None)
    return passed


def request_headers(headers: CIMultiDictProxy[str], fields: Fields | None = None) -> CIMultiDict[str]:
    """What engines get of the client's headers; with an id of the request, that of its fields, or a new one."""
    passed = end_to_end(headers)
    for name in _OF_THE_CLIENT_S_BODY:
        passed.popall(name, None)
    passed["Accept-Encoding"] = "identity"  # P's answer is read here, and an error may be added to D's
    own = _value(fields or {}, "request_id")
    given = own if isinstance(own, str) and _ID.fullmatch(own) else uuid.uuid4().hex
    passed[REQUEST_ID] = headers.get(REQUEST_ID) or given
    return passed
