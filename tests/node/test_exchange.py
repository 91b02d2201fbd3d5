"""Two nodes' ends of one stream in one process, its frames passed by hand: orders that a network makes rarely."""

import asyncio
import contextlib

import pytest

from fastrt._core.objects import functions, handles
from fastrt._core.repair.fsck import usage
from fastrt._core.tasks import actors, admission, generators, submission
from fastrt._core.tasks import tasks as core
from fastrt.cluster.peer import Peer
from fastrt.cluster.peer_stream import Exchange
from fastrt.cluster.references import PeerError
from fastrt.errors import FastrtError, ObjectLostError, ObjectStoreFullError, TaskCancelledError
from fastrt.store.serialize import serialize
from fastrt.tasks.actor_handle import ActorPlan
from fastrt.tasks.resources import Demand, export
from support.sides import PATIENCE_S, Frame, Side, frames_of, in_loop, pair


def first_pieces(frame):
    return [value for value in frame.value if not value.at]


def has_values(frame, count):
    """Whether so many values are there, whole."""
    firsts = first_pieces(frame)
    return len(firsts) == count and sum(len(v.data) for v in frame.value) == sum(v.size for v in firsts)


@in_loop
async def test_a_value_in_the_frame_of_the_task_that_names_it_arrives():
    async with pair() as (here, there):
        argument = here.store.put(["value"])
        result = here.forward(argument, 1)
        frame = await here.frames(lambda frame: frame.task and frame.value)
        there.exchange.on_frame(frame)
        task = core.next_task(there.client, 0.0, 0.0)
        assert task >= 0, "its argument is there, so it can run"
        _, (stand_in, one), _ = core.arguments(there.client, task)
        assert there.store.get(stand_in) == ["value"]
        assert core.finish_scalar(there.client, task, one + 41)
        here.exchange.on_frame(await there.frames(lambda frame: frame.ended))
        assert here.store.get(result, timeout=0) == 42
        assert here.exchange.ledger.forwarded == 0
        del stand_in


@in_loop
async def test_a_result_that_is_an_own_value_becomes_an_error_if_its_copy_finds_no_room():
    """The error ended the stream to the peer, and with it all tasks there."""
    async with pair() as (here, _):
        own = here.store.put(bytes(8 << 20))
        result = here.forward(1)
        here.exchange.references.name_again(own)
        rest = [here.store.put(bytes(9 << 20)) for _ in range(6)]
        frame = Frame()
        frame.value.add(task=1, yours=own.objref)
        here.exchange.on_frame(frame)
        with pytest.raises(ObjectStoreFullError):
            here.store.get(result, timeout=0)
        here.exchange.references.released(own.objref, 1)
        del own, result, rest


@in_loop
async def test_each_small_value_is_in_the_frame_that_first_names_it():
    """Else a name without a value is all that the peer has when this process is killed between two frames."""
    async with pair() as (here, there):
        for k in range(100):
            here.forward(here.store.put([here.store.put(k), bytes(20_000)]))
        count = 0
        while not here.exchange.out.is_empty:
            frame = await asyncio.wait_for(here.exchange.out.next_frame(), PATIENCE_S)
            names = [task.ref for task in frame.task] + [value.contains for value in frame.value]
            named = sorted(ref.objref for refs in names for ref in refs)
            assert named == sorted(value.objref for value in frame.value)
            count += len(frame.task)
            there.exchange.on_frame(frame)
        assert count == 100


@in_loop
async def test_a_large_container_comes_before_the_small_values_it_names():
    async with pair() as (here, there):
        inner = here.store.put([1, 2])
        outer = here.store.put([inner, bytes(1 << 20)])
        here.forward(outer)
        frame = await here.frames(lambda frame: has_values(frame, 2))
        there.exchange.on_frame(frame)
        task = core.next_task(there.client, 0.0, 0.0)
        _, (stand_in,), _ = core.arguments(there.client, task)
        found, _ = there.store.get(stand_in)
        assert there.store.get(found, timeout=0) == [1, 2]
        assert core.finish_scalar(there.client, task, None)
        del stand_in, found


