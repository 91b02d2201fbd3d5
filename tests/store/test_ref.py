"""ObjectRef: identity, pickling outside of the store, futures and await."""

import asyncio
import concurrent.futures
import copy
import gc
import os
import pickle
import queue
import sys
import threading

import numpy as np
import pytest

import fastrt
from fastrt._core.repair import fsck
from fastrt.errors import SerializationError, StaleReferenceError, TaskError, WorkerCrashedError

pytestmark = pytest.mark.usefixtures("rt")


@fastrt.remote
def echo(x=None):
    return x


@fastrt.remote
def raises(kind, *args):
    raise kind(*args)


@fastrt.remote
def when(path, value=None):
    pause = threading.Event()
    while not os.path.exists(path):
        pause.wait(0.002)
    return value


def test_reference_hashes_compares_and_prints_by_its_object():
    first, second = fastrt.put(1), fastrt.put(1)
    assert first == first
    assert first != second
    assert first != 1
    assert len({first, second, first}) == 2
    assert repr(first) == f"ObjectRef({first.hex()})"
    assert len(first.hex()) == 16
    assert fastrt.get(fastrt.put([first]))[0] == first
    assert hash(fastrt.get(fastrt.put([first]))[0]) == hash(first)


def test_copies_of_a_reference_are_the_reference():
    ref = fastrt.put("v")
    assert copy.copy(ref) is ref
    assert copy.deepcopy([ref])[0] is ref


def test_reference_has_no_room_for_attributes():
    with pytest.raises(AttributeError):
        fastrt.put(1).note = 2


def test_pickled_reference_is_the_object_while_it_lives():
    ref = fastrt.put([1, 2])
    text = pickle.dumps(ref)
    again = pickle.loads(text)
    assert again == ref
    assert fastrt.get(again) == [1, 2]
    del ref, again
    with pytest.raises(StaleReferenceError, match="gone"):
        pickle.loads(text)


def test_pickled_reference_of_another_session_is_refused():
    name, (_, objref, index) = fastrt.put(1).__reduce__()
    with pytest.raises(StaleReferenceError, match="pickled in session 00000000, this is"):
        name("0" * 32, objref, index)
    session = fastrt.put(1).__reduce__()[1][0]
    for bad in ((session, 12345, 2**32 - 1), (session, 0, 0), (session, 2**64 - 1, 1)):
        with pytest.raises(StaleReferenceError):
            name(*bad)


def test_reference_is_made_of_its_bytes_while_the_object_lives():
    ref = fastrt.put([1, 2])
    name = ref.binary()
    made = [fastrt.ObjectRef(name), fastrt.ObjectRef.from_binary(name), fastrt.ObjectRef.from_hex(ref.hex())]
    assert made == [ref] * 3
    del ref, made[1:]
    assert fastrt.get(made) == [[1, 2]]  # it holds the object as any other does
    del made
    with pytest.raises(StaleReferenceError, match=f"has no object {name.hex()}: .* pass the reference itself"):
        fastrt.ObjectRef(name)


def test_task_makes_a_reference_of_the_digits_that_it_is_told():
    @fastrt.remote
    def read(digits):
        return fastrt.get(fastrt.ObjectRef(bytes.fromhex(digits)))

    ref = fastrt.put(42)
    assert fastrt.get(read.remote(ref.hex())) == 42


@pytest.mark.parametrize(
    ("wrong", "error"),
    [(b"\0" * 8, StaleReferenceError), (b"1", ValueError), (b"\1" * 28, ValueError), ("0" * 16, TypeError)],
)
def test_reference_is_not_made_of_anything_else(wrong, error):
    with pytest.raises(error):
        fastrt.ObjectRef(wrong)


def test_reference_that_names_an_object_does_not_change():
    ref, other = fastrt.put(1), fastrt.put(2)
    with pytest.raises(ValueError, match="names an object already"):
        ref.__init__(other.binary())
    assert fastrt.get(ref) == 1


def test_position_of_a_contained_reference_means_nothing_outside_of_the_store():
    from fastrt.store.serialize import serialize

    parts = serialize([fastrt.put(1)])
    with pytest.raises(SerializationError, match="outside"):
        pickle.loads(parts.to_bytes())


def test_future_gets_the_value_or_the_error():
    assert echo.remote(3).future().result(timeout=60) == 3
    assert fastrt.put(4).future().result(timeout=60) == 4
    error = raises.remote(KeyError, "k").future().exception(timeout=60)
    assert isinstance(error, KeyError)
    assert isinstance(error, TaskError)
    assert (error.function_name, error.traceback_str) == (error.task_name, error.traceback_text)  # Ray's names


