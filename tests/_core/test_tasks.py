"""The task path in one process: submit, claim, run, finish, retry, cancel; and what is refused."""

import os
import random
import time

import pytest

from fastrt._core.objects import handles
from fastrt._core.repair import fsck
from fastrt._core.tasks import cancel, submission, tasks
from fastrt.errors import FastrtError, ObjectStoreFullError, StaleReferenceError

WAITING, READY, CLAIMED, RUNNING, BLOCKED, ENDING = 2, 3, 4, 5, 6, 7


def submit(client, function, *args, returns=1, retries=0, flags=0):
    return submission.submit(client, submission.TaskOptions(function, returns, retries, flags), args)


def next_task(client) -> int:
    return tasks.next_task(client, 0.0, 0.0)


def state(client, task: int) -> int:
    return tasks.info(client, task)["state"]


def run_all(client) -> list[int]:
    """Run every ready task: each adds its arguments. The results in the order in which the tasks ran."""
    values = []
    while (task := next_task(client)) >= 0:
        _, args, _ = tasks.arguments(client, task)
        values.append(sum(handles.read_scalar(client, a, None) if isinstance(a, handles.Ref) else a for a in args))
        assert tasks.finish_scalar(client, task, values[-1])
    return values


# ---- the path ----


def test_task_runs_with_its_arguments_and_seals_its_result(client, function):
    ref = submit(client, function, 1, "two", None)
    assert not handles.is_ready(client, ref)
    task = next_task(client)
    info = tasks.info(client, task)
    assert (info["state"], info["client"], info["attempts"], info["job"]) == (RUNNING, client.index, 1, client.job)
    assert info["function"] == tasks.function_of(client, task) == (function.objref, function.index)
    assert tasks.arguments(client, task) == (1, (1, "two", None), [])
    assert tasks.finish_scalar(client, task, 42)
    assert handles.read(client, ref) == (3, False, 42)
    assert next_task(client) == tasks.NO_TASK
    assert fsck.usage(client)["tasks"] == 0


def test_tasks_run_in_the_order_of_submission(client, function):
    refs = [submit(client, function, k) for k in range(1000)]
    assert tasks.queued(client) == 1000
    assert run_all(client) == list(range(1000))
    assert handles.read_scalars(client, refs, None) == list(range(1000))


@pytest.mark.parametrize("nbytes", [0, 100, 176, 177, 5000, 300_000])
@pytest.mark.parametrize("returns", [0, 1, 3, 100])
def test_serialized_arguments_of_any_size_arrive(node, client, function, nbytes, returns):
    args = bytes(k % 251 for k in range(nbytes))
    held = [node.put(10), handles.put_scalar(client, 5)]
    refs = submission.submit(
        client,
        submission.TaskOptions(function, returns, 3, tasks.RETRY_ERRORS),
        submission.PackedArgs(17, args, held, 1),
    )
    names = [(ref.objref, ref.index) for ref in held]
    held.clear()
    task = next_task(client)
    kind, got, got_refs = tasks.arguments(client, task)
    assert (kind, got) == (17, args)
    assert [(ref.objref, ref.index) for ref in got_refs] == names
    info = tasks.info(client, task)
    assert (info["returns"], info["refs"], info["deps"], info["retries"]) == (returns, 2, 1, 3)
    assert info["flags"] & tasks.RETRY_ERRORS
    refs = [refs] if returns == 1 else refs
    for k in range(returns):
        writer = handles.result(client, task, k, 2000 * k, 17)
        writer.copy(0, bytes([k]) * (2000 * k))
        assert writer.seal() is None
        assert handles.result(client, task, k, 10, 17) is None
    del got_refs
    tasks.finish(client, task)
    assert [bytes(handles.read(client, ref)[2]) for ref in refs] == [bytes([k]) * (2000 * k) for k in range(returns)]


def test_arguments_live_until_the_task_ends_without_the_submitter(node, client, function):
    argument = node.put(5000)
    ref = submit(client, function, argument)
    name = argument.objref, argument.index
    del argument
    task = next_task(client)
    assert len(handles.read(client, handles.acquire(client, *name))[2]) == 5000
    tasks.finish_scalar(client, task, None)
    with pytest.raises(StaleReferenceError):
        handles.acquire(client, *name)
    assert handles.is_ready(client, ref)


