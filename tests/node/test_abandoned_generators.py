"""Generators of other nodes that are read here, after the death of the uplink that fetched their items."""

import pytest

from fastrt._core.tasks import generators
from fastrt._core.tasks import tasks as core
from fastrt.cluster.node_tables import NodeTables
from fastrt.errors import ObjectLostError
from support.sides import in_loop, pair


@in_loop
async def test_a_reader_gets_an_error_when_the_uplink_that_fetched_the_items_has_died():
    async with pair() as (here, _):
        stream = generators.create(here.client, generators.ELSEWHERE)
        own = generators.create(here.client, 3)
        task, end = core.promise(here.client)
        assert generators.take(here.client, stream, end, 0, 0.0) is False
        NodeTables(here.store, here.waiter, None, 1 << 20).adopt()  # as the next uplink begins
        with pytest.raises(ObjectLostError, match="further items of a generator are lost"):
            here.store.load(generators.take(here.client, stream, end, 0, 0.0))
        core.finish_scalar(here.client, task, None)
        assert generators.take(here.client, stream, end, 0, 0.0) is None
        assert generators.info(here.client, own) == {"taken": 0, "produced": 0, "limit": 3, "unread": 0}
