"""Deaths at chosen states: whatever a killed process held comes back, and nobody else notices."""

import os
import random
import signal
import sys
import time

import pytest

from fastrt._core.memory import clients
from fastrt._core.objects import functions, handles
from fastrt._core.repair import fsck, recovery
from fastrt._core.tasks import submission, tasks
from fastrt.errors import ObjectStoreFullError, StaleReferenceError

NOTHING = {"ending": [], "running": []}
READY, RUNNING, ENDING = 3, 5, 7


def state(client, task: int) -> int:
    return tasks.info(client, task)["state"]


def submit(client, function, *args, returns=1, retries=0):
    return submission.submit(client, submission.TaskOptions(function, returns, retries), args)


def give(peer, **refs) -> None:
    """Let the peer hold references under the given names."""
    for name, ref in refs.items():
        peer.run(f"{name} = handles.acquire(client, {ref.objref}, {ref.index})")


def only_function_left(client) -> bool:
    left = fsck.usage(client)
    return fsck.fsck(client, quiet=True) == [] and (left["objects"], left["tasks"]) == (1, 0)


# ---- objects ----


@pytest.mark.parametrize(
    "code",
    [
        "pass",
        "held = [handles.put_scalar(client, k) for k in range(1000)]",
        "held = [handles.create(client, n, 16).seal() for n in (0, 100, 5000, 100_000)]",
        "pins = [handles.read(client, handles.create(client, 50_000, 16).seal())[2] for _ in range(20)]",
        "writers = [handles.create(client, n, 16, 2) for n in (0, 100, 5000, 100_000)]",
        "a = handles.put_scalar(client, 1)\nfor _ in range(1000): a = handles.create(client, 1, 16, 1).seal([a])",
        "a = handles.put_scalar(client, 1)\nw = handles.create(client, 500, 16, 2)\nw.copy(0, b'half')",
        "held = [handles.put_scalar(client, k) for k in range(500)]\ndel held[::2]",
    ],
    ids=["nothing", "values", "blocks", "pins", "writers", "chain", "half a container", "magazine"],
)
def test_objects_of_the_dead_come_back(node, client, function, code):
    peer = node.peer()
    peer.run(code)
    assert node.bury(peer) == NOTHING
    assert only_function_left(client)


def test_objects_that_others_hold_survive(node, client):
    peer, other = node.peer(), node.peer()
    mine, pinned, inner = node.put(5000), node.put(50_000), node.put(300)
    box = node.put(10, inner)
    give(peer, mine=mine, pinned=pinned, inner=inner, box=box)
    give(other, mine=mine)
    peer.run("pin = handles.read(client, pinned)[2]")
    pin = handles.read(client, pinned)[2]
    names = [(ref.objref, ref.index) for ref in (mine, pinned, inner)]
    del mine, pinned, inner
    node.bury(peer)
    assert bytes(memoryview(pin)[:1]) == bytes([50_000 % 251])
    assert handles.contained(client, box)[0].objref == names[2][0]
    assert handles.describe(client, handles.acquire(client, *names[0]))["refs"] == [0, other.index]
    del pin
    with pytest.raises(StaleReferenceError):
        handles.acquire(client, *names[1])
    other.run("del mine")
    with pytest.raises(StaleReferenceError):
        handles.acquire(client, *names[0])


def test_memory_of_the_dead_is_given_to_others(make_node):
    node = make_node(store_bytes=8 << 20, objects_max=1 << 11)
    for code in (
        "held = []\ntry:\n    while True: held.append(handles.create(client, 100_000, 16))\nexcept Exception: pass",
        "held = []\ntry:\n    while True: held.append(handles.put_scalar(client, 1))\nexcept Exception: pass",
    ):
        peer = node.peer()
        peer.run(code)
        with pytest.raises(ObjectStoreFullError):
            node.fill(lambda: handles.create(node.client, 100_000, 16), "no such text")
        node.bury(peer)
        assert handles.create(node.client, 7 << 20, 16) is not None
        held = [handles.put_scalar(node.client, k) for k in range(2000)]
        del held


