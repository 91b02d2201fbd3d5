"""Generators through the public API: streams of tasks and actors, read at once, later, elsewhere, or not at all."""

import asyncio
import os
import pickle
import signal
import threading

import numpy as np
import pytest

import fastrt
from fastrt._core.tasks import generators
from fastrt.errors import (
    ActorDiedError,
    GetTimeoutError,
    StaleReferenceError,
    TaskCancelledError,
    TaskError,
    WorkerCrashedError,
)
from fastrt.store import client as store_client

pytestmark = pytest.mark.usefixtures("rt")
SOON_S = 30.0


def get(refs):
    return fastrt.get(refs, timeout=SOON_S)


def unread(generator):
    return generators.info(store_client.require().client, generator._stream)["unread"]


@fastrt.remote
def count(n, fail_at=None):
    for k in range(n):
        if k == fail_at:
            raise ValueError(f"no {k}")
        yield k


@fastrt.remote
def gated(folder, n, gate_at=0):
    """Yields, and waits for the file `gate` in between, says so by `waits`; tells what it has come to."""
    pause = threading.Event()
    try:
        for k in range(n):
            if k == gate_at:
                open(f"{folder}/waits", "w").close()
            while k == gate_at and not os.path.exists(f"{folder}/gate"):
                pause.wait(0.002)
            yield k
    finally:
        with open(f"{folder}/ended", "w") as file:
            file.write(str(k))


@fastrt.remote
class Counter:
    def __init__(self):
        self.calls = 0

    def count(self, n):
        self.calls += 1
        for k in range(n):
            yield k * 10

    def fails(self):
        yield from range(2)
        raise ValueError("after two")

    def called(self):
        return self.calls

    @fastrt.method(num_returns="dynamic")
    def collect(self, n):
        yield from range(n)

    @fastrt.method(generator_backpressure=2)
    def slow(self, n):
        yield from range(n)


@fastrt.remote
class AsyncCounter:
    async def count(self, n, fail_at=None):
        for k in range(n):
            await asyncio.get_running_loop().run_in_executor(None, int)
            if k == fail_at:
                raise ValueError(f"no {k}")
            yield k

    @fastrt.method(num_returns="dynamic")
    async def collect(self, n):
        for k in range(n):
            yield k

    @fastrt.method(generator_backpressure=1)
    async def slow(self, n):
        for k in range(n):
            yield np.full(2000, k)

    def plain(self, n):
        yield from range(n)

    async def echo(self, x):
        return x


# ---- the common way ----


def test_items_come_one_by_one_and_in_order(tmp_path):
    assert [get(ref) for ref in count.remote(300)] == list(range(300))
    assert list(count.remote(0)) == []
    generator = gated.remote(str(tmp_path), 5, 2)
    assert isinstance(generator, fastrt.ObjectRefGenerator)
    assert [get(next(generator)), get(next(generator))] == [0, 1]
    with pytest.raises(GetTimeoutError, match="no further item after"):
        generator.next(timeout=0.01)
    assert not generator.is_finished()
    assert not generator.next_ready()
    (tmp_path / "gate").touch()
    fastrt.wait([generator])
    assert generator.next_ready()
    assert [get(ref) for ref in generator] == [2, 3, 4]
    assert get(generator.completed()) is None
    assert generator.is_finished()
    assert not generator.next_ready()
    with pytest.raises(StopIteration):
        next(generator)


def test_items_of_every_kind_arrive(rt):
    @fastrt.remote
    def yield_all(ref):
        yield np.arange(50_000)
        yield {"a": [1, 2]}
        yield "x" * 5000
        yield [ref]
        yield None

    inner = fastrt.put(7)
    array, mapping, text, box, nothing = (get(ref) for ref in yield_all.remote([inner]))
    assert (array == np.arange(50_000)).all()
    assert (mapping, len(text), nothing) == ({"a": [1, 2]}, 5000, None)
    assert get(box[0][0]) == 7


def test_exception_arrives_at_its_place_and_ends_the_stream():
    generator = count.remote(5, 3)
    *refs, last = generator
    assert get(refs) == [0, 1, 2]
    with pytest.raises(ValueError, match="no 3") as caught:
        get(last)
    assert isinstance(caught.value, TaskError)
    assert list(generator) == []
    with pytest.raises(ValueError, match="no 3"):
        get(generator.completed())


def test_value_that_cannot_be_pickled_ends_the_stream_at_its_place():
    @fastrt.remote
    def lock():
        yield 1
        yield threading.Lock()

    first, second = lock.remote()
    assert get(first) == 1
    with pytest.raises(TypeError, match="pickle"):
        get(second)