@in_loop
async def test_an_actor_is_known_when_its_plan_is_in_the_frame_of_the_value_that_first_names_it():
    async with pair() as (here, there):
        plan = ActorPlan("Counter", here.segment.session, (), None, None, 0, 1)
        counter = here.store.put(plan)
        actor = actors.create(here.client, counter, 0, "", 0, False)
        here.forward(here.store.put([counter]))
        frame = await here.frames(lambda frame: frame.value and frame.plan)
        there.exchange.on_frame(frame)
        task = core.next_task(there.client, 0.0, 0.0)
        _, (stand_in,), _ = core.arguments(there.client, task)
        (found,) = there.store.get(stand_in, timeout=0)
        assert there.store.get(found, timeout=0).name == "Counter"
        assert actors.is_actor(there.client, found)
        assert core.finish_scalar(there.client, task, None)
        del stand_in, found
        assert actors.end(here.client, actor, "the test is over") == []


@in_loop
async def test_an_object_named_again_while_its_release_is_under_way_is_sent_again():
    async with pair() as (here, there):
        argument = here.store.put(["value"])
        for _ in range(2):
            here.forward(argument)
        first = await here.frames(lambda frame: len(frame.task) == 2 and frame.value)
        second = Frame()
        second.task.append(first.task.pop())
        there.exchange.on_frame(first)
        core.finish_scalar(there.client, core.next_task(there.client, 0.0, 0.0), 1)
        there.exchange.tidy(set())
        answer = await there.frames(lambda frame: frame.ended and frame.release)
        there.exchange.on_frame(second)
        assert core.next_task(there.client, 0.0, 0.0) == core.NO_TASK
        here.exchange.on_frame(answer)
        there.exchange.on_frame(await here.frames(lambda frame: frame.value))
        task = core.next_task(there.client, 0.0, 0.0)
        assert task >= 0
        assert core.finish_scalar(there.client, task, 2)


@in_loop
async def test_pieces_of_a_value_that_nobody_wants_any_more_touch_nothing():
    async with pair() as (here, there):
        inner = here.store.put(bytes(1 << 20))
        holder = here.store.put([inner])
        here.forward(holder)
        frame = await here.frames(lambda frame: has_values(frame, 2))
        late = Frame(value=[value for value in frame.value if value.at])
        early = Frame(function=frame.function, task=frame.task, value=first_pieces(frame))
        there.exchange.on_frame(early)
        core.finish_scalar(there.client, core.next_task(there.client, 0.0, 0.0), 1)
        there.exchange.tidy(set())  # the container
        there.exchange.tidy(set())  # what it contained, of which a piece has come
        filled = [there.store.put(bytes([k]) * (1 << 20)) for k in range(8)]
        there.exchange.on_frame(late)
        assert [there.store.get(ref)[-1] for ref in filled] == list(range(8))
        assert usage(there.client)["tasks"] == 0


@in_loop
async def test_a_lost_stream_gives_everything_back():
    async with pair() as (here, there):
        result = here.forward(here.store.put(["value"]))
        there.exchange.on_frame(await here.frames(lambda frame: frame.task and frame.value))
        here.exchange.close("it was cut")
        there.exchange.close("it was cut")
        assert handles.is_ready(here.client, result)
        with pytest.raises(Exception, match=r"after attempt 1.*it was cut"):
            here.store.get(result)
        assert usage(there.client)["tasks"] == usage(here.client)["tasks"] == 0


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        ({"task": [{"task": 1, "results": 1, "function": b"?" * 16}]}, "a task before the function"),
        ({"task": [{"task": 1, "results": 1 << 30}]}, "invalid counts"),
        ({"task": [{"task": 1, "results": 1, "dependencies": 5}]}, "invalid counts"),
        ({"task": [{"task": 1, "results": 1, "ref": [{"objref": 77, "yours": True}]}]}, "which it does not hold"),
        ({"value": [{"objref": 5, "at": 100, "data": b"x"}], "release": [{"objref": 9, "named": 3}]}, None),
        ({"ended": [12], "cancel": [{"task": 13}, {"objref": 14}]}, None),
        ({"reads": [{"task": 4, "taken": 1}], "value": [{"task": 4, "item": 1}]}, None),
    ],
)
def test_what_makes_no_sense_closes_the_stream_and_changes_nothing(frame, words):
    @in_loop
    async def run():
        async with pair() as (_, there):
            before = usage(there.client)
            if words is None:
                there.exchange.on_frame(Frame(**frame))
            else:
                with pytest.raises(PeerError, match=words):
                    there.exchange.on_frame(Frame(**frame))
            assert usage(there.client) == before

    run()