# ---- tasks ----


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_task_of_a_dead_worker_runs_again_as_often_as_allowed(node, client, function, retries):
    ref = submit(client, function, 5, retries=retries)
    for attempt in range(1, retries + 2):
        peer = node.peer()
        task = peer.run("t = tasks.next_task(client, 5.0, 0.0)")
        task = peer.run("t")
        assert tasks.info(client, task)["attempts"] == attempt
        result = node.bury(peer)
        assert result == ({"ending": [task], "running": []} if attempt > retries else NOTHING)
    assert state(client, task) == ENDING
    node.end([task])
    assert handles.read(client, ref) == (node.KIND, True, b"error")


@pytest.mark.parametrize("retries", [0, 1])
@pytest.mark.parametrize(
    "code",
    [
        "kind, args, refs = tasks.arguments(client, t)",
        "w = handles.result(client, t, 1, 70_000, 16, 1)",
        "w = handles.result(client, t, 1, 10, 16, 0, True)",
        "handles.result(client, t, 0, 70_000, 16).seal()",
        "handles.result(client, t, 0, 70_000, 16).seal()\nw = handles.result(client, t, 1, 70_000, 16)",
        "tasks.set_blocked(client, t, True)",
        "x = handles.put_scalar(client, 1)\nhandles.result(client, t, 0, 8, 16, 2).seal([x, x])",
    ],
    ids=["arguments", "half a result", "half an error", "one result", "one and a half", "blocked", "container"],
)
def test_death_in_the_middle_of_a_task(node, client, function, code, retries):
    argument = node.put(5000)
    refs = submit(client, function, argument, returns=2, retries=retries)
    peer = node.peer()
    peer.run("t = tasks.next_task(client, 5.0, 0.0)")
    peer.run(code)
    ending = node.bury(peer)["ending"]
    assert fsck.fsck(client, quiet=True) == []
    assert len(ending) == (0 if retries else 1)
    if retries:
        task = tasks.next_task(client, 0.0, 0.0)
        assert tasks.arguments(client, task)[1] == (argument,)
        for k in range(2):
            writer = handles.result(client, task, k, 3, node.KIND)
            if writer is not None:
                writer.copy(0, b"new")
                writer.seal()
        tasks.finish(client, task)
        assert handles.read(client, refs[1]) == (node.KIND, False, b"new")
    else:
        node.end(ending)
        assert handles.read(client, refs[1]) == (node.KIND, True, b"error")
    assert handles.read(client, refs[0])[1] is ("seal(" not in code and not retries)


@pytest.mark.parametrize("returns", [1, 20])
def test_death_after_the_last_seal_is_a_success(node, client, function, returns):
    refs = submit(client, function, b"x" * 500, returns=returns)
    peer = node.peer()
    peer.run("t = tasks.next_task(client, 5.0, 0.0)")
    peer.run(f"for k in range({returns}): handles.result(client, t, k, 100, 16).seal()")
    assert node.bury(peer) == NOTHING
    refs = [refs] if returns == 1 else refs
    assert [handles.read(client, ref)[1] for ref in refs] == [False] * returns
    assert fsck.usage(client)["tasks"] == 0


def test_result_of_the_first_attempt_that_became_a_strangers_is_left_alone(node, client, function):
    """Sealed, dropped, and its entry taken by another task's result before the worker dies."""
    refs = submit(client, function, returns=2, retries=1)
    peer = node.peer()
    peer.run("t = tasks.next_task(client, 5.0, 0.0)")
    peer.run("handles.result(client, t, 0, 100, 16).seal()")
    index = refs[0].index
    del refs[0]
    others = [submit(client, function, k) for k in range(300)]
    stranger = next(ref for ref in others if ref.index == index)
    running = {}
    while (task := tasks.next_task(client, 0.0, 0.0)) >= 0:
        running[tasks.arguments(client, task)[1][0]] = task
    k = others.index(stranger)
    writer = handles.result(client, running[k], 0, 5000, node.KIND)
    writer.copy(0, b"stranger")
    assert node.bury(peer) == NOTHING
    writer.seal()
    tasks.finish(client, running.pop(k))
    assert bytes(memoryview(handles.read(client, stranger)[2])[:8]) == b"stranger"
    for task in running.values():
        tasks.finish_scalar(client, task, None)
    task = tasks.next_task(client, 0.0, 0.0)
    handles.result(client, task, 1, 5, node.KIND).seal()
    tasks.finish(client, task)


