"""The core's actors without a daemon: table, mailbox, inbox, deaths."""

import struct
import threading

import pytest

from fastrt._core.objects import handles
from fastrt._core.objects.pending import Watch
from fastrt._core.repair import fsck, inspect
from fastrt._core.tasks import actors, calls, submission, tasks
from fastrt._core.tasks.inbox import Inbox
from fastrt.errors import FastrtError, ObjectStoreFullError

NO_TASK = tasks.NO_TASK
# In layout.h: where the superblock has the offset of the client records, their size, and the place of `pushing` there.
CLIENTS_AT, CLIENT_BYTES, PUSHING_AT = 64, 256, 28


@pytest.fixture
def made(node, client, function):
    """An actor that wants a process: [its reference, its index]."""
    ref = node.put(60)
    found = [ref, actors.create(client, ref, function.objref, "name", 1, False)]
    del ref
    yield found
    found.clear()
    for index, _ in actors.attention(client):
        end(client, index)


def drain(client, inbox):
    """Run what there is; the first argument of each call."""
    ran = []
    while (task := inbox.next(0.0, 0.0)) != NO_TASK:
        ran.append(tasks.arguments(client, task)[1][0])
        tasks.finish_scalar(client, task, None)
    return ran


def serve(client, index, ordered=True):
    assert actors.enter(client, index)
    actors.alive(client, index)
    return Inbox(client, index, ordered)


def call(client, ref, *args):
    return submission.submit(client, submission.CallOptions(ref, 0), args)


def end(client, index, reason="over"):
    ending = actors.end(client, index, reason)
    assert ending is not None, "it has a process"
    for task in ending:
        handles.result(client, task, 0, 0, 20, 0, True).seal([])
        tasks.finish(client, task)


def test_calls_are_taken_in_the_order_in_which_they_were_made(client, made):
    ref, index = made
    before = [call(client, ref, k) for k in range(5)]
    inbox = serve(client, index)
    after = [call(client, ref, k) for k in range(5, 8)]
    assert drain(client, inbox) == list(range(8))
    assert all(handles.is_ready(client, result) for result in before + after)
    assert actors.info(client, index)["state"] == actors.LIVE
    assert fsck.fsck(client) == []


def test_call_that_waits_holds_back_those_behind_it(client, function, made):
    ref, index = made
    argument = submission.submit(client, submission.TaskOptions(function), (1,))
    results = [call(client, ref, k, *([argument] if k == 1 else [])) for k in range(4)]
    ordered, free = serve(client, index), Inbox(client, index, False)
    assert drain(client, ordered) == [0]
    tasks.finish_scalar(client, tasks.next_task(client, 0.0, 0.0), 7)
    assert drain(client, ordered) == [1, 2, 3]
    assert drain(client, free) == []
    assert len(results) == 4


def test_cancelled_call_breaks_the_list_and_loses_nothing(client, made):
    ref, index = made
    results = [call(client, ref, k) for k in range(6)]
    for k in (2, 5):
        what, task, _ = tasks.cancel(client, results[k])
        assert what == "ending"
        handles.result(client, task, 0, 0, 20, 0, True).seal([])
        tasks.finish(client, task)
    late = call(client, ref, 6)  # in the record of one that was cancelled
    assert drain(client, serve(client, index)) == [0, 1, 3, 4, 6]
    assert handles.is_ready(client, late)


def test_cells_that_were_taken_can_still_be_cancelled(client, made):
    ref, index = made
    results = [call(client, ref, k) for k in range(2)]
    inbox = serve(client, index, ordered=False)
    cells = inbox.take(0.0, 0.0)
    what, task, _ = tasks.cancel(client, results[0])
    assert what == "ending"
    assert inbox.claim(cells[0]) == NO_TASK
    handles.result(client, task, 0, 0, 20, 0, True).seal([])
    tasks.finish(client, task)
    assert inbox.claim(cells[0]) == NO_TASK
    tasks.finish_scalar(client, inbox.claim(cells[1]), 1)


