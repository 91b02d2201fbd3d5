"""Links: a process of fastrt gets the calls to its ports over one stream, and makes its own in batches."""

import contextlib
import queue
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest

from fastrt.net.grpc.descriptors import message_set
from fastrt.scheduler import Scheduler, SchedulerClient, SchedulerError, SchedulerOptions
from fastrt.scheduler.client import SchedulerLink
from fastrt.scheduler.wire import ATTACH, CLASSES, EXCHANGE, LINK

RAY = message_set("ray")
WAIT_S = 20.0


class Linked:
    """A store and two workers that serve no port: they get their calls over a link."""

    def __init__(self, scheduler: Scheduler, token: str | None = None) -> None:
        self.orders: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self.scheduler = scheduler
        local = scheduler.options.local_socket
        self.link = SchedulerLink(scheduler.address, self._take, token, local_socket=local)
        self.client = SchedulerClient(scheduler.address, token)
        self.addresses = ["127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"]
        self.link.attach(self.addresses)
        self.store = self.client.register_store(self.addresses[0])
        self.workers = [self.client.register_worker(each, self.addresses[0]) for each in self.addresses[1:]]
        for worker in self.workers:
            self.client.register_function(worker, "f", 1)

    def _take(self, stream: int, orders: Any) -> None:
        for order in orders:
            self.orders.put((stream, order))

    def next(self, path: str) -> Any:
        """The next call of the scheduler, which is answered; it must be of this kind."""
        stream, order = self.orders.get(timeout=WAIT_S)
        assert order.path == path
        self.link.answer(stream, order.number)
        return order

    def ask(self, *calls: tuple[str, dict[str, Any]]) -> list[SchedulerError | None]:
        """Make calls in one batch; returns the error of each."""
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for method, fields in calls:
            self.link.call(method, answers.put, **fields)
        self.link.send()
        return [answers.get(timeout=WAIT_S) for _ in calls]

    def close(self) -> None:
        self.link.close()
        self.client.close()


@pytest.fixture(params=["", "kept", "local", "local, kept"])
def scheduler(request: pytest.FixtureRequest, tmp_path: Any) -> Iterator[Scheduler]:
    local = str(tmp_path / "s.sock") if "local" in request.param else None
    state_dir = tmp_path / "state" if "kept" in request.param else None
    with Scheduler(SchedulerOptions(state_dir=state_dir, lost_after_s=1.2, local_socket=local)) as made:
        yield made
        made.check_invariants()


@pytest.fixture
def linked(scheduler: Scheduler) -> Iterator[Linked]:
    with contextlib.closing(Linked(scheduler)) as made:
        yield made


def invoked(order: Any) -> Any:
    return RAY.message("InvokeCallRequest").FromString(order.body).call


def test_calls_come_over_the_stream_and_their_reports_go_in_one_batch(linked: Linked) -> None:
    first, second = (linked.client.remote_call({"name": "f"})[0] for _ in range(2))
    orders = [linked.next("/WorkerService/InvokeCall") for _ in range(2)]
    assert {order.address for order in orders} == set(linked.addresses[1:])
    assert {invoked(order).result[0] for order in orders} == {first, second}
    for worker, ref in zip(linked.workers, (first, second), strict=True):
        assert linked.ask(
            ("ObjReady", {"objref": ref, "objstoreid": linked.store}),
            ("DecrementRefCount", {"objref": [ref]}),
            ("WorkerReady", {"workerid": worker}),
        ) == [None] * 3  # fmt: skip
    info = linked.client.info()
    assert sorted(info.avail_worker) == linked.workers
    assert list(info.reference_count) == [1, 1]


def test_deallocation_waits_for_another_call_and_goes_before_it(linked: Linked) -> None:
    refs = [linked.client.push(linked.workers[0]) for _ in range(2)]
    for ref in refs:
        linked.client.ready(ref, linked.store)
    linked.client.decrement(refs[:1])
    linked.next("/ObjStore/DeallocateObject")  # nothing follows it: it is sent all the same
    linked.client.decrement(refs[1:])
    linked.client.remote_call({"name": "f"})
    dropped, invoke = linked.next("/ObjStore/DeallocateObject"), linked.next("/WorkerService/InvokeCall")
    assert dropped.number < invoke.number


def test_address_added_to_a_link_gets_its_calls_over_it_and_over_the_next_stream(
    linked: Linked, wait_until: Callable[..., None]
) -> None:
    for _ in linked.workers:
        linked.client.remote_call({"name": "f"})
        linked.next("/WorkerService/InvokeCall")
    linked.addresses.append("127.0.0.1:6")
    linked.link.attach(linked.addresses)
    worker = linked.client.register_worker("127.0.0.1:6", linked.addresses[0])
    linked.client.register_function(worker, "f", 1)
    linked.client.remote_call({"name": "f"})
    assert linked.next("/WorkerService/InvokeCall").address == "127.0.0.1:6"
    batch = LINK["Exchange"][0](link=2**62, address=["127.0.0.1:8"])
    assert raw(linked.scheduler, EXCHANGE, batch.SerializeToString()) is grpc.StatusCode.OK  # of no link
    linked.link.close()
    wait_until(lambda: not linked.client.info().function_table["f"].workerid, "all workers are lost with the link")