def test_death_of_a_submitter_that_is_no_driver_leaves_its_tasks(node, client, function):
    """A worker's nested tasks belong to the driver's job."""
    submit(client, function, retries=0)
    peer = node.peer()
    give(peer, f=function)
    peer.run("t = tasks.next_task(client, 5.0, 0.0)")
    peer.run("nested = [submission.submit(client, submission.TaskOptions(f), (k,)) for k in range(3)]")
    peer.run("after = submission.submit(client, submission.TaskOptions(f), (nested[0],))")
    node.end(node.bury(peer)["ending"])
    ran = 0
    while (task := tasks.next_task(client, 0.0, 0.0)) >= 0:
        assert tasks.info(client, task)["job"] == client.job
        tasks.finish_scalar(client, task, None)
        ran += 1
    assert ran == 4
    assert only_function_left(client)


def test_death_of_a_driver_ends_its_tasks_only(node, client, function):
    driver, worker = node.peer(clients.KIND_DRIVER), node.peer()
    give(driver, f=function)
    mine = submit(client, function, "mine")
    code = """
client.adopt_job(client.job)
running = submission.submit(client, submission.TaskOptions(f, 1, 5), ("running",))
ready = [submission.submit(client, submission.TaskOptions(f, 1, 5), (b"x" * 1000,)) for _ in range(5)]
waiting = [submission.submit(client, submission.TaskOptions(f, 1, 5), (running, r)) for r in ready]
"""
    driver.run(code)
    tasks.finish_scalar(client, tasks.next_task(client, 0.0, 0.0), "mine")
    worker.run("t = tasks.next_task(client, 5.0, 0.0)")
    task = worker.run("t")
    result = node.bury(driver)
    assert result["running"] == [worker.pid]
    assert len(result["ending"]) == 10
    assert tasks.cancelled(client, task)
    assert worker.run("tasks.cancel_terms(client, t)") == [True, False]
    node.end(result["ending"])
    assert fsck.fsck(client, quiet=True) == []
    assert node.bury(worker) == {"ending": [task], "running": []}
    node.end([task])
    assert handles.read_scalar(client, mine, None) == "mine"
    del mine
    assert only_function_left(client)


def test_death_of_an_uplink_ends_the_tasks_that_came_from_other_nodes(node, client, function):
    """Those run again elsewhere. What they have submitted here goes on, and so does what the uplink had forwarded."""
    uplink, worker = node.peer(clients.KIND_TOOL), node.peer()
    give(uplink, f=function)
    give(worker, f=function)
    mine = submit(client, function, "mine", retries=1)
    code = """
client.adopt_job(client.job | 7 << clients.JOB_BITS)  # the tag of a job of another node
forwarded = tasks.next_task(client, 5.0, 0.0)
accepted = [submission.submit(client, submission.TaskOptions(f, 1, 5, hops=1), (k,)) for k in range(3)]
"""
    uplink.run(code)
    worker.run("t = tasks.next_task(client, 5.0, 0.0)")
    worker.run("nested = submission.submit(client, submission.TaskOptions(f), ('nested',))")
    task = worker.run("t")
    assert tasks.info(client, task)["job"] not in (0, client.job)
    result = node.bury(uplink)
    assert (result["running"], len(result["ending"])) == ([worker.pid], 2)
    assert tasks.cancelled(client, task)
    node.end(result["ending"])
    assert fsck.fsck(client, quiet=True) == []
    ran = set()
    while (task := tasks.next_task(client, 0.0, 0.0)) >= 0:
        ran.add(tasks.arguments(client, task)[1][0])
        tasks.finish_scalar(client, task, None)
    assert ran == {"mine", "nested"}
    node.end(node.bury(worker)["ending"])
    del mine
    assert only_function_left(client)


