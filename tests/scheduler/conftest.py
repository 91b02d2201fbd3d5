"""Two worlds with the same tests: the state machine with stores and workers in this process, and everything over gRPC.

Both go through the wire's messages, so that a test says `world.call("PushObj", workerid=0)` and reads a reply. Stores
and workers of the gRPC world are real servers, written from the protos alone.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest

from fastrt.net.grpc.descriptors import message_set
from fastrt.scheduler import Scheduler, SchedulerClient, SchedulerError, SchedulerOptions
from fastrt.scheduler import events as ev
from fastrt.scheduler.state import SchedulerState
from fastrt.scheduler.wire import CLASSES, METHODS, invoke_request, parse_request

RAY = message_set("ray")
STORE, WORKER = RAY.methods("ObjStore"), RAY.methods("WorkerService")
LOST_AFTER_S = 1.2
CHUNK_BYTES = 4


class Broken(Exception):
    """A store cannot deliver."""


class Store:
    """What a store does, whoever calls it: `log` is what it was told to do, in order."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.log: list[tuple[Any, ...]] = []
        self.objects: dict[int, bytes] = {}
        self.breaks = False
        self.number = -1
        self.address = ""

    def put(self, ref: int, data: bytes = b"data") -> None:
        """A worker beside it has made an object."""
        self.objects[ref] = data
        self.world.call("ObjReady", objref=ref, objstoreid=self.number)

    def deliver(self, ref: int, address: str, send: Callable[[int, bytes], None]) -> None:
        self.log.append(("deliver", ref, address))
        if self.breaks:
            raise Broken(f"{self.address} is out of order")
        send(ref, self.objects[ref])

    def notify(self, alias: int, canonical: int) -> None:
        self.log.append(("alias", alias, canonical))
        self.objects[alias] = self.objects[canonical]  # a KeyError here is an alias told too early

    def deallocate(self, canonical: int) -> None:
        self.log.append(("deallocate", canonical))
        gone = self.objects.pop(canonical, None)
        for alias in [alias for alias, data in self.objects.items() if data is gone]:
            del self.objects[alias]

    def stop(self) -> None:
        """The process ends."""


class Worker:
    """A worker that takes calls and leaves them to the test: `log` has name, references among arguments, results."""

    def __init__(self, world: "World", store: Store) -> None:
        self.world, self.store = world, store
        self.log: list[tuple[str, list[int], list[int]]] = []
        self.refuses = False
        self.number = -1
        self.address = ""

    def invoke(self, call: Any) -> None:
        self.log.append((call.name, [arg.ref for arg in call.arg if not arg.HasField("obj")], list(call.result)))

    def push(self, data: bytes = b"data") -> int:
        ref = self.world.call("PushObj", workerid=self.number).objref
        self.store.put(ref, data)
        return int(ref)

    def finish(self) -> None:
        """End the call taken last: unpack it, make its results, ask for more."""
        _, args, results = self.log[-1]
        self.world.call("DecrementRefCount", objref=args + results)
        for ref in results:
            if ref not in self.world.targets() or self.world.targets()[ref] == NONE:
                self.store.put(ref)
        self.world.call("WorkerReady", workerid=self.number)

    def stop(self) -> None:
        """The process ends."""


NONE = 2**64 - 1


class World:
    """What both worlds have in common."""

    def __init__(self) -> None:
        self.stores: list[Store] = []
        self.workers: list[Worker] = []
        self.gate = threading.Event()  # closed: deliveries are under way and do not arrive
        self.gate.set()

    def call(self, method: str, **fields: Any) -> Any:
        raise NotImplementedError

    def store(self) -> Store:
        raise NotImplementedError

    def worker(self, store: Store, *functions: str, results: int = 1) -> Worker:
        raise NotImplementedError

    def expect(self, found: Callable[[], Any], value: Any) -> None:
        """`found()` is `value`, in a world of processes after a while."""
        raise NotImplementedError

    def check(self) -> None:
        raise NotImplementedError

    def refused(self, code: str, words: str, method: str, **fields: Any) -> None:
        """A call is refused with this status and these words, and changes nothing."""
        before = self.call("SchedulerInfo")
        with pytest.raises(SchedulerError, match=words) as caught:
            self.call(method, **fields)
        assert caught.value.code == code
        assert self.call("SchedulerInfo") == before

    def counts(self) -> list[int]:
        """All counts; -1 for deallocated, as early Ray's Python showed it."""
        return [-1 if count == NONE else count for count in self.call("SchedulerInfo").reference_count]

    def targets(self) -> list[int]:
        return list(self.call("SchedulerInfo").target_objref)

    def remote(self, name: str, *args: int, count: bool = True) -> list[int]:
        """Submit a call with references as arguments, counted for the message as a client has to."""
        if args and count:
            self.call("IncrementRefCount", objref=args)
        call = RAY.message("Call")(name=name)
        for ref in args:
            call.arg.add(ref=ref)
        return list(self.call("RemoteCall", call=call).result)


