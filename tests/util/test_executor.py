"""`fastrt.Executor` keeps the contract of `concurrent.futures`: what CPython tests of its own executors, retold.

Each test names the one of CPython's that it stands for where there is one; `test_executor_cpython.py` runs those
themselves where this Python has them.
"""

import concurrent.futures as cf
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest

import fastrt
from fastrt.errors import FastrtError, SerializationError, TaskError, WorkerCrashedError
from fastrt.store import client as store_client


class Thing:
    def name(self, suffix=""):
        return "thing" + suffix


def mul(x, y):
    return x * y


def capture(*args, **kwargs):
    return args, kwargs


def held(path, value=None):
    """Return `value` once there is a file."""
    pause = threading.Event()
    while not os.path.exists(path):
        pause.wait(0.005)
    if isinstance(value, Exception):
        raise value
    return value


def die_unless(path):
    """Kill this worker, the first time."""
    if not os.path.exists(path):
        with open(path, "w"):
            os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid()


@pytest.fixture
def executor(rt):
    with fastrt.Executor() as made:
        yield made


@pytest.fixture(params=[None, 1], ids=["unlimited", "one at a time"])
def either(rt, request):
    """An executor whose calls go straight to the workers, and one that keeps them in its own queue."""
    with fastrt.Executor(request.param) as made:
        yield made


@pytest.fixture
def gate(tmp_path):
    """A file that does not exist yet; it is made at the end in any case."""
    path = tmp_path / "gate"
    yield path
    path.touch()


# ---- executor.py ----


def test_submit_and_keywords(either):
    assert either.submit(pow, 2, 8).result() == 256
    assert either.submit(mul, 2, y=8).result() == 16
    assert either.submit(capture, 1, self=2, fn=3).result() == ((1,), {"self": 2, "fn": 3})
    for wrong in ({"fn": capture, "arg": 1}, {"arg": 1}):
        with pytest.raises(TypeError):
            either.submit(**wrong)
    offset, thing = 5, Thing()
    calls = [either.submit(lambda x: x + offset, 1), either.submit(thing.name, "s"), either.submit(Thing)]
    calls += [either.submit(mul, fastrt.put(3), 4), either.submit(np.sum, np.ones(5000))]
    results = [call.result() for call in calls]
    assert results[:2] + results[3:] == [6, "things", 12, 5000.0]
    assert isinstance(results[2], Thing)


def test_map(either):
    expected = list(map(pow, range(10), range(10)))
    for chunksize in (1, 3, 100):
        assert list(either.map(pow, range(10), range(12), chunksize=chunksize)) == expected
    assert list(either.map(mul)) == list(either.map(mul, [], [1])) == []
    assert list(either.map(Thing().name, ["a", "b"])) == ["thinga", "thingb"]
    with pytest.raises(ValueError, match="chunksize must be >= 1"):
        either.map(abs, [1], chunksize=0)


@pytest.mark.parametrize("chunksize", [1, 2])
def test_map_exception_ends_the_iterator(either, chunksize):
    quotients = either.map(divmod, [1, 1, 1, 1], [2, 3, 0, 5], chunksize=chunksize)
    assert [next(quotients), next(quotients)] == [(0, 1)] * 2
    with pytest.raises(ZeroDivisionError):
        next(quotients)
    assert list(quotients) == []


def test_map_timeout(either, gate):
    results, done = either.map(lambda path: path and held(path), [None, None, gate], timeout=0.2), []
    with pytest.raises(cf.TimeoutError):
        done.extend(results)
    assert done == [None] * len(done)
    gate.touch()
    assert list(either.map(abs, [-1], timeout=50)) == [1]


def test_map_keeps_arguments_that_cannot_be_sent_in_their_place(executor):
    results = executor.map(type, [1, threading.Lock(), 2])
    assert next(results) is int
    with pytest.raises(SerializationError):
        next(results)


def test_map_stopped_early_cancels_what_has_not_begun(rt, gate, tmp_path):
    with fastrt.Executor() as executor:
        marks = [tmp_path / f"mark{k}" for k in range(50)]
        results = executor.map(lambda path, mark: (mark.touch(), held(path)), [gate.parent, *[gate] * 49], marks)
        next(results)
        results.close()
        gate.touch()
    assert sum(mark.exists() for mark in marks) < 10


def test_shutdown_right_after_map_issue12456(rt):
    executor = fastrt.Executor()
    executor.map(str, [2] * 6)
    executor.shutdown()


def test_no_stale_references_issue16284(either):
    thing, gone = Thing(), threading.Event()
    watched = weakref.ref(thing, lambda ref: gone.set())
    either.submit(thing.name)
    del thing
    assert gone.wait(20)
    assert watched() is None


