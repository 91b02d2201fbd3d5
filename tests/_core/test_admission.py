"""Tasks that demand resources, seen from the core: held, admitted, claimed, given back, refused; and deaths."""

import pytest

from fastrt._core.memory import clients
from fastrt._core.objects import handles
from fastrt._core.repair import fsck
from fastrt._core.tasks import admission, submission, tasks
from fastrt.errors import FastrtError


@pytest.fixture
def demand(node, client):
    node.keeps += 1
    return handles.put_scalar(client, "one of each")


def submit(client, function, demand, *args, retries=0):
    return submission.submit(client, submission.TaskOptions(function, 1, retries, demand=demand), args)


def next_task(client) -> int:
    return tasks.next_task(client, 0.0, 0.0)


def where(client, held) -> list[int]:
    return [state for state, _ in admission.states(client, held)]


def end(client, task, value=0):
    assert tasks.finish_scalar(client, task, value)


def test_task_is_held_until_it_is_admitted_and_runs_as_any_other(client, function, demand):
    before = admission.news(client)
    ref = submit(client, function, demand, 7, "x")
    assert admission.news(client) != before
    assert next_task(client) == tasks.NO_TASK
    (held,) = admission.take_held(client)
    assert admission.take_held(client) == []
    assert admission.demand_of(client, *held).objref == demand.objref
    assert where(client, [held]) == [admission.WAITING]
    assert admission.admit(client, *held)
    assert not admission.admit(client, *held)
    assert where(client, [held]) == [admission.QUEUED]
    task = next_task(client)
    assert where(client, [held]) == [admission.RUNNING]
    assert tasks.arguments(client, task) == (1, (7, "x"), [])
    assert tasks.info(client, task)["deps"] == 0
    before = admission.news(client)
    end(client, task, 42)
    assert admission.news(client) != before
    assert where(client, [held]) == [admission.GONE]
    assert handles.read_scalar(client, ref, None) == 42


def test_task_is_held_only_once_its_arguments_are_there(client, function, demand):
    maker, argument = tasks.promise(client)
    submit(client, function, demand, argument, 2)
    assert admission.take_held(client) == []
    end(client, maker, 40)
    (held,) = admission.take_held(client)
    admission.admit(client, *held)
    task = next_task(client)
    _, args, refs = tasks.arguments(client, task)
    assert [ref.objref for ref in refs] == [argument.objref]
    assert (handles.read_scalar(client, args[0], None), args[1]) == (40, 2)
    assert tasks.info(client, task)["deps"] == 1
    end(client, task)


def test_serialized_arguments_keep_their_references_in_order(client, function, demand):
    refs = [handles.put_scalar(client, k) for k in range(3)]
    submission.submit(
        client, submission.TaskOptions(function, demand=demand), submission.PackedArgs(17, b"args", refs, 1)
    )
    admission.admit(client, *admission.take_held(client)[0])
    task = next_task(client)
    kind, args, got = tasks.arguments(client, task)
    assert (kind, args, [ref.objref for ref in got]) == (17, b"args", [ref.objref for ref in refs])
    assert tasks.info(client, task)["deps"] == 1
    end(client, task)


def test_held_tasks_come_in_the_order_of_submission(client, function, demand):
    refs = [submit(client, function, demand, k) for k in range(100)]
    held = admission.take_held(client)
    assert len(held) == len(set(held)) == 100
    for one in reversed(held):
        assert admission.admit(client, *one)
    seen = []
    while (task := next_task(client)) >= 0:
        seen.append(tasks.arguments(client, task)[1][0])
        end(client, task)
    assert seen == list(reversed(range(100)))
    del refs


@pytest.mark.parametrize("taken", [False, True])
def test_cancelled_task_is_on_no_list(client, function, demand, taken):
    refs = [submit(client, function, demand, k) for k in range(3)]
    held = admission.take_held(client) if taken else []
    what, task, _ = tasks.cancel(client, refs[1])
    assert what == "ending"
    end(client, task)
    held = held or admission.take_held(client)
    assert [admission.admit(client, *one) for one in held] == ([True, False, True] if taken else [True, True])
    while (task := next_task(client)) >= 0:
        end(client, task)


def test_claimed_task_is_this_clients_and_goes_back_without_an_attempt(client, function, demand):
    ref = submit(client, function, demand, 1)
    (held,) = admission.take_held(client)
    assert admission.claim(client, *held)
    assert not admission.claim(client, *held)
    assert tasks.info(client, held[0])["attempts"] == 1
    assert tasks.give_back(client, held[0])
    assert admission.take_held(client) == [held]
    assert tasks.info(client, held[0])["attempts"] == 0
    with pytest.raises(FastrtError, match="not this client's"):
        tasks.give_back(client, held[0])
    assert admission.claim(client, *held)
    end(client, held[0], 5)
    assert handles.read_scalar(client, ref, None) == 5


def test_retried_task_is_held_again(client, function, demand):
    submit(client, function, demand, retries=1)
    (held,) = admission.take_held(client)
    admission.admit(client, *held)
    assert tasks.retry(client, next_task(client))
    assert next_task(client) == tasks.NO_TASK
    assert admission.take_held(client) == [held]
    admission.admit(client, *held)
    task = next_task(client)
    assert not tasks.retry(client, task)
    end(client, task)