@pytest.mark.parametrize("terms", [(False, False), (True, False), (False, True)])
def test_cancelled_tasks_are_ended_over_there_as_it_was_asked_for_each(terms):
    """Two are cancelled before anything of it is passed on, beside a third that is spared: each on its own terms."""

    @in_loop
    async def run():
        async with pair() as (here, there):
            refs = [here.forward(k) for k in range(3)]
            there.exchange.on_frame(await here.frames(lambda frame: len(frame.task) == 3))
            core.cancel(here.client, refs[0], *terms)
            core.cancel(here.client, refs[2])
            here.exchange.pass_cancels()
            frame = await here.frames(lambda frame: len(frame.cancel) == 2)
            assert [(one.task, one.force, one.alone) for one in frame.cancel] == [(1, *terms), (3, False, False)]
            assert [handles.is_ready(here.client, ref) for ref in refs] == [True, False, True]
            assert here.exchange.ledger.forwarded == 1
            there.exchange.on_frame(frame)
            task = core.next_task(there.client, 0.0, 0.0)
            assert core.arguments(there.client, task)[1] == (1,)
            assert core.finish_scalar(there.client, task, 5)
            assert core.next_task(there.client, 0.0, 0.0) == core.NO_TASK
            here.exchange.on_frame(await there.frames(lambda frame: len(frame.ended) == 3))
            assert (here.store.get(refs[1]), here.exchange.ledger.forwarded) == (5, 0)

    run()


@pytest.mark.parametrize("terms", [(False, False), (True, False), (False, True)])
def test_task_of_the_other_node_that_is_cancelled_here_ends_there(terms):
    """A reference that another node has named: who made it is asked to cancel it, once for each way of cancelling."""

    @in_loop
    async def run():
        async with pair() as (here, there):
            waits_for = here.submit()
            gate = core.next_task(here.client, 0.0, 0.0)
            wanted, spared = here.submit(waits_for), here.submit(waits_for)
            here.forward(here.store.put([wanted, spared]))
            there.exchange.on_frame(await here.frames(lambda frame: frame.task and frame.value))
            forwarded = core.next_task(there.client, 0.0, 0.0)
            _, (stand_in,), _ = core.arguments(there.client, forwarded)
            found, other = there.store.get(stand_in, timeout=0)
            assert core.cancel(there.client, found, *terms)[0] == "running"
            there.exchange.pass_cancels()
            there.exchange.pass_cancels()
            frame = await there.frames(lambda frame: frame.cancel)
            assert [(one.objref, one.force, one.alone) for one in frame.cancel] == [(wanted.objref, *terms)]
            assert not handles.is_ready(there.client, found), "its own node has the last word"
            here.exchange.on_frame(frame)
            with pytest.raises(TaskCancelledError):
                here.store.get(wanted, timeout=0)
            there.exchange.on_frame(await here.frames(lambda frame: frame.value))
            with pytest.raises(TaskCancelledError):
                there.store.get(found, timeout=0)
            assert not handles.is_ready(there.client, other)
            assert core.finish_scalar(there.client, forwarded, None)
            assert core.finish_scalar(here.client, gate, None)
            assert core.finish_scalar(here.client, core.next_task(here.client, 0.0, 0.0), None)
            del stand_in, found, other

    run()


@in_loop
async def test_a_task_that_is_lent_on_says_how_often_it_was():
    async with pair() as (here, there):
        here.forward(1)
        there.exchange.on_frame(await here.frames(lambda frame: frame.task))
        assert there.exchange.ledger.accepted == 1
        for times in (2, 3):
            task = core.next_task(there.client, 0.0, 0.0)
            assert core.info(there.client, task)["hops"] == times - 1
            there.exchange.forward(task)
            frame = await there.frames(lambda frame: frame.task)
            assert [one.hops for one in frame.task] == [times]
            here.exchange.on_frame(frame)
            here, there = there, here
        assert core.finish_scalar(there.client, core.next_task(there.client, 0.0, 0.0), 7)


@in_loop
async def test_a_node_with_workers_forwards_what_the_other_has_room_for_and_one_without_what_keeps_it_busy():
    async with pair() as (here, _):
        here.exchange.on_frame(Frame(hello={"node": "a" * 32, "address": "127.0.0.1:1", "workers": 2}, room=3))
        choosy, forced = (Peer(None, choice, here.exchange, target=8.0) for choice in (True, False))
        assert (choosy.room, forced.room) == (3, 8)
        here.forward(1)
        assert (choosy.room, forced.room) == (2, 7)
        here.exchange.on_frame(Frame(room=0))
        assert (choosy.room, forced.room) == (0, 7)