class StateWorld(World):
    """The pure state, its effects carried out at once."""

    def __init__(self) -> None:
        super().__init__()
        self.state = SchedulerState()
        self.held: list[ev.DeliverObj] = []

    def call(self, method: str, **fields: Any) -> Any:
        path = f"/Scheduler/{method}"
        body = CLASSES[method][0](**fields).SerializeToString()
        try:
            value = self.tell(parse_request(path, body, 1))
        except ev.Refused as refused:
            value = refused.failure
        if isinstance(value, ev.Failure):
            raise SchedulerError(value.message, value.code.name)
        return CLASSES[method][1].FromString(METHODS[path].build(value))

    def tell(self, event: ev.Event) -> Any:
        value = None
        for effect in self.state.handle(event):
            match effect:
                case ev.Answer():
                    value = effect.value
                case ev.InvokeCall():
                    self.invoke(effect)
                case ev.DeliverObj():
                    self.held.append(effect)
                case ev.NotifyAlias():
                    self.stores[effect.store].notify(effect.alias, effect.canonical)
                case ev.DeallocateObject():
                    self.stores[effect.store].deallocate(effect.canonical)
        return value

    def invoke(self, effect: ev.InvokeCall) -> None:
        worker = self.workers[effect.worker]
        if worker.refuses:
            self.tell(ev.InvokeRefused(effect.worker, effect.task, "not now"))
        else:
            body = invoke_request(effect.body, effect.results)
            worker.invoke(WORKER["InvokeCall"][0].FromString(body).call)

    def expect(self, found: Callable[[], Any], value: Any) -> None:
        while self.held and self.gate.is_set():
            self.deliver(self.held.pop(0))
        assert found() == value

    def deliver(self, order: ev.DeliverObj) -> None:
        target = self.stores[order.target]

        def send(ref: int, data: bytes) -> None:
            target.objects[ref] = data
            self.call("ObjReady", objref=ref, objstoreid=target.number)

        try:
            self.stores[order.source].deliver(order.ref, target.address, send)
        except Broken as error:
            self.tell(ev.DeliveryFailed(order.ref, order.source, order.target, str(error)))

    def store(self) -> Store:
        store = Store(self)
        store.address = f"10.0.0.{len(self.stores)}:1"
        store.number = self.call("RegisterObjStore", objstore_address=store.address).objstoreid
        store.stop = lambda: self.tell(ev.ObjStoreLost(store.number))  # type: ignore[method-assign]
        self.stores.append(store)
        return store

    def worker(self, store: Store, *functions: str, results: int = 1) -> Worker:
        worker = Worker(self, store)
        worker.address = f"10.0.0.{len(self.workers)}:2"
        reply = self.call("RegisterWorker", worker_address=worker.address, objstore_address=store.address)
        worker.number = reply.workerid
        worker.stop = lambda: self.tell(ev.WorkerLost(worker.number))  # type: ignore[method-assign]
        self.workers.append(worker)
        for name in functions:
            self.call("RegisterFunction", workerid=worker.number, fnname=name, num_return_vals=results)
        return worker

    def check(self) -> None:
        self.state.check_invariants()


