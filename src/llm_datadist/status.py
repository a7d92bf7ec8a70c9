"""Status codes and the exceptions of the library.

Numeric values are the ones of the original (error code page of LLM-DataDist), so programs that compare numbers keep
working.
"""

from __future__ import annotations

import functools
from enum import IntEnum
from typing import Any, ClassVar, Final, NoReturn

__all__ = [
    "EXCEPTIONS",
    "LLMAlreadyLinkError",
    "LLMException",
    "LLMExistLinkError",
    "LLMFailedError",
    "LLMFeatureNotEnabledError",
    "LLMKvCacheNotExistError",
    "LLMLinkBusyError",
    "LLMLinkFailedError",
    "LLMNotYetLinkError",
    "LLMOutOfMemoryError",
    "LLMParamInvalidError",
    "LLMProcessingLinkError",
    "LLMStatusCode",
    "LLMTimeoutError",
    "LLMUnlinkFailedError",
    "Status",
    "code_2_status",
    "exception_for",
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

    What this library raises is always one of the subclasses below, one for each status it produces. Where Python has a
    matching exception a subclass is that, too: ``except TimeoutError`` catches ``LLM_TIMEOUT``.

    A positional status code lands in ``args``, as in the original: pass it by keyword.

    Attributes:
        peer: cluster id of the peer, if one is involved.
        operation: the public call that failed.
        path: the transfer path that was in use.
        phase: ``"check"``, ``"link"``, ``"lookup"``, ``"transfer"`` or ``"confirm"``; before ``"transfer"`` nothing was
            moved, in ``"confirm"`` everything was.
        bytes_done: bytes known to be in place when it failed, of all that the call moves; at least so many are. None
            when not known.
        finished_blocks: of a transfer into blocks, the destination blocks known to be complete, in all tensors that the
            call moves, in ascending order. All others that the call names are undefined. None when not known.
        layer: of a layer-wise transfer, the local layer that was being moved.
        retryable: whether the same call can succeed later without a change by the caller.
        hint: what to do about it.
        quiescent: False if the peer could not confirm that it has stopped writing: do not use the destination until the
            link has ended. Else no byte of it changes any more.
        transfer_id: names the transfer, 64 bits, in traces and in the logs of both sides, there in hexadecimal.
    """

    default_code: ClassVar[LLMStatusCode] = LLMStatusCode.LLM_SUCCESS
    """The status unless another one is given."""
    recoverable: ClassVar[str] = ""
    """Whether the operation can succeed later, and what that takes."""
    remedy: ClassVar[str] = ""
    """What to do about it."""

    def __init__(  # noqa: PLR0913 - one keyword a field
        self,
        *args: object,
        status_code: LLMStatusCode | None = None,
        peer: int | None = None,
        operation: str | None = None,
        path: str | None = None,
        phase: str | None = None,
        bytes_done: int | None = None,
        finished_blocks: tuple[int, ...] | None = None,
        layer: int | None = None,
        retryable: bool = False,
        hint: str | None = None,
        quiescent: bool = True,
        transfer_id: int | None = None,
    ) -> None:
        super().__init__(*args)
        self._status_code = self.default_code if status_code is None else status_code
        self.peer = peer
        self.operation = operation
        self.path = path
        self.phase = phase
        self.bytes_done = bytes_done
        self.finished_blocks = finished_blocks
        self.layer = layer
        self.retryable = retryable
        self.hint = hint
        self.quiescent = quiescent
        self.transfer_id = transfer_id

    @property
    def status_code(self) -> LLMStatusCode:
        """The status of the failure."""
        return self._status_code

    def __reduce__(self) -> tuple[object, ...]:
        fields = {name: getattr(self, name) for name in _FIELDS}
        return (functools.partial(type(self), **fields), self.args)


_FIELDS: Final = (
    "status_code",
    "peer",
    "operation",
    "path",
    "phase",
    "bytes_done",
    "finished_blocks",
    "layer",
    "retryable",
    "hint",
    "quiescent",
    "transfer_id",
)


class LLMParamInvalidError(LLMException, ValueError):
    """Arguments, options or caches that cannot work together.

    A block index out of range, lists or tensor counts that differ, block sizes that differ, not remote accessible,
    modes of the two peers that differ, memory that is not where its placement says. Nothing was moved.
    """

    default_code = LLMStatusCode.LLM_PARAM_INVALID
    recoverable = "no"
    remedy = "correct what the text names: where two caches differ it lists all differences"


class LLMKvCacheNotExistError(LLMException, LookupError):
    """No such cache or key, here or at the peer; also a key that a pull has released."""

    default_code = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    recoverable = "once it is registered"
    remedy = "register it; check cache id, model id, request id"


class LLMNotYetLinkError(LLMException, ConnectionError):
    """No link to that cluster, or the peer has ended; a rank-table link that is not known."""

    default_code = LLMStatusCode.LLM_NOT_YET_LINK
    recoverable = "once it is linked"
    remedy = "unlink with `force=True`, link again"


class LLMAlreadyLinkError(LLMException):
    """Returned by `link_clusters`: there is a live link, perhaps to another process with that cluster id."""

    default_code = LLMStatusCode.LLM_ALREADY_LINK
    recoverable = "not needed"
    remedy = "use the link, or unlink first"


class LLMProcessingLinkError(LLMException, ConnectionError):
    """Returned by `link_clusters`: at the deadline another thread, or the peer, is still linking that cluster."""

    default_code = LLMStatusCode.LLM_PROCESSING_LINK
    recoverable = "yes"
    remedy = "wait for it"


class LLMLinkFailedError(LLMException, ConnectionError):
    """Returned by `link_clusters`, raised by `link`: the cluster cannot be linked.

    Nobody listens there, the peer speaks something else or another version, no permitted path works.
    """

    default_code = LLMStatusCode.LLM_LINK_FAILED
    recoverable = "if the cause goes"
    remedy = "see `LLMDataDist.last_link_error`"


class LLMUnlinkFailedError(LLMException, ConnectionError):
    """Returned by `unlink_clusters`: the peer cannot be told."""

    default_code = LLMStatusCode.LLM_UNLINK_FAILED
    recoverable = "with force"
    remedy = "use `force=True`"


class LLMTimeoutError(LLMException, TimeoutError):
    """The deadline passed.

    For a pull or push no byte of the destination changes any more, unless `quiescent` is False.
    """

    default_code = LLMStatusCode.LLM_TIMEOUT
    recoverable = "yes, the link goes on"
    remedy = "try again; raise `sync_kv_timeout`"


class LLMExistLinkError(LLMException):
    """`switch_role` with live links."""

    default_code = LLMStatusCode.LLM_EXIST_LINK
    recoverable = "once they are unlinked"
    remedy = "unlink first"


class LLMFeatureNotEnabledError(LLMException):
    """Allocation calls without a pool; rank tables or another listen address with `hixl`.

    Also `verify_transfers` with a peer that lacks the extra `verify`, or of GPU memory; GPU memory where no path to
    the peer reaches it, or in a copy within the process. Nothing was moved.
    """

    default_code = LLMStatusCode.LLM_FEATURE_NOT_ENABLED
    recoverable = "no"
    remedy = "configure it"


class LLMOutOfMemoryError(LLMException, MemoryError):
    """A pool is exhausted or cannot be reserved."""

    default_code = LLMStatusCode.LLM_OUT_OF_MEMORY
    recoverable = "once memory is freed"
    remedy = "free caches, make the pool larger"


class LLMLinkBusyError(LLMException):
    """`unregister_cache` and its kind: transfers still use the memory.

    Or a peer on this host that was given up has not confirmed that it stopped. Of a notification: the peer has too many
    that nobody there has read.
    """

    default_code = LLMStatusCode.LLM_LINK_BUSY
    recoverable = "yes"
    remedy = "keep the memory mapped, call again; end the process that the text or the log names"


class LLMFailedError(LLMException):
    """Anything else.

    A second instance, a port that is taken, memory that is registered but not mapped, a broken data connection, use
    after a fork or after `finalize`; bytes that differ after a transfer with `verify_transfers` (phase `confirm`).
    """

    default_code = LLMStatusCode.LLM_FAILED
    recoverable = "see `retryable`"
    remedy = "read the text"


EXCEPTIONS: Final[dict[LLMStatusCode, type[LLMException]]] = {
    kind.default_code: kind for kind in LLMException.__subclasses__()
}
"""The exception for each status that this library produces."""


def exception_for(status_code: LLMStatusCode, *args: object, **fields: Any) -> LLMException:
    """The exception for a status: of its subclass, or plain LLMException for one that this library never produces."""
    return EXCEPTIONS.get(status_code, LLMException)(*args, status_code=status_code, **fields)


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
        raise exception_for(code, message, operation=func_name)


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
    raise exception_for(status_code, text, phase="check")
