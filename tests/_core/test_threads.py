"""Threads of one process that use one client at once. With a GIL they take turns; without one they do not."""

import os
import random
import threading
from collections.abc import Callable
from functools import partial

import pytest

from fastrt._core.memory import clients
from fastrt._core.memory.clients import Client
from fastrt._core.objects import bulk, handles, unread_list
from fastrt._core.repair import fsck, recovery
from fastrt._core.tasks import submission, tasks
from fastrt.errors import NotInitializedError, StaleReferenceError
from support.threads import together

THREADS = 4
ROUNDS = 20_000
HELD = 50  # values that a thread keeps at a time


def in_threads(work: Callable[[int], object], count: int = THREADS) -> None:
    """Call `work(number)` in so many threads at once; the first error is raised."""
    together(*[partial(work, number) for number in range(count)])


def put(client: Client, data: bytes) -> handles.Ref:
    writer = handles.create(client, len(data), 16)
    writer.copy(0, data)
    return writer.seal()


def test_each_thread_gets_the_values_that_it_put(client):
    """The node's fixture checks the arena at the end: no block without an owner, no count without a holder."""

    def work(number: int) -> None:
        dice = random.Random(number)
        held: list[tuple[handles.Ref, bytes]] = []
        for k in range(ROUNDS):
            text = b"%d of %d" % (k, number)
            data = text.ljust(dice.choice((20, 250, 3000)), b".")
            held.append((put(client, data), data))
            if len(held) > HELD:
                ref, data = held.pop(dice.randrange(HELD))
                assert handles.read(client, ref)[2] == data if len(data) < 1000 else True
                assert bytes(handles.read(client, ref, True)[2]) == data

    in_threads(work)


def test_threads_hold_and_release_the_same_values(client):
    values = [handles.put_scalar(client, k) for k in range(8)]
    names = [(ref.objref, ref.index) for ref in values]

    def work(number: int) -> None:
        dice = random.Random(number)
        for _ in range(ROUNDS):
            k = dice.randrange(len(names))
            ref = handles.acquire(client, *names[k])
            assert handles.read_scalar(client, ref, None) == k
            pin = handles.read(client, values[k], True)[2]
            assert len(pin)

    in_threads(work)


def test_threads_that_drop_the_last_reference_and_look_for_it_agree(client):
    """One thread puts and drops; the others try to hold what it has named last."""
    named: list[tuple[int, int, int]] = [(0, 0, 0)]

    def work(number: int) -> None:
        if number == 0:
            for k in range(ROUNDS):
                ref = handles.put_scalar(client, k)
                named[0] = (ref.objref, ref.index, k)
            return
        for _ in range(ROUNDS):
            objref, index, k = named[0]
            try:
                ref = handles.acquire(client, objref, index)
            except StaleReferenceError:
                continue
            assert handles.read_scalar(client, ref, None) == k

    in_threads(work)


def test_no_two_objects_of_many_threads_have_one_number(client, function):
    options = submission.TaskOptions(function)
    ranked = submission.TaskOptions(function, priority=1)
    numbers: list[list[int]] = [[] for _ in range(THREADS)]

    def work(number: int) -> None:
        for k in range(ROUNDS // 20):
            ref = submission.submit(client, ranked if k % 10 == 0 else options, (k,))
            numbers[number].append(ref.objref)
            t = tasks.next_task(client, 1.0, 0.0)
            assert t >= 0
            assert tasks.finish_scalar(client, t, k)

    in_threads(work)
    assert len({one for some in numbers for one in some}) == THREADS * (ROUNDS // 20)


@pytest.mark.parametrize("rounds", [ROUNDS // 40, pytest.param(3 * ROUNDS, marks=pytest.mark.long)])
def test_values_made_in_one_call_beside_other_puts_are_whole(client, frequent_turns, rounds):
    def work(number: int) -> None:
        for k in range(rounds):
            if number % 2:
                refs = [handles.put_scalar(client, k + n) for n in range(30)]
                assert [handles.read_scalar(client, ref, None) for ref in refs] == list(range(k, k + 30))
                continue
            writers = bulk.create_many(client, [(100, 16, False)] * 40)
            for n, writer in enumerate(writers):
                writer.copy(0, bytes([n]) * 100)
            for n, ref in enumerate(bulk.seal_many(writers)):
                assert handles.read(client, ref)[2] == bytes([n]) * 100

    in_threads(work)


def test_errors_that_many_threads_drop_unread_are_all_reported(client):
    def work(number: int) -> None:
        for _ in range(100):
            writer = handles.create(client, 5, 16, error=True)
            writer.copy(0, b"error")
            writer.seal()

    in_threads(work)
    errors, dropped = unread_list.take()
    assert len(errors) + dropped == 100 * THREADS


def test_a_client_that_leaves_beside_puts_keeps_no_reference(node):
    """A put ends with a value or an error; in either case nothing of it stays once the client has left."""
    index, gen = clients.admit(node.segment, os.getpid(), clients.KIND_DRIVER, "leaver")
    client = Client(node.segment, index, gen)
    puts = threading.Event()

    def work(number: int) -> None:
        if number == 0:
            assert puts.wait(20)
            recovery.leave(client)
            return
        try:
            held = []
            while True:
                held.append(handles.put_scalar(client, number))
                puts.set()
                del held[:-HELD]
        except NotInitializedError:
            pass

    in_threads(work)
    node.others.append(index)
    assert fsck.usage(node.client)["objects"] == 0


CLOSING = """
import threading
puts = threading.Event()

def put():
    try:
        while True:
            handles.put_scalar(client, 1)
            writer = handles.create(client, 300_000, 16)
            writer.copy(0, bytes(300_000))  # without the GIL
            writer.seal()
            puts.set()
    except Exception as error:
        ends.append(type(error).__name__)

ends = []
threads = [threading.Thread(target=put) for _ in range(4)]
for thread in threads:
    thread.start()
assert puts.wait(20)
client.close()
for thread in threads:
    thread.join()
ends
"""


def test_a_client_that_closes_beside_puts_keeps_its_slot_until_its_process_ends(node):
    """Recovery of the slot frees the entries of interrupted puts; `close` leaves them in place."""
    peer = node.peer()
    assert peer.run(CLOSING) == ["NotInitializedError"] * 4
    assert fsck.fsck(node.client) == []
    node.bury(peer)
    assert fsck.usage(node.client)["objects"] == 0
