"""Objects that a peer releases early, or that are passed round: nothing stays on either node."""

from fastrt._core.tasks import tasks as core
from fastrt.cluster.node_tables import NodeTables
from fastrt.cluster.peer_stream import Exchange
from fastrt.store.serialize import serialize
from support.sides import in_loop, pair


@in_loop
async def test_an_object_that_is_released_before_it_exists_is_not_sent():
    async with pair() as (here, there):
        task, promised = core.promise(here.client)
        here.forward(here.store.put([promised]))
        there.exchange.on_frame(await here.frames(lambda frame: frame.task and frame.value))
        core.finish_scalar(there.client, core.next_task(there.client, 0.0, 0.0), 1)
        there.exchange.tidy(set())  # the container
        there.exchange.tidy(set())  # what it contained
        here.exchange.on_frame(await there.frames(lambda frame: frame.ended and len(frame.release) == 2))
        assert core.finish_scalar(here.client, task, 7)
        here.forward(here.store.put(["another"]))
        sent = await here.frames(lambda frame: frame.task and frame.value)
        assert promised.objref not in [value.objref for value in sent.value]


@in_loop
async def test_an_object_that_a_task_returns_from_its_own_argument_is_released():
    async with pair() as (here, there):
        here.exchange = Exchange(here.store, here.waiter, NodeTables(here.store, here.waiter, None, 1 << 20))
        task, promised = core.promise(there.client)
        there.forward(there.store.put([promised]))
        here.exchange.on_frame(await there.frames(lambda frame: frame.task and frame.value))
        running = core.next_task(here.client, 0.0, 0.0)
        _, (stand_in,), _ = core.arguments(here.client, running)
        inner = here.forward(stand_in)
        assert core.finish_scalar(here.client, running, 1)
        there.exchange.on_frame(await here.frames(lambda frame: frame.task and frame.ended))
        passed_on = core.next_task(there.client, 0.0, 0.0)
        there.store.put_result(passed_on, 0, serialize([promised]))
        core.finish(there.client, passed_on)
        here.exchange.on_frame(await there.frames(lambda frame: frame.ended))
        del stand_in, inner
        for _ in range(3):
            here.exchange.tidy(set())
        assert not here.exchange.references.has_stand_ins
        assert core.finish_scalar(there.client, task, 7)


@in_loop
async def test_a_node_that_holds_many_objects_of_its_peer_looks_at_some_of_them_at_a_time():
    count, most = 50, 8
    async with pair() as (here, there):
        promised = [core.promise(here.client) for _ in range(count)]
        here.forward(here.store.put([ref for _, ref in promised]))
        there.exchange.on_frame(await here.frames(lambda frame: frame.task and frame.value))
        references = there.exchange.references
        held = list(references.stand_ins())[-1].ref.objref
        assert core.finish_scalar(there.client, core.next_task(there.client, 0.0, 0.0), 1)
        assert there.exchange.tidy({held}, 1000) == 1, "the container"
        calls, left = 0, [count]
        while left[-1] > 1 and calls < count:  # bounded: a failure must end
            released = there.exchange.tidy({held}, most)
            left.append(len(list(references.stand_ins())))
            calls += 1
            assert left[-2] - left[-1] == released <= most
            assert references.has_unlooked == (calls < -(-count // most))
        assert [one.ref.objref for one in references.stand_ins()] == [held]
        assert calls == -(-count // most)
        for task, _ in promised:
            assert core.finish_scalar(here.client, task, 7)
