"""The tree of exceptions: one for each status, Python's own where there is one, nothing lost on the way."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from llm_datadist import LLMException, LLMStatusCode, status
from llm_datadist.status import (
    EXCEPTIONS,
    LLMKvCacheNotExistError,
    LLMTimeoutError,
    exception_for,
    handle_llm_status,
    raise_if_false,
    raise_if_true,
)

BUILTINS: dict[str, type[Exception]] = {
    "LLM_PARAM_INVALID": ValueError,
    "LLM_KV_CACHE_NOT_EXIST": LookupError,
    "LLM_NOT_YET_LINK": ConnectionError,
    "LLM_ALREADY_LINK": RuntimeError,
    "LLM_PROCESSING_LINK": ConnectionError,
    "LLM_LINK_FAILED": ConnectionError,
    "LLM_UNLINK_FAILED": ConnectionError,
    "LLM_TIMEOUT": TimeoutError,
    "LLM_EXIST_LINK": RuntimeError,
    "LLM_FEATURE_NOT_ENABLED": RuntimeError,
    "LLM_OUT_OF_MEMORY": MemoryError,
    "LLM_LINK_BUSY": RuntimeError,
    "LLM_FAILED": RuntimeError,
}
NEVER_PRODUCED = sorted(set(LLMStatusCode) - set(EXCEPTIONS))
FIELDS: dict[str, Any] = {
    "peer": 7,
    "operation": "pull_blocks",
    "path": "tcp",
    "phase": "transfer",
    "bytes_done": 0,
    "finished_blocks": (),
    "layer": 0,
    "retryable": True,
    "hint": "h",
    "quiescent": False,
}


def test_every_status_that_is_produced_has_its_class() -> None:
    assert {code.name for code in EXCEPTIONS} == set(BUILTINS)
    assert LLMStatusCode.LLM_SUCCESS in NEVER_PRODUCED


@pytest.mark.parametrize("name", BUILTINS)
def test_the_class_of_a_status(name: str) -> None:
    code = LLMStatusCode[name]
    error = exception_for(code, "what happened")
    assert type(error) is EXCEPTIONS[code] is getattr(status, type(error).__name__)
    assert type(error).__name__ in status.__all__
    assert type(error).__bases__[0] is LLMException
    assert isinstance(error, BUILTINS[name])
    assert isinstance(error, RuntimeError)
    assert error.status_code is type(error)("x").status_code is code
    assert str(error) == "what happened"
    assert repr(error) == f"{type(error).__name__}('what happened')"


@pytest.mark.parametrize("code", NEVER_PRODUCED)
def test_other_statuses_stay_what_they_were(code: LLMStatusCode) -> None:
    error = exception_for(code, "text", peer=1)
    assert type(error) is LLMException
    assert (error.status_code, error.args, error.peer) == (code, ("text",), 1)


@pytest.mark.parametrize("kind", [LLMException, *EXCEPTIONS.values()])
@pytest.mark.parametrize("args", [(), ("text",), (2, "two"), (2, "two", "file"), ("text", LLMStatusCode.LLM_TIMEOUT)])
def test_pickled_or_copied_nothing_is_lost(kind: type[LLMException], args: tuple[object, ...]) -> None:
    """Two arguments too: OSError, from which some are derived, takes them for errno and text."""
    error = kind(*args, status_code=LLMStatusCode.LLM_REPEAT_REQUEST, **FIELDS)
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(other) is kind
        assert other.args == args
        assert other.status_code is LLMStatusCode.LLM_REPEAT_REQUEST
        assert {name: getattr(other, name) for name in FIELDS} == FIELDS
        assert str(other) == str(RuntimeError(*args))


def test_fields_that_nobody_knows() -> None:
    error = LLMTimeoutError("text")
    assert [getattr(error, name) for name in FIELDS] == [None] * 7 + [False, None, True]


def test_a_program_s_own_subclass() -> None:
    class MineError(LLMTimeoutError):
        pass

    assert MineError("text").status_code is LLMStatusCode.LLM_TIMEOUT
    assert type(exception_for(LLMStatusCode.LLM_TIMEOUT, "text")) is LLMTimeoutError


def test_the_helpers_raise_the_class_of_the_status() -> None:
    with pytest.raises(TimeoutError):
        handle_llm_status(LLMStatusCode.LLM_TIMEOUT, "pull_cache", "c")
    with pytest.raises(ValueError, match=r"^no 1$"):
        raise_if_true(1, "no {}", 1)
    with pytest.raises(LLMKvCacheNotExistError, match=r"^no$"):
        raise_if_false(0, "no", status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST)
