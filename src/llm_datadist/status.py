"""Status codes and the one exception of the library.

Numeric values are the ones of the original (error code page of LLM-DataDist), so programs that compare numbers keep
working.
"""

from __future__ import annotations

import functools
from enum import IntEnum
from typing import NoReturn

__all__ = [
    "LLMException",
    "LLMStatusCode",
    "Status",
    "code_2_status",
    "handle_llm_status",
    "raise_if_false",
    "raise_if_true",
]


class LLMStatusCode(IntEnum):
    """Outcome of an operation; members equal their number."""

    LLM_SUCCESS = 0
    LLM_FAILED = 0xFFFFFFFF
    LLM_WAIT_PROCESS_TIMEOUT = 0x5010B001
    LLM_KV_CACHE_NOT_EXIST = 0x5010B002
    LLM_REPEAT_REQUEST = 0x5010B003
    LLM_REQUEST_ALREADY_COMPLETED = 0x5010B004
    LLM_PARAM_INVALID = 0x5010B005
    LLM_ENGINE_FINALIZED = 0x5010B006
    LLM_NOT_YET_LINK = 0x5010B007
    LLM_ALREADY_LINK = 0x5010B008
    LLM_LINK_FAILED = 0x5010B009
    LLM_UNLINK_FAILED = 0x5010B00A
    LLM_NOTIFY_PROMPT_UNLINK_FAILED = 0x5010B00B
    LLM_CLUSTER_NUM_EXCEED_LIMIT = 0x5010B00C
    LLM_PROCESSING_LINK = 0x5010B00D
    LLM_DEVICE_OUT_OF_MEMORY = 0x5010B00E
    LLM_PREFIX_ALREADY_EXIST = 0x5010B00F
    LLM_PREFIX_NOT_EXIST = 0x5010B010
    LLM_SEQ_LENOVERLIMIT = 0x5010B011
    LLM_NO_FREE_BLOCK = 0x5010B012
    LLM_BLOCKS_OUT_OF_MEMORY = 0x5010B013
    LLM_EXIST_LINK = 0x5010B018
    LLM_FEATURE_NOT_ENABLED = 0x5010B019
    LLM_TIMEOUT = 0x5010B01A
    LLM_LINK_BUSY = 0x5010B01B
    LLM_OUT_OF_MEMORY = 0x5010B01C
    LLM_DEVICE_MEM_ERROR = 507053
    LLM_SUSPECT_REMOTE_ERROR = 507057
    LLM_UNKNOWN_ERROR = -1

    def __str__(self) -> str:
        return f"LLMStatusCode.{self.name}"

    def __format__(self, spec: str) -> str:
        # IntEnum formats as a number from Python 3.12 on; messages want the name on every version.
        return int.__format__(self, spec) if spec else str(self)


class LLMException(RuntimeError):  # noqa: N818 - the original's public name
    """An operation failed; ``status_code`` says how, the message says who, what, why and what to do.

    A positional status code lands in ``args``, as in the original: pass it by keyword.

    Attributes:
        status_code: the status of the failure.
        peer: cluster id of the peer, if one is involved.
        operation: the public call that failed.
        path: the transfer path that was in use.
        phase: ``"check"``, ``"link"``, ``"lookup"``, ``"transfer"`` or ``"confirm"``.
        bytes_done: bytes known to be in place when it failed; None when not known.
        retryable: whether the same call can succeed later without a change by the caller.
        hint: what to do about it.
    """

    def __init__(
        self,
        *args: object,
        status_code: LLMStatusCode = LLMStatusCode.LLM_SUCCESS,
        peer: int | None = None,
        operation: str | None = None,
        path: str | None = None,
        phase: str | None = None,
        bytes_done: int | None = None,
        retryable: bool = False,
        hint: str | None = None,
    ) -> None:
        super().__init__(*args)
        self._status_code = status_code
        self.peer = peer
        self.operation = operation
        self.path = path
        self.phase = phase
        self.bytes_done = bytes_done
        self.retryable = retryable
        self.hint = hint

    @property
    def status_code(self) -> LLMStatusCode:
        """The status of the failure."""
        return self._status_code

    def __reduce__(self) -> tuple[object, ...]:
        fields = {
            "status_code": self._status_code,
            "peer": self.peer,
            "operation": self.operation,
            "path": self.path,
            "phase": self.phase,
            "bytes_done": self.bytes_done,
            "retryable": self.retryable,
            "hint": self.hint,
        }
        return (functools.partial(type(self), **fields), self.args)  # type: ignore[arg-type]


class Status:
    """A status code as an object: ``is_ok()`` and ``status_code``."""

    def __init__(self, status_code: LLMStatusCode) -> None:
        self._status_code = status_code

    @property
    def status_code(self) -> LLMStatusCode:
        """The wrapped code."""
        return self._status_code

    def is_ok(self) -> bool:
        """Whether the code is ``LLM_SUCCESS``."""
        return self._status_code == LLMStatusCode.LLM_SUCCESS


def code_2_status(code: int) -> LLMStatusCode:
    """The member with this number; anything unknown, -1 included, is ``LLM_FAILED``."""
    if code == LLMStatusCode.LLM_UNKNOWN_ERROR:
        return LLMStatusCode.LLM_FAILED
    try:
        return LLMStatusCode(code)
    except ValueError:
        return LLMStatusCode.LLM_FAILED


def handle_llm_status(status: int, func_name: str, context: str) -> None:
    """Raise ``LLMException`` unless ``status`` is success.

    Raises:
        LLMException: with the status, and the text ``[func] failed, error code is <code>, <context>.``
    """
    code = code_2_status(status)
    if code != LLMStatusCode.LLM_SUCCESS:
        message = f"[{func_name}] failed, error code is {code}, {context}."
        raise LLMException(message, status_code=code, operation=func_name)


def raise_if_false(
    predicate: object,
    message: str,
    *args: object,
    status_code: LLMStatusCode = LLMStatusCode.LLM_PARAM_INVALID,
    **kwargs: object,
) -> None:
    """Raise ``LLMException`` with ``message.format(*args, **kwargs)`` when ``predicate`` is falsy."""
    if not predicate:
        _fail(message.format(*args, **kwargs), status_code)


def raise_if_true(
    predicate: object,
    message: str,
    *args: object,
    status_code: LLMStatusCode = LLMStatusCode.LLM_PARAM_INVALID,
    **kwargs: object,
) -> None:
    """Raise ``LLMException`` with ``message.format(*args, **kwargs)`` when ``predicate`` is truthy."""
    if predicate:
        _fail(message.format(*args, **kwargs), status_code)


def _fail(text: str, status_code: LLMStatusCode) -> NoReturn:
    from llm_datadist.utils import log  # noqa: PLC0415 - log is one floor up; only a failure pays for it

    log.error("%s", text)
    raise LLMException(text, status_code=status_code, phase="check")