def serve(service: str, methods: dict[str, tuple[Any, bool]]) -> tuple[grpc.Server, str]:
    """A real gRPC server on a port of its own: methods by name, each a function and whether it takes a stream."""
    handlers = {}
    for name, (function, streams) in methods.items():
        request, reply = RAY.methods(service)[name]
        make = grpc.stream_unary_rpc_method_handler if streams else grpc.unary_unary_rpc_method_handler
        handlers[name] = make(function, request.FromString, lambda message: message.SerializeToString())
        assert reply
    server = grpc.server(futures.ThreadPoolExecutor(8), options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    return server, f"127.0.0.1:{port}"


class GrpcWorld(World):
    """A scheduler, stores and workers, each behind its port."""

    def __init__(self, wait_until: Callable[..., None], **options: Any) -> None:
        super().__init__()
        self.wait_until = wait_until
        self.scheduler = Scheduler(SchedulerOptions(lost_after_s=LOST_AFTER_S, **options))
        self.scheduler.start()
        self.client = SchedulerClient(self.scheduler.address, options.get("token"))
        self.servers: list[grpc.Server] = []

    def call(self, method: str, **fields: Any) -> Any:
        return self.client.call(method, **fields)

    def expect(self, found: Callable[[], Any], value: Any) -> None:
        try:
            self.wait_until(lambda: found() == value, f"{value}", 20.0)
        except AssertionError:
            assert found() == value
            raise

    def store(self) -> Store:
        store = Store(self)
        server, store.address = serve(
            "ObjStore",
            {
                "DeliverObj": (lambda request, context: self.deliver(store, request, context), False),
                "StreamObj": (lambda chunks, context: self.receive(store, chunks), True),
                "NotifyAlias": (lambda r, c: self.ack(store.notify(r.alias_objref, r.canonical_objref)), False),
                "DeallocateObject": (lambda r, c: self.ack(store.deallocate(r.canonical_objref)), False),
            },
        )
        self.servers.append(server)
        store.stop = lambda: server.stop(None).wait()  # type: ignore[method-assign]
        store.number = self.call("RegisterObjStore", objstore_address=store.address).objstoreid
        self.stores.append(store)
        return store

    def worker(self, store: Store, *functions: str, results: int = 1) -> Worker:
        worker = Worker(self, store)

        def invoke(request: Any, context: Any) -> Any:
            if worker.refuses:
                context.abort(grpc.StatusCode.FAILED_PRECONDITION, "not now")
            worker.invoke(request.call)
            return WORKER["InvokeCall"][1]()

        server, worker.address = serve("WorkerService", {"InvokeCall": (invoke, False)})
        self.servers.append(server)
        worker.stop = lambda: server.stop(None).wait()  # type: ignore[method-assign]
        reply = self.call("RegisterWorker", worker_address=worker.address, objstore_address=store.address)
        worker.number = reply.workerid
        self.workers.append(worker)
        for name in functions:
            self.call("RegisterFunction", workerid=worker.number, fnname=name, num_return_vals=results)
        return worker

    def deliver(self, store: Store, request: Any, context: Any) -> Any:
        def send(ref: int, data: bytes) -> None:
            self.gate.wait(20)
            chunk = STORE["StreamObj"][0]
            parts = [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]
            with grpc.insecure_channel(request.objstore_address) as channel:
                stream = channel.stream_unary("/ObjStore/StreamObj", lambda m: m.SerializeToString())
                stream(iter([chunk(objref=ref, totalsize=len(data), data=part) for part in parts]), timeout=10)

        try:
            store.deliver(request.objref, request.objstore_address, send)
        except Broken as error:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return self.ack(None)

    def receive(self, store: Store, chunks: Any) -> Any:
        data, ref = b"", 0
        for chunk in chunks:
            ref, data = chunk.objref, data + chunk.data
        store.put(ref, data)
        return self.ack(None)

    def ack(self, done: None) -> Any:
        return RAY.message("AckReply")()

    def check(self) -> None:
        self.scheduler.check_invariants()

    def close(self) -> None:
        self.gate.set()
        self.scheduler.stop()
        self.client.close()
        for stopped in [server.stop(None) for server in self.servers]:
            stopped.wait()


def warm_up() -> None:
    """Let grpc open what it keeps open for good, before the first test is watched for what it leaves."""
    with Scheduler(SchedulerOptions()) as scheduler, SchedulerClient(scheduler.address) as client:
        client.register_store("127.0.0.1:9")
        server, _ = serve("WorkerService", {})
        server.stop(None).wait()


warm_up()


@pytest.fixture
def grpc_world(wait_until: Callable[..., None]) -> Iterator[Callable[..., GrpcWorld]]:
    """Make a world over gRPC: `grpc_world(token=...)`."""
    with contextlib.ExitStack() as made:

        def make(**options: Any) -> GrpcWorld:
            world = GrpcWorld(wait_until, **options)
            made.callback(world.close)
            return world

        yield make


@pytest.fixture(params=["state", "grpc", "grpc, kept"])
def world(request: pytest.FixtureRequest, grpc_world: Callable[..., GrpcWorld], tmp_path: Path) -> Iterator[World]:
    """A world of each kind, the last with a state directory, whose scheduler is whole at the end."""
    if request.param == "state":
        made: World = StateWorld()
    else:
        made = grpc_world(state_dir=tmp_path if "kept" in request.param else None)
    yield made
    made.check()
