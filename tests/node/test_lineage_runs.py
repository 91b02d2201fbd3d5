"""How often a task may run again for its values, if it has begun again before."""

import math
import pickle

import pytest

from fastrt._core.objects import handles
from fastrt._core.tasks import submission
from fastrt._core.tasks import tasks as core
from fastrt.cluster.node_tables import NodeTables
from fastrt.cluster.peer_stream import Exchange
from fastrt.errors import ObjectLostError
from fastrt.store.serialize import serialize
from support.sides import in_loop, pair

MANY = 200  # results of one task


@in_loop
async def test_a_task_that_begins_again_after_its_stream_has_ended_has_a_run_less_in_its_lineage():
    async with pair() as (here, there):
        here.exchange = Exchange(here.store, here.waiter, NodeTables(here.store, here.waiter, None, 1 << 20))
        _, last = submission.submit(here.client, submission.TaskOptions(here.function, 2, 1), ())
        here.exchange.forward(core.next_task(here.client, 0.0, 0.0))
        there.exchange.on_frame(await here.frames(lambda frame: frame.task))
        running = core.next_task(there.client, 0.0, 0.0)
        task, promised = core.promise(there.client)
        there.store.put_result(running, 1, serialize([promised]))  # the first result does not come
        here.exchange.on_frame(await there.frames(lambda frame: frame.value))
        [lost] = here.store.load(last)
        here.exchange.close("the connection broke")
        again = core.next_task(here.client, 0.0, 0.0)
        assert core.info(here.client, again)["attempts"] == 2
        assert core.next_task(here.client, 0.0, 0.0) < 0
        with pytest.raises(ObjectLostError, match=r"may not run again \(max_retries\)"):
            here.store.load(lost)
        for k in range(2):
            here.store.put_result(again, k, serialize(1))
        core.finish(here.client, again)
        core.finish_scalar(there.client, task, 1)
        there.store.put_result(running, 0, serialize(1))
        core.finish(there.client, running)


@in_loop
async def test_references_in_many_results_are_stored_in_few_lists_that_the_next_uplink_takes_over():
    """The uplink stored the whole record anew for each value that named an object: 2,000 results took 3 seconds."""
    async with pair() as (here, there):
        tables = NodeTables(here.store, here.waiter, None, 1 << 20)
        here.exchange = Exchange(here.store, here.waiter, tables)
        held, sizes = {}, []

        def hold(ref):
            held[ref.objref] = ref
            sizes.append(handles.describe(here.client, ref)["bytes"])

        tables.lineage.on_store, tables.lineage.on_drop = hold, held.pop
        results = submission.submit(here.client, submission.TaskOptions(here.function, MANY + 1, 1), ())
        here.exchange.forward(core.next_task(here.client, 0.0, 0.0))
        there.exchange.on_frame(await here.frames(lambda frame: frame.task))
        running = core.next_task(there.client, 0.0, 0.0)
        promised = [core.promise(there.client) for _ in range(MANY)]
        for k, (_, ref) in enumerate(promised, 1):  # the first result does not come
            there.store.put_result(running, k, serialize([ref]))
        here.exchange.on_frame(await there.frames(lambda frame: len(frame.value) == MANY))
        lost = [here.store.load(one)[0] for one in results[1:]]
        origins = tables.lineage.origins()
        assert [origins[one.objref][1:] for one in lost] == [(k, (0,)) for k in range(1, MANY + 1)]
        assert len(held) <= 2 + math.log2(MANY)
        assert sum(sizes) < 4 * sizes[0] + 40 * MANY * math.log2(MANY)  # 40: more than a row takes

        stored = []
        adopted = NodeTables(here.store, here.waiter, None, 1 << 20).lineage
        adopted.on_store = stored.append
        adopted.adopt(held.values())
        dropped = []
        small = NodeTables(here.store, here.waiter, None, 0).lineage  # of a node that keeps no lineage any more
        small.on_drop = dropped.append
        small.adopt(held.values())
        assert set(dropped) == set(held)
        form = pickle.loads(here.store.read(stored[-1])[2])  # of the run that begins with this uplink
        assert form["left"] == 0
        assert form["places"] == {objref: place[1:] for objref, place in origins.items()}
        here.exchange.close("the connection broke")
        again = core.next_task(here.client, 0.0, 0.0)
        for k in range(MANY + 1):
            here.store.put_result(again, k, serialize(1))
        core.finish(here.client, again)
        for task, _ in promised:
            core.finish_scalar(there.client, task, 1)
        there.store.put_result(running, 0, serialize(1))
        core.finish(there.client, running)