def test_result_may_contain_references(node, client, function):
    ref = submit(client, function)
    task = next_task(client)
    writer = handles.result(client, task, 0, 3, node.KIND, 2)
    inner = [handles.put_scalar(client, "a"), handles.put_scalar(client, "b")]
    writer.seal(inner)
    tasks.finish(client, task)
    assert handles.contained(client, ref) == inner


@pytest.mark.parametrize("first", [(5000, 2, False), (10, 0, True), (0, 4, False), (0, 5, True)])
def test_result_may_be_begun_again(node, client, function, first):
    """An attempt that failed in the middle leaves a size, references or an error flag behind."""
    nbytes, nrefs, error = first
    ref = submit(client, function)
    task = next_task(client)
    handles.result(client, task, 0, nbytes, node.KIND, nrefs, error)
    handles.result(client, task, 0, nbytes, node.KIND, nrefs, error)
    assert tasks.finish_scalar(client, task, "x" * 500)
    assert handles.read(client, ref) == (5, False, "x" * 500)


# ---- dependencies ----


def test_task_waits_for_its_argument(client, function):
    first = submit(client, function, 1)
    second = submit(client, function, first, 10)
    task = next_task(client)
    assert next_task(client) == tasks.NO_TASK
    tasks.finish_scalar(client, task, 5)
    assert run_all(client) == [15]
    assert handles.read_scalar(client, second, None) == 15


def test_chain_of_tasks_runs_to_its_end(client, function):
    ref = submit(client, function, 0)
    for _ in range(1000):
        ref = submit(client, function, ref, 1)
    assert tasks.queued(client) == 1
    assert run_all(client)[-1] == 1000
    assert handles.read_scalar(client, ref, None) == 1000


@pytest.mark.parametrize("order", [1, -1])
def test_fan_in_of_a_thousand_is_released_by_the_last(client, function, order):
    parts = [submit(client, function, k) for k in range(1000)]
    whole = submission.submit(client, submission.TaskOptions(function), submission.PackedArgs(17, b"", parts, 1000))
    got = [next_task(client) for _ in range(1000)]
    for task in got[::order][:-1]:
        tasks.finish_scalar(client, task, 1)
        assert tasks.queued(client) == 0
    tasks.finish_scalar(client, got[::order][-1], 1)
    task = next_task(client)
    assert tasks.arguments(client, task)[2] == parts
    tasks.finish_scalar(client, task, "whole")
    assert handles.read_scalar(client, whole, None) == "whole"


def test_fan_out_of_a_thousand_is_released_at_once(client, function):
    first = submit(client, function, 1)
    refs = [submit(client, function, first, k) for k in range(1000)]
    tasks.finish_scalar(client, next_task(client), 1)
    assert tasks.queued(client) == 1000
    assert run_all(client) == list(range(1, 1001))  # in the order in which they began to wait
    assert sorted(handles.read_scalars(client, refs, None)) == list(range(1, 1001))


def test_same_argument_twice_is_one_wait(client, function):
    first = submit(client, function, 2)
    second = submit(client, function, first, first, first)
    run_all(client)
    assert handles.read_scalar(client, second, None) == 6


def test_reference_beyond_the_dependencies_is_not_waited_for(client, function):
    unsealed = submit(client, function, 1)
    task = next_task(client)
    submission.submit(client, submission.TaskOptions(function), submission.PackedArgs(17, b"", [unsealed], 0))
    other = next_task(client)
    assert tasks.arguments(client, other)[2] == [unsealed]
    tasks.finish_scalar(client, other, None)
    tasks.finish_scalar(client, task, None)


# ---- retry ----


@pytest.mark.parametrize("retries", [0, 1, 5])
def test_retry_ends_with_the_attempts(client, function, retries):
    ref = submit(client, function, 7, retries=retries)
    for attempt in range(1, retries + 1):
        task = next_task(client)
        assert tasks.info(client, task)["attempts"] == attempt
        assert tasks.retry(client, task)
    task = next_task(client)
    assert not tasks.retry(client, task)
    assert state(client, task) == RUNNING
    tasks.finish_scalar(client, task, None)
    assert handles.is_ready(client, ref)


