"""An event loop in a thread: calls into it, their end by a timeout, and its own end."""

import asyncio
import threading
from concurrent.futures import TimeoutError as FutureTimeout

import pytest

from fastrt.net.loop_thread import LoopThread


@pytest.fixture
def thread():
    made = LoopThread("test-loop")
    yield made
    if not made.loop.is_closed():
        made.stop()


async def where():
    return threading.current_thread().name


def test_coroutine_runs_in_the_thread_and_its_result_or_error_comes_back(thread):
    assert thread.run(where()) == "test-loop"
    assert not thread.is_current

    async def fail():
        assert thread.is_current
        raise KeyError("of the coroutine")

    with pytest.raises(KeyError, match="of the coroutine"):
        thread.run(fail())


def test_timeout_cancels_the_coroutine(thread):
    cancelled = threading.Event()

    async def wait():
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    with pytest.raises(FutureTimeout):
        thread.run(wait(), 0.01)
    assert cancelled.wait(30)


def test_stop_ends_the_thread_and_closes_the_loop(thread):
    thread.stop()
    assert thread.loop.is_closed()
    assert "test-loop" not in [one.name for one in threading.enumerate()]
