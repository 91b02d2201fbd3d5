"""How often a task may run again for its values, if it has begun again before."""

import pytest

from fastrt._core.tasks import submission
from fastrt._core.tasks import tasks as core
from fastrt.cluster.peer_stream import Exchange
from fastrt.cluster.value_traffic import NodeTables
from fastrt.errors import ObjectLostError
from fastrt.store.serialize import serialize
from support.sides import in_loop, pair


@in_loop
async def test_a_task_that_begins_again_after_its_stream_has_ended_has_a_run_less_in_its_lineage():
    async with pair() as (here, there):
        here.exchange = Exchange(here.store, here.waiter, NodeTables(here.store, here.waiter, None, 1 << 20))
        first, _ = submission.submit(here.client, submission.TaskOptions(here.function, 2, 1), ())
        here.exchange.forward(core.next_task(here.client, 0.0, 0.0))
        there.exchange.on_frame(await here.frames(lambda frame: frame.task))
        running = core.next_task(there.client, 0.0, 0.0)
        task, promised = core.promise(there.client)
        there.store.put_result(running, 0, serialize([promised]))  # the second result does not come
        here.exchange.on_frame(await there.frames(lambda frame: frame.value))
        [lost] = here.store.load(first)
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
        there.store.put_result(running, 1, serialize(1))
        core.finish(there.client, running)