def test_retry_255_times_never_ends(client, function):
    ref = submit(client, function, retries=255)
    for _ in range(1000):
        assert tasks.retry(client, next_task(client))
    run_all(client)
    assert handles.is_ready(client, ref)


def test_retried_task_keeps_the_results_it_has_sealed(node, client, function):
    """Sealed, dropped, and its entry taken by another task's result: the retry must not touch that."""
    refs = submit(client, function, returns=2, retries=3)
    task = next_task(client)
    handles.result(client, task, 0, 100, node.KIND).seal()
    handles.result(client, task, 1, 100, node.KIND)
    index = refs[0].index
    del refs[0]
    others = [submit(client, function, k) for k in range(200)]
    assert index in {ref.index for ref in others}
    assert tasks.retry(client, task)
    done = 0
    while (again := next_task(client)) != task:
        tasks.finish_scalar(client, again, 1)
        done += 1
    assert handles.result(client, task, 0, 100, node.KIND) is None
    handles.result(client, task, 1, 200, node.KIND).seal()
    tasks.finish(client, task)
    assert done == 200
    assert handles.read_scalars(client, others, None) == [1] * 200


# ---- cancel ----


def test_cancel_of_a_ready_task_hands_it_over(node, client, function):
    ref = submit(client, function)
    what, task, pid = tasks.cancel(client, ref)
    assert (what, pid, state(client, task)) == ("ending", 0, ENDING)
    assert next_task(client) == tasks.NO_TASK
    assert tasks.cancel(client, ref) == ("done", 0, 0)
    node.end([task])
    assert handles.read(client, ref) == (node.KIND, True, b"error")
    assert tasks.cancel(client, ref) == ("done", 0, 0)


@pytest.mark.parametrize("seed", range(4))
def test_cancel_of_waiting_tasks_takes_them_out_of_their_list(node, client, function, seed):
    """Any of them, in any order, and others begin to wait in between; those that stay run in order."""
    rng = random.Random(seed)
    first = submit(client, function, 1)
    waiting, gone = [], []
    for k in range(60):
        waiting.append((k, submit(client, function, first, k)))
        if len(waiting) > 3 and rng.random() < 0.7:
            _, ref = waiting.pop(rng.choice((0, -1, rng.randrange(len(waiting)))))
            what, task, _ = tasks.cancel(client, ref)
            assert what == "ending"
            node.end([task])
            gone.append(ref)
        assert fsck.fsck(client, quiet=True) == []
    assert run_all(client) == [1, *(k + 1 for k, _ in waiting)]
    assert all(handles.read(client, ref)[1] for ref in gone)


def test_cancelling_many_tasks_that_wait_for_one_object_takes_linear_time(make_node):
    """A search from one end of their list took 60 s for 100,000 of them."""
    node = make_node(256 << 20, tasks_max=100_100, objects_max=200_300)
    client = node.client
    function = handles.put_scalar(client, b"f")
    first = submit(client, function, 1)
    waiting = [submit(client, function, first, k) for k in range(100_000)]
    start = time.perf_counter()
    for ref in waiting[::2] + waiting[::-2]:
        node.end([tasks.cancel(client, ref)[1]])
    assert time.perf_counter() - start < 10
    assert run_all(client) == [1]


def test_error_of_a_cancelled_task_releases_those_that_wait_for_it(node, client, function):
    first = submit(client, function)
    second = submit(client, function, first)
    _, task, _ = tasks.cancel(client, first)
    node.end([task])
    task = next_task(client)
    assert handles.read(client, tasks.arguments(client, task)[1][0])[1]
    tasks.finish_scalar(client, task, "seen")
    assert handles.read_scalar(client, second, None) == "seen"


def test_cancel_of_a_running_task_marks_it_and_names_its_process(node, client, function):
    ref = submit(client, function, retries=3)
    task = next_task(client)
    assert tasks.cancel_terms(client, task) is None
    assert tasks.cancel(client, ref) == ("running", task, os.getpid())
    assert tasks.cancelled(client, task)
    assert tasks.cancel_terms(client, task) == (False, False)
    assert not tasks.retry(client, task)
    assert not tasks.give_back(client, task)
    tasks.finish_scalar(client, task, None)
    following = submit(client, function, retries=3)
    again = next_task(client)
    assert again == task  # the record has another tenant, who is not meant
    assert not tasks.cancelled(client, task)
    assert tasks.cancel_terms(client, task) is None
    tasks.finish_scalar(client, task, None)
    assert handles.is_ready(client, following)