def test_back_pressure_bounds_what_is_unread(wait_until):
    for options in ({"generator_backpressure": 3}, {"_generator_backpressure_num_objects": 3}):
        generator = count.options(**options).remote(50)
        wait_until(lambda g=generator: unread(g) == 3, "three unread items")
        for k in range(50):
            assert get(next(generator)) == k
            assert unread(generator) <= 3
        assert list(generator) == []


def test_wait_takes_generators_that_are_ready_when_their_next_item_is(tmp_path):
    slow, quick, value = gated.remote(str(tmp_path), 2, 1), count.remote(1), fastrt.put(1)
    assert fastrt.wait([slow, value, quick], num_returns=3, timeout=SOON_S) == ([slow, value, quick], [])
    assert get(next(slow)) == 0
    get(quick.completed())
    assert fastrt.wait([slow, quick], timeout=SOON_S) == ([quick], [slow])
    assert fastrt.wait([slow, quick, value], num_returns=3, timeout=0.01) == ([quick, value], [slow])
    (tmp_path / "gate").touch()
    assert fastrt.wait((slow,)) == ([slow], [])
    assert [get(ref) for ref in (*slow, *quick)] == [1, 0]
    assert fastrt.wait([slow, quick], num_returns=2, timeout=0) == ([slow, quick], []), "an end is ready, too"
    with pytest.raises(TypeError, match="one has a int"):
        fastrt.wait([slow, 1])


def test_tasks_that_wait_for_generators_give_their_place_to_these():
    @fastrt.remote
    def first_of(generators):
        ready, _ = fastrt.wait(generators)
        return fastrt.get(next(ready[0]))

    @fastrt.remote
    def lead():
        return fastrt.get([first_of.remote([count.remote(3)]) for _ in range(4)])

    assert get(lead.remote()) == [0] * 4


def test_generators_that_wait_for_readers_do_not_keep_these_from_running():
    bounded = count.options(generator_backpressure=1)

    @fastrt.remote
    def total(*generators):
        return sum(fastrt.get(ref) for generator in generators[0] for ref in generator)

    streams = [bounded.remote(20) for _ in range(4)]  # more than there are workers
    assert get(total.remote(streams)) == 4 * sum(range(20))


# ---- asyncio ----


def test_async_for_leaves_the_event_loop_free(tmp_path):
    async def read(generator):
        return [await ref async for ref in generator]

    async def main():
        waiting = asyncio.create_task(read(gated.remote(str(tmp_path), 3)))
        assert await read(count.remote(50)) == list(range(50))
        assert not waiting.done()
        given_up = asyncio.create_task(anext(AsyncCounter.remote().slow.remote(0)))
        with pytest.raises(StopAsyncIteration):
            await given_up
        (tmp_path / "gate").touch()
        return await asyncio.wait_for(waiting, SOON_S)

    assert asyncio.run(main()) == [0, 1, 2]


# ---- actors ----


def test_actor_methods_stream_in_their_turn():
    actor = Counter.remote()
    first, second = actor.count.remote(3), actor.count.remote(2)
    assert get(actor.called.remote()) == 2
    assert [get(ref) for ref in second] == [0, 10]
    assert [get(ref) for ref in first] == [0, 10, 20]
    assert [get(ref) for ref in actor.slow.remote(10)] == list(range(10))
    assert get(get(actor.collect.remote(4))) == [0, 1, 2, 3]
    assert get(get(actor.count.options(num_returns="dynamic").remote(2))) == [0, 10]
    assert get(actor.count.options(num_returns=2).remote(2)) == [0, 10]


def test_threads_and_coroutines_stream_side_by_side():
    for actor, method in ((Counter.options(max_concurrency=3).remote(), "slow"), (AsyncCounter.remote(), "slow")):
        streams = [getattr(actor, method).remote(8) for _ in range(3)]
        for row in range(8):
            assert [int(np.max(get(next(stream)))) for stream in streams] == [row] * 3
        assert [list(stream) for stream in streams] == [[], [], []]


def test_async_methods_fail_at_their_place_and_can_be_collected():
    actor = AsyncCounter.remote()
    *refs, last = actor.count.remote(4, 2)
    assert get(refs) == [0, 1]
    with pytest.raises(ValueError, match="no 2"):
        get(last)
    assert [get(ref) for ref in actor.plain.remote(3)] == [0, 1, 2]
    assert get(get(actor.collect.remote(3))) == [0, 1, 2]
    held = actor.slow.remote(100)
    assert get(next(held))[0] == 0
    assert get(actor.echo.remote(5)) == 5  # the loop is not held up by a stream that waits


def test_call_of_a_dead_actor_ends_its_stream():
    actor = Counter.remote()
    get(actor.called.remote())
    fastrt.kill(actor)
    (ref,) = actor.count.remote(3)
    with pytest.raises(ActorDiedError):
        get(ref)


