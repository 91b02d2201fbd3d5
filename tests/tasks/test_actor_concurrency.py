"""Actors that run several calls at once: coroutines, threads, concurrency groups; and cancelling calls."""

import asyncio
import os
import signal
import threading

import pytest

import fastrt
from fastrt.errors import ActorDiedError, TaskCancelledError

pytestmark = pytest.mark.usefixtures("rt")
SOON_S = 30.0


def get(refs):
    return fastrt.get(refs, timeout=SOON_S)


@fastrt.remote
class Meeting:
    """Calls that wait for each other: it only ends when as many as expected run at once."""

    def __init__(self, expected):
        self.expected, self.here, self.most = expected, 0, 0
        self.open = asyncio.Event()

    async def come(self, k):
        self.here += 1
        self.most = max(self.most, self.here)
        if self.here == self.expected:
            self.open.set()
        await self.open.wait()
        self.here -= 1
        return k

    async def count(self):
        return self.here

    async def peak(self):
        return self.most

    async def forever(self, path):
        try:
            self.here += 1
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            with open(path, "w") as file:
                file.write("cancelled")
            raise

    async def fail(self):
        self.open.set()
        await self.open.wait()
        raise KeyError("lost")

    async def add(self, ref_in_list, other):
        return await ref_in_list[0] + other

    def plain(self):
        return "plain"


@fastrt.remote
class Threaded:
    def __init__(self, expected):
        self.barrier = threading.Barrier(expected, timeout=SOON_S)
        self.names = set()

    def meet(self, k):
        self.names.add(threading.current_thread().name)
        self.barrier.wait()
        return k

    def who(self):
        return self.names

    def fail(self):
        raise KeyError("lost")


@fastrt.remote(concurrency_groups={"io": 2})
class Grouped(Threaded.cls):
    @fastrt.method(concurrency_group="io")
    def load(self, k):
        self.barrier.wait()
        return threading.current_thread().name


@fastrt.remote
class Slow:
    """One call at a time."""

    def __init__(self):
        self.interrupted = 0

    def hold(self, started, gate):
        pause = threading.Event()
        try:
            with open(started, "w"):
                pass
            while not os.path.exists(gate):
                pause.wait(0.002)
        except KeyboardInterrupt:
            self.interrupted += 1
            raise
        return "held"

    def interruptions(self):
        return self.interrupted


def test_coroutines_run_at_once_on_one_event_loop():
    actor = Meeting.remote(200)
    assert get([actor.come.remote(k) for k in range(200)]) == list(range(200))
    assert get([actor.peak.remote(), actor.plain.remote()]) == [200, "plain"]


def test_coroutines_are_limited_by_max_concurrency(wait_until):
    actor = Meeting.options(max_concurrency=3).remote(3)
    assert get([actor.come.remote(k) for k in range(9)]) == list(range(9))
    assert get(actor.peak.remote()) == 3


def test_coroutine_awaits_references_and_its_errors_arrive():
    actor = Meeting.remote(1)
    assert get(actor.add.remote([fastrt.put(40)], fastrt.put(2))) == 42
    with pytest.raises(KeyError, match="lost") as caught:
        get(actor.fail.remote())
    assert caught.value.task_name == "Meeting.fail"


def test_driver_awaits_calls_of_actors():
    async def main(actor):
        return await asyncio.gather(*[actor.come.remote(k) for k in range(20)])

    assert asyncio.run(main(Meeting.remote(20))) == list(range(20))


def test_coroutine_that_runs_is_cancelled(tmp_path, wait_until):
    actor = Meeting.remote(1)
    path = tmp_path / "said"
    running = actor.forever.remote(str(path))
    wait_until(lambda: get(actor.count.remote()) == 1, "the call to run")
    with pytest.raises(ValueError, match=r"force=True is not supported .* force would end the actor"):
        fastrt.cancel(running, force=True)
    fastrt.cancel(running)
    with pytest.raises(TaskCancelledError, match="while it ran") as caught:
        get(running)
    assert isinstance(caught.value, fastrt.TaskError)
    assert caught.value.task_name == "Meeting.forever"
    assert path.read_text() == "cancelled"
    assert get(actor.plain.remote()) == "plain"


