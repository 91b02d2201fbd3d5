"""`fastrt.util.Queue`: order, limits, waiting, large values, growth, many processes, and processes that are killed."""

import asyncio
import os
import signal
import threading
from collections import Counter

import numpy as np
import pytest

import fastrt
from fastrt._core.repair import fsck
from fastrt.store import client as store_client
from fastrt.tasks.actor_handle import kill
from fastrt.util import Empty, Full, Queue
from fastrt.util import queue as queue_module


@fastrt.remote(max_retries=0)
def put_numbers(queue, start, count, pid_to=None):
    if pid_to is not None:
        pid_to.put(os.getpid())
    for k in range(start, start + count):
        queue.put(k)
    return os.getpid()


@fastrt.remote(max_retries=0)
def get_numbers(queue, count):
    return [queue.get() for _ in range(count)]


@fastrt.remote(max_retries=0)
def forward(source, target, pid_to):
    pid_to.put(os.getpid())
    while True:
        target.put(source.get())


class Held:
    def __init__(self, ref):
        self.ref = ref


def test_values_of_all_kinds_come_out_in_order(rt):
    queue = Queue()
    ref = fastrt.put("inside")
    large = np.arange(50_000)
    values = [1, 2.5, None, True, "text", b"bytes", 1 << 80, [1, (2, {"a": b"x" * 70_000})], {3}, "x" * 100_000, len]
    for value in [*values, large, np.ones(3), Held(ref)]:
        queue.put(value)
    del ref
    assert len(queue) == queue.qsize() == queue.size() == len(values) + 3
    assert [queue.get() for _ in values] == values
    view = queue.get()
    assert np.array_equal(view, large)
    assert not view.flags.writeable
    assert queue.get().sum() == 3
    assert fastrt.get(queue.get().ref) == "inside"
    assert queue.empty()
    with pytest.raises(fastrt.SerializationError):
        queue.put(threading.Lock())
    assert queue.empty()


def test_limits_and_timeouts(rt):
    queue = Queue(2)
    for call in (queue.get_nowait, lambda: queue.get(timeout=0.01), lambda: queue.get(timeout=0)):
        with pytest.raises(Empty):
            call()
    queue.put("a")
    assert not queue.full()
    queue.put([1])
    assert queue.full()
    for call in (
        lambda: queue.put_nowait(1),
        lambda: queue.put([1], timeout=0.01),
        lambda: queue.put(np.ones(10**5), False),
    ):
        with pytest.raises(Full):
            call()
    with pytest.raises(Full, match="room for 0"):
        queue.put_nowait_batch([1])
    assert queue.get_nowait_batch(2) == ["a", [1]]
    queue.put_nowait_batch([1])
    with pytest.raises(Full):
        queue.put_nowait_batch([1, 2])
    assert queue.qsize() == 1
    with pytest.raises(Empty):
        queue.get_nowait_batch(2)
    assert queue.get_nowait_batch(1) == [1]
    for item in (1, [1]):
        with pytest.raises(ValueError):  # also where it need not wait
            queue.put(item, timeout=-1)
    queue.put(1)
    for wrong in (
        lambda: queue.get(timeout=-1),
        lambda: queue.put([1], timeout=-1),
        lambda: queue.get_nowait_batch(-1),
    ):
        with pytest.raises(ValueError):
            wrong()
    for wrong in (lambda: Queue("1"), lambda: Queue(True), lambda: queue.get_nowait_batch(1.5)):
        with pytest.raises(TypeError):
            wrong()
    assert Queue(-5).maxsize == 0


def test_waiters_are_woken(rt, wait_until):
    queue = Queue(1)
    got = []
    getter = threading.Thread(target=lambda: got.append(queue.get()))
    getter.start()
    queue.put("for the thread")
    getter.join(60)
    queue.put(1)
    putter = threading.Thread(target=lambda: queue.put(2))
    putter.start()
    assert [queue.get(), queue.get()] == [1, 2]
    putter.join(60)
    assert got == ["for the thread"]
    refs = [get_numbers.remote(queue, 1) for _ in range(6)]  # more than there are workers: they lend their places
    for k in range(6):
        queue.put(k)
    assert sorted(number for (number,) in fastrt.get(refs)) == list(range(6))


def test_processes_share_it_and_it_grows_and_shrinks_again(rt, monkeypatch):
    monkeypatch.setattr(queue_module, "_SEGMENT_BYTES", 512)
    queue = Queue()
    puts = [put_numbers.remote(queue, 10_000 * k, 5_000) for k in range(2)]
    fastrt.get(puts)
    assert queue.size() == 10_000
    gets = [get_numbers.remote(queue, 2_500) for _ in range(2)]
    mine = [queue.get() for _ in range(5_000)]
    numbers = [n for some in fastrt.get(gets) for n in some] + mine
    assert sorted(numbers) == [*range(5_000), *range(10_000, 15_000)]
    for some in (mine, *fastrt.get(gets)):
        assert [n for n in some if n < 10_000] == sorted(n for n in some if n < 10_000)
    queue.put("x" * 60_000)
    queue.put("y" * 3)
    assert (len(queue.get()), queue.get()) == (60_000, "yyy")


