"""Early Ray's services over the wire, with a client, a store and a worker in plain grpc (`foreign.py`).

The foreign program's RPCs of one operation are in each row's `extra_info`. Beside them: an empty handler of plain grpc,
and the same program at a scheduler that answers and does nothing else. `bench/compare_seed.py` prints a whole call's
latency, rate and processor time, beside another build of fastrt.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from .foreign import RAY, Cluster, Empty, Foreign, Nothing

MANY, IN_FLIGHT = 200, 100
CALL_S, SETTLE_S = 20, 0.2
Counted = Callable[..., Any]


@pytest.fixture(scope="module")
def foreign() -> Iterator[Foreign]:
    """A node of fastrt with a scheduler, and a program beside it that is not fastrt's."""
    with ExitStack() as stack:
        cluster = Cluster(stack)
        made = Foreign(cluster, stack, function="foreign")
        methods = RAY.methods("ObjStore")
        channel = stack.enter_context(cluster.certified.open_channel(cluster.store))
        request, reply = methods["ObjStoreInfo"]
        look = channel.unary_unary("/ObjStore/ObjStoreInfo", request.SerializeToString, reply.FromString)
        made.look = lambda: look(request(), timeout=CALL_S)
        piece, reply = methods["StreamObj"]
        stream = channel.stream_unary("/ObjStore/StreamObj", piece.SerializeToString, reply.FromString)
        made.send = lambda ref, data: stream(iter([piece(objref=ref, totalsize=len(data), data=data)]), timeout=CALL_S)
        yield made


@pytest.fixture
def counted(measure, benchmark) -> Counted:
    """Measure an operation of a foreign program, and note how many RPCs one of them takes."""

    def run(foreign: Foreign, operation: Callable[[], Any], per: int = 1, more: int = 0) -> None:
        time.sleep(SETTLE_S)  # the last RPCs follow an operation
        before = foreign.rpcs.total()
        operation()
        time.sleep(SETTLE_S)
        benchmark.extra_info["rpcs"] = (foreign.rpcs.total() - before) / per + more
        measure(operation, per=per)

    return run


@pytest.mark.benchmark(group="seed's services, one RPC")
def test_empty_handler_of_plain_grpc(measure) -> None:
    """The floor: both ends are plain grpc, and nothing is done."""
    with ExitStack() as stack:
        measure(Empty(stack))


@pytest.mark.benchmark(group="seed's services, one RPC")
def test_scheduler_push_and_drop(counted: Counted, foreign: Foreign) -> None:
    """Scheduler: make a reference, and drop it."""

    def push_and_drop() -> None:
        ref = foreign.call("PushObj", workerid=foreign.worker).objref
        foreign.call("DecrementRefCount", objref=[ref])

    counted(foreign, push_and_drop, per=2)


@pytest.mark.benchmark(group="seed's services, one RPC")
def test_store_information(counted: Counted, foreign: Foreign) -> None:
    """ObjStore: list the objects of the node's store, which has none."""
    counted(foreign, foreign.look, more=1)


@pytest.mark.benchmark(group="seed's services, a whole call")
def test_object_into_the_store_of_a_node(counted: Counted, foreign: Foreign) -> None:
    """Scheduler and ObjStore: PushObj, StreamObj to the node's store, and the reference is dropped."""
    value = RAY.message("Obj")(string_data={"data": bytes(1024)}).SerializeToString()

    def put() -> None:
        ref = foreign.call("PushObj", workerid=foreign.worker).objref
        foreign.send(ref, value)
        foreign.call("DecrementRefCount", objref=[ref])

    counted(foreign, put, more=1)


@pytest.mark.benchmark(group="seed's services, a whole call")
def test_exported_function_to_its_result_in_a_foreign_store(counted: Counted, foreign: Foreign) -> None:
    """Scheduler and ObjStore: RemoteCall of an exported function, RequestObj, and the result arrives by StreamObj."""

    def fetch() -> None:
        ref, _ = foreign.fetch(foreign.square(7))
        foreign.drop(ref)

    counted(foreign, fetch)


@pytest.mark.benchmark(group="seed's services, a whole call")
def test_the_same_rpcs_at_a_scheduler_that_does_nothing(counted: Counted) -> None:
    """The floor of the row before."""
    with ExitStack() as stack:
        program = Foreign(Nothing(stack), stack)

        def fetch() -> None:
            ref, _ = program.fetch(program.square(7))
            program.drop(ref)

        counted(program, fetch)


@pytest.mark.benchmark(group="seed's services, a whole call")
def test_exported_functions_in_flight(counted: Counted, foreign: Foreign) -> None:
    """Exported functions, a hundred at a time."""
    counted(foreign, lambda: foreign.run([foreign.square(k) for k in range(MANY)], IN_FLIGHT), per=MANY)


@pytest.mark.benchmark(group="seed's services, a whole call")
def test_function_of_a_foreign_worker(counted: Counted, foreign: Foreign) -> None:
    """WorkerService: RemoteCall of a function that the foreign worker runs, until the scheduler has its result."""

    def call() -> None:
        ref, _ = foreign.fetch(foreign.square(7, "foreign"))
        foreign.drop(ref)

    counted(foreign, call)
