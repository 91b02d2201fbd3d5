"""Large values beside an exchange: by the native stream, over broken connections, and in pieces where there is none."""

import asyncio
import contextlib

import numpy as np
import pytest

from fastrt._core.objects import handles
from fastrt._core.tasks import tasks as core
from fastrt.cluster.large_values import BYTES_MIN, Native, Values
from fastrt.cluster.node_tables import NEVER_BYTES, NodeTables, _send_order
from fastrt.cluster.outbox import PIECE_BYTES
from fastrt.cluster.peer_stream import Exchange
from fastrt.cluster.remote_values import Replacement
from fastrt.cluster.spread import Fetch
from fastrt.errors import NotFoundError, ObjectLostError
from fastrt.net.grpc.descriptors import message_set
from fastrt.net.grpc.identity import Identity, new_token
from fastrt.net.grpc.streams import Access
from fastrt.transfer.table import TransferError
from support.sides import Side, in_loop
from support.sites import Proxy, Unbound

TOKEN = new_token()
_NAMES = "Report", "Frame", "Value", "Release"
Report, Frame, Value, Release = (message_set("node").message(f"fastrt.node.{name}") for name in _NAMES)
PATIENCE_S = 20.0
NBYTES = 8 << 20


class End(Side):
    """A node's end of an exchange, with a native stream."""

    def __init__(self, token=TOKEN, keep_bytes=BYTES_MIN):
        super().__init__()
        self.native = Native(self.store, Access(Identity.from_token(token)), "127.0.0.1")
        self.tables = NodeTables(self.store, self.waiter, self.native, 1 << 20, keep_bytes)
        self.exchange = Exchange(self.store, self.waiter, self.tables)
        loop = asyncio.get_running_loop()
        wanted = self.exchange.traffic.remote.wanted
        # As a daemon and its uplink:
        self.store.tell = lambda one: loop.call_soon_threadsafe(wanted, one.entry, one.objref)
        self.pieces = 0
        self.answers = []

    def hear(self, frame):
        self.pieces += sum(value.at > 0 for value in frame.value)
        self.answers += [*(("taken", n) for n in frame.taken), *(("again", n) for n in frame.again)]
        self.exchange.on_frame(frame)

    def close(self):
        self.native.close()
        super().close()


async def forward(one, other):
    """Pass the frames of one end to the other until its stream ends."""
    while (frame := await one.exchange.out.next_frame()) is not None:
        other.hear(frame)


@contextlib.asynccontextmanager
async def pair(wait_until, address=None, tokens=(TOKEN, TOKEN), keep_bytes=(BYTES_MIN, BYTES_MIN)):
    """Two ends whose frames go to and fro; `address` makes the one where the first end's stream is said to be."""
    here, there = map(End, tokens, keep_bytes)

    told = here.native.address if address is None else address(here.native.address)
    there.hear(here.exchange.first_frame(Report(node="1" * 32, address="127.0.0.1:1", name="one", native=told)))
    theirs = Report(node="2" * 32, address="127.0.0.1:2", name="two", native=there.native.address)
    here.hear(there.exchange.first_frame(theirs))
    passing = [asyncio.create_task(forward(here, there)), asyncio.create_task(forward(there, here))]
    try:
        yield here, there
        loop = asyncio.get_running_loop()

        def is_released():  # offers last as long as the peer holds the objects
            for end in (here, there):
                loop.call_soon_threadsafe(end.exchange.tidy, set())
            return not here.native.offers.listed() and not there.native.offers.listed()

        await asyncio.to_thread(wait_until, is_released, "no offer is left")
    finally:
        for one in passing:
            one.cancel()
        here.close()
        there.close()


async def run(wait_until, there):
    """Take the task at the other end, once it can run: it, and its first argument."""
    await asyncio.to_thread(wait_until, lambda: core.queued(there.client), "the task can run", PATIENCE_S)
    task = core.next_task(there.client, 0.0, 0.0)
    _, (argument,), _ = core.arguments(there.client, task)
    return task, argument


