"""Clients without a server, which ask where an object is: early Ray's messages, and fastrt's Locator beside them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from fastrt.net.grpc.descriptors import message_set
from fastrt.scheduler import Scheduler, SchedulerClient, SchedulerOptions
from fastrt.scheduler import events as ev
from fastrt.scheduler.locate import LOCATE

REQUEST, REPLY = message_set("transfer").methods("fastrt.transfer.Locator")["Locate"]
PATIENCE_S = 20.0


class Client:
    """Two stores and their workers, which never serve, and calls that wait."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.seed = SchedulerClient(scheduler.address)
        self._channel = grpc.insecure_channel(scheduler.address)
        self._method = self._channel.unary_unary(LOCATE, REQUEST.SerializeToString, REPLY.FromString)
        self.addresses = ["127.0.0.1:9", "127.0.0.1:10"]
        self.stores = [self.seed.register_store(address) for address in self.addresses]
        self.workers = [self.seed.register_worker(f"127.0.0.1:{7 - n}", self.addresses[n]) for n in (0, 1)]

    def locate(self, ref: int) -> Any:
        return self._method.future(REQUEST(objref=ref), timeout=PATIENCE_S)

    def wait(self, ref: int, wait_until: Callable[..., None]) -> Any:
        """A call that the scheduler has taken, and that waits."""
        waiting = self.scheduler._locator._waiting
        count = len(waiting.get(ref, ()))
        made = self.locate(ref)
        wait_until(lambda: len(waiting.get(ref, ())) > count, "the call waits")
        return made

    def close(self) -> None:
        self.seed.close()
        self._channel.close()


@pytest.fixture(params=["memory", "kept"])
def client(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Client]:
    options = SchedulerOptions(lost_after_s=60, state_dir=tmp_path if request.param == "kept" else None)
    with Scheduler(options) as scheduler:
        made = Client(scheduler)
        yield made
        made.close()
        assert scheduler._locator._waiting == {}
        scheduler.check_invariants()


def code_of(call: Any, words: str) -> str:
    with pytest.raises(grpc.RpcError, match=words) as caught:
        call.result(PATIENCE_S)
    return caught.value.code().name


def test_object_that_exists_is_located_at_once(client: Client) -> None:
    ref = client.seed.push(client.workers[0])
    for store in client.stores:
        client.seed.ready(ref, store)
    found = client.locate(ref).result(PATIENCE_S)
    assert (found.objref, list(found.objstore_address)) == (ref, client.addresses)


def test_callers_wait_until_a_store_has_the_object(client: Client, wait_until: Callable[..., None]) -> None:
    ref, other = client.seed.push(client.workers[0]), client.seed.push(client.workers[0])
    calls = [client.wait(ref, wait_until) for _ in range(3)]
    client.seed.ready(other, client.stores[0])
    assert not any(call.done() for call in calls)
    client.seed.ready(ref, client.stores[1])
    for call in calls:
        assert list(call.result(PATIENCE_S).objstore_address) == client.addresses[1:]


def test_alias_is_located_by_its_object(client: Client, wait_until: Callable[..., None]) -> None:
    alias, target, late = [client.seed.push(client.workers[0]) for _ in range(3)]
    first = client.wait(alias, wait_until)
    client.seed.alias(alias, target)
    client.seed.ready(target, client.stores[0])
    second = client.wait(late, wait_until)
    client.seed.alias(late, target)
    assert [call.result(PATIENCE_S).objref for call in (first, second)] == [target, target]


def test_caller_is_told_when_the_object_will_never_come(client: Client, wait_until: Callable[..., None]) -> None:
    client.seed.register_function(client.workers[0], "f", 1)
    pushed = client.seed.push(client.workers[0])
    client.seed.increment([pushed])
    (result,) = client.seed.remote_call({"name": "f", "arg": [{"ref": pushed}]})
    calls = [client.wait(ref, wait_until) for ref in (pushed, result)]
    client.scheduler.report(ev.WorkerLost(client.workers[0]))
    assert code_of(calls[0], "which was to make it, is gone") == "DATA_LOSS"
    assert code_of(calls[1], "that was to make it will not run") == "DATA_LOSS"
    assert code_of(client.locate(result), "will not run") == "DATA_LOSS"  # also who asks later


def test_caller_is_told_when_the_reference_is_dropped(client: Client, wait_until: Callable[..., None]) -> None:
    container, inner = client.seed.push(client.workers[0]), client.seed.push(client.workers[0])
    client.seed.ready(container, client.stores[0])
    client.seed.contain(container, [inner])
    call = client.wait(inner, wait_until)
    client.seed.decrement([container])
    client.scheduler.report(ev.ObjStoreLost(client.stores[0]))  # its producer is gone, and nothing counts it
    assert code_of(call, "is deallocated") == "NOT_FOUND"
    assert code_of(client.locate(inner), "is deallocated") == "NOT_FOUND"
    assert code_of(client.locate(99), "is unknown") == "NOT_FOUND"


def test_caller_that_leaves_is_forgotten(client: Client, wait_until: Callable[..., None]) -> None:
    ref = client.seed.push(client.workers[0])
    client.wait(ref, wait_until).cancel()
    wait_until(lambda: not client.scheduler._locator._waiting, "the call is forgotten")


def test_garbage_is_refused(client: Client) -> None:
    with grpc.insecure_channel(client.scheduler.address) as channel, pytest.raises(grpc.RpcError) as refused:
        channel.unary_unary(LOCATE)(b"\xff\xff", timeout=PATIENCE_S)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
