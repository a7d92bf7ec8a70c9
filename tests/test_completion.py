"""Every way to learn that work in the background has ended."""

from __future__ import annotations

import asyncio
import gc
import select
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest

from llm_datadist.utils.completion import Completion
from test_concurrency_forks import in_child

WAIT_S = 20


@pytest.fixture
def future() -> Future[int]:
    made: Future[int] = Future()
    made.set_running_or_notify_cancel()
    return made


def test_block(future: Future[int]) -> None:
    completion = Completion(future)
    assert not completion.done()
    with pytest.raises(TimeoutError, match=r"within 0\.01 s"):
        completion.result(0.01)
    ender = threading.Thread(target=future.set_result, args=(7,))
    ender.start()
    assert completion.result(WAIT_S) == 7
    assert completion.done()
    ender.join(WAIT_S)


def test_an_exception_is_that_of_the_work(future: Future[int]) -> None:
    future.set_exception(KeyError("x"))
    with pytest.raises(KeyError, match="x"):
        Completion(future).result(WAIT_S)


def test_await(future: Future[int]) -> None:
    async def wait() -> int:
        asyncio.get_running_loop().call_soon(threading.Thread(target=future.set_result, args=(7,)).start)
        return await asyncio.wait_for(_awaited(Completion(future)), WAIT_S)

    assert asyncio.run(wait()) == 7


async def _awaited(completion: Completion[int]) -> int:
    return await completion


def test_many_may_await_and_one_that_is_cancelled_harms_nobody(future: Future[int]) -> None:
    async def wait() -> list[object]:
        completion = Completion(future)
        tasks = [asyncio.ensure_future(_awaited(completion)) for _ in range(3)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.wait([tasks[1]], timeout=WAIT_S)
        assert not completion.done()
        future.set_result(7)
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), WAIT_S)

    first, second, third = asyncio.run(wait())
    assert (first, third) == (7, 7)
    assert isinstance(second, asyncio.CancelledError)


def test_a_loop_that_has_ended_meanwhile(future: Future[int], caplog: pytest.LogCaptureFixture) -> None:
    async def begin() -> None:
        waiting = asyncio.ensure_future(_awaited(Completion(future)))
        await asyncio.sleep(0)
        assert not waiting.done()

    asyncio.run(begin())
    future.set_result(7)
    assert not caplog.records


def test_be_called(future: Future[int]) -> None:
    completion, called = Completion(future), []
    completion.add_done_callback(lambda: called.append(threading.current_thread()))
    assert not called
    future.set_result(1)
    completion.add_done_callback(lambda: called.append(threading.current_thread()))
    assert called == [threading.current_thread()] * 2


@pytest.mark.parametrize("early", [False, True])
def test_watch_a_descriptor(future: Future[int], early: bool) -> None:
    completion = Completion(future)
    if early:
        future.set_result(1)
    poll = select.poll()
    poll.register(completion, select.POLLIN)
    assert bool(poll.poll(0)) == early
    if not early:
        threading.Thread(target=future.set_result, args=(1,)).start()
    assert poll.poll(WAIT_S * 1000) == [(completion.fileno(), select.POLLIN)]
    assert poll.poll(0)  # it stays readable
    completion.close()


def open_descriptors() -> set[str]:
    gc.collect()
    return {each.name for each in Path("/proc/self/fd").iterdir()}


@pytest.mark.parametrize("close", [False, True])
def test_the_descriptor_goes_with_the_object(future: Future[int], close: bool) -> None:
    before = open_descriptors()
    completion = Completion(future)
    assert completion.fileno() == completion.fileno()
    if close:
        completion.close()
        completion.close()
        with pytest.raises(ValueError, match="closed"):
            completion.fileno()
    else:
        del completion
    assert open_descriptors() == before
    future.set_result(1)  # its end finds no descriptor any more, or one that belongs to somebody else


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # of Python 3.12
def test_a_forked_child_is_told(future: Future[int]) -> None:
    """Also of what has ended already: the locks of the parent cannot be trusted there."""
    future.set_result(7)
    completion = Completion(future, KeyError)
    calls = (completion.done, completion.result, completion.fileno, completion.__await__().__next__)

    def told() -> str:
        for call in calls:
            with pytest.raises(KeyError, match="not in its forked child"):
                call()
        return "told"

    assert in_child(told) == "told"
    assert completion.result(WAIT_S) == 7
