"""Transfers that run on a thread of the engine instead of the caller's."""

from __future__ import annotations

import functools
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING

from llm_datadist.engine.errors import failure
from llm_datadist.net.workers import NoThreadError
from llm_datadist.status import LLMStatusCode

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm_datadist.engine.core import Core
    from llm_datadist.engine.requests import PullRequest, PushRequest
    from llm_datadist.status import LLMException
    from llm_datadist.utils.deadline import Deadline


def begin(
    core: Core, request: PullRequest | PushRequest, deadline: Deadline, transfer: Callable[[], None]
) -> Future[None]:
    """Run ``transfer`` on a worker. The local cache is held from now on, as by the transfer, until it has ended.

    Raises:
        LLMException: LLM_FAILED: the engine has been closed, or the system gives no thread.
    """
    outcome: Future[None] = Future()
    outcome.set_running_or_notify_cancel()
    place: Future[object] = Future()
    place.add_done_callback(
        lambda ended: outcome.set_exception(_finalized(request.operation)) if ended.cancelled() else None
    )
    entry = core.catalogue.get(request.cache_id)
    if entry is not None:
        outcome.add_done_callback(lambda _ended: core.catalogue.let_go(entry, deadline))
    try:
        if entry is not None:
            core.catalogue.hold(entry, deadline)  # if that is too late, the transfer finds the words for it
        core.transfer_workers.submit(functools.partial(_run, transfer, outcome), place)
    except NoThreadError as error:
        place.cancel()
        context = f"no thread could be started: {error}"
        raise failure(LLMStatusCode.LLM_FAILED, request.operation, context, retryable=True) from error
    except CancelledError as error:
        place.cancel()
        raise _finalized(request.operation) from error
    except BaseException:  # Ctrl-C; if a worker has it already, it ends there
        place.cancel()
        raise
    return outcome


def _run(transfer: Callable[[], None], outcome: Future[None]) -> None:
    try:
        transfer()
    except BaseException as error:  # noqa: BLE001 - whoever waits for it gets it
        outcome.set_exception(error)
    else:
        outcome.set_result(None)
    finally:
        del outcome  # else its exception would keep it, by way of this frame


def _finalized(operation: str) -> LLMException:
    return failure(LLMStatusCode.LLM_FAILED, operation, "it has been finalized", phase="check")
