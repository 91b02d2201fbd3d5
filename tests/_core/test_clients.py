"""The client table, and what a handle is good for once its process, slot or session is another."""

import contextlib
import gc
import os

import pytest

from fastrt._core.memory import arena, clients, trace
from fastrt._core.memory.clients import Client, ForkedHandle
from fastrt._core.memory.segment import Segment
from fastrt._core.objects import functions, handles
from fastrt._core.repair import fsck, recovery
from fastrt._core.tasks import submission, tasks
from fastrt.errors import AttachError, NotInitializedError


def test_admit_gives_every_slot_once_keeps_some_for_tools_and_then_refuses(make_node):
    node = make_node(clients_max=1)  # rounded up to 64, one of which is the node's own
    slots = [clients.admit(node.segment, os.getpid(), clients.KIND_WORKER) for _ in range(63)]
    assert clients.occupancy(node.segment) == (64, 0, 64)
    with pytest.raises(AttachError, match=r"all 64 client slots.*raise clients_max"):
        clients.admit(node.segment, os.getpid(), clients.KIND_WORKER)
    slots += [clients.admit(node.segment, os.getpid(), clients.KIND_DRIVER, beyond=2) for _ in range(2)]
    slots += [clients.admit(node.segment, os.getpid(), clients.KIND_TOOL, beyond=4) for _ in range(2)]
    node.others += [index for index, _ in slots]
    assert sorted(index for index, _ in slots) == list(range(1, 68))
    rows = clients.table(node.segment)
    assert [clients.table(node.segment, row["client"]) for row in rows] == [[row] for row in rows]
    assert clients.table(node.segment, 68) == []
    with pytest.raises(AttachError, match="all 64 client slots"):
        clients.admit(node.segment, os.getpid(), clients.KIND_TOOL, beyond=4)


def test_table_grows_with_the_clients_and_what_they_hold_goes_with_them(make_node, in_thread):
    node = make_node(clients_max=700, clients_dense=64, objects_max=1 << 15)
    early = node.put(1000)
    slots = [clients.admit(node.segment, os.getpid(), clients.KIND_ACTOR) for _ in range(699)]
    assert [index for index, _ in slots] == list(range(1, 700))
    assert (clients.occupancy(node.segment), clients.slots(node.segment)) == ((700, 0, 704), 64 + 3 * 256)
    many = [handles.put_scalar(node.client, k) for k in range(10_000)]  # whose records got memory after the planes
    for at in (62, 63, 318, 319, 698):
        other = Client(node.segment, *slots[at])
        for ref in (early, many[-1]):
            there = handles.acquire(other, ref.objref, ref.index)
            assert handles.describe(node.client, ref)["refs"] == [0, slots[at][0]]
            del there
            assert handles.describe(node.client, ref)["refs"] == [0]
        function = handles.put_scalar(other, b"f")
        result = submission.submit(other, submission.TaskOptions(function), ())
        thread = in_thread(lambda other=other, result=result: handles.wait_all(other, [result], 10.0, 0.0))
        tasks.finish_scalar(node.client, tasks.next_task(node.client, 10.0, 0.0), at)
        thread.join(60)
        assert handles.read_scalar(other, result, None) == at
        other.abandon()  # and what it holds is for the recovery
    del many, ref
    for index, _ in slots:
        recovery.recover(node.client, index)
    assert fsck.usage(node.client)["objects"] == 1
    assert clients.occupancy(node.segment) == (1, 0, 704)
    with pytest.raises(AttachError, match="not in the table of 64"):
        Client(node.segment, 500, 1)
    again, _ = clients.admit(node.segment, os.getpid(), clients.KIND_TOOL, first=500)
    assert again == 500, "a plane that was in use before"
    node.others.append(again)
    assert fsck.fsck(node.client, quiet=True) == []
    del early


def test_admit_of_256_clients_holds_and_waits_in_every_word(make_node, in_thread):
    node = make_node(clients_max=256)
    slots = [clients.admit(node.segment, os.getpid(), clients.KIND_TOOL) for _ in range(255)]
    node.others += [index for index, _ in slots]
    ref = node.put(1000)
    for at in (62, 63, 127, 254):
        other = Client(node.segment, *slots[at])
        there = handles.acquire(other, ref.objref, ref.index)
        assert handles.describe(node.client, ref)["refs"] == [0, slots[at][0]]
        del there
        function = handles.put_scalar(other, b"f")
        result = submission.submit(other, submission.TaskOptions(function), ())
        thread = in_thread(lambda other=other, result=result: handles.wait_all(other, [result], 10.0, 0.0))
        task = tasks.next_task(node.client, 10.0, 0.0)
        tasks.finish_scalar(node.client, task, at)
        thread.join(60)
        assert handles.read_scalar(other, result, None) == at
        other.close()