def test_death_of_a_worker_whose_task_is_cancelled_ends_it(node, client, function):
    ref = submit(client, function, retries=5)
    peer = node.peer()
    peer.run("t = tasks.next_task(client, 5.0, 0.0)")
    what, task, pid = tasks.cancel(client, ref)
    assert (what, pid) == ("running", peer.pid)
    assert node.bury(peer) == {"ending": [task], "running": []}
    node.end([task])


def test_death_of_a_canceller_hands_over_what_it_had_taken(node, client, function):
    """One that waits: its record must not be recycled inside a waiter list."""
    first = submit(client, function)
    waiting = [submit(client, function, first) for _ in range(3)]
    ready = submit(client, function)
    peer = node.peer()
    give(peer, a=waiting[1], b=ready)
    assert peer.run("[tasks.cancel(client, a)[0], tasks.cancel(client, b)[0]]") == ["ending", "ending"]
    ending = node.bury(peer)["ending"]
    assert len(ending) == 2
    node.end(ending)
    ran = 0
    while (task := tasks.next_task(client, 0.0, 0.0)) >= 0:
        tasks.finish_scalar(client, task, None)
        ran += 1
    assert ran == 3
    assert [handles.read(client, ref)[1] for ref in (*waiting, ready)] == [False, True, False, True]


def test_functions_outlive_whoever_stored_them(node, client):
    node.keeps += 1
    peer = node.peer()
    peer.run("functions.add_function(client, b'0' * 16, handles.put_scalar(client, b'code'), 'f')")
    node.bury(peer)
    ref = functions.find_function(client, b"0" * 16)
    assert handles.read_scalar(client, ref, None) == b"code"


# ---- deaths in a sleep ----


@pytest.mark.parametrize("call", ["wait_all(client, refs, None, 0.0)", "wait_some(client, refs, 1, None, 0.0)"])
def test_death_in_a_wait_disturbs_nobody(node, client, function, wait_until, call):
    ref = submit(client, function)
    task = tasks.next_task(client, 0.0, 0.0)
    dead, alive = node.peer(), node.peer()
    for peer in (dead, alive):
        give(peer, ref=ref)
        peer.start(f"refs = [ref]\nhandles.{call} and None")
        wait_until(peer.is_asleep, "the peer to sleep")
    node.bury(dead)
    tasks.finish_scalar(client, task, 1)
    alive.finish()


@pytest.mark.parametrize("spins", [False, True])
def test_death_of_an_idle_worker_leaves_tasks_to_the_others(node, client, function, wait_until, spins):
    """The wake that a dead sleeper has eaten, and the spinner whom pushes relied on."""
    dead, alive = node.peer(), node.peer()
    if spins:
        dead.start("while True: tasks.next_task(client, 1e-5, 3e-6)")  # a longer spin ends early on a busy machine
        wait_until(lambda: spun(dead.pid), "the worker to spin")
    else:
        dead.start("tasks.next_task(client, 30.0, 0.0)")
        wait_until(dead.is_asleep, "the worker to sleep")
    alive.start("t = tasks.next_task(client, 30.0, 0.0)\ntasks.finish_scalar(client, t, 7)")
    wait_until(alive.is_asleep, "the other worker to sleep")
    os.kill(dead.pid, signal.SIGKILL)
    ref = submit(client, function)
    assert handles.wait_all(client, [ref], 5.0, 0.0)
    alive.finish()
    node.bury(dead)
    ref = submit(client, function)
    assert tasks.finish_scalar(client, tasks.next_task(client, 0.0, 0.0), None)