def test_actor_is_released_with_its_last_reference_and_its_record_freed(client, made):
    ref, index = made
    inbox = serve(client, index)
    result = call(client, ref, 1)
    assert not actors.is_over(client, index)
    del ref
    made.clear()
    assert actors.info(client, index)["released"]
    assert not actors.is_over(client, index), "its call has not ended"
    assert drain(client, inbox) == [1]
    assert handles.is_ready(client, result)
    assert actors.is_over(client, index)


def test_call_of_a_dead_actor_is_the_callers_to_end(client, made):
    ref, index = made
    waiting = call(client, ref, 1)
    end(client, index)
    assert handles.is_ready(client, waiting)
    with pytest.raises(submission.CallOfDead) as caught:
        call(client, ref, 2)
    task, result = caught.value.args
    handles.result(client, task, 0, 0, 20, 0, True).seal([])
    tasks.finish(client, task)
    assert handles.is_ready(client, result)
    assert actors.info(client, index)["reason"] == "over"
    assert not actors.start_again(client, index)


def test_name_is_one_actors_only_until_it_is_dead(node, client, function, made):
    ref, index = made
    assert actors.names(client) == ["name"]
    assert actors.find(client, "name") == ref
    assert actors.create(client, node.put(60), function.objref, "name", 0, False) is None
    end(client, index)
    assert actors.names(client) == []
    assert actors.find(client, "name") is None
    assert actors.create(client, node.put(60), function.objref, "name", 0, False) is not None


def test_reference_of_no_actor_is_refused(node, client, made):
    with pytest.raises(FastrtError, match="is no actor's"):
        call(client, node.put(60), 1)
    with pytest.raises(IndexError, match="no actor 5000"):
        actors.info(client, 5000)


def test_actor_that_has_a_process_is_not_ended_for_it(client, made):
    ref, index = made
    assert actors.enter(client, index)
    assert actors.end(client, index, "over") is None
    actors.alive(client, index)
    assert actors.end(client, index, "over") is None
    result = call(client, ref, 1)
    assert drain(client, Inbox(client, index, True)) == [1]
    assert handles.is_ready(client, result)
    assert actors.info(client, index)["reason"] == ""


def test_table_of_actors_may_be_full(node, client, function):
    refs, found = [], []
    for _ in range(8192):
        refs.append(node.put(60))
        found.append(actors.create(client, refs[-1], function.objref, "", 0, False, bare=True))
    with pytest.raises(ObjectStoreFullError, match="table"):
        actors.create(client, refs[-1], function.objref, "", 0, False, bare=True)
    assert found == list(range(8192))
    for index in found:
        end(client, index)
    refs.clear()
    assert fsck.usage(client)["actors"] == 0


def test_bare_actor_that_waits_ends_with_its_last_handle(node, client, function):
    ref = node.put(60)
    index = actors.create(client, ref, function.objref, "", -1, False, bare=True)
    waiting = {index: actors.info(client, index)["gen"]}
    actors.let_go(client, index)
    assert actors.attention(client, waiting) == []
    del ref
    assert actors.attention(client, waiting) == [(index, actors.WANTED)]
    end(client, index)
    assert fsck.usage(client)["actors"] == 0


def test_client_that_stands_for_a_process_passes_calls_on_and_leaves_the_rest_to_the_next(client, made, function):
    ref, index = made
    results = [call(client, ref, k) for k in range(3)]
    gen = actors.info(client, index)["gen"]
    assert not actors.carry(client, index, gen + 1)
    assert actors.carry(client, index, gen)
    assert not actors.carry(client, index, gen)
    assert not actors.enter(client, index)
    actors.carried(client, index)
    assert actors.of_client(client, client.index) == [index]
    inbox = Inbox(client, index, True)
    assert inbox.arm()
    first, second, third = [inbox.claim(cell) for cell in inbox.look()]
    assert actors.has_calls(client, index)
    tasks.finish_scalar(client, first, "there")
    assert not calls.put_back(client, second, True), "it has run, and may not again"
    handles.result(client, second, 0, 0, 20, 0, True).seal([])
    tasks.finish(client, second)
    assert calls.put_back(client, third, False)
    assert fsck.fsck(client) == []
    actors.drop(client, index, "it fell " + "\N{SNOWMAN}" * 100)
    actors.tell_how(client, index, "another reason")
    assert actors.info(client, index)["state"] == actors.DOWN
    assert actors.info(client, index)["how"] == "it fell " + "\N{SNOWMAN}" * 82
    assert not actors.info(client, index)["node_lost"]
    assert actors.start_again(client, index)
    assert actors.info(client, index)["how"] == ""
    actors.tell_how(client, index, "too early")
    assert any("WANTED" in one for one in fsck.fsck(client))
    assert drain(client, serve(client, index)) == [2]
    assert handles.read_scalar(client, results[0], None, 0.0) == "there"
    with pytest.raises(FastrtError, match="not this client's"):
        calls.put_back(client, third, False)