def test_admit_of_a_process_that_is_gone_is_refused(node, lone_peers):
    peer = lone_peers()
    peer.kill()
    with pytest.raises(AttachError, match="ended before it could join"):
        clients.admit(node.segment, peer.pid, clients.KIND_WORKER)


def test_admit_again_counts_the_slots_generation(node):
    index, gen = clients.admit(node.segment, os.getpid(), clients.KIND_TOOL)
    recovery.recover(node.client, index)
    assert clients.admit(node.segment, os.getpid(), clients.KIND_TOOL) == (index, gen + 1)
    with pytest.raises(AttachError, match="belongs to process"):
        Client(node.segment, index, gen)
    recovery.recover(node.client, index)


@pytest.mark.parametrize(("index", "gen"), [(64, 1), (63, 0), (0, 2), (0xFFFFFFFF, 1)])
def test_client_of_a_slot_not_given_to_it_is_refused(node, index, gen):
    with pytest.raises(AttachError, match=f"slot {index}"):
        Client(node.segment, index, gen)


@pytest.mark.parametrize(("index", "gen"), [(-1, 1), (1 << 32, 1), (0, -1), (0, 1 << 40)])
def test_client_of_an_impossible_slot_is_refused(node, index, gen):
    with pytest.raises(OverflowError):
        Client(node.segment, index, gen)


def test_client_of_another_process_slot_is_refused(node):
    peer = node.peer()
    with pytest.raises(AttachError, match=f"belongs to process {peer.pid}"):
        Client(node.segment, peer.index, 1)


def test_table_shows_who_is_there(node):
    peer = node.peer()
    rows = {row["client"]: row for row in clients.table(node.segment)}
    assert rows[0]["pid"] == os.getpid()
    assert rows[0]["kind"] == clients.KIND_DRIVER
    assert rows[0]["name"] == "test"
    assert rows[peer.index]["pid"] == peer.pid
    assert rows[peer.index]["name"] == f"peer {peer.pid}"
    assert rows[peer.index]["task"] is None


@pytest.mark.parametrize("name", ["x" * 200, "ä" * 40, "", "a\0b"])
def test_table_keeps_the_beginning_of_any_name(node, name):
    index, _ = clients.admit(node.segment, os.getpid(), clients.KIND_TOOL, name)
    shown = next(row["name"] for row in clients.table(node.segment) if row["client"] == index)
    assert name.startswith(shown.rstrip("\ufffd"))
    assert len(shown.encode()) <= 66
    recovery.recover(node.client, index)


def test_job_differs_for_each_tenant_of_a_slot(node):
    jobs = set()
    for _ in range(3):
        index, gen = clients.admit(node.segment, os.getpid(), clients.KIND_TOOL)
        jobs.add(Client(node.segment, index, gen).job)
        recovery.recover(node.client, index)
    assert len(jobs | {node.client.job}) == 4
    assert 0 not in jobs


# ---- closed, forked, none ----


def calls_on(client, ref, task):
    """Every call of the core that takes a client."""
    return [
        lambda: arena.grow(client),
        lambda: client.adopt_job(1),
        lambda: client.wake(0),
        lambda: fsck.fsck(client),
        lambda: fsck.holders(client),
        lambda: fsck.usage(client),
        lambda: functions.add_function(client, b"0" * 16, ref, "name"),
        lambda: functions.find_function(client, b"0" * 16),
        lambda: functions.function_name(client, 1),
        lambda: handles.acquire(client, ref.objref, ref.index),
        lambda: handles.contained(client, ref),
        lambda: handles.create(client, 10, 16),
        lambda: handles.describe(client, ref),
        lambda: handles.is_ready(client, ref),
        lambda: handles.put_scalar(client, 1),
        lambda: handles.read(client, ref),
        lambda: handles.result(client, task, 0, 10, 16),
        lambda: handles.use(client, ref),
        lambda: handles.wait_all(client, [ref], 0.0, 0.0),
        lambda: handles.wait_some(client, [ref], 1, 0.0, 0.0),
        lambda: recovery.recover(client, 1),
        lambda: tasks.arguments(client, task),
        lambda: tasks.cancel(client, ref),
        lambda: tasks.cancelled(client, task),
        lambda: tasks.claim_for(client, ref),
        lambda: tasks.finish(client, task),
        lambda: tasks.finish_scalar(client, task, 1),
        lambda: tasks.function_of(client, task),
        lambda: tasks.info(client, task),
        lambda: tasks.cancel_terms(client, task),
        lambda: tasks.next_task(client, 0.0, 0.0),
        lambda: tasks.queued(client),
        lambda: tasks.resume(client, task),
        lambda: tasks.retry(client, task),
        lambda: tasks.set_blocked(client, task, True),
        lambda: submission.submit(client, submission.TaskOptions(ref), submission.PackedArgs(16, b"", [], 0)),
        lambda: submission.submit(client, submission.TaskOptions(ref), ()),
        lambda: trace.drain(client, 0),
        lambda: trace.enabled(client),
        lambda: trace.record(client, 1, 1),
        lambda: arena.room(client),
    ]