@pytest.mark.parametrize(
    ("first", "second", "both"),
    [
        ((False, True), (False, True), (False, True)),
        ((True, True), (False, False), (True, False)),
        ((False, False), (True, True), (True, False)),
        ((False, True), (True, True), (True, True)),
    ],
)
def test_one_of_two_cancellers_is_enough_for_more(client, function, first, second, both):
    ref = submit(client, function)
    task = next_task(client)
    tasks.cancel(client, ref, *first)
    assert tasks.cancel_terms(client, task) == first
    tasks.cancel_task(client, task, tasks.info(client, task)["id"], *second)
    assert tasks.cancel_terms(client, task) == both
    tasks.finish_scalar(client, task, None)


def test_two_tasks_of_one_client_are_cancelled_at_once(client, function):
    """As one that runs on top of another in a worker, or all that a node has lent."""
    refs = [submit(client, function, k) for k in range(3)]
    running = [next_task(client) for _ in refs]
    tasks.cancel(client, refs[0], True)
    tasks.cancel(client, refs[2], False, True)
    assert [tasks.cancel_terms(client, task) for task in running] == [(True, False), None, (False, True)]
    for task in running:
        tasks.finish_scalar(client, task, None)


def test_task_that_is_given_back_is_run_by_the_next_and_has_lost_no_attempt(client, function):
    ref = submit(client, function, 7)
    other = submit(client, function, 8)
    task = next_task(client)
    assert tasks.give_back(client, task)
    assert (state(client, task), tasks.info(client, task)["attempts"]) == (READY, 0)
    assert run_all(client) == [8, 7]
    assert handles.is_ready(client, ref)
    assert handles.is_ready(client, other)


def test_cancel_of_a_value_is_done(client):
    assert tasks.cancel(client, handles.put_scalar(client, 1)) == ("done", 0, 0)


# ---- helping ----


def test_claim_for_finds_what_a_reference_waits_for(client, function):
    ref = submit(client, function, 1)
    for _ in range(5):
        ref = submit(client, function, ref, 1)
    bystander = submit(client, function, 100)
    for expected in range(1, 7):
        task = tasks.claim_for(client, ref)
        _, args, _ = tasks.arguments(client, task)
        value = sum(handles.read_scalar(client, a, None) if isinstance(a, handles.Ref) else a for a in args)
        assert value == expected
        tasks.finish_scalar(client, task, value)
    assert tasks.claim_for(client, ref) == tasks.NO_TASK
    assert not handles.is_ready(client, bystander)
    assert run_all(client) == [100]


def test_claim_for_what_runs_elsewhere_is_nothing(client, function):
    ref = submit(client, function, submit(client, function, 1))
    task = next_task(client)
    assert tasks.claim_for(client, ref) == tasks.NO_TASK
    tasks.set_blocked(client, task, True)
    assert state(client, task) == BLOCKED
    tasks.set_blocked(client, task, False)
    tasks.resume(client, task)
    assert state(client, task) == RUNNING
    tasks.finish_scalar(client, task, 1)
    run_all(client)


# ---- what is refused ----


def test_call_on_a_task_of_nobody_is_refused(node, client):
    for task in (0, 63, 64, 8192, 1 << 20, 0xFFFFFFFF):
        for call in (tasks.info, tasks.cancelled, tasks.cancel_terms, tasks.function_of):
            with pytest.raises(IndexError, match=f"no task {task}"):
                call(client, task)


