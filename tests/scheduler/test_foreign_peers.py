"""Peers in processes of their own, written from the protos alone, and their deaths."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fastrt.scheduler import Scheduler, SchedulerClient, SchedulerError, SchedulerOptions
from fastrt.scheduler import events as ev

# A worker and a store at one port. It takes calls and never ends them.
PEER = """
import concurrent.futures, sys, threading, grpc
from fastrt.net.grpc.descriptors import message_set
ray = message_set("ray")
request, reply = ray.methods("WorkerService")["InvokeCall"]
def invoke(asked, context):
    print("called", flush=True)
    return reply()
handler = grpc.unary_unary_rpc_method_handler(invoke, request.FromString, reply.SerializeToString)
server = grpc.server(concurrent.futures.ThreadPoolExecutor(2))
server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("WorkerService", {"InvokeCall": handler})])
own = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
server.start()
channel = grpc.insecure_channel(sys.argv[1])
def call(name, **fields):
    asked, answered = ray.methods("Scheduler")[name]
    method = channel.unary_unary(f"/Scheduler/{name}", asked.SerializeToString, answered.FromString)
    return method(asked(**fields), timeout=20)
store = call("RegisterObjStore", objstore_address=own).objstoreid
worker = call("RegisterWorker", worker_address=own, objstore_address=own).workerid
if "call" not in sys.argv:
    call("RegisterFunction", workerid=worker, fnname="f", num_return_vals=1)
print(worker, flush=True)
made = []
words = sys.argv[2:]
while words:
    match words.pop(0):
        case "increment":
            call("IncrementRefCount", objref=[int(words.pop(0))])
        case "push":
            made.append(call("PushObj", workerid=worker).objref)
            call("ObjReady", objref=made[-1], objstoreid=store)
        case "call":
            call("IncrementRefCount", objref=made)
            made += call("RemoteCall", call={"name": "f", "arg": [{"ref": made[-1]}]}).result
if made:
    print(*made, flush=True)
threading.Event().wait()
"""
PATIENT_S = 60.0  # how long the scheduler waits for a peer that does not answer


@pytest.fixture
def scheduler() -> Iterator[Scheduler]:
    with Scheduler(SchedulerOptions(lost_after_s=PATIENT_S)) as made:
        yield made
        made.check_invariants()


@pytest.fixture
def client(scheduler: Scheduler) -> Iterator[SchedulerClient]:
    with SchedulerClient(scheduler.address) as made:
        yield made


@pytest.fixture
def peer(scheduler: Scheduler) -> Iterator[Callable[..., tuple[subprocess.Popen[str], int]]]:
    """Start a peer, and what it does: its process, and its number."""
    with contextlib.ExitStack() as stack:

        def start(*words: object) -> tuple[subprocess.Popen[str], int]:
            command = [sys.executable, "-c", PEER, scheduler.address, *map(str, words)]
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            stack.callback(process.kill)
            assert process.stdout is not None
            return process, int(process.stdout.readline())

        yield start


def is_known(client: SchedulerClient, worker: int) -> bool:
    try:
        client.request(worker, client.push(worker))
    except SchedulerError:
        return False
    return True


def test_call_of_a_killed_worker_runs_elsewhere_at_once(
    scheduler: Scheduler, client: SchedulerClient, peer: Any, wait_until: Callable[..., None]
) -> None:
    first, number = peer()
    client.remote_call({"name": "f"})
    assert first.stdout.readline() == "called\n"
    second, _ = peer()
    begun = time.monotonic()
    first.kill()
    assert second.stdout.readline() == "called\n"
    assert time.monotonic() - begun < PATIENT_S / 4
    wait_until(lambda: not is_known(client, number), "the killed worker is lost")


def test_stopped_peer_is_not_lost(client: SchedulerClient, peer: Any) -> None:
    """Its socket stays open: it may answer again."""
    process, number = peer()
    os.kill(process.pid, signal.SIGSTOP)
    assert is_known(client, number)
    os.kill(process.pid, signal.SIGCONT)
    client.remote_call({"name": "f"})
    assert process.stdout.readline() == "called\n"


def test_peer_whose_connection_breaks_is_not_lost(client: SchedulerClient, wait_until: Callable[..., None]) -> None:
    """Its port accepts connections: only a closed port shows that the process is gone."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(20)
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        client.register_store(address)
        worker = client.register_worker(address, address)
        for _ in range(6):
            listener.accept()[0].close()
        assert is_known(client, worker)


def counts(client: SchedulerClient, *refs: int) -> list[int]:
    """The counts of references, -1 of a deallocated one."""
    found = list(client.info().reference_count)
    return [-1 if found[ref] == (1 << 64) - 1 else found[ref] for ref in refs]


def test_killed_worker_gives_back_the_counts_of_its_message_and_its_own(
    client: SchedulerClient, peer: Any, wait_until: Callable[..., None]
) -> None:
    client.register_store("127.0.0.1:9")
    mine = client.register_worker("127.0.0.1:8", "127.0.0.1:9")
    argument = client.push(mine)
    client.ready(argument, 0)
    first, _ = peer("increment", argument, "push")
    (pushed,) = map(int, first.stdout.readline().split())
    client.increment([argument])
    (result,) = client.remote_call({"name": "f", "arg": [{"ref": argument}]})
    assert first.stdout.readline() == "called\n"
    assert counts(client, argument, pushed, result) == [3, 1, 2]
    second, _ = peer()
    first.kill()
    assert second.stdout.readline() == "called\n"  # its message has counts of its own
    wait_until(lambda: counts(client, argument, pushed, result) == [2, -1, 2], "the killed one's counts are dropped")
    second.kill()
    wait_until(lambda: counts(client, argument, result) == [1, 1], "and those of the second message")


def test_caller_that_dies_gives_back_results_and_not_what_messages_hold(
    client: SchedulerClient, peer: Any, wait_until: Callable[..., None]
) -> None:
    worker, _ = peer()
    caller, _ = peer("push", "call")
    pushed, result = map(int, caller.stdout.readline().split())
    assert worker.stdout.readline() == "called\n"
    assert counts(client, pushed, result) == [2, 2]
    caller.kill()
    wait_until(lambda: counts(client, pushed, result) == [1, 1], "only the message holds them")


def test_program_that_goes_on_keeps_its_counts_when_its_worker_is_lost(
    scheduler: Scheduler, client: SchedulerClient, peer: Any, wait_until: Callable[..., None]
) -> None:
    client.register_store("127.0.0.1:9")
    kept = client.push(client.register_worker("127.0.0.1:8", "127.0.0.1:9"))
    client.increment([kept])
    scheduler.report(ev.ObjStoreLost(0))
    other, _ = peer("push")
    (pushed,) = map(int, other.stdout.readline().split())
    other.kill()
    wait_until(lambda: counts(client, pushed) == [-1], "the counts of the killed program are dropped")
    assert counts(client, kept) == [2]