def test_rejected_call_of_a_batch_leaves_the_others_and_has_its_words(linked: Linked) -> None:
    ref = linked.client.push(linked.workers[0])
    made, wrong, again = linked.ask(
        ("IncrementRefCount", {"objref": [ref]}),
        ("IncrementRefCount", {"objref": [999]}),
        ("IncrementRefCount", {"objref": [ref, ref]}),
    )
    assert (made, again) == (None, None)
    assert wrong is not None
    assert wrong.code == "NOT_FOUND"
    assert "999" in str(wrong)
    assert list(linked.client.info().reference_count) == [4]


def test_addresses_of_a_link_are_not_lost_although_nothing_listens_there(
    linked: Linked, wait_until: Callable[..., None]
) -> None:
    other = linked.client.register_worker("127.0.0.1:9", linked.addresses[0])  # after the others, and has no link
    assert other in linked.client.info().avail_worker
    wait_until(lambda: other not in linked.client.info().avail_worker, "the worker without a link is lost", WAIT_S)
    assert sorted(linked.client.info().avail_worker) == linked.workers
    linked.link.close()
    wait_until(lambda: not linked.client.info().avail_worker, "the workers are lost with the link", WAIT_S)


def test_orders_that_an_ended_link_has_not_answered_are_sent_to_the_ports_in_order(
    grpc_world: Any, wait_until: Callable[..., None]
) -> None:
    world = grpc_world()
    store = world.store()
    worker = world.worker(store, "f")
    taken: queue.SimpleQueue[Any] = queue.SimpleQueue()
    link = SchedulerLink(world.scheduler.address, lambda stream, orders: [taken.put(each) for each in orders])
    link.attach([store.address, worker.address])
    refs = [worker.push() for _ in range(5)]
    aliases = [world.call("PushObj", workerid=worker.number).objref for _ in refs]
    (result,) = world.remote("f")
    for alias, ref in zip(aliases, refs, strict=True):
        world.call("AliasObjRefs", alias_objref=alias, target_objref=ref)
        world.call("RequestObj", workerid=worker.number, objref=alias)
        world.call("DecrementRefCount", objref=[alias, ref])
    orders = [taken.get(timeout=WAIT_S) for _ in range(11)]
    assert [order.path for order in orders[:3]] == [
        "/WorkerService/InvokeCall", "/ObjStore/NotifyAlias", "/ObjStore/DeallocateObject",
    ]  # fmt: skip
    assert not store.log
    assert not worker.log
    link.close()
    wait_until(lambda: len(store.log) == 10 and len(worker.log) == 1, "the calls arrive at the ports", WAIT_S)
    expected = [
        each for alias, ref in zip(aliases, refs, strict=True) for each in (("alias", alias, ref), ("deallocate", ref))
    ]
    assert store.log == expected
    assert worker.log == [("f", [], [result])]
    world.check()


def test_answers_of_an_ended_stream_are_no_answers_to_the_next_one(linked: Linked) -> None:
    linked.client.remote_call({"name": "f"})
    stream, order = linked.orders.get(timeout=WAIT_S)
    linked.link.answer(stream + 1, order.number)
    linked.link.send()
    assert linked.ask(("IncrementRefCount", {})) == [None]
    linked.link.answer(stream, order.number, grpc.StatusCode.FAILED_PRECONDITION.value[0], "not now")
    linked.link.send()
    assert linked.next("/WorkerService/InvokeCall").address != order.address  # the other worker gets the refused call


def test_delivery_whose_target_cannot_be_reached_is_ordered_again_until_it_can(linked: Linked) -> None:
    other = linked.client.register_store("127.0.0.1:4")
    taker = linked.client.register_worker("127.0.0.1:5", "127.0.0.1:4")
    ref = linked.client.push(linked.workers[0])
    linked.client.ready(ref, linked.store)
    linked.client.request(taker, ref)
    for _ in range(6):  # more than the state machine would try
        stream, order = linked.orders.get(timeout=WAIT_S)
        assert order.path == "/ObjStore/DeliverObj"
        linked.link.answer(stream, order.number, grpc.StatusCode.UNAVAILABLE.value[0], "not now")
    linked.next("/ObjStore/DeliverObj")
    linked.client.ready(ref, other)