def test_order_wakes_who_stands_for_an_actor_of_another_node(client, function, node):
    ref = node.put(61)
    index = actors.stand_in(client, ref, function.objref)
    assert actors.is_actor(client, ref)
    assert not actors.is_actor(client, function)
    inbox = Inbox(client, index, True)
    assert inbox.look() == []
    assert not inbox.arm()
    word = Watch(client).word()
    actors.order(client, index, actors.ORDER_KILL)
    assert Watch(client).word() != word
    assert inbox.arm()
    assert [actors.take_order(client, index) for _ in range(2)] == [actors.ORDER_KILL, actors.ORDER_NONE]
    assert actors.demanding(client) == []
    del ref
    assert inbox.arm()
    assert actors.info(client, index)["released"]
    actors.drop(client, index)
    end(client, index)
    assert actors.info(client, index)["state"] == actors.EMPTY


def test_demand_of_an_actor_is_found_with_it(client, function, node):
    ref, demand = node.put(60), node.put(8)
    index = actors.create(client, ref, function.objref, "", 0, False, demand)
    about = actors.info(client, index)
    assert about["demand"] == (demand.objref, handles.describe(client, demand)["index"])
    assert actors.demanding(client) == [(index, about["gen"])]
    assert fsck.fsck(client) == []
    del ref
    end(client, index)
    assert actors.demanding(client) == []


def test_notification_of_a_dead_process_queues_no_call_that_has_the_record_of_an_ended_task(node, client, made):
    """The process was killed when it had queued a task. Others ran the task, and its record is a call's now."""
    peer = node.peer()
    peer.run("None")
    result = call(client, made[0], 1)
    (row,) = inspect.tasks(client)
    with open(f"/dev/shm{client.segment.name}", "r+b") as file:
        file.seek(CLIENTS_AT)
        slot = struct.unpack("<Q", file.read(8))[0] + peer.index * CLIENT_BYTES
        file.seek(slot)
        assert struct.unpack_from("<i", file.read(PUSHING_AT + 4), 8) == (peer.pid,)
        file.seek(slot + PUSHING_AT)
        file.write(struct.pack("<I", row["task"] + 1))
    node.bury(peer)
    assert tasks.next_task(client, 0.0, 0.0) == NO_TASK
    assert not handles.is_ready(client, result)


def test_an_actor_that_is_marked_as_ended_has_its_reason_for_every_process_that_sees_the_mark(node, client, function):
    """The daemon found the mark without the reason, and said that the last handle was gone."""
    made = []
    for _ in range(24):
        ref = node.put(60)
        made.append([ref, actors.create(client, ref, function.objref, "", 1, False)])
        del ref
    peer = node.peer()
    peer.run("from fastrt._core.tasks import actors")
    peer.start(
        "def see(k):\n"
        "    while not (info := actors.info(client, k))['ended']:\n"
        "        pass\n"
        "    return info['reason']\n"
        f"[see(k) for k in {[index for _, index in made]}]"
    )
    for _, index in made:
        threading.Event().wait(0.0002)  # the peer looks at this one by now
        assert actors.end_for_good(client, index, actors.KILLED, "enough " * 60)
    assert set(peer.finish()) == {("enough " * 60)}
    for one in made:
        index = one[1]
        one.clear()
        end(client, index)