def test_call_on_a_task_of_another_is_refused(node, client, function):
    """Each of these would free or change what somebody else works on."""
    peer = node.peer()
    refs = [submit(client, function, k) for k in range(3)]
    theirs = peer.run("tasks.next_task(client, 1.0, 0.0)")
    mine = next_task(client)
    tasks.finish_scalar(client, mine, None)
    ready = refs[2]
    ready_task = next(t for t in range(64) if state(client, t) == READY)
    for task in (theirs, mine, ready_task, 1 << 20):
        for call in (
            lambda t: tasks.arguments(client, t),
            lambda t: tasks.finish(client, t),
            lambda t: tasks.finish_scalar(client, t, 1),
            lambda t: tasks.resume(client, t),
            lambda t: tasks.retry(client, t),
            lambda t: tasks.set_blocked(client, t, True),
            lambda t: handles.result(client, t, 0, 10, node.KIND),
        ):
            with pytest.raises(FastrtError, match="not this client's"):
                call(task)
    assert fsck.fsck(client) == []
    peer.run(f"tasks.finish_scalar(client, {theirs}, 1)")
    assert run_all(client) == [2]
    assert handles.is_ready(client, ready)


def test_finish_before_all_results_are_sealed_is_refused(node, client, function):
    refs = submit(client, function, returns=2)
    task = next_task(client)
    assert not tasks.finish_scalar(client, task, 1)
    with pytest.raises(RuntimeError, match="not sealed"):
        tasks.finish(client, task)
    with pytest.raises(IndexError, match="has 2 results"):
        handles.result(client, task, 2, 10, node.KIND)
    for k in range(2):
        handles.result(client, task, k, 10, node.KIND).seal()
    tasks.finish(client, task)
    assert len(refs) == 2


def test_finish_scalar_of_what_is_no_scalar_does_nothing(client, function):
    submit(client, function)
    task = next_task(client)
    for value in ([], 1 << 70, "\ud800"):
        assert tasks.finish_scalar(client, task, value) is False
    assert state(client, task) == RUNNING
    assert tasks.finish_scalar(client, task, None)


def test_finish_scalar_after_its_result_is_sealed_does_nothing(node, client, function):
    ref = submit(client, function)
    task = next_task(client)
    handles.result(client, task, 0, 10, node.KIND).seal()
    assert tasks.finish_scalar(client, task, 5) is False
    tasks.finish(client, task)
    assert handles.read(client, ref)[0] == node.KIND


@pytest.mark.parametrize("refs", [[None], [5], ["x"], [handles.Ref()]], ids=["none", "number", "text", "made by hand"])
def test_submit_of_what_is_no_reference_is_refused(client, function, refs):
    with pytest.raises((TypeError, StaleReferenceError)):
        submission.submit(client, submission.TaskOptions(function), submission.PackedArgs(17, b"", refs, 0))
    with pytest.raises((TypeError, StaleReferenceError)):
        submission.submit(client, submission.TaskOptions(handles.Ref()), submission.PackedArgs(17, b"", [], 0))
    assert fsck.usage(client)["tasks"] == 0


def test_more_dependencies_than_references_are_refused(client, function):
    with pytest.raises(ValueError, match="1 dependencies among 0"):
        submission.submit(client, submission.TaskOptions(function), submission.PackedArgs(17, b"", [], 1))


@pytest.mark.parametrize("returns", [-1, 1 << 32])
def test_count_of_results_out_of_range_is_refused(client, function, returns):
    with pytest.raises(OverflowError):
        submit(client, function, returns=returns)


@pytest.mark.parametrize("returns", [20_000, 1 << 20, (1 << 32) - 1])
def test_more_results_than_fit_are_refused_and_leave_nothing(client, function, returns):
    with pytest.raises(ObjectStoreFullError):
        submission.submit(
            client, submission.TaskOptions(function, returns), submission.PackedArgs(17, b"", [function], 1)
        )
    assert fsck.fsck(client, quiet=True) == []
    assert fsck.usage(client)["objects"] == 1


def test_flags_other_than_retry_are_ignored(client, function):
    submit(client, function, flags=255)
    task = next_task(client)
    assert tasks.info(client, task)["flags"] == tasks.RETRY_ERRORS
    tasks.finish_scalar(client, task, None)


def test_table_of_tasks_full_raises_and_recovers(make_node):
    node = make_node(tasks_max=64)
    function = handles.put_scalar(node.client, b"f")
    for _ in range(3):
        held = node.fill(lambda: submit(node.client, function), "too many objects, tasks or functions")
        assert len(held) == 64
        assert len(run_all(node.client)) == 64