def test_call_that_a_link_does_not_answer_in_time_loses_its_worker(wait_until: Callable[..., None]) -> None:
    with Scheduler(SchedulerOptions(call_timeout_s=0.3)) as scheduler, contextlib.closing(Linked(scheduler)) as linked:
        (ref,) = linked.client.remote_call({"name": "f"})
        _, silent = linked.orders.get(timeout=WAIT_S)
        again = linked.next("/WorkerService/InvokeCall")
        assert again.address != silent.address
        assert list(invoked(again).result) == [ref]
        wait_until(lambda: not linked.client.info().avail_worker, "one worker is lost, the other one has the call")
        assert len(linked.client.info().function_table["f"].workerid) == 1


def raw(scheduler: Scheduler, path: str, body: bytes) -> grpc.StatusCode:
    with grpc.insecure_channel(scheduler.address) as channel:
        call = channel.unary_stream(path)(body, timeout=WAIT_S)
        try:
            list(call)
        except grpc.RpcError as error:
            return error.code()
    return grpc.StatusCode.OK


def test_garbage_is_an_invalid_argument_and_unknown_calls_are_none(scheduler: Scheduler) -> None:
    assert raw(scheduler, EXCHANGE, b"\xff") is grpc.StatusCode.INVALID_ARGUMENT
    assert raw(scheduler, ATTACH, b"\xff") is grpc.StatusCode.INVALID_ARGUMENT
    request, reply = LINK["Exchange"]
    batch = request(link=7, answer=[{"number": 1}, {"number": 2**64 - 1}])
    batch.call.add(path="/Scheduler/Nothing")
    batch.call.add(path=EXCHANGE)
    batch.call.add(path="/Scheduler/PushObj", body=b"\xff")
    batch.call.add(path="/Scheduler/SchedulerInfo")
    with grpc.insecure_channel(scheduler.address) as channel:
        call = channel.unary_unary(EXCHANGE, request.SerializeToString, reply.FromString)
        answers = call(batch, timeout=WAIT_S).answer
        assert [answer.code for answer in answers] == [12, 12, 3, 0]
        assert not call(request(), timeout=WAIT_S).answer


def test_link_needs_the_token_of_the_scheduler() -> None:
    token = "5f" * 32
    with Scheduler(SchedulerOptions(token=token)) as scheduler, contextlib.closing(Linked(scheduler, token)) as linked:
        linked.client.remote_call({"name": "f"})
        linked.next("/WorkerService/InvokeCall")
        assert raw(scheduler, EXCHANGE, b"") is grpc.StatusCode.UNAUTHENTICATED
        assert raw(scheduler, ATTACH, b"") is grpc.StatusCode.UNAUTHENTICATED


def test_batches_survive_the_death_of_a_scheduler_that_keeps_its_state(tmp_path: Any) -> None:
    with Scheduler(SchedulerOptions(state_dir=tmp_path)) as scheduler, contextlib.closing(Linked(scheduler)) as linked:
        ref = linked.client.push(linked.workers[0])
        assert linked.ask(*[("IncrementRefCount", {"objref": [ref]})] * 5) == [None] * 5
    with Scheduler(SchedulerOptions(state_dir=tmp_path)) as scheduler, SchedulerClient(scheduler.address) as client:
        assert list(client.info().reference_count) == [6]


def test_scheduler_that_is_not_fastrts_gets_the_calls_one_after_the_other() -> None:
    log: list[list[int]] = []
    request, reply = CLASSES["DecrementRefCount"]

    def decrement(message: Any, context: Any) -> Any:
        log.append(list(message.objref))
        if message.objref == [1]:
            context.abort(grpc.StatusCode.NOT_FOUND, "no such reference")
        return reply()

    server = grpc.server(futures.ThreadPoolExecutor(4))
    handler = grpc.unary_unary_rpc_method_handler(decrement, request.FromString, reply.SerializeToString)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("Scheduler", {"DecrementRefCount": handler}),)
    )
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with contextlib.closing(SchedulerLink(address, lambda stream, orders: None)) as link:
        for k in range(4):
            link.call("DecrementRefCount", answers.put, objref=[k])
        link.send()
        found = [answers.get(timeout=WAIT_S) for _ in range(4)]
        link.attach(["127.0.0.1:1"])
        link.call("DecrementRefCount", answers.put, objref=[9])
        link.send()
        assert answers.get(timeout=WAIT_S) is None
    assert log == [[0], [1], [2], [3], [9]]
    assert [each and each.code for each in found] == [None, "NOT_FOUND", None, None]
    server.stop(None).wait()


def test_link_to_nothing_fails_its_calls(free_port: int) -> None:
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with contextlib.closing(SchedulerLink(f"127.0.0.1:{free_port}", lambda stream, orders: None)) as link:
        link.attach(["127.0.0.1:1"])
        link.call("WorkerReady", answers.put, workerid=0)
        link.send()
        assert answers.get(timeout=WAIT_S).code == "UNAVAILABLE"