def test_wrong_settings_are_refused(rt):
    for number in (0, -1):
        with pytest.raises(ValueError, match="max_workers must be greater than 0"):
            fastrt.Executor(number)
    for wrong in ({"max_workers": 1.5}, {"max_workers": True}, {"initializer": 3}):
        with pytest.raises(TypeError):
            fastrt.Executor(**wrong)
    for retries in (-1, 251, 1.0):
        with pytest.raises(ValueError, match="max_retries"):
            fastrt.Executor(max_retries=retries)
    with pytest.raises(TypeError, match=r"call mul\.remote"), fastrt.Executor() as executor:
        executor.submit(fastrt.remote(mul), 1, 2).result()


def test_map_keeps_no_reference_to_results_issue14406(executor):
    for thing in executor.map(lambda k: Thing(), range(10)):
        watched = weakref.ref(thing)
        del thing
        assert watched() is None


# ---- test_shutdown.py ----


def test_run_after_shutdown(rt):
    executor = fastrt.Executor()
    executor.shutdown()
    for call in (lambda: executor.submit(pow, 2, 5), lambda: executor.map(abs, [1])):
        with pytest.raises(RuntimeError, match="cannot schedule new futures after shutdown"):
            call()


def test_end_of_the_program_runs_what_was_submitted_and_refuses_more(rt, program):
    out, err = program(
        """
        import atexit, threading, fastrt
        @atexit.register
        def last():
            try:
                executors[0].submit(id, None)
            except RuntimeError as exc:
                print(exc)
        def say(text):
            threading.Event().wait(0.05)
            print(text)
        fastrt.init(2, "32MiB")
        executors = [fastrt.Executor(5), fastrt.Executor(1)]
        for executor in executors:
            executor.submit(say, "apple")
            executor.submit(say, "pear")
            executor.map(say, ["plum"])
            executor.shutdown(wait=False) if executor is executors[1] else None
        third = fastrt.Executor()
        third.submit(say, "fig")
        third.shutdown(wait=False, cancel_futures=True)  # perhaps it has begun
        """
    ).finish()
    words = out.split()
    assert (words.count("apple"), words.count("pear"), words.count("plum")) == (2, 2, 2), out
    assert words.count("fig") < 2
    assert "cannot schedule new futures after interpreter shutdown" in out
    assert not err


def test_shutdown_waits_for_all_issue12364(either):
    futures = [
        either.submit(threading.Event().wait, 0.005) if k % 10 == 0 else either.submit(abs, k) for k in range(50)
    ]
    either.shutdown()
    assert all(future.done() for future in futures)


def test_cancel_futures(either, gate):
    futures = [either.submit(held, gate) for _ in range(50)]
    mapped = either.map(held, [gate] * 20)
    threading.Timer(0.1, gate.touch).start()
    either.shutdown(cancel_futures=True)
    cancelled = [future for future in futures if future.cancelled()]
    others = [future for future in futures if not future.cancelled()]
    assert len(cancelled) > 20
    assert all(future.done() and future.exception() is None for future in others)
    assert not cf.wait(futures, 0).not_done  # waiters know of the cancelled ones, too
    with pytest.raises(cf.CancelledError):
        list(mapped)


@pytest.mark.parametrize("limit", [1, None])
def test_shutdown_after_a_quick_cancel_gh94440(rt, limit):
    executor = fastrt.Executor(limit)
    executor.submit(int).result()
    executor.submit(int).cancel()
    executor.shutdown(wait=True)


def test_executor_dropped_or_not_waited_for_still_computes(rt):
    executor = fastrt.Executor(5)
    results = executor.map(abs, range(-5, 5))
    del executor
    assert list(results) == [5, 4, 3, 2, 1, 0, 1, 2, 3, 4]
    executor = fastrt.Executor(1)
    results = executor.map(abs, range(-5, 5))
    executor.shutdown(wait=False)
    assert list(results) == [5, 4, 3, 2, 1, 0, 1, 2, 3, 4]


# ---- test_init.py ----


def set_variable(name, value):
    os.environ[name] = value


def fail_to_initialize():
    raise ValueError("error in initializer")


@pytest.mark.parametrize("limit", [1, 5])
def test_initializer_runs_in_each_worker_before_the_calls(rt, limit):
    with fastrt.Executor(limit, initializer=set_variable, initargs=(f"FRT_{limit}", "set")) as executor:
        assert [f.result() for f in [executor.submit(os.getenv, f"FRT_{limit}") for _ in range(9)]] == ["set"] * 9
        assert list(executor.map(os.getenv, [f"FRT_{limit}"] * 9)) == ["set"] * 9


