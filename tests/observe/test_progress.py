"""`progress`: what it gives, and what it shows in a pipe and at a terminal."""

import io
import os
import select
import traceback

import pytest

import fastrt
from fastrt._core.tasks import tasks as core
from fastrt.store import client as store_client


@fastrt.remote
def tenfold(number):
    if number == 3:
        raise ValueError("three")
    return 10 * number


@fastrt.remote
class Failing:
    async def call(self):
        await self.inner()

    async def inner(self):
        raise RuntimeError("in a coroutine")


@pytest.fixture(scope="module")
def rt():
    with fastrt.init(num_workers=1, object_store_memory=64 << 20) as runtime:
        yield runtime


def test_values_come_in_the_order_of_the_references_and_lines_say_how_far(rt):
    shown = io.StringIO()
    bar = fastrt.progress([tenfold.remote(k) for k in (2, 1, 5)], "numbers", file=shown)
    assert len(bar) == 3
    assert bar.get() == [20, 10, 50]
    lines = shown.getvalue().splitlines()
    assert lines[-1].startswith("numbers: 3/3 ready after ")
    assert "failed" not in shown.getvalue()
    assert fastrt.progress([], file=shown).get() == []


def test_references_come_as_they_become_ready_and_errors_are_counted(rt):
    shown = io.StringIO()
    refs = [tenfold.remote(k) for k in range(20)]
    assert set(fastrt.progress(iter(refs), file=shown)) == set(refs)
    last = shown.getvalue().splitlines()[-1]
    assert "20/20 ready, 1 failed" in last
    assert len(shown.getvalue().splitlines()) <= 11  # not one for each
    with pytest.raises(ValueError, match="three"):
        fastrt.progress(refs, file=shown).get()
    assert fastrt.progress(refs, file=shown).wait() == refs


def test_bar_is_drawn_at_a_terminal(rt):
    main, other = os.openpty()
    with open(other, "w") as terminal:
        assert fastrt.progress([tenfold.remote(1)], "at a terminal", file=terminal).get() == [10]
        terminal.flush()
        drawn = b""
        while b"1/1" not in drawn and select.select([main], [], [], 10)[0]:
            drawn += os.read(main, 65536)
    os.close(main)
    drawn = drawn.decode()
    assert "at a terminal" in drawn
    assert "1/1" in drawn
    assert "\x1b[" in drawn


def test_wrong_use_and_timeouts_are_errors(rt):
    with pytest.raises(TypeError, match="progress takes ObjectRefs; this has a int"):
        fastrt.progress([1])
    store = store_client.require()
    task, never = core.promise(store.client)
    with pytest.raises(fastrt.GetTimeoutError):
        fastrt.progress([tenfold.remote(1), never], timeout=0.01).get()
    store.put_error(task, fastrt.TaskCancelledError("the test has ended"))
    core.finish(store.client, task)


def test_error_of_a_task_shows_no_frame_of_fastrt_but_the_call_itself(rt, monkeypatch):
    for ref, where in ((tenfold.remote(3), "in tenfold"), (Failing.remote().call.remote(), "in inner")):
        with pytest.raises((ValueError, RuntimeError)) as caught:
            fastrt.get(ref)
        text = "".join(traceback.format_exception(caught.value))
        assert where in text
        inside = [line for line in text.splitlines() if line.lstrip().startswith("File") and "/fastrt/" in line]
        assert [line.split()[-1] for line in inside if "test_progress" not in line] == ["get"]
    monkeypatch.setenv("FASTRT_FULL_TRACEBACK", "1")
    with pytest.raises(ValueError, match="three") as caught:
        fastrt.get(tenfold.remote(3))
    assert "in load" in "".join(traceback.format_tb(caught.tb))
    del ref, caught
