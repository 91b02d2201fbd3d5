"""`fastrt.util.Pool` does what `multiprocessing.Pool` does, and `ActorPool` what Ray's does."""

import math
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections import Counter

import pytest

import fastrt
from fastrt.util import ActorPool, Pool


def held(path, value=None):
    pause = threading.Event()
    while not os.path.exists(path):
        pause.wait(0.005)
    return value


def add(x, y=1):
    return x + y


def die_once(path):
    if not os.path.exists(path):
        with open(path, "w"):
            os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


@pytest.fixture(params=[None, 1])
def pool(rt, request):
    with Pool(request.param) as made:
        yield made


@pytest.fixture
def gate(tmp_path):
    path = tmp_path / "gate"
    yield path
    path.touch()


def test_apply_and_maps_return_what_the_calls_do(pool):
    assert pool.apply(add, (1,), {"y": 5}) == 6
    assert pool.apply_async(add, (1,)).get(30) == 2
    for size in (None, 1, 3, 100):
        assert pool.map(add, range(20), size) == list(range(1, 21))
        assert pool.starmap(add, zip(range(5), range(5), strict=True), size) == [0, 2, 4, 6, 8]
    assert pool.map_async(add, (k for k in range(3))).get() == [1, 2, 3]
    assert pool.starmap_async(add, [(1, 2), [3, 4]]).get() == [3, 7]
    assert pool.map(add, []) == []
    for size in (1, 4):
        assert list(pool.imap(add, iter(range(10)), size)) == list(range(1, 11))
        assert sorted(pool.imap_unordered(add, range(10), size)) == list(range(1, 11))
    assert list(pool.imap(add, [])) == []


def test_imap_reads_only_some_way_ahead_of_an_endless_input(rt):
    read = Counter()

    def numbers():
        for k in range(10**9):
            read["items"] += 1
            yield k

    with Pool() as pool:
        results = pool.imap(add, numbers())
        assert [next(results) for _ in range(5)] == [1, 2, 3, 4, 5]
        assert read["items"] < 2000


def test_results_tell_how_far_they_are(rt, gate):
    with Pool() as pool:
        result = pool.map_async(held, [gate] * 3)
        assert not result.ready()
        for call in (lambda: result.get(0.01), lambda: pool.imap(held, [gate]).next(0.01)):
            with pytest.raises(multiprocessing.TimeoutError):
                call()
        with pytest.raises(multiprocessing.TimeoutError):
            pool.imap_unordered(held, [gate]).next(timeout=0.01)
        result.wait(0.01)
        with pytest.raises(ValueError, match="not ready"):
            result.successful()
        gate.touch()
        result.wait()
        assert result.ready()
        assert result.successful()


def test_errors_arrive_where_they_are_asked_for(pool):
    with pytest.raises(ZeroDivisionError):
        pool.apply(divmod, (1, 0))
    failed = pool.map_async(math.sqrt, [1, -1, 4], 1)
    with pytest.raises(ValueError, match=r"expected a nonnegative input|math domain error"):
        failed.get()
    assert not failed.successful()
    results = pool.imap(math.sqrt, [4, -1, 9])
    assert next(results) == 2
    with pytest.raises(ValueError):
        next(results)
    assert next(results) == 3  # an imap goes on behind an error


def test_wait_returns_when_a_call_has_raised_system_exit(pool):
    ended = pool.apply_async(sys.exit, (3,))
    ended.wait()
    assert ended.ready()
    with pytest.raises(SystemExit):
        ended.get()


def test_callbacks(pool, wait_until):
    values, errors = [], []
    pool.apply_async(add, (1,), callback=values.append, error_callback=errors.append)
    pool.map_async(add, [1, 2, 3], 1, values.append, errors.append)
    pool.map_async(add, [], None, values.append)
    pool.apply_async(divmod, (1, 0), callback=values.append, error_callback=errors.append)
    pool.starmap_async(divmod, [(1, 1), (1, 0)], 1, values.append, errors.append)
    wait_until(lambda: len(values) == 3 and len(errors) == 2, "all callbacks")
    assert sorted(values, key=str) == [2, [2, 3, 4], []]
    assert {type(error) for error in errors} == {ZeroDivisionError}


def test_closed_pool_ends_what_it_has_and_takes_no_more(rt, tmp_path):
    pool = Pool()
    with pytest.raises(ValueError, match="still running"):
        pool.join()
    marks = [tmp_path / str(k) for k in range(5)]
    pool.imap(type(tmp_path).touch, iter(marks))
    waiting = pool.imap(type(tmp_path).touch, iter(marks))
    pool.close()
    pool.join()
    assert all(mark.exists() for mark in marks)
    assert len(list(waiting)) == 5
    for call in (lambda: pool.apply(add, (1,)), lambda: pool.map(add, [1]), lambda: pool.imap(add, [1])):
        with pytest.raises(ValueError, match="Pool not running: it is closed"):
            call()
    with pytest.raises(ValueError, match="not running"), pool:
        pass