def test_async_forms(rt):
    queue = Queue(1)

    async def talk():
        with pytest.raises(Empty):
            await queue.get_async(timeout=0.01)
        with pytest.raises(Empty):
            await queue.get_async(block=False)
        getting = [asyncio.create_task(queue.get_async()) for _ in range(3)]
        for k in range(3):
            await queue.put_async(k)
        assert sorted(await asyncio.gather(*getting)) == [0, 1, 2]
        await queue.put_async("full")
        with pytest.raises(Full):
            await queue.put_async(1, timeout=0.01)
        given_up = asyncio.create_task(queue.put_async("never"))
        await asyncio.wait([given_up], timeout=0.02)
        given_up.cancel()
        assert await queue.get_async() == "full"

    asyncio.run(talk())
    assert queue.empty()


def test_many_waiting_coroutines_share_one_thread_and_leave_the_loops_own_alone(rt):
    queue = Queue()

    async def talk():
        before = set(threading.enumerate())
        getting = [asyncio.create_task(queue.get_async()) for _ in range(40)]
        await asyncio.wait(getting, timeout=0.02)  # all have begun to wait
        assert await asyncio.wait_for(asyncio.to_thread(lambda: len(set(threading.enumerate()) - before)), 30) == 2
        for k in range(40):
            queue.put(k)
        assert sorted(await asyncio.gather(*getting)) == list(range(40))

    asyncio.run(talk())


def test_killed_putters_leave_whole_values_and_a_usable_queue(rt):
    queue, pids = Queue(), Queue()
    came, last = Counter(), {}
    for k in range(12):
        ref = put_numbers.remote(queue, k << 32, 10**9, pids)
        pid = pids.get(timeout=30)
        for _ in range(50 * k):  # die at another moment each time, and mostly with the lock
            number = queue.get(timeout=30)
            came[number >> 32] += 1
            assert number == last.get(number >> 32, (number >> 32 << 32) - 1) + 1
            last[number >> 32] = number
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(fastrt.WorkerCrashedError):
            fastrt.get(ref, timeout=30)
    while not queue.empty():
        number = queue.get()
        assert number == last.get(number >> 32, (number >> 32 << 32) - 1) + 1  # none is missing, none comes twice
        last[number >> 32] = number
    queue.put("after")
    assert queue.get() == "after"


def test_killed_getters_take_no_more_than_what_they_had(rt):
    source, target, pids = Queue(), Queue(), Queue()
    total, kills = 20_000, 8
    for k in range(total):
        source.put(k)
    for k in range(kills):
        ref = forward.remote(source, target, pids)
        pid = pids.get(timeout=30)
        for _ in range(100 * k):
            target.put(target.get(timeout=30))
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(fastrt.WorkerCrashedError):
            fastrt.get(ref, timeout=30)
    found = Counter(queue.get() for queue in (source, target) for _ in range(queue.size()))
    assert max(found.values()) == 1
    assert total - kills <= len(found) <= total


def test_large_values_are_lost_with_their_keeper_and_the_rest_is_not(rt, wait_until):
    queue = Queue(actor_options={"name": "keeper"})
    assert "keeper" in fastrt.list_named_actors()
    queue.put(1)
    queue.put(np.ones(50_000))
    queue.put(2)
    keeper = fastrt.get_actor("keeper")
    fastrt.get(keeper.keep.remote([]))  # it has come to what was put
    kill(keeper)
    assert queue.get() == 1

    def lost():
        try:
            queue.put(np.ones(50_000))
        except fastrt.ActorDiedError:
            return True
        return False

    wait_until(lost, "the keeper to be dead for all")
    with pytest.raises(fastrt.ObjectLostError, match="actor that held it has died"):
        queue.get()
    assert queue.get() == 2


def test_shutdown_ends_it_for_all(rt, wait_until):
    queue, other = Queue(), Queue(1)
    ends = []

    def wait_for(call):
        try:
            call()
        except fastrt.ActorDiedError:
            ends.append(1)

    other.put(1)
    threads = [threading.Thread(target=wait_for, args=[call]) for call in (queue.get, lambda: other.put([2]))]
    for thread in threads:
        thread.start()
    queue.shutdown(force=True)
    other.shutdown(grace_period_s=0.01)
    for thread in threads:
        thread.join(60)
    assert len(ends) == 2
    for call in (queue.get, lambda: queue.put(1), lambda: queue.put([1]), lambda: queue.get(False)):
        with pytest.raises(fastrt.ActorDiedError, match="shut down"):
            call()
    third = Queue()
    third.put(5)
    drained = threading.Thread(target=lambda: third.shutdown(grace_period_s=30))
    drained.start()
    assert third.get(timeout=60) == 5
    drained.join(60)
    assert not drained.is_alive()


def test_it_ends_with_its_last_handle(rt, wait_until):
    client = store_client.require().client
    queue = Queue()
    for _ in range(10):
        queue.put(np.ones(20_000))
    inside = fastrt.put([queue])
    queue.put("kept by what has the handle")
    del queue
    again = fastrt.get(inside)[0]
    assert again.get().sum() == 20_000
    del inside, again
    wait_until(lambda: fsck.usage(client)["actors"] == 0, "the keeper to go")


def test_it_works_in_a_forked_child_and_not_after_its_session(rt, runtime_dir):
    queue = Queue()
    queue.put("for the child")
    pid = os.fork()
    if pid == 0:
        try:
            found = queue.get()
            queue.put(found + "!")
            queue.put([found])
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert [queue.get(timeout=60), queue.get(timeout=60)] == ["for the child!", ["for the child"]]