def pattern(seed):
    return np.arange(NBYTES // 8, dtype=np.uint64) * np.uint64(2 * seed + 1)


@in_loop
async def test_object_that_a_peer_claims_without_a_native_stream_is_sent_and_stays_known_until_it_is_released():
    """The claim was answered with `unknown`, and the daemon held the object as long as the node ran."""
    end = End()
    try:
        tables, dropped = end.tables, []
        tables.kept.on_drop = lambda node, objref: dropped.append(objref)
        end.exchange.traffic.values.on_release = dropped.append
        end.exchange.on_frame(Frame(hello=Report(node="2" * 32, address="127.0.0.1:2", name="two"), claims=True))
        first, second = (end.store.put(pattern(k)) for k in (1, 2))
        tables.kept.keep("2" * 32, [first, second])
        end.exchange.on_frame(Frame(claim=[first.objref, 0]))
        assert dropped == [second.objref]
        sent = await end.frames(lambda frame: sum(len(value.data) for value in frame.value) >= NBYTES)
        assert not sent.unknown
        assert list(sent.named) == [first.objref]
        assert tables.kept.is_held("2" * 32, first.objref)
        end.exchange.on_frame(Frame(release=[Release(objref=first.objref, named=1)]))
        assert dropped == [second.objref, first.objref]
        assert not tables.kept.is_held("2" * 32, first.objref)
    finally:
        end.close()


@contextlib.contextmanager
def holders(count, nbytes):
    """Nodes that offer a value each, of one size but filled with the node's number: addresses and offers."""
    with contextlib.ExitStack() as stack:
        found = []
        for number in range(1, count + 1):
            side = stack.enter_context(contextlib.closing(Side()))
            native = stack.enter_context(
                contextlib.closing(Native(side.store, Access(Identity.from_token(TOKEN)), "127.0.0.1"))
            )
            found.append((native, native.offers.offer(side.store.put(bytes([number]) * nbytes))))
        yield found


async def taken(end, found, nbytes):
    """Take a value from several holders into one memory: the error that `landed` got, and the bytes."""
    landed = asyncio.get_running_loop().create_future()
    values = Values(end.native, lambda number, error: landed.set_result((number, error)))
    try:
        kind = handles.describe(end.client, end.store.put(bytes(nbytes)))["kind"]
        writer = end.store.create(nbytes, kind, 0)
        memoryview(writer)[:] = bytes(nbytes)
        values.take(7, writer, kind, [(native.address, offered) for native, offered in found])
        number, error = await asyncio.wait_for(landed, PATIENCE_S)
        assert (number, values.is_on_its_way(7)) == (7, False)
        return error, bytes(writer)
    finally:
        values.close()


@pytest.mark.parametrize(
    ("nbytes", "shares"),
    [(9 << 20, [9]), (17 << 20, [12, 5]), (48 << 20, [16, 16, 16])],
    ids=["too small to be divided", "two parts", "three parts"],
)
def test_parts_of_a_value_come_from_several_nodes_at_once(nbytes, shares):
    async def play():
        end = End()
        try:
            with holders(3, nbytes) as found:
                error, data = await taken(end, found, nbytes)
                assert error is None
                assert data == b"".join(bytes([k]) * (share << 20) for k, share in enumerate(shares, 1))
        finally:
            end.close()

    asyncio.run(play())


@pytest.mark.parametrize("how", ["gone", "withdrawn", "of another size"])
def test_value_fails_as_a_whole_if_one_of_its_senders_does(how):
    async def play():
        end = End()
        try:
            with holders(3, 48 << 20) as found, holders(1, 16 << 20) as others:
                native, offered = found[1]
                if how == "gone":
                    native.close()
                elif how == "withdrawn":
                    native.offers.drop(offered)
                else:
                    found[1] = others[0]
                error, _ = await taken(end, found, 48 << 20)
                assert isinstance(error, NotFoundError if how == "withdrawn" else TransferError)
        finally:
            end.close()

    asyncio.run(play())


def test_two_values_with_one_number_at_their_sender_arrive_at_once():
    """The second one took the place of the first, and the end of both ended the uplink."""

    async def play():
        end = End()
        try:
            with holders(1, 9 << 20) as found:
                ((native, offered),) = found
                landed = asyncio.Queue()
                values = Values(end.native, lambda *about: landed.put_nowait(about))
                kind = handles.describe(end.client, end.store.put(bytes(9 << 20)))["kind"]
                writers = {number: end.store.create(9 << 20, kind, 0) for number in (7, offered)}
                for number, writer in writers.items():
                    values.take(number, writer, kind, [(native.address, offered)])
                ended = [await asyncio.wait_for(landed.get(), PATIENCE_S) for _ in writers]
                assert sorted(ended) == sorted((number, None) for number in writers)
                for writer in writers.values():
                    assert bytes(writer) == bytes([1]) * (9 << 20)
                values.close()
                writers.clear()
                del writer
        finally:
            end.close()

    asyncio.run(play())


@pytest.mark.parametrize("plan", [None, ("cut", 1 << 20), ("reset", 5 << 20), ("cut", 100)])
def test_large_values_go_by_the_native_stream_both_ways(wait_until, plan):
    async def play():
        with contextlib.ExitStack() as stack:

            def through(address):
                stack.enter_context(contextlib.closing(Unbound()))
                proxy = stack.enter_context(contextlib.closing(Proxy(address, plans=[plan])))
                return proxy.address

            async with pair(wait_until, through if plan else None) as (here, there):
                result = here.forward(here.store.put(pattern(1)))
                task, argument = await run(wait_until, there)
                np.testing.assert_array_equal(there.store.get(argument), pattern(1))
                del argument
                there.store.put_result(task, 0, serialized(pattern(2)))
                core.finish(there.client, task)
                found = await asyncio.to_thread(here.store.get, result, PATIENCE_S)
                np.testing.assert_array_equal(found, pattern(2))
                await asyncio.to_thread(wait_until, lambda: here.exchange.ledger.forwarded == 0, "the task has ended")
                assert (here.pieces, there.pieces) == (0, 0)
                assert here.answers + there.answers == []
                del found, result

    asyncio.run(play())


def serialized(value):
    from fastrt.store.serialize import serialize

    return serialize(value)


@pytest.mark.parametrize("value", [b"x" * NBYTES, "y" * NBYTES, [b"z" * NBYTES, 1]], ids=["bytes", "str", "list"])
def test_large_values_of_other_kinds_arrive_as_they_were(wait_until, value):
    async def play():
        async with pair(wait_until) as (here, there):
            result = here.forward(here.store.put(value))
            task, argument = await run(wait_until, there)
            assert there.store.get(argument) == value
            assert there.pieces == 0
            del argument
            assert core.finish_scalar(there.client, task, None)
            assert await asyncio.to_thread(here.store.get, result, PATIENCE_S) is None

    asyncio.run(play())


@pytest.mark.parametrize("why", ["nobody listens", "another token"])
def test_values_that_cannot_go_so_come_in_pieces(wait_until, why):
    async def play():
        tokens = (TOKEN, TOKEN if why == "nobody listens" else new_token())
        async with pair(wait_until, lambda a: "127.0.0.1:1" if "nobody" in why else a, tokens) as (here, there):
            inner = here.store.put("inner")
            for count in (1, 2):
                result = here.forward(here.store.put([inner, pattern(3)]))
                task, argument = await run(wait_until, there)
                found = there.store.get(argument)
                np.testing.assert_array_equal(found[1], pattern(3))
                assert there.store.get(found[0], timeout=PATIENCE_S) == "inner"
                assert there.pieces == count * (NBYTES // PIECE_BYTES)
                assert [what for what, _ in here.answers].count("again") == count
                assert not there.exchange.traffic.values.is_reachable  # the second time, it does not try
                del found, argument
                assert core.finish_scalar(there.client, task, None)
                assert await asyncio.to_thread(here.store.get, result, PATIENCE_S) is None
            del inner

    asyncio.run(play())


@pytest.mark.parametrize("how", ["dropped", "closed"])
def test_a_value_that_is_not_wanted_any_more_leaves_nothing(wait_until, how):
    async def play():
        with contextlib.ExitStack() as stack:
            proxies = []

            def stalled(address):
                stack.enter_context(contextlib.closing(Unbound()))
                proxies.append(stack.enter_context(contextlib.closing(Proxy(address, then=("stall", 3 << 20)))))
                return proxies[0].address

            async with pair(wait_until) as (there, here):
                # A result is read, and the stream of the end that made it stalls on its way.
                here.exchange.traffic.values.connect(stalled(there.native.address))
                result = here.forward(None)
                task = await lent_task(wait_until, there)
                there.store.put_result(task, 0, serialized(pattern(4)))
                core.finish(there.client, task)
                assert await asyncio.to_thread(here.store.wait, [result], 1, PATIENCE_S) == ([result], [])
                here.exchange.traffic.remote.fetch(result.objref)
                await asyncio.to_thread(wait_until, lambda: proxies[0].passed >= 3 << 20, "half of it")
                if how == "dropped":
                    del result
                    here.exchange.tidy(set())
                    await asyncio.to_thread(wait_until, lambda: not there.native.offers.listed(), "it is given up")
                else:
                    holder = here.store.put([result])  # here the driver and the uplink are one client
                    here.exchange.close("the test says so")
                    there.exchange.close("the test says so")
                    assert not there.native.offers.listed()
                    here.exchange.traffic.remote.lose("1" * 32, "the test says so")
                    with pytest.raises(ObjectLostError, match="the test says so"):
                        here.store.get(result, timeout=0)
                    del holder, result

    asyncio.run(play())


async def lent_task(wait_until, there):
    await asyncio.to_thread(wait_until, lambda: core.queued(there.client), "the task is there", PATIENCE_S)
    return core.next_task(there.client, 0.0, 0.0)


def test_value_that_shares_the_source_of_an_unused_one_is_made_again_when_it_is_lost(wait_until):
    """Its stream ends and begins again meanwhile, and the node has forgotten the unused one."""

    async def play():
        async with pair(wait_until) as (here, there):
            remote, node = here.exchange.traffic.remote, "2" * 32
            first, second = here.forward(1, retries=1), here.forward(2, retries=1)
            for one in (first, second):
                task = await lent_task(wait_until, there)
                there.store.put_result(task, 0, serialized(pattern(4)))
                core.finish(there.client, task)
                await asyncio.to_thread(here.store.wait, [one], 1, PATIENCE_S)
            await asyncio.to_thread(wait_until, lambda ref=second: remote.find(ref.objref), "its source is known")
            # The first one is lost, and what was made again in its place is the second one.
            remote.forget(first.objref)
            Replacement(here.store, remote, first).point_at(remote.find(second.objref))
            assert remote.find(first.objref).same_as is not None
            holder = here.store.put([first])  # here the driver and the uplink are one client
            del second, one
            here.exchange.close("the test says so")
            there.exchange.close("the test says so")
            assert len(remote.claims(node)) == 1
            remote.lose(node, "the test says so")
            task = core.next_task(here.client, 0.0, 0.0)
            assert core.arguments(here.client, task)[1] == (2,)  # it runs here, as a worker would
            here.store.put_result(task, 0, serialized(pattern(5)))
            core.finish(here.client, task)
            found = await asyncio.to_thread(here.store.get, first, PATIENCE_S)
            np.testing.assert_array_equal(found, pattern(5))
            del found, first, holder

    asyncio.run(play())


@pytest.mark.parametrize("is_used", [True, False])
def test_lost_value_is_made_again_only_if_something_uses_it(wait_until, is_used):
    async def play():
        async with pair(wait_until) as (here, there):
            remote = here.exchange.traffic.remote
            result = here.forward(1, retries=1)  # here the driver and the uplink are one client: nothing else uses it
            task = await lent_task(wait_until, there)
            there.store.put_result(task, 0, serialized(pattern(6)))
            core.finish(there.client, task)
            await asyncio.to_thread(wait_until, lambda ref=result: remote.find(ref.objref), "its source is known")
            holder = here.store.put([result]) if is_used else None
            there.exchange.close("the test says so")
            here.exchange.close("the test says so")
            remote.lose("2" * 32, "the test says so")
            assert core.queued(here.client) == is_used
            if is_used:
                task = core.next_task(here.client, 0.0, 0.0)
                assert core.finish_scalar(here.client, task, None)
            del holder, result

    asyncio.run(play())


def test_node_that_stops_fetching_a_value_does_not_keep_its_turn(wait_until):
    """Other nodes wait for the copy of the node that is about to get it."""

    async def play():
        async with pair(wait_until) as (here, there):
            remote, spreads = here.exchange.traffic.remote, there.exchange.traffic._tables.spreads
            result = here.forward(1)
            task = await lent_task(wait_until, there)
            there.store.put_result(task, 0, serialized(pattern(3)))
            core.finish(there.client, task)
            await asyncio.to_thread(wait_until, lambda: remote.find(result.objref), "its source is known")
            asked = []
            ask, received = spreads.ask, spreads.received
            spreads.ask = lambda *what: (asked.append("ask"), ask(*what))
            spreads.received = lambda fetch, number: (asked.append(number), received(fetch, number))
            remote.fetch(result.objref)
            here.exchange.traffic.arrivals.cancel(remote.find(result.objref).number)
            await asyncio.to_thread(wait_until, lambda: asked[:2] == ["ask", 0], "the peer to learn of both")
            assert not spreads._spreads
            found = await asyncio.to_thread(here.store.get, result, PATIENCE_S)
            np.testing.assert_array_equal(found, pattern(3))
            del found

    asyncio.run(play())


def test_node_that_has_stopped_fetching_a_value_gives_its_turn_back_when_it_comes(wait_until):
    """The node stops while it waits. Its turn came later, and other nodes waited for its copy without end."""

    async def play():
        async with pair(wait_until) as (here, there):
            remote, spreads = here.exchange.traffic.remote, there.exchange.traffic._tables.spreads
            result = here.forward(1)
            number = result.objref
            task = await lent_task(wait_until, there)
            there.store.put_result(task, 0, serialized(pattern(3)))
            core.finish(there.client, task)
            await asyncio.to_thread(wait_until, lambda: remote.find(number), "its source is known")
            objref = remote.find(number).objref
            first, word = Fetch("another", 1), (Fetch(there.exchange, remote.find(number).number), 0)
            spreads._order = lambda order: order.receiver == first or _send_order(order)
            spreads.ask(objref, first)  # another node has the turn
            stopped, received = [], spreads.received
            spreads.received = lambda *what: (stopped.append(what), received(*what))
            remote.fetch(number)
            here.exchange.traffic.arrivals.cancel(remote.find(number).number)
            await asyncio.to_thread(wait_until, lambda: stopped == [word], "the peer to learn of the stop")
            spreads.received(first, 0)
            await asyncio.to_thread(wait_until, lambda: stopped == [word, (first, 0), word], "the turn to come back")
            assert not spreads._spreads
            del result

    asyncio.run(play())


def test_result_that_is_about_to_be_sent_keeps_the_value_that_another_node_has(wait_until):
    """A task came here and was forwarded on, here to the node that it came from. Unused values are released then."""

    async def play():
        async with pair(wait_until) as (there, here):
            on_frame = here.exchange.on_frame

            def then_tidy(frame):
                on_frame(frame)
                here.exchange.tidy(set())  # before the event loop sends the results that this frame has brought

            here.exchange.on_frame = then_tidy
            result = there.forward(1)
            here.exchange.forward(await lent_task(wait_until, here))
            task = await lent_task(wait_until, there)
            there.store.put_result(task, 0, serialized(pattern(7)))
            core.finish(there.client, task)
            found = await asyncio.to_thread(there.store.get, result, PATIENCE_S)
            np.testing.assert_array_equal(found, pattern(7))
            del found, result

    asyncio.run(play())


def test_result_that_is_a_value_without_a_known_source_becomes_an_error(wait_until):
    """The event loop must not wait for the value: only the loop itself could fetch it."""

    async def play():
        async with pair(wait_until) as (here, there):
            first = here.forward(1)
            task = await lent_task(wait_until, there)
            there.store.put_result(task, 0, serialized(pattern(8)))
            core.finish(there.client, task)
            await asyncio.to_thread(
                wait_until, lambda ref=first: here.exchange.traffic.remote.find(ref.objref), "its source"
            )
            here.exchange.traffic.remote.forget(first.objref)
            here.exchange.references.name_again(first)
            second = here.forward(2)
            task = await lent_task(wait_until, there)
            here.exchange.on_frame(Frame(value=[Value(task=2, yours=first.objref)]))
            with pytest.raises(ObjectLostError, match="where its value is"):
                await asyncio.to_thread(here.store.get, second, PATIENCE_S)
            assert core.finish_scalar(there.client, task, None)
            here.exchange.references.released(first.objref, 1)
            del first, second

    asyncio.run(play())


@pytest.mark.parametrize("may_claim", [True, False])
def test_node_holds_for_a_peer_only_what_the_peer_may_claim(wait_until, may_claim):
    async def play():
        async with pair(wait_until, keep_bytes=(BYTES_MIN if may_claim else NEVER_BYTES, BYTES_MIN)) as (there, here):
            held = []
            here.exchange.traffic.values.on_keep = lambda ref: held.append(ref.objref)
            result, task = there.forward(1), await lent_task(wait_until, here)
            here.store.put_result(task, 0, serialized(pattern(6)))
            core.finish(here.client, task)
            assert await asyncio.to_thread(there.store.wait, [result], 1, PATIENCE_S) == ([result], [])
            await asyncio.to_thread(wait_until, lambda: not here.exchange.ledger.accepted, "the result is sent")
            assert bool(held) == may_claim
            assert (there.exchange.traffic.remote.find(result.objref) is not None) == may_claim
            np.testing.assert_array_equal(await asyncio.to_thread(there.store.get, result), pattern(6))
            del result

    asyncio.run(play())


@in_loop
async def test_objects_that_share_the_value_of_a_third_node_are_released_one_by_one():
    end = End()
    refs = [end.store.put([k]) for k in range(2)]
    values = end.exchange.traffic.values
    assert [values.keep(ref, 77) for ref in refs] == [77, 77]
    values.release(refs[0].objref)
    assert values.kept_object(77) == refs[1].objref
    values.release(refs[1].objref)
    assert values.kept_object(77) is None
    end.close()


def test_answer_to_a_claim_is_also_the_argument_of_a_task_in_its_frame(wait_until):
    """The task made a stand-in, the answer was used for the claim alone, and no other value came."""

    async def play():
        async with pair(wait_until) as (here, there):
            result = here.forward(1, retries=1)
            task = await lent_task(wait_until, there)
            there.store.put_result(task, 0, serialized(pattern(2)))
            core.finish(there.client, task)
            remote = here.exchange.traffic.remote
            await asyncio.to_thread(wait_until, lambda ref=result: remote.find(ref.objref), "its source is known")
            holder = here.store.put([result])  # here the driver and the uplink are one client
            kept = there.exchange.references.exported_ref(remote.find(result.objref).objref)
            for end in (here, there):
                end.exchange.close("the test says so")
                end.exchange = Exchange(end.store, end.waiter, end.tables)
            ends = {"1" * 32: here, "2" * 32: there}
            hellos = {node: end.exchange.first_frame(Report(node=node, address="127.0.0.1:1", name=node[0],
                      native=end.native.address)) for node, end in ends.items()}  # fmt: skip
            here.hear(hellos["2" * 32])
            there.hear(hellos["1" * 32])
            claim = await here.frames(lambda frame: 0 in frame.claim)
            assert list(claim.claim) == [kept.objref, 0]
            there.hear(claim)
            done = there.forward(kept)
            here.hear(await there.frames(lambda frame: frame.task and frame.value))
            passing = [asyncio.create_task(forward(here, there)), asyncio.create_task(forward(there, here))]
            task, argument = await run(wait_until, here)
            np.testing.assert_array_equal(here.store.get(argument), pattern(2))
            del argument, kept
            assert core.finish_scalar(here.client, task, None)
            assert await asyncio.to_thread(there.store.get, done, PATIENCE_S) is None
            del done, holder, result
            assert not any(one.done() for one in passing)

    asyncio.run(play())


def test_arguments_that_share_the_value_of_a_third_node_all_arrive(wait_until):
    """Their offers have one number: the second one took the place of the first, whose task then waited without end."""

    async def play():
        async with pair(wait_until) as (here, there):
            refs = [here.store.put(pattern(3)) for _ in range(3)]
            values = here.exchange.traffic.values
            number = values.keep(refs[0])
            assert [values.keep(ref, number) for ref in refs[1:]] == [number] * 2
            result = here.forward(*refs)
            await asyncio.to_thread(wait_until, lambda: core.queued(there.client), "the task can run", PATIENCE_S)
            task = core.next_task(there.client, 0.0, 0.0)
            _, arguments, _ = core.arguments(there.client, task)
            for argument in arguments:
                np.testing.assert_array_equal(there.store.get(argument), pattern(3))
            del argument, arguments
            assert core.finish_scalar(there.client, task, None)
            assert await asyncio.to_thread(here.store.get, result, PATIENCE_S) is None

    asyncio.run(play())