def test_call_that_waits_for_its_turn_is_cancelled(tmp_path, wait_until):
    actor = Meeting.options(max_concurrency=1).remote(2)
    first = actor.forever.remote(str(tmp_path / "said"))
    waiting = [actor.come.remote(k) for k in range(3)]
    fastrt.cancel(waiting[1])
    with pytest.raises(TaskCancelledError, match="before it started"):
        get(waiting[1])
    fastrt.kill(actor)
    for ref in (first, waiting[0], waiting[2]):
        with pytest.raises(ActorDiedError):
            get(ref)


def test_calls_run_at_once_in_threads():
    actor = Threaded.options(max_concurrency=4).remote(4)
    assert get([actor.meet.remote(k) for k in range(8)]) == list(range(8))
    assert len(get(actor.who.remote())) == 4
    with pytest.raises(KeyError, match="lost"):
        get(actor.fail.remote())


def test_concurrency_groups_have_limits_of_their_own():
    actor = Grouped.options(max_concurrency=1).remote(3)
    names = get([actor.load.remote(0), actor.load.remote(1), actor.meet.remote(2)])
    assert sorted(names[:2]) == ["fastrt-io_0", "fastrt-io_1"]
    assert get(actor.who.remote()) == {"fastrt-calls_0"}


@fastrt.remote(concurrency_groups={"io": 2, "slow": 1})
class Loops:
    def __init__(self):
        self.open = threading.Event()

    @fastrt.method(concurrency_group="slow")
    async def block(self):
        self.open.wait(SOON_S)
        return threading.current_thread().name

    @fastrt.method(concurrency_group="io")
    async def unblock(self):
        self.open.set()
        return threading.current_thread().name, fastrt.runtime_context().task_name

    async def name(self):
        return threading.current_thread().name

    @fastrt.method(concurrency_group="io")
    async def hang(self):
        await asyncio.Event().wait()


def test_concurrency_groups_of_coroutines_have_event_loops_of_their_own(wait_until):
    actor = Loops.remote()
    blocked, name = actor.block.remote(), actor.name.remote()
    assert get(name) == "MainThread"
    assert get(actor.unblock.remote()) == ("fastrt-io", "Loops.unblock")
    assert get(blocked) == "fastrt-slow"
    hanging = actor.hang.remote()
    wait_until(lambda: [row for row in fastrt.list_tasks(name="Loops.hang") if row["state"] == "running"], "the call")
    fastrt.cancel(hanging)
    with pytest.raises(TaskCancelledError, match="while it ran"):
        get(hanging)


def test_call_runs_in_the_concurrency_group_that_its_options_name():
    actor = Loops.remote()
    in_io = actor.name.options(concurrency_group="io")
    assert get(in_io.remote()) == "fastrt-io"
    assert get(in_io.options(num_returns=1).remote()) == "fastrt-io"
    assert get(in_io.options(timeout=SOON_S).remote()) == "fastrt-io"
    assert get(in_io.options(concurrency_group="slow").remote()) == "fastrt-slow"
    assert get(actor.unblock.options(concurrency_group="").remote())[0] == "MainThread"
    with pytest.raises(ValueError, match=r"no concurrency group 'net'; class Loops names \['io', 'slow'\]"):
        actor.name.options(concurrency_group="net")
    threads = Grouped.options(max_concurrency=1).remote(1)
    assert get(threads.load.options(concurrency_group="").remote(0)) == "fastrt-calls_0"
    with pytest.raises(KeyError, match="lost") as caught:
        get(threads.fail.options(concurrency_group="io").remote())
    assert caught.value.task_name == "Grouped.fail"