@in_loop
async def test_results_of_a_task_come_in_one_frame():
    """Each had a frame of its own, as it was made: a task of 64 results took its uplink as long as 64 tasks."""
    async with pair() as (here, there):
        options = submission.TaskOptions(here.function, 64, 0)
        results = submission.submit(here.client, options, ())
        here.exchange.forward(core.next_task(here.client, 0.0, 0.0))
        there.exchange.on_frame(await here.frames(lambda frame: frame.task))
        running = core.next_task(there.client, 0.0, 0.0)
        for k in range(63):
            there.store.put_result(running, k, serialize(k))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(there.exchange.out.next_frame(), 0.1)
        there.store.put_result(running, 63, serialize(63))
        core.finish(there.client, running)
        frame = await asyncio.wait_for(there.exchange.out.next_frame(), PATIENCE_S)
        assert len(frame.value) == 64
        here.exchange.on_frame(frame)
        assert here.store.get(results, timeout=0) == list(range(64))


def give(side, **value):
    side.exchange.on_frame(Frame(value=[{"task": 1, "kind": 0, "data": b"N.", "size": 2, **value}]))  # None, pickled


@in_loop
async def test_items_are_added_in_order_and_make_no_sense_twice_or_with_gaps():
    async with pair() as (here, there):
        stream = generators.create(here.client, 0)
        end = submission.submit(here.client, submission.TaskOptions(here.function), (1,), stream)
        here.exchange.forward(core.next_task(here.client, 0.0, 0.0))
        frame = await here.frames(lambda frame: frame.task)
        frame.task[0].results = 2
        with pytest.raises(PeerError, match="a generator with 2 results"):
            there.exchange.on_frame(frame)
        give(here, item=2)
        assert generators.info(here.client, stream)["unread"] == 0
        with pytest.raises(PeerError, match="some of its items did not arrive"):
            give(here)
        with pytest.raises(PeerError, match=r"item 2 of a stream .* twice"):
            give(here, item=2)
        give(here, item=1)
        with pytest.raises(PeerError, match=r"item 1 of a stream .* twice"):
            give(here, item=1)
        assert generators.info(here.client, stream)["unread"] == 2
        give(here)
        assert handles.is_ready(here.client, end)
        here.exchange.on_frame(Frame(ended=[1]))


def forward_stream(side, limit=0):
    """Forward a generator's task; return its stream and its end."""
    stream = generators.create(side.client, limit)
    end = submission.submit(side.client, submission.TaskOptions(side.function), (1,), stream)
    side.exchange.forward(core.next_task(side.client, 0.0, 0.0))
    return stream, end


@in_loop
async def test_a_stream_whose_task_ends_while_others_sleep_for_it_delays_none_of_them():
    async with pair() as (here, there):
        shown = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: shown.append(context["exception"]))
        first, second = forward_stream(here, 1), forward_stream(here, 1)
        there.exchange.on_frame(await here.frames(lambda frame: len(frame.task) == 2))
        forwarded = {number: one.task for number, one in here.exchange.ledger.open()}
        assert core.finish_scalar(here.client, forwarded[1], 1)  # as in the moment before its flow is dropped
        for k in range(3):
            give(here, task=2, item=k + 1)
            generators.take(here.client, *second, 1.0, 0.0)
            await here.frames(lambda frame, k=k: any((one.task, one.taken) == (2, k + 1) for one in frame.reads))
        here.exchange.ledger.take(1)
        here.exchange.flows.drop(1)
        give(here, task=2)
        assert handles.is_ready(here.client, first[1])
        assert {type(exc) for exc in shown} <= {FastrtError}
        here.exchange.on_frame(Frame(ended=[2]))