def test_failing_initializer_breaks_the_executor(rt, caplog, wait_until):
    executor = fastrt.Executor(1, initializer=fail_to_initialize)
    with caplog.at_level(logging.CRITICAL, "concurrent.futures"):
        futures = [executor.submit(abs, 1) for _ in range(5)]
        for future in futures:
            with pytest.raises(cf.BrokenExecutor, match="error in initializer"):
                future.result()
        wait_until(lambda: executor._broken, "the executor to be broken")
    with pytest.raises(cf.BrokenExecutor, match="ValueError: error in initializer"):
        executor.submit(abs, 1)
    assert "ValueError: error in initializer" in caplog.text
    executor.shutdown()
    with fastrt.Executor(initializer=fail_to_initialize) as another, pytest.raises(cf.BrokenExecutor):
        list(another.map(abs, [1]))


# ---- test_wait.py, test_as_completed.py ----


def test_wait_knows_all_conditions(either, gate):
    now, later = either.submit(mul, 21, 2), either.submit(held, gate)
    done, left = cf.wait([now, later], return_when=cf.FIRST_COMPLETED, timeout=60)
    assert (done, left) == ({now}, {later})
    broken, bad = cf.Future(), either.submit(held, gate, ValueError("this is an exception"))
    broken.cancel()
    assert cf.wait([broken, now, later], timeout=0)[1] >= {later}
    threading.Timer(0.05, gate.touch).start()
    done, left = cf.wait([bad, cf.Future()], return_when=cf.FIRST_EXCEPTION, timeout=60)
    assert done == {bad}
    assert isinstance(bad.exception(), ValueError)
    done, left = cf.wait([now, later, bad], return_when=cf.ALL_COMPLETED)
    assert (done, left) == ({now, later, bad}, set())
    assert cf.wait([now, now], return_when=cf.FIRST_EXCEPTION).done == {now}


def test_as_completed_yields_each_once_and_times_out(either, gate):
    futures = [either.submit(mul, 2, 21), either.submit(mul, 7, 6)]
    assert set(cf.as_completed([*futures, *futures])) == set(futures)
    later = either.submit(held, gate)
    completed = cf.as_completed([*futures, later], timeout=0.05)
    assert {next(completed), next(completed)} == set(futures)
    with pytest.raises(cf.TimeoutError, match=r"1 \(of 3\) futures unfinished"):
        next(completed)
    with pytest.raises(cf.TimeoutError):
        later.result(0)
    with pytest.raises(cf.TimeoutError):
        later.exception(0)


# ---- test_future.py, as far as these futures differ ----


def test_callbacks_run_once_whoever_waits(either, wait_until):
    called = []
    futures = [either.submit(mul, k, 2) for k in range(20)]
    for future in futures:
        future.add_done_callback(called.append)
        future.result()
    wait_until(lambda: len(called) == 20, "all callbacks")
    futures[0].add_done_callback(called.append)
    assert len(called) == 21


def test_running_and_cancel_know_how_far_the_call_is(rt, gate, wait_until):
    with fastrt.Executor() as executor:
        begun = [executor.submit(held, gate, k) for k in range(2)]
        waiting = executor.submit(mul, 1, 2)
        wait_until(lambda: all(future.running() for future in begun), "both workers to be busy")
        assert not waiting.running()
        assert not begun[0].cancel()
        told = []
        waiting.add_done_callback(told.append)
        assert waiting.cancel()
        assert waiting.cancel()
        assert (waiting.cancelled(), waiting.done(), told) == (True, True, [waiting])
        with pytest.raises(cf.CancelledError):
            waiting.result()
        gate.touch()
        assert [future.result() for future in begun] == [0, 1]
        assert not begun[0].cancel()
        assert not begun[0].running()


def test_a_task_cancelled_from_elsewhere_is_a_cancelled_future(rt, gate, wait_until):
    with fastrt.Executor() as executor:
        future = executor.submit(held, gate)
        wait_until(future.running, "it to run")
        future.kill()
        with pytest.raises(cf.CancelledError):
            future.result(60)
        assert future.cancelled()


# ---- test_process_pool.py, test_deadlock.py ----


class Bomb:
    """Does something where it is pickled or unpickled."""

    def __init__(self, when, what):
        self.when, self.what = when, what

    def __reduce__(self):
        return (self.what, ()) if self.when == "unpickle" else self.what()


def crash():
    os.kill(os.getpid(), signal.SIGKILL)


def leave():
    sys.exit(3)


def fail():
    raise ZeroDivisionError("on purpose")


def test_exception_is_the_one_that_was_raised_with_the_remote_traceback(either):
    def raises():
        raise RuntimeError(123)  # some comment

    future = either.submit(raises)
    with pytest.raises(RuntimeError) as caught:
        future.result()
    assert type(caught.value) is RuntimeError
    assert caught.value.args == (123,)
    assert type(caught.value.__cause__) is TaskError
    assert "raise RuntimeError(123)  # some comment" in str(caught.value.__cause__)
    assert future.exception() is caught.value
    with pytest.raises(RuntimeError) as caught:
        next(either.map(lambda k: raises(), [1]))
    assert type(caught.value) is RuntimeError
    assert "some comment" in str(caught.value.__cause__)