# ---- other numbers of results ----


def test_dynamic_gives_a_list_with_the_error_as_its_last():
    dynamic = count.options(num_returns="dynamic")
    refs = get(dynamic.remote(3))
    assert get(refs) == [0, 1, 2]
    refs = get(dynamic.remote(5, 2))
    assert get(refs[:-1]) == [0, 1]
    with pytest.raises(ValueError, match="no 2"):
        get(refs[-1])


def test_generator_with_a_number_of_results_that_fails_keeps_the_items_before_the_error(tmp_path):
    def second_time(path):
        yield 0
        if not os.path.exists(path):
            open(path, "w").close()
            raise ValueError("the first time")
        yield 1

    refs = count.options(num_returns=4).remote(4, fail_at=2)
    assert get(refs[:2]) == [0, 1]
    for ref in refs[2:]:
        with pytest.raises(ValueError, match="no 2"):
            get(ref)
    counter = Counter.remote()
    refs = counter.fails.options(num_returns=3).remote()
    assert get(refs[:2]) == [0, 1]
    with pytest.raises(ValueError, match="after two"):
        get(refs[2])
    again = fastrt.remote(second_time).options(num_returns=2, retry_exceptions=True)
    assert get(again.remote(f"{tmp_path}/was")) == [0, 1]


def test_numbers_of_results_take_what_a_generator_yields():
    assert get(count.options(num_returns=3).remote(3)) == [0, 1, 2]
    assert get(count.options(num_returns=1).remote(1)) == 0
    refs = count.options(num_returns=3).remote(2)
    assert get(refs[:2]) == [0, 1]
    with pytest.raises(ValueError, match="num_returns=3, its generator has yielded 2 items"):
        get(refs[2])
    assert get(count.options(num_returns=2).remote(3)) == [0, 1]
    assert get(count.options(num_returns=1).remote(2)) == 0


def test_list_of_references_is_for_generators(rt):
    with pytest.raises(TypeError, match='num_returns="dynamic" is for generators; the function returned a list'):
        get(fastrt.remote(sorted).options(num_returns="dynamic").remote([1]))


def test_function_that_returns_an_iterable_can_stream_it():
    @fastrt.remote(num_returns="streaming")
    def items(what):
        return what

    assert [get(ref) for ref in items.remote([1, "a"])] == [1, "a"]
    (error,) = items.remote(5)
    with pytest.raises(TypeError, match="not iterable"):
        get(error)


# ---- handles ----


def test_handles_can_be_passed_on_and_shared():
    @fastrt.remote
    def some(generator, n):
        return [fastrt.get(next(generator)) for _ in range(n)]

    generator = count.remote(30)
    assert get(next(generator)) == 0
    parts = get([some.remote(generator, 10) for _ in range(2)])
    assert sorted(parts[0] + parts[1]) == list(range(1, 21))
    again = pickle.loads(pickle.dumps(generator))
    box = fastrt.put({"stream": generator})
    del generator
    assert get(next(again)) == 21
    assert [fastrt.get(ref) for ref in get(box)["stream"]] == list(range(22, 30))


def test_dropped_handle_closes_the_generator_at_its_next_yield(tmp_path, wait_until):
    generator = gated.remote(str(tmp_path), 1 << 40, 3)
    assert get(next(generator)) == 0
    wait_until((tmp_path / "waits").exists, "the gate, beyond the item that was read")
    del generator
    (tmp_path / "gate").touch()
    wait_until((tmp_path / "ended").exists, "the generator's end")
    assert (tmp_path / "ended").read_text() == "3"


def test_generator_runs_to_its_end_for_whoever_wants_just_that(tmp_path):
    generator = gated.remote(str(tmp_path), 100, 3)
    end = generator.completed()
    del generator
    (tmp_path / "gate").touch()
    assert get(end) is None
    assert (tmp_path / "ended").read_text() == "99"


# ---- deaths and cancellation ----


@fastrt.remote
def mortal(folder, n, die_at, most):
    """Kills its own process at an item, in the first `most` runs."""
    for k in range(n):
        if k == die_at:
            with open(f"{folder}/died", "a") as file:
                file.write("x")
            if os.stat(f"{folder}/died").st_size <= most:
                os.kill(os.getpid(), signal.SIGKILL)
        yield k


def test_killed_generator_runs_again_and_doubles_nothing(tmp_path):
    assert [get(ref) for ref in mortal.remote(str(tmp_path), 20, 7, 2)] == list(range(20))
    assert (tmp_path / "died").read_text() == "xxx"