def test_store_full_of_arguments_raises_and_recovers(node, client, function):
    held = node.fill(
        lambda: submission.submit(
            client, submission.TaskOptions(function), submission.PackedArgs(17, bytes(1 << 20), [], 0)
        ),
        "store is full",
    )
    assert len(held) == 15
    while (task := next_task(client)) >= 0:
        tasks.finish_scalar(client, task, None)
    assert handles.read_scalars(client, held, 1) == [None] * 15


# ---- whether a task has ended ----


def test_end_of_a_task_is_known_without_its_result(node, client, function):
    first, other = submit(client, function, 1), submit(client, function, 2)
    known = [submission.record_of(client, ref) for ref in (first, other)]
    assert len(set(known)) == 2
    assert not any(submission.has_ended(client, *one) for one in known)
    assert tasks.next_task(client, 0, 0) == known[0][0]
    assert not submission.has_ended(client, *known[0])
    tasks.finish_scalar(client, known[0][0], 7)
    assert [submission.has_ended(client, *one) for one in known] == [True, False]
    assert submission.record_of(client, first) is None
    del first, other
    assert run_all(client) == [2]
    assert all(submission.has_ended(client, *one) for one in known)
    again = [submit(client, function, k) for k in range(300)]  # the records are used for others
    assert all(submission.has_ended(client, *one) for one in known)
    with pytest.raises(IndexError, match="there is no task 99999999"):
        submission.has_ended(client, 99999999, 1)
    assert run_all(client) == list(range(300))
    del again


# ---- children, and attempts that wait ----


def test_children_are_found_by_their_path_and_cancelled_by_their_id(node, client, function):
    parent = submit(client, function, 1)
    other = submit(client, function, 2)
    job, path = tasks.maker_of(client, parent)
    assert job == client.job
    inside = 1 << 63  # begin_path takes it back: a path that a task has
    tasks.begin_path(client, path ^ inside)
    children = [submit(client, function, k) for k in range(3)]
    found = sorted(tasks.children(client, job, path), key=lambda row: row[1])
    assert [tasks.maker_of(client, child) for child in children] == [(job, row[2]) for row in found]
    assert not any(is_call for _, _, _, is_call in found)
    assert tasks.children(client, job + 1, path) == tasks.children(client, job, path + 1) == []
    assert tasks.children(client, job, 0) == []
    tasks.begin_path(client, path)  # of an actor that has this number
    stranger = submit(client, function, 4)
    assert len(tasks.children(client, job, path)) == len(found)

    task, known = found[0][:2]
    assert tasks.cancel_task(client, task, known + 1) == ("done", 0, 0)
    assert tasks.cancel_task(client, 1 << 30, known) == ("done", 0, 0)
    assert tasks.cancel_task(client, task, known) == ("ending", task, 0)
    node.end([task])
    assert tasks.maker_of(client, children[0]) is None
    assert run_all(client) == [1, 2, 1, 2, 4]
    assert handles.read(client, other)[2] == 2
    assert handles.read(client, stranger)[2] == 4


def test_attempt_that_waits_is_kept_and_hides_no_task_that_runs(client, function):
    ref, other = submit(client, function, 1, retries=1), submit(client, function, 2)
    task = next_task(client)
    submission.park(client, task)
    assert state(client, task) == CLAIMED
    running = next_task(client)
    assert tasks.cancel(client, other) == ("running", running, os.getpid())
    assert tasks.retry(client, task)
    assert not cancel.end_for(client, task, tasks.info(client, task)["id"], True)  # it does not run, so we live
    assert not cancel.end_for(client, running, tasks.info(client, running)["id"] + 1, True)
    assert tasks.finish_scalar(client, running, 2)
    assert run_all(client) == [1]
    assert handles.read(client, ref)[2] == 1


def test_another_attempt_begins_where_the_first_has_failed(client, function):
    ref = submit(client, function, 1, retries=1)
    task = next_task(client)
    assert submission.again(client, task)
    assert tasks.info(client, task)["attempts"] == 2
    assert not submission.again(client, task)
    assert tasks.finish_scalar(client, task, 1)
    for misused in (submission.again, submission.park):
        with pytest.raises(FastrtError, match="not this client's to run"):
            misused(client, task)
    assert handles.read(client, ref)[2] == 1