def test_refused_task_is_to_be_ended_here(client, function, demand):
    ref = submit(client, function, demand)
    (held,) = admission.take_held(client)
    assert admission.refuse(client, *held)
    end(client, held[0], -1)
    assert not admission.refuse(client, *held)
    assert handles.read_scalar(client, ref, None) == -1


def test_dead_workers_task_is_held_again_or_ends(node, client, function, demand):
    refs = [submit(client, function, demand, retries=retries) for retries in (1, 0)]
    held = admission.take_held(client)
    peer = node.peer()
    for one in held:
        admission.admit(client, *one)
        peer.run("tasks.next_task(client, 5.0, 0.0)")
    assert where(client, held) == [admission.RUNNING, admission.RUNNING]
    assert node.bury(peer)["ending"] == [held[1][0]]
    end(client, held[1][0])
    assert admission.take_held(client) == [held[0]]
    assert admission.admit(client, *held[0])
    end(client, next_task(client))
    del refs


def test_what_a_dead_daemon_knew_is_found_again(node, client, function, demand):
    refs = [submit(client, function, demand, k) for k in range(6)]
    peer = node.peer()
    held = [tuple(one) for one in peer.run("held = admission.take_held(client); held")]
    peer.run("[admission.admit(client, *one) for one in held[:2]]")
    runs = next_task(client)
    node.bury(peer)
    assert sorted(admission.take_over(client)) == sorted(held[:2])
    assert sorted(admission.take_held(client)) == sorted(held[2:])
    end(client, runs)
    for one in held[2:]:
        admission.admit(client, *one)
    while (task := next_task(client)) >= 0:
        end(client, task)
    del refs


def test_dead_drivers_held_tasks_end(node, client, function):
    peer = node.peer(kind=2)
    peer.run(f"function = handles.acquire(client, {function.objref}, {function.index})")
    peer.run("client.adopt_job(client.job); demand = handles.put_scalar(client, 'd')")
    peer.run("options = submission.TaskOptions(function, 1, 3, demand=demand)")
    peer.run("refs = [submission.submit(client, options, (k,)) for k in range(5)]")
    ending = node.bury(peer)["ending"]
    assert len(ending) == 5
    for task in ending:
        end(client, task)
    assert admission.take_held(client) == []


def test_demand_of_another_tasks_record_is_not_told(client, function, demand):
    submit(client, function, demand)
    ((task, id),) = admission.take_held(client)
    assert admission.demand_of(client, task, id + 1) is None
    assert admission.demand_of(client, 10**6, id) is None
    assert not admission.admit(client, task, id + 1)
    admission.admit(client, task, id)
    end(client, next_task(client))
    assert admission.demand_of(client, task, id) is None
    assert not admission.admit(client, 10**6, id)


def test_sleeper_is_woken_by_news(node, client, function, demand):
    peer = node.peer()
    peer.start(f"admission.wait_news(client, {admission.news(client)}, 30.0)")
    submit(client, function, demand)
    assert peer.finish() == admission.news(client)
    admission.admit(client, *admission.take_held(client)[0])
    end(client, next_task(client))
    assert fsck.fsck(client) == []


def test_watch_returns_the_tasks_that_have_moved_and_no_others(client, function, demand):
    refs = [submit(client, function, demand, k) for k in range(200)]
    held = admission.take_held(client)
    watch = admission.Watch(client)
    for task in held:
        watch.add((*task, "tag"))
    assert [(task, state) for task, state, _ in watch.moved()] == [((*task, "tag"), admission.WAITING) for task in held]
    for task in held:
        assert admission.admit(client, *task)
    assert {state for _, state, _ in watch.moved()} == {admission.QUEUED}
    assert watch.moved() == []
    task = next_task(client)
    moved = ((*held[0], "tag"), admission.RUNNING, client.index)
    assert watch.moved() == [moved]
    assert watch.moved() == []  # this client is no worker
    end(client, task)
    for _ in range(2):  # until it is removed
        assert watch.moved() == [((*held[0], "tag"), admission.GONE, 0)]
    for task in held[:150]:
        watch.remove((*task, "tag"))
    watch.remove((*held[0], "tag"))
    assert (len(watch), watch.moved()) == (50, [])
    watch.add((*held[150], "tag"))  # it is watched already: it is returned once more
    assert watch.moved() == [((*held[150], "tag"), admission.QUEUED, 0)]
    while (task := next_task(client)) != tasks.NO_TASK:
        end(client, task)
    assert [task for task, _, _ in watch.moved()] == [(*task, "tag") for task in held[150:]]
    assert len(refs) == 200


def test_watch_always_returns_the_tasks_that_workers_run(node, client, function, demand):
    """A worker begins to sleep, and ends to, without a change of its task's record."""
    ref = submit(client, function, demand, 1)
    (held,) = admission.take_held(client)
    admission.admit(client, *held)
    worker = node.attach(clients.KIND_WORKER)
    task = next_task(worker)
    watch = admission.Watch(client)
    watch.add(held)
    for _ in range(3):
        assert watch.moved() == [(held, admission.RUNNING, worker.index)]
    end(worker, task, 5)
    assert handles.read_scalar(client, ref, None) == 5
