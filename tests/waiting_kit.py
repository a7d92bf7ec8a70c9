"""Every way to wait for a task, for the tests of transfers in the background."""

from __future__ import annotations

import asyncio
import select
import threading
from typing import TYPE_CHECKING, Any

from peers import TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm_datadist import CacheTask, TransferTask


def by_await(task: TransferTask | CacheTask) -> Any:
    async def wait() -> Any:
        return await asyncio.wait_for(task, TIMEOUT_S)

    return asyncio.run(wait())


def by_callback(task: TransferTask | CacheTask) -> Any:
    called = threading.Event()
    task.add_done_callback(called.set)
    assert called.wait(TIMEOUT_S)
    return at_once(task)


def by_descriptor(task: TransferTask | CacheTask) -> Any:
    poll = select.poll()
    poll.register(task, select.POLLIN)
    assert poll.poll(TIMEOUT_S * 1000)
    result = at_once(task)
    task.close()
    return result


def by_event_loop(task: TransferTask | CacheTask) -> Any:
    """The descriptor, watched by asyncio."""

    async def wait() -> Any:
        loop, readable = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(task, readable.set)
        await asyncio.wait_for(readable.wait(), TIMEOUT_S)
        loop.remove_reader(task)
        return at_once(task)

    return asyncio.run(wait())


def at_once(task: TransferTask | CacheTask) -> Any:
    """What there is without any waiting."""
    assert task.done()
    return task.synchronize(0) if hasattr(task, "synchronize") else task.result(0)


def by_blocking(task: TransferTask | CacheTask) -> Any:
    return task.synchronize() if hasattr(task, "synchronize") else task.result(TIMEOUT_S)


WAYS: dict[str, Callable[[Any], Any]] = {
    "block": by_blocking,
    "await": by_await,
    "callback": by_callback,
    "descriptor": by_descriptor,
    "event loop": by_event_loop,
}