def spun(pid: int) -> bool:
    """Whether a process has used the processor for 50 ms."""
    with open(f"/proc/{pid}/stat") as f:
        ticks = int(f.read().rpartition(")")[2].split()[11])
    return ticks > 100 * 0.05 + 20  # beside the 0.2 s that its start takes


def test_stopped_process_keeps_what_it_holds(node, client, function, wait_until):
    """SIGSTOP is no death: nothing of it is given back, and it goes on as if nothing had been."""
    peer = node.peer()
    ref = submit(client, function)
    peer.run("t = tasks.next_task(client, 5.0, 0.0)\nheld = handles.put_scalar(client, 5)")
    os.kill(peer.pid, signal.SIGSTOP)
    wait_until(peer.is_stopped, "the peer to stop")
    for k in range(1000):
        handles.put_scalar(client, k)
    assert fsck.fsck(client) == []
    os.kill(peer.pid, signal.SIGCONT)
    assert peer.run("tasks.finish_scalar(client, t, handles.read_scalar(client, held, None))")
    assert handles.read_scalar(client, ref, None) == 5


# ---- recover itself ----


def test_recover_of_a_free_slot_does_nothing(node, client):
    assert recovery.recover(client, 63) == NOTHING
    peer = node.peer()
    node.bury(peer)
    assert recovery.recover(client, peer.index) == NOTHING


@pytest.mark.parametrize("index", [0, 64, 255, 0xFFFFFFFF])
def test_recover_of_oneself_or_nobody_is_refused(client, index):
    with pytest.raises(ValueError, match=f"client {index} cannot be recovered"):
        recovery.recover(client, index)


def test_recover_by_another_than_the_daemon(node, client, function):
    dead, heir = node.peer(), node.peer()
    ref = submit(client, function)
    dead.run("t = tasks.next_task(client, 5.0, 0.0)")
    dead.kill()
    node.peers.remove(dead)
    ending = heir.run(f"recovery.recover(client, {dead.index})")["ending"]
    assert len(ending) == 1
    assert node.bury(heir) == {"ending": ending, "running": []}
    node.end(ending)
    assert handles.read(client, ref)[1]


def test_killed_at_random_instants_nothing_is_lost(node, client, function):
    """Beside the states chosen above: a peer works at full speed and is killed wherever it happens to be."""
    rng = random.Random(7)
    anchor = node.put(300)
    code = """
import random
rng = random.Random({seed})
held = []
sys.stdout.write("!"); sys.stdout.flush()
while True:
    what = rng.randrange(7)
    if what == 0: held.append(handles.put_scalar(client, 1))
    elif what == 1: held.append(handles.create(client, rng.choice([10, 300, 9000, 100_000]), 16, 1).seal([anchor]))
    elif what == 2 and held: del held[rng.randrange(len(held))]
    elif what == 3: held.append(submission.submit(client, submission.TaskOptions(f, 1, 1), tuple(held[-2:])))
    elif what == 4:
        t = tasks.next_task(client, 0.0, 0.0)
        if t >= 0: tasks.arguments(client, t); tasks.finish_scalar(client, t, "x" * rng.choice([1, 500]))
    elif what == 5 and held: tasks.cancel(client, held[-1])[0] == "ending" and sys.exit()
    elif what == 6: handles.contained(client, handles.create(client, 1, 16, 1).seal([anchor]))
    if len(held) > 50: del held[:25]
"""
    for seed in range(8):
        pair = [node.peer(), node.peer()]
        for k, peer in enumerate(pair):
            give(peer, anchor=anchor, f=function)
            peer.start(code.format(seed=10 * seed + k))
        for peer in pair:
            assert os.read(peer.process.stdout.fileno(), 1) == b"!"
        until = time.perf_counter() + rng.random() / 20
        while time.perf_counter() < until:
            handles.acquire(client, anchor.objref, anchor.index)
        for peer in pair:
            node.end(node.bury(peer)["ending"])
        assert handles.describe(client, anchor)["refs"] == [client.index]
        while (task := tasks.next_task(client, 0.0, 0.0)) >= 0:
            tasks.finish_scalar(client, task, None)
        assert fsck.fsck(client, quiet=True) == []
        assert fsck.usage(client)["objects"] == 2