def test_calls_that_cannot_travel_fail_alone(either):
    with pytest.raises(SerializationError):
        either.submit(type, threading.Lock()).result()
    with pytest.raises(TypeError):
        either.submit(mul, 1).result()
    with pytest.raises(ZeroDivisionError):
        either.submit(type, Bomb("unpickle", fail)).result()
    with pytest.raises((SerializationError, ZeroDivisionError)):
        either.submit(lambda: Bomb("pickle", fail)).result()
    with pytest.raises(ZeroDivisionError):
        either.submit(lambda: Bomb("unpickle", fail)).result()
    with pytest.raises(SystemExit):
        either.submit(leave).result()
    assert either.submit(mul, 6, 7).result() == 42


def test_a_killed_worker_costs_a_retry_and_in_the_end_the_call(rt, tmp_path):
    with fastrt.Executor() as executor:
        assert executor.submit(die_unless, tmp_path / "once").result() != os.getpid()
        assert len(set(executor.map(die_unless, [tmp_path / "a", tmp_path / "b"]))) >= 1
    with fastrt.Executor(max_retries=0) as executor:
        calls = [executor.submit(what) for what in (crash, lambda: Bomb("pickle", crash))]
        calls += [executor.submit(type, Bomb("unpickle", crash)), executor.submit(mul, 6, 7)]
        for call in calls[:3]:
            with pytest.raises(WorkerCrashedError):
                call.result(30)
        assert calls[3].result() == 42
        assert executor.submit(mul, 6, 7).result() == 42


def test_results_are_not_kept_in_the_workers(executor):
    """What a call returned lives as long as the driver has it: the arena is clean at the end of each test."""
    arrays = list(executor.map(np.ones, [50_000] * 4))
    assert sum(array.sum() for array in arrays) == 200_000
    future = executor.submit(np.ones, 50_000)
    assert future.result().sum() == 50_000
    del arrays, future
    gc.collect()


# ---- what is fastrt's own ----


def test_calls_that_wait_for_calls_do_not_starve(rt):
    def depth(executor_limit, n):
        if n == 0:
            return 0
        with fastrt.Executor(executor_limit) as inner:
            return inner.submit(depth, executor_limit, n - 1).result() + 1

    for limit in (None, 1):
        with fastrt.Executor(limit) as executor:
            assert [f.result(50) for f in [executor.submit(depth, limit, 3) for _ in range(3)]] == [3] * 3


def test_no_more_calls_run_at_once_than_max_workers(rt, tmp_path):
    def alone(folder):
        mark = folder / "mark"
        mark.mkdir()  # fails if another call is between this line and the last
        threading.Event().wait(0.01)
        mark.rmdir()

    with fastrt.Executor(1) as executor:
        list(executor.map(alone, [tmp_path] * 10))


def test_idle_futures_use_no_thread_each_and_no_processor(rt, gate, wait_until):
    with fastrt.Executor() as executor:
        futures = [executor.submit(held, gate) for _ in range(300)]
        before = threading.active_count()
        watchers = [t for t in threading.enumerate() if t.name == "fastrt-watch"]
        assert len(watchers) == 1
        watcher = store_client.require().waiter
        assert len(watcher._watch) == 300
        times = Path(f"/proc/self/task/{watchers[0].native_id}/schedstat")  # the third is how often it ran
        wait_until(lambda: times.read_text().split()[2] != "0", "the thread to run")
        ran = int(times.read_text().split()[2])
        until = time.monotonic() + 0.5
        wait_until(lambda: time.monotonic() > until, "a while")
        assert int(times.read_text().split()[2]) - ran <= 5  # every 250 ms, and for news
        gate.touch()
        assert [future.result() for future in futures] == [None] * 300
        assert threading.active_count() <= before  # a thread of an earlier test may end meanwhile


def test_an_executor_is_useless_in_a_forked_child_and_says_so(rt):
    with fastrt.Executor() as executor:
        assert executor.submit(mul, 1, 2).result() == 2
        code = os.fork()
        if code == 0:
            try:
                executor.submit(mul, 1, 2)
            except FastrtError as exc:
                os._exit(7 if "create another here" in str(exc) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(code, 0)[1]) == 7


def test_import_of_fastrt_stays_light(rt):
    code = (
        "import fastrt, sys\n"
        "assert not {'grpc', 'joblib', 'dask', 'fastrt.util.executor', 'multiprocessing.pool'} & set(sys.modules)\n"
        "assert fastrt.Executor is fastrt.util.Executor and fastrt.util.Pool\n"
        "try: fastrt.nothing\n"
        "except AttributeError as exc: print(exc)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "module 'fastrt' has no attribute 'nothing'"