@in_loop
async def test_limit_of_unread_items_holds_over_a_node_between():
    async with pair() as (here, between):
        third = Side()
        onward = Exchange(between.store, between.waiter)
        try:
            stream, end = forward_stream(here, 2)
            between.exchange.on_frame(await here.frames(lambda frame: frame.task))
            onward.forward(core.next_task(between.client, 0.0, 0.0))
            third.exchange.on_frame(await frames_of(onward, lambda frame: frame.task))
            task = core.next_task(third.client, 0.0, 0.0)
            producer = generators.Producer(third.client, task)
            for read in range(3):
                while not producer.full:
                    producer.add("item")
                    onward.on_frame(await third.frames(lambda frame: frame.value))
                    here.exchange.on_frame(await between.frames(lambda frame: frame.value))
                assert generators.info(here.client, stream)["unread"] == 2
                assert generators.info(here.client, stream)["taken"] == read
                generators.take(here.client, stream, end, 1.0, 0.0)
                between.exchange.on_frame(await here.frames(lambda frame: frame.reads))
                third.exchange.on_frame(await frames_of(onward, lambda frame: frame.reads))
            assert core.finish_scalar(third.client, task, None)
        finally:
            onward.close("the test is over")
            third.close()


async def name_stream(here, there):
    """Name a generator that runs here to the other node: its producer here, and its stream and end there."""
    stream = generators.create(here.client, 0)
    end = submission.submit(here.client, submission.TaskOptions(here.function), (1,), stream)
    task = core.next_task(here.client, 0.0, 0.0)
    submission.submit(
        here.client, submission.TaskOptions(here.function, 0), submission.PackedArgs(16, b"", [stream, end], 0)
    )
    here.exchange.forward(core.next_task(here.client, 0.0, 0.0))
    there.exchange.on_frame(await here.frames(lambda frame: frame.task))
    reader = core.next_task(there.client, 0.0, 0.0)
    _, _, refs = core.arguments(there.client, reader, True)
    core.finish(there.client, reader)
    here.exchange.on_frame(await there.frames(lambda frame: frame.ended))
    return stream, generators.Producer(here.client, task), task, refs


@in_loop
async def test_a_generator_is_read_on_another_node_as_it_is_asked_for():
    async with pair() as (here, there):
        stream, producer, task, there_refs = await name_stream(here, there)
        for k in range(200):
            producer.add_ref(here.store.put(["large" * 20_000])) if k == 3 else producer.add(k)
        with pytest.raises(asyncio.TimeoutError):  # nobody has wanted any
            await asyncio.wait_for(there.exchange.out.next_frame(), 0.2)
        assert generators.info(here.client, stream)["unread"] == 200
        assert generators.take(there.client, *there_refs, 0, 0.0) is False
        here.exchange.on_frame(await there.frames(lambda frame: frame.reads))
        there.exchange.on_frame(await here.frames(lambda frame: len(frame.value) >= 64))
        read = [there.store.get(generators.take(there.client, *there_refs, 1.0, 0.0)) for _ in range(40)]
        assert read == [0, 1, 2, ["large" * 20_000], *range(4, 40)]
        assert generators.info(here.client, stream)["unread"] == 200 - 64
        assert core.finish_scalar(here.client, task, None)  # its end comes there before the last items
        frame = await here.frames(lambda frame: any(one.objref and not one.item for one in frame.value))
        there.exchange.on_frame(frame)
        assert handles.is_ready(there.client, there_refs[1])
        while (item := generators.take(there.client, *there_refs, 0, 0.0)) is not None:
            if item is not False:
                read.append(there.store.get(item))
                continue
            with contextlib.suppress(asyncio.TimeoutError):
                here.exchange.on_frame(await asyncio.wait_for(there.exchange.out.next_frame(), 0.2))
            with contextlib.suppress(asyncio.TimeoutError):
                there.exchange.on_frame(await asyncio.wait_for(here.exchange.out.next_frame(), 0.2))
        assert read[4:] == list(range(4, 200))
        assert generators.take(there.client, *there_refs, 0, 0.0) is None
        del there_refs
        there.exchange.tidy(set())
        here.exchange.on_frame(await there.frames(lambda frame: len(frame.release) == 2))


@in_loop
async def test_a_generator_of_a_node_that_is_lost_ends_with_an_error():
    async with pair() as (here, there):
        _, producer, task, there_refs = await name_stream(here, there)
        producer.add("first")
        assert generators.take(there.client, *there_refs, 0, 0.0) is False
        here.exchange.on_frame(await there.frames(lambda frame: frame.reads))
        there.exchange.on_frame(await here.frames(lambda frame: frame.value))
        there.exchange.close("it was cut")
        assert there.store.get(generators.take(there.client, *there_refs, 0, 0.0)) == "first"
        with pytest.raises(ObjectLostError, match=r"further items.*it was cut"):
            there.store.get(generators.take(there.client, *there_refs, 0, 0.0))
        assert core.finish_scalar(here.client, task, None)