def test_janitor_takes_milliseconds_for_a_hundred_thousand_objects(make_node, record_property, capsys):
    node = make_node(objects_max=1 << 18)
    held = [handles.put_scalar(node.client, k) for k in range(100_000)]
    peer = node.peer()
    peer.run("held = [handles.put_scalar(client, k) for k in range(100_000)]")
    peer.kill()
    node.peers.remove(peer)
    start = time.thread_time()  # of CPU: other processes may have the machine meanwhile
    recovery.recover(node.client, peer.index)
    took_ms = (time.thread_time() - start) * 1e3
    record_property("janitor_ms", took_ms)
    with capsys.disabled():
        sys.stdout.write(f"\njanitor: {took_ms:.1f} ms for 100,000 objects of the dead beside 100,000 of others\n")
    assert took_ms < 500
    assert fsck.usage(node.client)["objects"] == 100_000
    del held


# ---- promises of values that a process fetches ----


def test_promise_of_a_dead_process_goes_to_the_next_one_with_its_source_and_its_cancellation(node, client):
    old, new = node.peer(), node.peer()
    old.run("task, ref = tasks.promise(client, b'node 7')\nother, _ = tasks.promise(client)")
    old.run("made = tasks.promises(client)")
    task, objref, index = (old.run(name) for name in ("task", "ref.objref", "ref.index"))
    assert old.run("[(one[0], one[1].objref, one[2].decode()) for one in made]") == [[task, objref, "node 7"]]
    ref = handles.acquire(client, objref, index)
    found = node.bury(old)
    assert len(found["ending"]) == 2
    assert tasks.arguments(client, task, True)[1] == b"node 7"
    assert tasks.cancel(client, ref, force=True) == ("done", 0, 0)
    assert not tasks.hand_over(client, task, old.index)
    assert tasks.hand_over(client, task, new.index)
    assert state(client, task) == RUNNING
    assert not handles.is_ready(client, ref)
    assert new.run("[(one[0], one[2].decode()) for one in tasks.promises(client)]") == [[task, "node 7"]]
    assert new.run(f"tasks.cancel_terms(client, {task})") == [True, False]
    new.run(f"tasks.finish_scalar(client, {task}, 5)")
    assert handles.read_scalar(client, ref, None) == 5
    node.end([one for one in found["ending"] if one != task])


def test_promise_in_the_record_of_a_task_of_another_node_is_not_cancelled_with_its_process(node, client, function):
    peer = node.peer(clients.KIND_TOOL)
    peer.run("client.adopt_job(client.job)")
    options = submission.TaskOptions(function, 1, 0, hops=1)
    for _ in range(3):  # until the peer's magazine has a record of such a task
        submission.submit(client, options, ())
        task = tasks.next_task(client, 0.0, 0.0)
        tasks.finish_scalar(client, task, 1)
    mine, held = tasks.promise(client, b"node 7")
    assert tasks.info(client, mine)["hops"] == 0
    tasks.finish_scalar(client, mine, 2)
    assert handles.read_scalar(client, held, None) == 2
    task = peer.run("tasks.promise(client, b'node 7')[0]")
    assert node.bury(peer)["ending"] == [task]
    assert tasks.cancel_terms(client, task) is None
    node.end([task])


def test_promise_that_was_passed_to_a_process_is_found_again_when_that_one_dies(node, client):
    old, new = node.peer(), node.peer()
    task = old.run("tasks.promise(client, b'node 7')[0]")
    node.bury(old)
    assert tasks.hand_over(client, task, new.index)
    assert node.bury(new)["ending"] == [task]
    with pytest.raises(ValueError, match="a source of 65 bytes"):
        tasks.promise(client, b"x" * 65)
    node.end([task])
