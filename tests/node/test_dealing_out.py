"""Which peer gets a task: that with least to fetch."""

from fastrt._core.tasks import submission
from fastrt._core.tasks import tasks as core
from fastrt.cluster.peer import Helpers, Peer
from fastrt.cluster.peer_stream import Exchange
from support.sides import in_loop, pair


@in_loop
async def test_tasks_whose_arguments_are_everywhere_are_dealt_out():
    """All went to the node that had a little more of them than the others, which then fetched the rest of all."""
    async with pair() as (here, _):
        another = Exchange(here.store, here.waiter)
        here.exchange.node, another.node = "a" * 32, "b" * 32
        rows = [[here.store.put(bytes(200_000)) for _ in range(3)] for _ in range(12)]
        there_too = here.forward(*[row[0] for row in rows])
        near, far = (Peer(None, False, exchange, target=99.0) for exchange in (here.exchange, another))
        results = [submission.submit(here.client, submission.TaskOptions(here.function), tuple(row)) for row in rows]
        helpers, went = Helpers(here.client, [near, far]), []
        for _ in results:
            task = core.next_task(here.client, 0.0, 0.0)
            assert helpers.has_room()
            went.append(helpers.choose(task))
            went[-1].exchange.forward(task)
        assert 3 <= went.count(near) <= 9
        fetching = [peer.exchange.ledger.fetching for peer in (near, far)]
        assert max(fetching) - min(fetching) <= 700_000  # what one task has to fetch
        for exchange in (here.exchange, another):
            exchange.close("the connection broke")
            assert exchange.ledger.fetching == 0
        del there_too, results


def chosen(client, peers, tasks):
    """The peers that get tasks, none of which is sent."""
    helpers = Helpers(client, peers)
    return [helpers.choose(task) for task in tasks if helpers.has_room()]


@in_loop
async def test_bytes_that_the_other_node_has_been_sent_are_known():
    async with pair() as (here, there):
        sent, own = here.store.put(b"x" * 70_000), here.store.put(b"y" * 70_000)
        held = []
        here.exchange.references.on_held = lambda *about: held.append(about)
        another = Exchange(here.store, here.waiter)
        assert here.exchange.lacks([sent, own]) == 140_000
        here.forward(sent)
        there.exchange.on_frame(await here.frames(lambda frame: frame.value))
        assert here.exchange.lacks([sent, own]) == 70_000
        assert [objref for objref, nbytes in held if nbytes >= 70_000] == [sent.objref]
        here.exchange.node, another.node = "a" * 32, "b" * 32
        near, far = (Peer(None, False, exchange, target=9.0) for exchange in (here.exchange, another))
        tasks = [
            submission.submit(here.client, submission.TaskOptions(here.function), args)
            for args in ((sent, 1), (own,), (3,))
        ]
        claimed = [core.next_task(here.client, 0.0, 0.0) for _ in tasks]
        assert chosen(here.client, [far, near], claimed) == [near, far, far]
        assert chosen(here.client, [far], claimed) == [far, far, far]
        for task in claimed:
            assert core.finish_scalar(here.client, task, 1)
        assert core.finish_scalar(there.client, core.next_task(there.client, 0.0, 0.0), 1)
        there.exchange.tidy(set())
        here.exchange.on_frame(await there.frames(lambda frame: frame.release))
        assert held[1:] == [(sent.objref, 0)]
        another.close("the test is over")
