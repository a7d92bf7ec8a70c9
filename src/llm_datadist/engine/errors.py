"""How the engine reports failures: one text shape, one mapping from path errors to statuses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from llm_datadist.memory.regions import RegionError
from llm_datadist.net.channel import ChannelClosedError, ReplyTimeoutError
from llm_datadist.paths.base import (
    ConnectionLostError,
    NoDevicePathError,
    PathError,
    PathTimeoutError,
    PeerGoneError,
)
from llm_datadist.status import EXCEPTIONS, LLMStatusCode, exception_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llm_datadist.engine.link import PeerLink
    from llm_datadist.status import LLMException
    from llm_datadist.utils.deadline import Deadline

RELINK_HINT: Final = "unlink the cluster with force=True and link it again"


class LinkError(Exception):
    """A cluster could not be linked or unlinked; reported as a status, not raised to the caller."""

    def __init__(self, code: LLMStatusCode, reason: str, *, retryable: bool = False, hint: str | None = None) -> None:
        super().__init__(reason)
        self.code: LLMStatusCode = produced(code)
        self.retryable = retryable
        self.hint = hint


def produced(code: LLMStatusCode) -> LLMStatusCode:
    """The status if it is one that this library produces as a failure: a peer may say anything, even LLM_SUCCESS."""
    return code if code in EXCEPTIONS else LLMStatusCode.LLM_FAILED


def failure(
    code: LLMStatusCode,
    operation: str,
    context: str,
    *,
    peer: int | None = None,
    path: str | None = None,
    phase: str | None = None,
    retryable: bool = False,
    hint: str | None = None,
) -> LLMException:
    """The exception for a failed operation.

    Its text is ``[operation] failed, error code is <code>, <context>.``, as in the original.
    """
    code = produced(code)
    advice = f"; {hint}" if hint else ""
    return exception_for(
        code,
        f"[{operation}] failed, error code is {code}, {context}{advice}.",
        operation=operation,
        peer=peer,
        path=path,
        phase=phase,
        retryable=retryable,
        hint=hint,
    )


def invalid(operation: str, context: str, *, peer: int | None = None, hint: str | None = None) -> LLMException:
    """The exception for arguments that cannot work."""
    return failure(LLMStatusCode.LLM_PARAM_INVALID, operation, context, peer=peer, phase="check", hint=hint)


def path_failure(
    error: Exception,
    operation: str,
    link: PeerLink,
    path: str | None,
    deadline: Deadline,
    done: tuple[int, ...] | None,
) -> LLMException:
    """The exception for an error of a path; it tells the end of the link from that of one data connection.

    ``done`` are its ``finished_blocks``.
    """
    if isinstance(error, ConnectionLostError) and link.ends(deadline):
        gone = PeerGoneError(f"the link ended: {error}", quiescent=error.quiescent)
        gone.progress = error.progress
        error = gone
    failed = transfer_failure(error, operation, link.cluster_id, path, deadline)
    failed.finished_blocks = done
    return failed


def transfer_failure(
    error: Exception, operation: str, peer: int, path: str | None, deadline: Deadline, phase: str = "transfer"
) -> LLMException:
    """The exception for an error of a path, or of the control connection, during a transfer."""
    code, hint, retryable = LLMStatusCode.LLM_FAILED, None, False
    if isinstance(error, (PathTimeoutError, ReplyTimeoutError)) or (
        isinstance(error, ConnectionLostError) and deadline.expired()
    ):
        code, retryable = LLMStatusCode.LLM_TIMEOUT, True
        hint = "raise sync_kv_timeout if the transfer is large, else see whether the peer is stalled"
    elif isinstance(error, (PeerGoneError, ChannelClosedError)):
        code, hint, retryable = LLMStatusCode.LLM_NOT_YET_LINK, RELINK_HINT, True
    elif isinstance(error, ConnectionLostError):
        hint, retryable = "try again: the connection is replaced", True
    elif isinstance(error, RegionError):
        code = LLMStatusCode.LLM_PARAM_INVALID
    elif isinstance(error, NoDevicePathError):
        code, hint, phase = LLMStatusCode.LLM_FEATURE_NOT_ENABLED, error.hint, "check"
    context = f"peer cluster {peer}: {error} (transfer {deadline.transfer_id:016x})"
    if isinstance(error, PathError) and not error.quiescent:
        context += (
            " (the peer did not confirm that it has stopped writing: do not use the destination until it is unlinked)"
        )
    failed = failure(code, operation, context, peer=peer, path=path, phase=phase, retryable=retryable, hint=hint)
    failed.transfer_id = deadline.transfer_id
    if isinstance(error, PathError):
        failed.quiescent = error.quiescent
        failed.bytes_done = error.progress.bytes_done if error.progress is not None else None
    return failed


def finished_blocks(error: Exception, ids: Sequence[int], size: int, *, local: bool) -> tuple[int, ...] | None:
    """Which of the destination blocks, of ``size`` bytes, a transfer that failed has filled; None if not known.

    ``local`` tells the side on which the destination is.
    """
    if not isinstance(error, PathError) or error.progress is None:
        return None
    return error.progress.finished_blocks(np.array(ids, dtype=np.int64), size, local=local)
