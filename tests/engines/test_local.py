"""`local_mode`: one process, at once, and fit for a debugger; its references and handles end with it."""

import json
import os
import threading

import numpy as np
import pytest

import fastrt
from fastrt.errors import (
    FastrtError,
    GetTimeoutError,
    SerializationError,
    StaleReferenceError,
    TaskError,
    UnsupportedError,
)
from fastrt.store import client as store_client

SEEN = []


@pytest.fixture
def local():
    SEEN.clear()
    with fastrt.init(local_mode=True, num_workers=3, resources={"license": 2}) as session:
        yield session
    assert not fastrt.is_initialized()


@fastrt.remote
def work(x=0):
    SEEN.append((os.getpid(), threading.get_ident()))
    return x


@fastrt.remote
class Keeper:
    def __init__(self):
        self.value = 0

    def keep(self, value):
        self.value = value
        return value

    def context(self):
        return fastrt.runtime_context()

    async def never(self):
        import asyncio

        await asyncio.Event().wait()


def test_task_runs_inside_its_call_in_this_thread(local):
    work.remote()
    assert [(os.getpid(), threading.get_ident())] == SEEN
    assert local.num_workers == 3
    assert fastrt.available_resources() == {"CPU": 3.0, "license": 2.0}
    assert (local.session, local.object_store_memory) == ("local", 0)


def test_error_has_the_frames_of_the_task_for_a_debugger(local):
    @fastrt.remote
    def fail():
        where = "here"
        raise ValueError(where)

    with pytest.raises(ValueError, match="here") as info:
        fastrt.get(fail.remote())
    cause = info.value.__cause__
    assert isinstance(info.value, TaskError)
    assert cause.__traceback__.tb_frame.f_locals["where"] == "here"
    assert "fastrt/engines" not in str(info.value)


def test_debugger_that_is_quit_ends_the_program_and_not_the_task(local):
    import bdb

    @fastrt.remote
    def quit_debugger(kind):
        raise kind

    for kind in (bdb.BdbQuit, KeyboardInterrupt):
        with pytest.raises(kind):
            quit_debugger.remote(kind)
    with pytest.raises(TaskError, match="SystemExit"):
        fastrt.get(quit_debugger.remote(SystemExit))


def test_values_are_serialized_and_what_cannot_be_says_so(local):
    lock = threading.Lock()
    for call in (lambda: fastrt.put(lock), lambda: work.remote(lock), lambda: Keeper.remote().keep.remote(lock)):
        with pytest.raises(SerializationError):
            call()

    @fastrt.remote
    def give_lock():
        return lock

    with pytest.raises(SerializationError):
        fastrt.get(give_lock.remote())
    array = np.zeros(10)
    keeper = Keeper.remote()
    kept = fastrt.get(keeper.keep.remote(array))
    array[0] = 1
    assert kept[0] == 0
    with pytest.raises(ValueError, match="read-only"):
        kept[0] = 1


def test_task_ids_are_those_of_fastrts_own_engine(program):
    """A program of nested tasks and actors says all its ids: what is the same under both is the same in every run."""
    code = """
        import fastrt
        @fastrt.remote
        def leaf(k):
            return fastrt.runtime_context().task_id
        @fastrt.remote
        def inner(k):
            return [fastrt.runtime_context().task_id, *fastrt.get([leaf.remote(j) for j in range(3)])]
        @fastrt.remote
        class Actor:
            def call(self):
                return [fastrt.runtime_context().task_id, *fastrt.get([leaf.remote(0), leaf.remote(1)])]
        for local_mode in (False, True):
            with fastrt.init(2, local_mode=local_mode):
                actor = Actor.remote()
                refs = [inner.remote(k) for k in range(20)]
                refs += [actor.call.remote() for _ in range(3)]
                print(fastrt.get(refs))
    """
    said = program(code).finish()[0].splitlines()
    assert said[0] == said[1]
    ids = [one for row in json.loads(said[0].replace("'", '"')) for one in row]
    assert len(ids) == len(set(ids)) == 20 * 4 + 3 * 3
    assert ids[0] == f"{1:016x}", "the driver's own are numbered"


def test_priority_is_taken_and_changes_no_order(local):
    refs = [work.options(priority=k).remote(k) for k in range(3)]
    assert fastrt.get(refs) == [work.function(k) for k in range(3)]


def test_what_needs_a_store_says_that_it_has_no_counterpart(local):
    calls = [
        store_client.require,
        lambda: fastrt.placement_group([{"CPU": 1}]),
        lambda: fastrt.get_placement_group("mine"),
        fastrt.placement_group_table,
    ]
    for call in calls:
        with pytest.raises(UnsupportedError, match="engine 'local'"):
            call()


def test_references_and_handles_end_with_the_session(local):
    ref, keeper = work.remote(1), Keeper.options(name="k").remote()
    late = keeper.never.remote()
    with pytest.raises(GetTimeoutError, match="1 of 2 objects"):
        fastrt.get([ref, late], timeout=0)
    with pytest.raises(FastrtError, match="already"):
        fastrt.init()
    assert fastrt.init(ignore_reinit_error=True) is local
    fastrt.shutdown()
    calls = [
        lambda: fastrt.get(ref),
        lambda: work.remote(ref),
        lambda: work.remote([ref]),
        lambda: fastrt.wait([ref]),
        lambda: fastrt.cancel(ref),
        lambda: keeper.keep.remote(1),
        lambda: fastrt.kill(keeper),
    ]
    with fastrt.init(local_mode=True):
        for call in calls:
            with pytest.raises((StaleReferenceError, SerializationError)):
                call()
    for call in (calls[0], calls[3], calls[4], calls[5], calls[6]):
        with pytest.raises(StaleReferenceError):
            call()
    assert not fastrt.is_initialized()


def test_killed_actor_that_may_be_restarted_is_built_again(local):
    keeper = Keeper.options(max_restarts=1).remote()
    late = keeper.never.remote()
    fastrt.kill(keeper, no_restart=False)
    with pytest.raises(fastrt.ActorDiedError):
        fastrt.get(late)
    assert fastrt.get(keeper.context.remote()).restarts == 1
    fastrt.kill(keeper, no_restart=False)
    with pytest.raises(fastrt.ActorDiedError, match="killed"):
        fastrt.get(keeper.keep.remote(1))


def test_actor_that_exits_in_its_constructor_is_dead_and_says_so(local):
    @fastrt.remote
    class Leaver:
        def __init__(self):
            fastrt.exit_actor()

        def ping(self):
            return True

    with pytest.raises(fastrt.ActorDiedError, match=r"left by fastrt\.exit_actor"):
        fastrt.get(Leaver.remote().ping.remote())


def test_constructor_may_be_a_coroutine_function(local):
    @fastrt.remote
    class Slow:
        async def __init__(self, value):
            self.value = await self.doubled(value)

        async def doubled(self, value):
            return 2 * value

        async def look(self):
            return self.value

    assert fastrt.get(Slow.remote(5).look.remote()) == 10


def test_generator_that_yields_too_many_items_says_so(local, capfd):
    @fastrt.remote(num_returns=2)
    def three():
        yield from range(3)

    assert fastrt.get(three.remote()) == [0, 1]
    assert "three' has num_returns=2, and yields more; that is lost" in capfd.readouterr().err
    assert fastrt.get(three.options(num_returns=1).remote()) == 0
