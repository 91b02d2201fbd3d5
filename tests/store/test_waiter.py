"""The waiter of an event loop: callbacks for references, and sources that the arena wakes."""

import asyncio

import pytest

import fastrt
from fastrt.errors import FastrtError
from fastrt.store import client as store_client
from fastrt.store.waiter import NEVER_S, LoopWaiter

PATIENCE_S = 60.0


class Counted:
    """A source with news for its first looks."""

    def __init__(self, news: int, fails: bool = False) -> None:
        self.looks = 0
        self.rests = asyncio.Event()
        self._news, self._fails = news, fails

    def look(self) -> None:
        self.looks += 1
        if self._fails:
            raise FastrtError("this source always fails")

    def arm(self) -> float:
        if self.looks < self._news:
            return 0.0
        self.rests.set()
        return NEVER_S


@pytest.fixture
def run(rt):
    """Run a coroutine function with a waiter of this session; what the loop reported as errors."""

    def run_one(test):
        errors = []

        async def main():
            loop = asyncio.get_running_loop()
            loop.set_exception_handler(lambda loop, context: errors.append(str(context["exception"])))
            waiter = LoopWaiter(store_client.require(), loop)
            try:
                await asyncio.wait_for(test(waiter), PATIENCE_S)
            finally:
                waiter.close()

        asyncio.run(main())
        return errors

    return run_one


def test_source_is_looked_at_until_it_has_no_news(run):
    async def test(waiter):
        source = Counted(3)
        waiter.open(source)
        await source.rests.wait()
        assert source.looks >= 3
        looks = source.looks
        source.rests.clear()
        waiter.stir()
        await source.rests.wait()
        assert source.looks > looks

    assert run(test) == []


def test_source_that_fails_is_reported_and_stops_no_other(run):
    async def test(waiter):
        failing, sound = Counted(1, fails=True), Counted(2)
        waiter.open(failing)
        waiter.open(sound)
        await sound.rests.wait()
        waiter.drop(failing)

    assert set(run(test)) == {"this source always fails"}


def test_callback_that_fails_is_reported_and_the_others_run(run):
    async def test(waiter):
        called, both = [], asyncio.Event()

        def then(ref):
            called.append(fastrt.get(ref))
            if len(called) == 2:
                both.set()
            raise FastrtError(f"callback {called[-1]} fails")

        refs = [fastrt.put(k) for k in range(2)]
        for ref in refs:
            waiter.add(ref, then)
        await both.wait()
        assert sorted(called) == [0, 1]

    assert sorted(run(test)) == ["callback 0 fails", "callback 1 fails"]
