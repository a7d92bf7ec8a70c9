"""Every outcome as an integer: nothing that the bridge does raises."""

from __future__ import annotations

import _thread
import functools
from typing import TYPE_CHECKING, Final, TypeVar

from llm_datadist.status import LLMException, LLMStatusCode
from llm_datadist.utils import log

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Concatenate, ParamSpec

    P = ParamSpec("P")

S = TypeVar("S")

SUCCESS: Final = int(LLMStatusCode.LLM_SUCCESS)
FAILED: Final = int(LLMStatusCode.LLM_FAILED)
PARAM_INVALID: Final = int(LLMStatusCode.LLM_PARAM_INVALID)
KV_CACHE_NOT_EXIST: Final = int(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST)
FEATURE_NOT_ENABLED: Final = int(LLMStatusCode.LLM_FEATURE_NOT_ENABLED)
_CODES: Final = {int(LLMStatusCode.LLM_SUCCESS)} | {
    int(code)
    for code in LLMStatusCode
    if code >> 12 == 0x5010B  # noqa: PLR2004 - the module's part of a code
}


class RefusedError(Exception):
    """A call is refused with ``code``; the text says why and what to do."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


def refuse(reason: str, code: int = PARAM_INVALID) -> RefusedError:
    """The exception for a call that is refused before the engine sees it."""
    return RefusedError(code, reason)


def public(code: int) -> int:
    """The code if it is one of the documented ones, else ``LLM_FAILED``."""
    return code if code in _CODES else FAILED


def failed(operation: str, error: BaseException) -> int:
    """The status of an exception; its text goes to the log, because the caller only gets the number."""
    if isinstance(error, RefusedError):
        log.error("[%s] failed, error code is %s, %s", operation, LLMStatusCode(error.code), error)
        return error.code
    if isinstance(error, LLMException):
        log.error("%s", error)
        return public(int(error.status_code))
    if isinstance(error, KeyboardInterrupt):  # of the program that hosts the interpreter: it gets it back
        _thread.interrupt_main()
    log.error("[%s] failed unexpectedly", operation, exc_info=error)
    return FAILED


def status(operation: str) -> Callable[[Callable[Concatenate[S, P], None]], Callable[Concatenate[S, P], int]]:
    """Make a method return its status instead of raising; ``operation`` names the call in the log."""

    def decorate(method: Callable[Concatenate[S, P], None]) -> Callable[Concatenate[S, P], int]:
        @functools.wraps(method)
        def guarded(self: S, /, *args: P.args, **kwargs: P.kwargs) -> int:
            try:
                method(self, *args, **kwargs)
            except BaseException as error:  # noqa: BLE001 - nothing may pass into C++
                return failed(operation, error)
            return SUCCESS

        return guarded

    return decorate