def test_death_of_a_concurrent_actor_fails_all_that_ran():
    actor = Meeting.options(max_restarts=1).remote(2)
    pid = get(actor.plain.remote()) and get(pid_of.remote(actor))
    refs = [actor.forever.remote("/dev/null") for _ in range(20)]
    while get(actor.count.remote()) < 20:
        pass
    os.kill(pid, signal.SIGKILL)
    for ref in refs:
        with pytest.raises(ActorDiedError, match="died while it ran this call"):
            get(ref)
    assert get(actor.count.remote()) == 0, "the new instance is as new"


@fastrt.remote
def pid_of(actor):
    from fastrt._core.tasks import actors
    from fastrt.store.client import require

    client = require().client
    return actors.info(client, actors.index_of(client, actor._actor_ref))["pid"]


def test_queued_and_running_calls_of_an_ordered_actor_are_cancelled(tmp_path, wait_until):
    actor = Slow.remote()
    started, gate = tmp_path / "started", tmp_path / "gate"
    running = actor.hold.remote(str(started), str(gate))
    queued = [actor.hold.remote(str(tmp_path / f"{k}"), str(gate)) for k in range(3)]
    wait_until(started.exists, "the call to run")
    fastrt.cancel(queued[1])
    with pytest.raises(TaskCancelledError, match="before it started"):
        get(queued[1])
    fastrt.cancel(running)
    with pytest.raises(TaskCancelledError, match="while it ran"):
        get(running)
    gate.touch()
    assert get([queued[0], queued[2], actor.interruptions.remote()]) == ["held", "held", 1]
    assert not (tmp_path / "1").exists()


@fastrt.remote
class Persistent:
    """Its calls run to their end, also when they are cancelled."""

    def __init__(self):
        self.ended = 0

    def _hold(self, started, gate):
        pause = threading.Event()
        while not os.path.exists(started) or not os.path.exists(gate):
            try:
                open(started, "w").close()
                while not os.path.exists(gate):
                    pause.wait(0.002)
            except KeyboardInterrupt:
                open(f"{started} interrupted", "w").close()
        self.ended += 1

    def scalar(self, started, gate):
        self._hold(started, gate)
        return 1

    def large(self, started, gate):
        self._hold(started, gate)
        return list(range(3))

    def items(self, started, gate):
        self._hold(started, gate)
        yield 1
        yield 2

    def count(self):
        return self.ended


class Awaiting(Persistent.cls):
    """The same with coroutines."""

    async def scalar(self, started, gate):
        held = asyncio.get_running_loop().run_in_executor(None, self._hold, started, gate)
        try:
            await asyncio.shield(held)
        except asyncio.CancelledError:
            await held
        return 1

    async def count(self):
        return self.ended


@pytest.mark.parametrize("kind", ["threads", "alone", "coroutine"])
def test_cancelled_call_that_runs_to_its_end_raises_all_the_same(kind, tmp_path, wait_until):
    actor = (fastrt.remote(Awaiting) if kind == "coroutine" else Persistent).options(
        max_concurrency=1 if kind == "alone" else 8
    )
    actor = actor.remote()
    calls = [actor.scalar]
    if kind == "threads":
        calls += [
            actor.large,
            actor.large.options(num_returns=3),
            actor.items.options(num_returns=2),
            actor.items.options(num_returns="dynamic"),
        ]
    gate = tmp_path / "gate"
    running = [call.remote(str(tmp_path / f"{k}"), str(gate)) for k, call in enumerate(calls)]
    wait_until(lambda: all((tmp_path / f"{k}").exists() for k in range(len(calls))), "the calls to run")
    for refs in running:
        fastrt.cancel(refs[0] if isinstance(refs, list) else refs)
    if kind == "alone":  # threads and coroutines' threads are not interrupted
        wait_until((tmp_path / "0 interrupted").exists, "the interrupt")
    gate.touch()
    for refs in running:
        for ref in refs if isinstance(refs, list) else [refs]:
            with pytest.raises(TaskCancelledError, match="while it ran"):
                get(ref)
    assert get(actor.count.remote()) == len(calls)