def test_callback_gets_the_value_or_the_error_as_libraries_for_ray_ask_for_it(tmp_path):
    got = queue.SimpleQueue()
    for ref in (fastrt.put(4), when.remote(str(tmp_path / "gate"), 5), raises.remote(KeyError, "k"), echo.remote(None)):
        ref._on_completed(got.put)
        (tmp_path / "gate").touch()
        del ref
    values = [got.get(timeout=60) for _ in range(4)]
    assert sorted(filter(bool, values), key=str)[:2] == [4, 5]
    assert [type(one).__mro__.count(KeyError) for one in values if isinstance(one, TaskError)] == [1]
    assert values.count(None) == 1


def test_callback_of_a_reference_is_dropped_after_its_call(wait_until):
    def callback(value):
        raise ValueError("of the callback")

    held = sys.getrefcount(callback)
    ref = echo.remote(1)
    ref._on_completed(callback)
    assert fastrt.get(ref) == 1
    wait_until(lambda: sys.getrefcount(callback) == held, "the end of the callback")


def test_futures_work_with_the_tools_of_concurrent_futures():
    futures = {echo.remote(i).future(): i for i in range(200)}
    for future in concurrent.futures.as_completed(futures, timeout=30):
        assert future.result() == futures[future]
    done, pending = concurrent.futures.wait([echo.remote(1).future()], timeout=30)
    assert (len(done), len(pending)) == (1, 0)


def test_future_calls_back_and_cannot_be_cancelled(tmp_path):
    called = threading.Event()
    future = when.remote(str(tmp_path / "gate")).future()
    future.add_done_callback(lambda future: called.set())
    assert not future.cancel()
    assert not called.is_set()
    (tmp_path / "gate").touch()
    assert called.wait(20)


def test_future_added_while_others_wait_does_not_wait_for_them(tmp_path):
    slow = when.remote(str(tmp_path / "gate")).future()
    assert [echo.remote(i).future().result(timeout=60) for i in range(20)] == list(range(20))
    assert not slow.done()
    (tmp_path / "gate").touch()
    slow.result(timeout=60)


def test_future_waiter_thread_ends_with_the_last_future(wait_until):
    echo.remote(1).future().result(timeout=60)
    wait_until(lambda: all(thread.name != "fastrt-futures" for thread in threading.enumerate()), "no waiter thread")


def test_await_gives_the_value_without_blocking_the_loop(tmp_path):
    async def main():
        ticks = 0
        slow = asyncio.ensure_future(ask(when.remote(str(tmp_path / "gate"), "late")))
        while not slow.done():
            ticks += 1
            if ticks == 10:
                (tmp_path / "gate").touch()
            await asyncio.wait([slow], timeout=0.002)
        return ticks, await slow, await asyncio.gather(*[ask(echo.remote(i)) for i in range(100)])

    async def ask(ref):
        return await ref

    ticks, value, values = asyncio.run(asyncio.wait_for(main(), 30))
    assert ticks >= 10
    assert value == "late"
    assert values == list(range(100))


@pytest.mark.parametrize("kind", [ValueError, StopIteration, StopAsyncIteration, KeyboardInterrupt, SystemExit])
def test_await_raises_what_the_task_raised_and_never_hangs(kind):
    async def main():
        ref = raises.remote(kind)
        with pytest.raises(TaskError, match=kind.__name__):
            # `wait_for` makes a task of it, and asyncio lets KeyboardInterrupt and SystemExit of a task end the loop.
            await (asyncio.wait_for(ref, 20) if issubclass(kind, Exception) else ref)

    asyncio.run(main())


def test_error_of_a_generators_end_does_not_end_the_callers_loop():
    refs = [raises.remote(StopIteration), echo.remote(2)]
    with pytest.raises(TaskError, match="StopIteration"):
        list(map(fastrt.get, refs))


def test_await_of_a_crash_says_so():
    @fastrt.remote(max_retries=0)
    def crash():
        os._exit(1)

    async def main():
        return await crash.remote()

    with pytest.raises(WorkerCrashedError):
        asyncio.run(asyncio.wait_for(main(), 30))


def test_future_that_is_dropped_lets_go_of_its_object(wait_until):
    ref = fastrt.put(np.ones(1000))
    client = ref.owner
    before = fsck.usage(client)["objects"]
    ref.future().result()
    del ref
    wait_until(lambda: gc.collect() >= 0 and fsck.usage(client)["objects"] == before - 1, "the object to go")
