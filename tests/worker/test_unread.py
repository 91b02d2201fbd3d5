"""Errors that nothing reads: printed once, with the user's traceback; errors that were read are not."""

from collections.abc import Callable
from typing import Any

import pytest

from fastrt.store.unread import PRINTED_MAX, WINDOW_S, Printer

WORDS = "fastrt: an error was never read:"
HEAD = """
import os, sys, threading, time
import fastrt
fastrt.init(2, "64MiB")

@fastrt.remote
def fail(text="boom", wait=""):
    if wait:
        open(wait).read()
    raise ValueError(text)

@fastrt.remote(max_retries=0)
def crash():
    os._exit(3)

@fastrt.remote
class Actor:
    def __init__(self, fails=False):
        if fails:
            raise ValueError("not built")
    def fail(self):
        raise ValueError("in a method")
    def die(self):
        os._exit(4)
    def stay(self, seconds):
        threading.Event().wait(seconds)
"""


@pytest.fixture
def errors_of(program: Callable[..., Any]) -> Callable[..., str]:
    """Run a program; what it has printed to stderr."""

    def run(code: str) -> str:
        text: str = program(HEAD + code).finish()[1]
        return text

    return run


def test_error_of_a_task_that_is_not_waited_for_is_printed_with_its_traceback(errors_of):
    text = errors_of("""
fail.remote("one")
fail.options(num_returns=0).remote("two")
fail.options(num_returns=3).remote("three")
held = fail.remote("four")
fastrt.wait([held], timeout=60)
del held
crash.remote()
gone = crash.remote()
fastrt.wait([gone], timeout=60)
several = fail.options(num_returns=2).remote("five")
fastrt.wait(several, num_returns=2, timeout=60)
at_end = fail.remote("six")
fastrt.wait([at_end], timeout=60)
""")
    for word in ("one", "two", "three", "four", "five", "six"):
        assert text.count(f"ValueError: {word}") == 1, text
    assert text.count("task 'crash' was given up") == 2, text
    assert text.count(WORDS) == 8, text
    assert "raise ValueError(text)" in text, text
    assert "_core" not in text, text


def test_errors_of_actors_that_are_not_waited_for_are_printed(errors_of):
    text = errors_of("""
from fastrt._core.tasks import actors
from fastrt.store.client import require

def record(index):
    return actors.info(require().client, index)

actor = Actor.remote()
actor.fail.remote()
fastrt.get(actor.stay.remote(0))
dropped = Actor.remote(True)
index = actors.index_of(require().client, dropped._actor_ref)
del dropped
while record(index)["state"] != actors.EMPTY:
    threading.Event().wait(0.005)
held_until_exit = Actor.remote(True)
index = actors.index_of(require().client, held_until_exit._actor_ref)
while record(index)["ended"] != actors.FAILED:
    threading.Event().wait(0.005)
other = Actor.remote()
held = other.die.remote()
fastrt.wait([held], timeout=60)
""")
    assert text.count("ValueError: in a method") == 1, text
    assert text.count("ValueError: not built") == 2, text
    assert text.count("died while it ran this call") == 1, text
    assert text.count(WORDS) == 4, text


def test_errors_that_were_read_passed_on_cancelled_or_retried_are_not_printed(errors_of):
    text = errors_of("""
import asyncio, concurrent.futures, contextlib

@fastrt.remote
def use(x):
    return x

@fastrt.remote
def read_inside(refs):
    with contextlib.suppress(ValueError):
        fastrt.get(refs[0])

@fastrt.remote(max_retries=3, retry_exceptions=True)
def second_time(path):
    if os.path.exists(path):
        return 1
    open(path, "w").close()
    raise ValueError("again")

@fastrt.remote
def numbers():
    yield 1
    raise ValueError("after one")

def expect(function):
    try:
        function()
    except Exception:
        return
    raise SystemExit("nothing was raised")

expect(lambda: fastrt.get(fail.remote()))
expect(lambda: fastrt.get([fail.remote() for _ in range(20)]))
expect(lambda: fastrt.get(fastrt.remote(lambda *args: args).remote(fail.remote("one"), fail.remote("two"))))
expect(lambda: fastrt.get(fastrt.remote(lambda *args: args).remote(fail.remote("one"), fail.remote("two"), [])))
async def wait():
    await fail.remote()
expect(lambda: asyncio.run(wait()))
expect(lambda: fail.remote().future().result())
expect(lambda: fastrt.get(use.remote(fail.remote())))
fastrt.get(read_inside.remote([fail.remote()]))
fastrt.get(second_time.remote(os.path.join(os.getcwd(), "flag")))
expect(lambda: [fastrt.get(ref) for ref in numbers.remote()])
with fastrt.Executor() as executor:
    expect(executor.submit(int, "x").result)
    expect(lambda: list(executor.map(int, ["x"] * 20)))
actor = Actor.remote(True)
expect(lambda: fastrt.get(actor.fail.remote()))
expect(lambda: fastrt.get(actor.fail.remote()))
late = Actor.remote(True)
other = Actor.remote()
expect(lambda: fastrt.get(other.fail.remote()))
refs = [other.stay.remote(60), other.fail.remote()]
fastrt.wait(refs, timeout=0.1)
fastrt.kill(other)
fastrt.wait(refs, num_returns=2, timeout=60)
expect(lambda: fastrt.get(late.fail.remote()))
slow = fastrt.remote(time.sleep).remote(60)
fastrt.cancel(slow)
fastrt.wait([slow], timeout=60)
""")
    assert WORDS not in text, text


def test_flood_of_errors_is_counted_beyond_the_limit():
    now, written = [0.0], []
    printer = Printer(written.append, lambda: now[0])
    for k in range(PRINTED_MAX + 5):
        printer.say(f"error {k}")
    assert len(written) == PRINTED_MAX
    assert 0 < printer.left_s() <= WINDOW_S
    now[0] += WINDOW_S
    printer.say("later")
    assert [line for line in written if "5 more errors were never read" in line] == [written[-2]]
    printer.drop(7)
    printer.end()
    assert written[-1].startswith("fastrt: 7 more errors were never read; at most 10 are printed in 5 s")
    assert printer.left_s() == 0


def test_flood_of_failing_tasks_ends_with_their_number(errors_of):
    text = errors_of("""
refs = [fail.remote(str(k)) for k in range(300)]
fastrt.wait(refs, num_returns=300, timeout=30)
""")
    assert text.count(WORDS) == PRINTED_MAX
    assert f"fastrt: {300 - PRINTED_MAX} more errors were never read" in text