@fastrt.remote
class Steps:
    """Holds up its event loop so that a call is claimed, and cancelled, before it can begin."""

    def __init__(self):
        self.turn = asyncio.Event()

    def _until(self, is_so):
        pause = threading.Event()
        while not is_so():
            pause.wait(0.002)

    async def first(self, started, turned):
        ready = asyncio.get_running_loop()._ready
        open(started, "w").close()
        self._until(lambda: len(ready) == 1)  # a call has come
        self.turn.set()
        open(turned, "w").close()
        self._until(lambda: len(ready) == 3)  # then `second`, then a look for cancelled calls

    async def second(self, holds, gate):
        await self.turn.wait()
        open(holds, "w").close()
        self._until(lambda: os.path.exists(gate))

    async def forever(self, started):
        open(started, "w").close()
        await asyncio.Event().wait()


def test_coroutine_that_is_cancelled_before_its_first_step_raises(tmp_path, wait_until):
    actor = Steps.remote()
    holds, gate, runs, started, turned = (tmp_path / name for name in ("holds", "gate", "runs", "started", "turned"))
    second = actor.second.remote(str(holds), str(gate))
    running = actor.forever.remote(str(runs))
    wait_until(runs.exists, "the coroutine to run")
    first = actor.first.remote(str(started), str(turned))
    wait_until(started.exists, "the first call to hold up the loop")
    claimed = actor.forever.remote(str(tmp_path / "never"))
    wait_until(turned.exists, "the turn of the second call")
    fastrt.cancel(running)
    wait_until(holds.exists, "the second call to hold up the loop")
    fastrt.cancel(claimed)
    gate.touch()
    for ref in (running, claimed):
        with pytest.raises(TaskCancelledError, match="while it ran"):
            get(ref)
    assert get([first, second]) == [None, None]


def test_items_of_a_cancelled_generator_in_a_thread_end_with_the_error(tmp_path, wait_until):
    actor = Persistent.options(max_concurrency=2).remote()
    started, gate = tmp_path / "started", tmp_path / "gate"
    items = actor.items.options(num_returns="streaming").remote(str(started), str(gate))
    wait_until(started.exists, "the generator to run")
    fastrt.cancel(items)
    gate.touch()
    assert [get(next(items)) for _ in range(2)] == [1, 2]
    with pytest.raises(TaskCancelledError):
        get(next(items))


def test_many_cancelled_calls_leave_the_others_in_order(wait_until):
    @fastrt.remote
    class Log:
        def __init__(self):
            self.seen = []

        def see(self, k):
            self.seen.append(k)

        def all(self):
            return self.seen

    actor = Log.remote()
    refs = [actor.see.remote(k) for k in range(2000)]
    for ref in refs[1::2]:
        fastrt.cancel(ref)
    seen = get(actor.all.remote())
    assert seen == sorted(seen)
    assert set(range(0, 2000, 2)) <= set(seen)


def test_constructor_of_an_actor_with_coroutines_runs_on_their_loop(rt):
    @fastrt.remote
    class Looped:
        def __init__(self):
            import asyncio

            self.loop = asyncio.get_running_loop()
            self.begun = self.loop.create_task(self.say("begun"))

        async def say(self, text):
            return text

        async def look(self):
            import asyncio

            return asyncio.get_running_loop() is self.loop, await self.begun

    assert fastrt.get(Looped.remote().look.remote(), timeout=60) == (True, "begun")


def test_constructor_on_the_loop_that_raises_ends_the_actor_without_frames_of_asyncio(rt):
    @fastrt.remote
    class Broken:
        def __init__(self):
            raise ValueError("no instance today")

        async def look(self):
            return 1

    with pytest.raises(fastrt.ActorDiedError, match="no instance today") as caught:
        fastrt.get(Broken.remote().look.remote(), timeout=60)
    assert "asyncio" not in str(caught.value)


def test_constructor_may_be_a_coroutine_function(rt):
    @fastrt.remote
    class Slow:
        def __new__(cls, value):
            return super().__new__(cls)

        async def __init__(self, value):
            self.value = await self.doubled(value)

        async def doubled(self, value):
            return 2 * value

        async def look(self):
            return self.value

    assert fastrt.get(Slow.remote(5).look.remote(), timeout=60) == 10