@pytest.fixture
def busy(node, client, function):
    """A reference and the index of a running task."""
    node.keeps += 1  # pytest holds it
    ref = submission.submit(client, submission.TaskOptions(function), ())
    task = tasks.next_task(client, 0.0, 0.0)
    yield ref, task
    if not client.closed:
        tasks.finish_scalar(client, task, None)


def test_call_with_none_as_client_is_refused(busy):
    for call in calls_on(None, *busy):
        with pytest.raises((TypeError, AttributeError), match=r"Client|NoneType"):
            call()


def test_call_after_close_is_refused(node):
    other = node.attach()
    ref = handles.put_scalar(other, b"function")
    result = submission.submit(other, submission.TaskOptions(ref), ())
    task = tasks.next_task(other, 0.0, 0.0)
    tasks.finish_scalar(other, task, None)
    other.close()
    other.close()
    for call in calls_on(other, ref, task):
        with pytest.raises(NotInitializedError, match=r"fastrt\.init"):
            call()
    assert handles.read_scalar(other, result, "missing") == "missing"


def test_call_in_a_forked_child_is_refused_and_its_end_changes_nothing(busy, client):
    pid = os.fork()
    if pid == 0:
        refused = 0
        for call in calls_on(client, *busy):
            with contextlib.suppress(ForkedHandle):
                call()
                refused -= 1
            refused += 1
        forked = client.forked and handles.read_scalar(client, busy[0], "missing") == "missing"
        del call
        gc.collect()
        os._exit(refused if forked else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == len(calls_on(client, *busy))
    assert not client.forked


def test_child_that_attaches_anew_takes_its_inherited_references_over(node, client):
    ref = node.put(100_000)
    (say_from, say), (go_from, go) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(go_from, 1)
        attached = Segment.attach(node.segment.name)
        row = next(row for row in clients.table(attached) if row["pid"] == os.getpid())
        mine = Client(attached, row["client"], row["gen"])
        handles.use(mine, ref)
        view = memoryview(handles.read(mine, ref)[2])
        os.write(say, bytes(view[:1]))
        os.read(go_from, 1)
        os._exit(0)
    index, _ = clients.admit(node.segment, pid, clients.KIND_TOOL)
    os.write(go, b"1")
    assert os.read(say_from, 1) == bytes([100_000 % 251])
    assert handles.describe(client, ref)["refs"] == [0, index]
    assert handles.describe(client, ref)["pins"] == [index]
    objref, at = ref.objref, ref.index
    del ref
    ref = handles.acquire(client, objref, at)  # the child's hold alone kept it
    os.write(go, b"1")
    os.waitpid(pid, 0)
    recovery.recover(client, index)
    assert handles.describe(client, ref)["refs"] == [0]
    assert handles.describe(client, ref)["pins"] == []
    for fd in (say_from, say, go_from, go):
        os.close(fd)


def test_reference_of_another_client_of_this_process_is_refused(node, client):
    other = node.attach()
    ref = handles.put_scalar(other, 5)
    with pytest.raises(Exception, match="another client of this process"):
        handles.read(client, ref)
    del ref
    other.close()


def test_reference_of_an_ended_session_is_stale(node, make_node):
    ref = make_node().put(10)
    with pytest.raises(Exception, match="a session that has ended"):
        handles.read(node.client, ref)


def test_reference_made_by_hand_is_refused(client):
    for ref in (handles.Ref(), None):
        with pytest.raises((TypeError, Exception), match=r"session that has ended|Ref|None"):
            handles.read(client, ref)
        with pytest.raises((TypeError, Exception), match=r"session that has ended|Ref|None"):
            handles.wait_all(client, [ref], 0.0, 0.0)


def test_numbers_of_results_follow_the_id_of_their_task_also_at_the_end_of_a_range(node, client, function):
    """Each client draws numbers from ranges of 65,536."""
    last = handles.put_scalar(client, 1).objref
    end = handles.put_scalar(node.attach(), 1).objref  # the first number of the range that follows
    while last < end - 3:
        last = handles.put_scalar(client, 1).objref
    assert last == end - 3  # two numbers are left
    refs = submission.submit(client, submission.TaskOptions(function, 2), ())
    task = tasks.next_task(client, 0.0, 0.0)
    info = tasks.info(client, task)
    assert [ref.objref for ref in refs] == [info["id"] + 1, info["id"] + 2]
    assert info["id"] > end
    for k in range(2):
        handles.result(client, task, k, 10, node.KIND).seal()
    tasks.finish(client, task)
    assert handles.put_scalar(client, 1).objref == info["id"] + 3
