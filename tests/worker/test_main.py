"""The worker's loop against whatever a task does: raise, crash, nest, print, fork, close, and meddle."""

import asyncio
import contextlib
import faulthandler
import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import psutil
import pytest

import fastrt
from fastrt._core.memory import clients
from fastrt.errors import SerializationError, TaskError, WorkerCrashedError
from fastrt.store import client as store_client

pytestmark = pytest.mark.usefixtures("rt")


def call(function, *args, **kwargs):
    return fastrt.get(function.remote(*args, **kwargs), timeout=30)


@fastrt.remote
def run(function, *args):
    return function(*args)


def workers():
    rows = clients.table(store_client.require().client.segment)
    return {row["pid"] for row in rows if row["kind"] == clients.KIND_WORKER}


def test_the_kernel_ends_workers_before_the_others_when_memory_runs_out():
    """`oom_score_adj`: the kernel adds this many thousandths of the machine's memory to what a process uses."""

    def score(pid):
        return int(Path(f"/proc/{pid}/oom_score_adj").read_text())

    daemon = store_client.require().client.segment.daemon[0]
    assert call(run, os.getpid) in workers()
    assert {score(pid) for pid in workers()} == {1000}
    assert score(daemon) == score(os.getpid()) < 1000


# ---- exceptions ----


class TwoArguments(Exception):
    def __init__(self, a, b):
        super().__init__(f"{a}-{b}")
        self.a, self.b = a, b

    def __reduce__(self):
        return TwoArguments, (self.a, self.b)


class Unrestorable(Exception):
    def __init__(self, a, b):
        super().__init__("only one")


class WithLock(Exception):
    def __init__(self):
        super().__init__("locked")
        self.lock = threading.Lock()


class InterruptsReduce(Exception):
    def __reduce__(self):
        raise KeyboardInterrupt


class InterruptsStr(Exception):
    def __str__(self):
        raise KeyboardInterrupt

    __repr__ = __str__


class ExitsOnLook(Exception):
    def __getattribute__(self, name):
        raise SystemExit(name)


class OursWithLock(SerializationError):
    def __init__(self):
        super().__init__("ours")
        self.lock = threading.Lock()


class Final(Exception):
    def __init_subclass__(cls):
        raise TypeError("final")


RAISED = {
    "plain": (lambda: ValueError("v", 3), ValueError, "ValueError: ('v', 3)"),
    "os": (lambda: FileNotFoundError(2, "gone", "/x"), FileNotFoundError, "/x"),
    "two": (lambda: TwoArguments(1, 2), TwoArguments, "1-2"),
    "unrestorable": (lambda: Unrestorable(1, 2), TaskError, "only one"),
    "lock": (WithLock, TaskError, "locked"),
    "reduce": (InterruptsReduce, TaskError, "InterruptsReduce"),
    "str": (InterruptsStr, TaskError, "InterruptsStr"),
    "look": (ExitsOnLook, TaskError, "ExitsOnLook"),
    "ours": (OursWithLock, TaskError, "ours"),
    "final": (lambda: Final("f"), TaskError, "Final: f"),
    "exit": (lambda: SystemExit(3), SystemExit, "SystemExit: 3"),
    "interrupt": (lambda: KeyboardInterrupt(), KeyboardInterrupt, "KeyboardInterrupt"),
    "cancelled": (lambda: asyncio.CancelledError("c"), asyncio.CancelledError, "CancelledError: c"),
    "generator": (lambda: GeneratorExit(), TaskError, "GeneratorExit"),
    "stop": (lambda: StopIteration(1), TaskError, "StopIteration"),
    "memory": (lambda: MemoryError("m"), MemoryError, "MemoryError: m"),
    "timeout": (lambda: TimeoutError("t"), TimeoutError, "t"),
    "unicode": (lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), UnicodeDecodeError, "bad"),
    "surrogate": (lambda: ValueError("\ud800"), ValueError, "ValueError"),
    "huge": (lambda: ValueError("x" * 5_000_000), ValueError, "xxx"),
}


