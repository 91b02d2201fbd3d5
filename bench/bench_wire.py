"""Early Ray's services over the wire, with a client, a store and a worker in plain grpc (`foreign.py`).

`bench/compare_seed.py` prints a whole call's latency, rate and processor time, beside another build of fastrt.
"""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from .foreign import RAY, Cluster, Empty, Foreign

MANY, IN_FLIGHT = 200, 100


@pytest.fixture(scope="module")
def foreign() -> Iterator[Foreign]:
    """A node of fastrt with a scheduler, and a program beside it that is not fastrt's."""
    with ExitStack() as stack:
        cluster = Cluster(stack)
        made = Foreign(cluster, stack, function="foreign")
        request, reply = RAY.methods("ObjStore")["ObjStoreInfo"]
        channel = stack.enter_context(cluster.certified.open_channel(cluster.store))
        look = channel.unary_unary("/ObjStore/ObjStoreInfo", request.SerializeToString, reply.FromString)
        made.look = lambda: look(request(), timeout=20)
        yield made


@pytest.mark.benchmark(group="seed's services, one RPC")
def test_empty_handler_of_plain_grpc(measure) -> None:
    """The floor: both ends are plain grpc, and nothing is done."""
    with ExitStack() as stack:
        measure(Empty(stack))


@pytest.mark.benchmark(group="seed's services, one RPC")
def test_scheduler_push_and_drop(measure, foreign: Foreign) -> None:
    """Scheduler: make a reference, and drop it."""

    def push_and_drop() -> None:
        ref = foreign.call("PushObj", workerid=foreign.worker).objref
        foreign.call("DecrementRefCount", objref=[ref])

    measure(push_and_drop, per=2)


@pytest.mark.benchmark(group="seed's services, one RPC")
def test_store_information(measure, foreign: Foreign) -> None:
    """ObjStore: list the objects of the node's store, which has none."""
    measure(foreign.look)


@pytest.mark.benchmark(group="seed's services, a whole call")
def test_exported_function_to_its_result_in_a_foreign_store(measure, foreign: Foreign) -> None:
    """Scheduler and ObjStore: RemoteCall of an exported function, RequestObj, and the result arrives by StreamObj."""

    def fetch() -> None:
        ref, _ = foreign.fetch(foreign.square(7))
        foreign.drop(ref)

    measure(fetch)


@pytest.mark.benchmark(group="seed's services, a whole call")
def test_exported_functions_in_flight(measure, foreign: Foreign) -> None:
    """The same, a hundred at a time."""
    measure(lambda: foreign.run([foreign.square(k) for k in range(MANY)], IN_FLIGHT), per=MANY)


@pytest.mark.benchmark(group="seed's services, a whole call")
def test_function_of_a_foreign_worker(measure, foreign: Foreign) -> None:
    """WorkerService: RemoteCall of a function that the foreign worker runs, until the scheduler has its result."""

    def call() -> None:
        ref, _ = foreign.fetch(foreign.square(7, "foreign"))
        foreign.drop(ref)

    measure(call)