def test_terminate_ends_running_calls_at_once(rt, tmp_path, wait_until):
    pool = Pool()
    results = [pool.apply_async(lambda mark: (mark.touch(), threading.Event().wait(100)), (tmp_path / "in",))]
    wait_until((tmp_path / "in").exists, "the call to run")
    results += [pool.apply_async(add, (1,)) for _ in range(3)]
    pool.terminate()
    pool.join()
    assert results[0].ready()
    assert not results[0].successful()
    with Pool() as another:
        assert another.map(add, range(10)) == list(range(1, 11))


def test_what_cannot_be_is_refused(rt):
    with pytest.raises(ValueError, match="maxtasksperchild=3 is not supported"):
        Pool(maxtasksperchild=3)
    for processes in (0, -1, 1.5, "2"):
        with pytest.raises(ValueError, match="processes"):
            Pool(processes)
    with Pool() as pool:
        for size in (0, -1, 1.5):
            with pytest.raises(ValueError, match="chunksize"):
                pool.imap(add, [1], size)
        with pytest.raises(NotImplementedError, match="create one there"):
            pickle.dumps(pool)


def test_initializer_and_a_killed_worker(rt, tmp_path):
    def mark(folder):
        (folder / str(os.getpid())).touch()

    with Pool(initializer=mark, initargs=[tmp_path]) as pool:
        pids = set(pool.map(lambda k: str(os.getpid()), range(20), 1))
        assert pids <= {path.name for path in tmp_path.iterdir()}
        assert pool.apply(die_once, (tmp_path / "once",)) == "alive"


# ---- ActorPool ----


@fastrt.remote
class Worker:
    def double(self, x):
        return 2 * x

    def hold(self, path, x):
        return held(path, x)

    def both(self, x):
        return x, -x

    def fail(self, x):
        raise KeyError(x)

    def pid(self, x):
        return os.getpid()


def test_actor_pool_maps_in_both_orders(rt, gate):
    workers = [Worker.remote(), Worker.remote()]
    pool = ActorPool(workers)
    assert list(pool.map(lambda actor, x: actor.double.remote(x), range(20))) == list(range(0, 40, 2))
    assert sorted(pool.map_unordered(lambda actor, x: actor.double.remote(x), range(20))) == list(range(0, 40, 2))
    pool.submit(lambda actor, x: actor.hold.remote(str(gate), x), "slow")
    for x in range(3):
        pool.submit(lambda actor, x: actor.double.remote(x), x)
    assert not pool.has_free()
    assert pool.pop_idle() is None
    assert [pool.get_next_unordered() for _ in range(3)] == [0, 2, 4]
    with pytest.raises(TimeoutError):
        pool.get_next(timeout=0.01)
    with pytest.raises(TimeoutError):
        pool.get_next_unordered(timeout=0.01)
    assert pool.get_next_unordered(timeout=0.01, ignore_if_timedout=True) is None
    assert pool.has_next()
    gate.touch()
    assert pool.get_next() == "slow"
    assert not pool.has_next()
    for call in (pool.get_next, pool.get_next_unordered):
        with pytest.raises(StopIteration):
            call()
    pool.submit(lambda actor, x: actor.double.remote(x), 1)  # its result is not wanted
    method = Worker.cls.both
    assert method
    both = lambda actor, x: actor.both.options(num_returns=2).remote(x)  # noqa: E731
    assert list(pool.map(both, [1, 2, 3])) == [[1, -1], [2, -2], [3, -3]]


def test_actor_pool_gives_and_takes_actors(rt, gate):
    first, second = Worker.remote(), Worker.remote()
    pool = ActorPool([first])
    with pytest.raises(ValueError, match="in the pool already"):
        pool.push(first)
    with pytest.raises(TypeError, match="handles of actors"):
        pool.push(Worker)
    assert pool.has_free()
    assert pool.pop_idle() == first
    with pytest.raises(fastrt.ActorDiedError, match="push another"):
        pool.submit(lambda actor, x: actor.double.remote(x), 1)
    pool.push(second)
    pool.submit(lambda actor, x: actor.hold.remote(str(gate), x), 1)
    pool.submit(lambda actor, x: actor.double.remote(x), 4)
    pool.push(first)  # it gets what waits at once
    assert pool.get_next_unordered() == 8
    assert pool.get_next(timeout=0.01, ignore_if_timedout=True) is None
    gate.touch()
    pool.submit(lambda actor, x: actor.fail.remote(x), 5)
    with pytest.raises(KeyError):
        pool.get_next()
    assert pool.has_free()


def test_actor_pool_goes_on_without_an_actor_that_was_killed(rt):
    pool = ActorPool([Worker.remote(), Worker.remote()])
    pids = list(pool.map(lambda actor, x: actor.pid.remote(x), range(2)))
    os.kill(pids[0], signal.SIGKILL)
    ends = Counter()
    for x in range(10):
        pool.submit(lambda actor, x: actor.double.remote(x), x)
    while pool.has_next():
        try:
            pool.get_next()
            ends["done"] += 1
        except fastrt.ActorDiedError:
            ends["died"] += 1
    assert ends == {"done": 9, "died": 1}
    os.kill(pids[1], signal.SIGKILL)
    for x in range(2):
        pool.submit(lambda actor, x: actor.double.remote(x), x)
    with pytest.raises(fastrt.ActorDiedError, match="last actor of the pool is dead; 1 values"):
        pool.get_next()