@pytest.mark.parametrize("name", RAISED)
def test_whatever_is_raised_comes_back_readable_and_costs_no_worker(rt, name):
    make, kind, text = RAISED[name]

    @fastrt.remote(max_retries=0)
    def fail():
        raise make()

    call(run, len, [])
    before = workers()
    with pytest.raises(TaskError) as info:
        call(fail)
    assert isinstance(info.value, kind)
    assert text in str(info.value)
    assert "fail" in info.value.task_name
    assert str(pickle.loads(pickle.dumps(info.value))) == str(info.value)
    assert info.value.pid in workers()
    assert before <= workers()


def test_remote_traceback_shows_the_users_frames_only(rt):
    def inner():
        raise ValueError("here")

    @fastrt.remote
    def outer():
        inner()

    with pytest.raises(ValueError, match="here") as info:
        call(outer)
    text = str(info.value)
    assert "in outer" in text
    assert "in inner" in text
    assert "fastrt/worker" not in text


def test_error_passes_through_nested_tasks_with_its_first_cause(rt):
    @fastrt.remote
    def nest(n):
        if n == 0:
            raise TwoArguments("a", "b")
        return fastrt.get(nest.remote(n - 1))

    with pytest.raises(TwoArguments) as info:
        call(nest, 5)
    assert (info.value.a, info.value.b) == ("a", "b")
    assert type(info.value.cause) is TwoArguments
    assert str(info.value).count("in nest") >= 2


def test_deep_recursion_and_long_chains_of_causes_are_reported(rt):
    def deep(n):
        return deep(n + 1)

    def chain():
        error = None
        for i in range(3000):
            following = ValueError(i)
            following.__cause__ = error
            error = following
        raise error

    with pytest.raises(RecursionError):
        call(run, deep, 0)
    with pytest.raises(ValueError, match="2999"):
        call(run, chain)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups came with 3.11")
def test_exception_group_comes_back_as_one(rt):
    def fail():
        raise ExceptionGroup("g", [ValueError(1), KeyError(2)])  # noqa: F821  a name of 3.11

    with pytest.raises(TaskError) as info:
        call(run, fail)
    assert [type(e) for e in info.value.exceptions] == [ValueError, KeyError]


class RaisesInReduce:
    def __init__(self, kind):
        self.kind = kind

    def __reduce__(self):
        raise self.kind("in reduce")


def test_result_that_cannot_be_pickled_is_an_error_that_names_the_part(rt):
    with pytest.raises(SerializationError, match=r"lock.* at value\['k'\]\[1\]"):
        call(run, lambda: {"k": [1, threading.Lock()]})
    with pytest.raises(SerializationError, match="in reduce"):
        call(run, lambda: [RaisesInReduce(ZeroDivisionError)])
    for kind in (KeyboardInterrupt, SystemExit):
        with pytest.raises(TaskError, match="in reduce"):
            call(run, lambda kind=kind: [RaisesInReduce(kind)])


def test_result_that_cannot_be_read_is_an_error_here(rt):
    def broken():
        raise ZeroDivisionError("in read")

    class Bad:
        def __reduce__(self):
            return broken, ()

    with pytest.raises(ZeroDivisionError, match="in read"):
        call(run, Bad)
    with pytest.raises(ZeroDivisionError, match="in read"):
        call(run, len, Bad())


# ---- retries ----


@pytest.mark.parametrize(
    ("die", "how"),
    [
        (lambda: os._exit(7), "exited with code 7"),
        (lambda: os._exit(0), "exited with code 0"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), r"signal 9 \(SIGKILL, Killed\)"),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), r"signal 15 \(SIGTERM, Terminated\)"),
        (lambda: os.kill(os.getpid(), 40), r"signal 40 \(.+\)"),
        (
            lambda: (faulthandler.disable(), __import__("ctypes").string_at(0)),
            r"signal 11 \(SIGSEGV, Segmentation fault\)",
        ),
    ],
    ids=["exit 7", "exit 0", "kill", "term", "real time", "segfault"],
)
def test_crash_is_retried_then_named_with_signal_and_attempts(rt, tmp_path, die, how):
    def crash():
        with open(tmp_path / "attempts", "a") as file:
            file.write("x")
        die()

    for retries in (0, 2):
        with pytest.raises(WorkerCrashedError, match=f"'crashing'.* after attempt {retries + 1}:.*process .*{how}"):
            call(fastrt.remote(max_retries=retries, name="crashing")(crash))
    assert (tmp_path / "attempts").read_text() == "x" * 4
    assert call(run, len, [1]) == 1


