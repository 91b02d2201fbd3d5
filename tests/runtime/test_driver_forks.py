"""Children that a driver forks after init, by os.fork or multiprocessing: clients of their own in the same session."""

import multiprocessing
import os

import numpy as np
import pytest

import fastrt

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")


@fastrt.remote
def echo(x=None):
    return x


def in_child(action):
    """Run `action` in a forked child; what it returns or raises, as text."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            text = repr(action())
        except BaseException as exc:
            text = f"{type(exc).__name__}: {exc}"
        os.write(write, text.encode()[:60_000])
        os._exit(0)
    os.close(write)
    with open(read) as file:
        text = file.read()
    assert os.waitpid(pid, 0)[1] == 0
    return text


def test_child_uses_the_session_as_itself_and_its_end_does_not_end_it(rt):
    ref = fastrt.put({"a": np.arange(1000)})
    view = fastrt.get(fastrt.put(np.arange(100_000)))
    running = echo.remote([ref])

    def child():
        own = fastrt.put([1])
        first = fastrt.get(own), int(fastrt.get(ref)["a"].sum()), fastrt.get(echo.remote("c"))
        return int(view.sum()), *first, fastrt.get(fastrt.get(running)[0])["a"].size, fastrt.is_initialized()

    assert in_child(child) == f"({sum(range(100_000))}, [1], 499500, 'c', 1000, True)"
    assert in_child(lambda: int(view[5])) == "5"
    assert in_child(lambda: (fastrt.shutdown(), fastrt.is_initialized())) == "(None, False)"
    assert in_child(lambda: fastrt.init()).startswith("FastrtError: fastrt is initialised already")
    assert in_child(lambda: in_child(lambda: fastrt.get(ref)["a"].size)) == "'1000'"
    assert in_child(lambda: echo.remote(8).future().result(60)) == "8"
    assert in_child(lambda: fastrt.wait([ref, running], num_returns=2)[1]) == "[]"
    assert in_child(lambda: fastrt.cancel(running)) == "None"
    assert fastrt.get(echo.remote(6)) == 6
    assert fastrt.get(ref)["a"].sum() == 499500


def test_child_finds_an_object_gone_that_its_parent_has_dropped_before_it_came(rt):
    ref = fastrt.put([1])
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.read(read, 1)
            fastrt.get(ref)
        except fastrt.StaleReferenceError:
            code = 42
        finally:
            os._exit(code)
    del ref
    fastrt.get(echo.remote(1))
    os.write(write, b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 42
    os.close(read)
    os.close(write)


def test_child_that_is_killed_lets_go_of_everything(rt, wait_until):
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        held = [fastrt.put(np.ones(100_000)) for _ in range(5)], [echo.remote(i) for i in range(100)]
        os.write(write, b"x")
        while held:
            os.sched_yield()
    os.read(read, 1)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    os.close(read)
    os.close(write)
    assert fastrt.get(echo.remote(2)) == 2


def _sum_in_child(pair):
    ref, k = pair
    return int(fastrt.get(echo.remote(ref)).sum()) + k


def test_children_of_multiprocessing_use_the_session(rt):
    ref = fastrt.put(np.arange(10_000))
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(_sum_in_child, [(ref, k) for k in range(20)]) == [49_995_000 + k for k in range(20)]
        pool.close()
        pool.join()
    assert fastrt.get(echo.remote(rt.session)) == rt.session


def test_child_of_spawn_starts_a_session_of_its_own(program):
    out, _ = program(
        """
        import multiprocessing
        import fastrt

        def child(queue):
            rt = fastrt.init(1, "32MiB")
            queue.put((rt.session, fastrt.get(fastrt.remote(lambda: 4).remote())))

        if __name__ == "__main__":
            context = multiprocessing.get_context("spawn")
            queue = context.SimpleQueue()
            with fastrt.init(1, "32MiB") as rt:
                process = context.Process(target=child, args=[queue])
                process.start()
                session, value = queue.get()
                process.join()
                assert session != rt.session and value == 4 and process.exitcode == 0
            print("good")
        """
    ).finish()
    assert out == "good\n"