@in_loop
async def test_a_task_with_a_demand_is_held_where_it_is_lent_to():
    async with pair() as (here, there):
        wanted = Demand((("CPU", 5000), ("gpu", 10000)), "spread")
        ref = submission.submit(
            here.client, submission.TaskOptions(here.function, demand=export(here.store, wanted)), (1,)
        )
        ((task, number),) = admission.take_held(here.client)
        assert admission.claim(here.client, task, number)
        here.exchange.forward(task)
        there.exchange.on_frame(await here.frames(lambda frame: frame.task))
        assert core.next_task(there.client, 0.0, 0.0) == core.NO_TASK
        ((accepted, number),) = admission.take_held(there.client)
        found = Demand.from_bytes(there.store.load(admission.demand_of(there.client, accepted, number)))
        assert found == wanted._replace(strategy="", node=there.client.segment.session)
        assert admission.admit(there.client, accepted, number)
        assert core.finish_scalar(there.client, core.next_task(there.client, 0.0, 0.0), 42)
        here.exchange.on_frame(await there.frames(lambda frame: frame.ended))
        assert here.store.get(ref, timeout=0) == 42


@in_loop
async def test_a_task_with_a_demand_that_is_none_closes_the_stream():
    async with pair() as (here, there):
        here.forward(1)
        frame = await here.frames(lambda frame: frame.task)
        frame.task[0].demand = b"much"
        with pytest.raises(PeerError, match="invalid demand: b'much' is no demand"):
            there.exchange.on_frame(frame)


@in_loop
async def test_a_function_that_its_node_drops_leaves_the_other_node_and_comes_again():
    async with pair() as (here, there):
        names = []
        for number in range(2):
            digest, code = bytes([number]) * 16, [b"large code" * 1000, number]
            function = functions.add_function(here.client, digest, here.store.put(code), "passing", False)
            names.append(function.objref)
            before = usage(there.client)["functions"]
            for _ in range(2):  # the second time, the other node has it
                result = submission.submit(here.client, submission.TaskOptions(function), (1,))
                here.exchange.forward(core.next_task(here.client, 0.0, 0.0))
                there.exchange.on_frame(await here.frames(lambda frame: frame.task))
                assert functions.sweep(there.client) == 0  # a task there names it
                task = core.next_task(there.client, 0.0, 0.0)
                assert there.store.get(handles.acquire(there.client, *core.function_of(there.client, task))) == code
                assert core.finish_scalar(there.client, task, 2)
                here.exchange.on_frame(await there.frames(lambda frame: frame.ended))
                assert here.store.get(result, timeout=0) == 2
                here.exchange.tidy(set())
                assert functions.sweep(there.client) == 0  # the other node can still name it
            del function, result
            assert functions.sweep(here.client) == 1
            here.exchange.tidy(set())
            there.exchange.on_frame(await here.frames(lambda frame: frame.forget))
            assert functions.sweep(there.client) == 1
            assert usage(there.client)["functions"] == before


@in_loop
async def test_a_function_that_a_frame_forgets_and_brings_again_stays():
    async with pair() as (here, there):
        for passing in range(2):
            function = functions.add_function(
                here.client, b"p" * 16, here.store.put(b"the same code"), "passing", False
            )
            result = submission.submit(here.client, submission.TaskOptions(function, 0), ())
            here.exchange.forward(core.next_task(here.client, 0.0, 0.0))
            ((number, forwarded),) = here.exchange.ledger.open()
            here.exchange.ledger.take(number)
            core.finish(here.client, forwarded.task)
            del function, result
            if passing == 0:
                assert functions.sweep(here.client) == 1
                here.exchange.tidy(set())
        frame = await here.frames(lambda frame: len(frame.task) == 2)
        assert (len(frame.function), len(frame.forget)) == (2, 1)
        there.exchange.on_frame(frame)
        assert functions.sweep(there.client) == 0
        assert functions.sweep(here.client) == 1
        here.exchange.tidy(set())
        there.exchange.on_frame(await here.frames(lambda frame: frame.forget))
        for _ in range(2):
            core.finish(there.client, core.next_task(there.client, 0.0, 0.0))
        assert functions.sweep(there.client) == 1