def test_killed_generator_without_retries_ends_with_the_error_at_its_place(tmp_path):
    refs = list(mortal.options(max_retries=0).remote(str(tmp_path), 20, 7, 99))
    assert get(refs[:7]) == list(range(7))
    with pytest.raises(WorkerCrashedError):
        get(refs[7])
    assert len(refs) == 8


def test_generator_that_fails_runs_again_and_doubles_nothing(tmp_path):
    @fastrt.remote(max_retries=2, retry_exceptions=True)
    def flaky(folder):
        for k in range(6):
            if k == 4:
                with open(f"{folder}/runs", "a") as file:
                    file.write("x")
                if os.stat(f"{folder}/runs").st_size < 3:
                    raise ValueError(k)
            yield k

    assert [get(ref) for ref in flaky.remote(str(tmp_path))] == list(range(6))


def test_actors_stream_goes_on_after_a_restart(tmp_path):
    @fastrt.remote(max_restarts=1, max_task_retries=1)
    class Mortal:
        def count(self, folder, n):
            for k in range(n):
                if k == 5 and not os.path.exists(f"{folder}/died"):
                    open(f"{folder}/died", "w").close()
                    os.kill(os.getpid(), signal.SIGKILL)
                yield k

    actor = Mortal.remote()
    assert [get(ref) for ref in actor.count.remote(str(tmp_path), 10)] == list(range(10))


@pytest.mark.parametrize("limit", [None, 2])
def test_cancel_ends_a_stream_where_it_is(tmp_path, wait_until, limit):
    generator = gated.options(generator_backpressure=limit).remote(str(tmp_path), 5, 3)
    wait_until(lambda: unread(generator) == (limit or 3), "items")
    fastrt.cancel(generator)
    *refs, last = generator
    assert get(refs) in ([0, 1], [0, 1, 2])  # reading has made room, perhaps before the interrupt came
    with pytest.raises(TaskCancelledError):
        get(last)


def test_cancelled_coroutine_stream_ends(wait_until):
    actor = AsyncCounter.remote()
    generator = actor.slow.remote(1 << 40)
    wait_until(lambda: unread(generator) == 1, "an item")
    fastrt.cancel(generator)
    *_, last = generator
    with pytest.raises(TaskCancelledError):
        get(last)


# ---- wrong use ----


def test_wrong_options_are_refused():
    def plain():
        return 1

    def items():
        yield 1

    async def coroutine():
        yield 1

    for options, error, words in (
        ({"num_returns": "many"}, ValueError, "it must be a number, 'streaming' or 'dynamic'"),
        ({"generator_backpressure": 0}, ValueError, "from 1 to"),
        ({"generator_backpressure": 1.5}, TypeError, "whole number"),
        ({"generator_backpressure": 2, "num_returns": 3}, ValueError, "this one has num_returns=3"),
        ({"generator_backpressure": 2, "_generator_backpressure_num_objects": 2}, TypeError, "two names"),
    ):
        with pytest.raises(error, match=words):
            fastrt.remote(**options)(items)
    with pytest.raises(ValueError, match="generator_backpressure"):
        fastrt.remote(generator_backpressure=2)(plain)
    with pytest.raises(TypeError, match="coroutine function"):
        fastrt.remote(coroutine)
    with pytest.raises(TypeError, match="not an option of methods"):
        fastrt.method(backpressure=2)
    with pytest.raises(TypeError, match="not an option of methods"):
        Counter.remote().count.options(backpressure=1)
    with pytest.raises(ValueError, match="timeout is -1"):
        count.remote(1).next(timeout=-1)


def test_generator_of_an_ended_session_says_so(program):
    done = program(
        """
        import fastrt

        @fastrt.remote
        def count(n):
            yield from range(n)

        if __name__ == "__main__":
            fastrt.init(num_workers=1)
            generator = count.remote(3)
            print(fastrt.get(next(generator)))
            fastrt.shutdown()
            try:
                next(generator)
            except fastrt.StaleReferenceError as exc:
                print(type(exc).__name__)
        """
    )
    assert done.finish()[0].split() == ["0", StaleReferenceError.__name__]


def test_generator_where_references_are_wanted_is_refused_with_what_to_pass():
    @fastrt.remote
    def items():
        yield 1

    generator = items.remote()
    for call in (lambda one: fastrt.get([one]), fastrt.wait):
        with pytest.raises(TypeError, match=r"ObjectRefGenerator; next\(generator\) gives the reference"):
            call(generator)
    assert fastrt.get(generator) is generator
    assert list(fastrt.as_completed([generator])) == [generator]
    ready, _ = fastrt.wait([next(generator), generator.completed()], num_returns=2)
    assert fastrt.get(ready) == [1, None]