def test_crash_that_passes_by_itself_is_not_seen(rt, tmp_path):
    @fastrt.remote
    def third(ref):
        count = len(os.listdir(tmp_path))
        open(tmp_path / str(count), "w").close()
        if count < 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return count, ref.sum()

    assert call(third, np.ones(10_000)) == (2, 10_000)


def test_exceptions_are_retried_only_when_asked_for(rt, tmp_path):
    def flaky(name, good_at):
        with open(tmp_path / name, "a") as file:
            file.write("x")
        if len((tmp_path / name).read_text()) < good_at:
            raise ValueError("not yet")
        return "good"

    with pytest.raises(ValueError, match="not yet"):
        call(fastrt.remote(flaky), "a", 2)
    assert (tmp_path / "a").read_text() == "x"
    assert call(fastrt.remote(retry_exceptions=True)(flaky), "b", 4) == "good"
    with pytest.raises(ValueError, match="not yet"):
        call(fastrt.remote(retry_exceptions=True, max_retries=1)(flaky), "c", 3)
    assert (tmp_path / "c").read_text() == "xx"


def test_crash_of_one_task_does_not_touch_the_others(rt):
    crash = fastrt.remote(max_retries=0)(lambda: os._exit(1))
    refs = [(crash if i % 10 == 3 else run.options()).remote(*([] if i % 10 == 3 else [int, i])) for i in range(60)]
    for i, ref in enumerate(refs):
        if i % 10 == 3:
            with pytest.raises(WorkerCrashedError):
                fastrt.get(ref, timeout=30)
        else:
            assert fastrt.get(ref, timeout=30) == i


# ---- nesting ----


@fastrt.remote
def nest_get(n):
    return 0 if n == 0 else fastrt.get(nest_get.remote(n - 1)) + 1


@fastrt.remote
def nest_wait(n):
    if n == 0:
        return 0
    (ref,), _ = fastrt.wait([nest_wait.remote(n - 1)])
    return fastrt.get(ref) + 1


@fastrt.remote
def nest_timeout(n):
    return 0 if n == 0 else fastrt.get(nest_timeout.remote(n - 1), timeout=60) + 1


@fastrt.remote
def nest_future(n):
    return 0 if n == 0 else nest_future.remote(n - 1).future().result() + 1


@fastrt.remote
def nest_thread(n):
    if n == 0:
        return 0
    got = []
    thread = threading.Thread(target=lambda: got.append(fastrt.get(nest_thread.remote(n - 1))))
    thread.start()
    thread.join()
    return got[0] + 1


@pytest.mark.parametrize("function", [nest_get, nest_wait, nest_timeout, nest_future, nest_thread])
def test_tasks_nested_deeper_than_workers_do_not_deadlock(rt, function):
    assert call(function, 40) == 40


def test_tasks_nested_far_deeper_than_spare_workers_do_not_overflow_the_stack(rt):
    assert call(nest_get, 300) == 300


def test_many_nested_tasks_at_once_give_the_right_results(rt):
    refs = [nest_get.remote(n % 12) for n in range(150)]
    assert fastrt.get(refs, timeout=40) == [n % 12 for n in range(150)]


def test_tasks_that_all_wait_for_one_other_go_on_when_it_is_there(rt, tmp_path):
    @fastrt.remote
    def root(path):
        pause = threading.Event()
        while not os.path.exists(path):
            pause.wait(0.002)
        return fastrt.get(nest_get.remote(3))

    @fastrt.remote
    def follower(box):
        return fastrt.get(box[0])

    first = root.remote(str(tmp_path / "go"))
    refs = [follower.remote([first]) for _ in range(40)]
    fastrt.wait(refs, timeout=0.2)
    (tmp_path / "go").touch()
    assert fastrt.get(refs, timeout=30) == [3] * 40


# ---- what a task may do to its process ----


def test_tasks_use_the_session_that_they_run_in(rt):
    def inside():
        with pytest.raises(fastrt.FastrtError, match="session"):
            fastrt.init(1)
        fastrt.shutdown()
        return fastrt.is_initialized(), fastrt.get(fastrt.put([1]))

    assert call(run, inside) == (True, [1])


def test_child_that_a_task_forks_uses_the_same_session(rt):
    def fork():
        import multiprocessing

        context = multiprocessing.get_context("fork")
        queue = context.SimpleQueue()

        def child():
            from fastrt.store import client

            queue.put((fastrt.get(fastrt.put([7])), client.require().client.segment.session))

        process = context.Process(target=child)
        process.start()
        got = queue.get()
        process.join()
        return got, process.exitcode

    (value, session), code = call(run, fork)
    assert (value, session, code) == ([7], rt.session, 0)


@pytest.mark.parametrize(("leave", "code"), [(lambda: None, 0), (lambda: sys.exit(5), 5), (lambda: 1 / 0, 1)])
def test_child_that_a_task_forks_and_that_comes_back_leaves_by_itself(rt, leave, code):
    def fork():
        child = os.fork()
        if child == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            return leave()
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert call(run, fork) == code
    assert call(run, len, [1]) == 1


def test_processes_that_a_task_leaves_behind_end_with_its_worker(rt, tmp_path, wait_until):
    def crash():
        (tmp_path / "pid").write_text(str(subprocess.Popen(["sleep", "1000"]).pid))
        os._exit(1)

    with pytest.raises(WorkerCrashedError):
        call(fastrt.remote(max_retries=0)(crash))
    left = int((tmp_path / "pid").read_text())
    # A zombie that init has not reaped yet has ended too.
    wait_until(
        lambda: not psutil.pid_exists(left) or psutil.Process(left).status() == psutil.STATUS_ZOMBIE, "the child to end"
    )


def test_subprocess_and_shell_work_in_a_task(rt):
    assert call(run, subprocess.check_output, ["echo", "hi"]) == b"hi\n"


@pytest.mark.parametrize("first", [1, 3])
def test_task_that_closes_descriptors_harms_nobody_else(rt, first, wait_until):
    def close():
        os.closerange(first, first + 1 if first == 1 else 256)
        return os.getpid()

    closed = call(run, close)
    results = []
    for _ in range(30):
        try:
            results.append(call(run, lambda: np.ones(1000).sum()))
        except (fastrt.FastrtError, OSError):
            continue
    assert set(results) == {1000.0}
    with contextlib.suppress(ProcessLookupError):
        os.kill(closed, signal.SIGKILL)  # not for the next test
    wait_until(lambda: closed not in workers(), "the worker to be buried")


def test_workers_draw_different_random_numbers(rt):
    def draw():
        threading.Event().wait(0.05)
        import random

        return random.random(), float(np.random.random())

    drawn = fastrt.get([run.remote(draw) for _ in range(8)], timeout=30)
    assert len({number for pair in drawn for number in pair}) == 16


def test_worker_collects_garbage_but_looks_at_nothing_it_was_forked_with(rt):
    assert call(run, gc.isenabled)
    assert call(run, gc.get_freeze_count) > 10_000  # a Python that has only started has none


def test_result_that_shares_memory_with_the_arguments_is_right(rt):
    array = np.arange(100_000)
    halves = fastrt.get([run.remote(lambda a: a[::2], array), run.remote(lambda a: a, array)], timeout=30)
    assert np.array_equal(halves[0], array[::2])
    assert np.array_equal(halves[1], array)


def test_thread_that_outlives_its_task_may_still_use_the_store(rt, tmp_path, wait_until):
    def leave_thread():
        def later():
            for _ in range(50):
                fastrt.get(nest_get.remote(1))
            (tmp_path / "done").touch()

        threading.Thread(target=later).start()

    call(run, leave_thread)
    for i in range(300):
        assert call(run, int, i) == i
    wait_until((tmp_path / "done").exists, "the thread to end", 20)
