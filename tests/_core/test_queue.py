"""The ready queue: order and growth with many tasks, and what stale hints come to."""

import json
import random

import pytest

from fastrt._core.objects import handles
from fastrt._core.repair import fsck
from fastrt._core.tasks import submission, tasks

RING_CELLS = 16384  # FRT_RING_CELLS: the ring's first size


def submit(client, function, *args):
    return submission.submit(client, submission.TaskOptions(function, 0), args)


def take(client) -> int | None:
    """The first argument of the next task, which is ended; None when there is none."""
    task = tasks.next_task(client, 0.0, 0.0)
    if task < 0:
        return None
    value = tasks.arguments(client, task)[1][0]
    tasks.finish(client, task)
    return value


@pytest.fixture
def big(make_node):
    node = make_node(tasks_max=1 << 17, objects_max=1 << 17)
    node.function = handles.put_scalar(node.client, b"function")
    node.keeps += 1
    return node


@pytest.mark.parametrize("ahead", [0, 1, 1000, RING_CELLS - 1])
def test_ring_grows_and_keeps_the_order(big, ahead):
    """Growth copies cells from any position of the ring, and more than once."""
    client, function = big.client, big.function
    for k in range(ahead):
        submit(client, function, -k)
        assert take(client) == -k
    for k in range(100_000):
        submit(client, function, k)
    assert tasks.queued(client) == 100_000
    assert fsck.fsck(client, quiet=True) == []
    for k in range(100_000):
        assert take(client) == k
    assert take(client) is None


def test_ring_at_its_largest_drops_what_is_stale(make_node):
    """Cancelled tasks leave their cells in the ring; records are reused faster than cells."""
    node = make_node(tasks_max=8192)
    client = node.client
    function = handles.put_scalar(client, b"function")
    keep = [submission.submit(client, submission.TaskOptions(function), (k,)) for k in range(4000)]
    for k in range(40_000):
        ref = submission.submit(client, submission.TaskOptions(function), (k,))
        what, task, _ = tasks.cancel(client, ref)
        assert what == "ending"
        assert tasks.finish_scalar(client, task, None)
    assert tasks.queued(client) <= 16384
    assert fsck.fsck(client, quiet=True) == []
    for k in range(4000):
        task = tasks.next_task(client, 0.0, 0.0)
        assert tasks.arguments(client, task)[1] == (k,)
        tasks.finish_scalar(client, task, k)
    assert tasks.next_task(client, 0.0, 0.0) == tasks.NO_TASK
    assert handles.read_scalars(client, keep, None) == list(range(4000))


def test_task_claimed_beside_the_queue_runs_once(node, client, function):
    """claim_for leaves a hint behind, which may meet the record's next tenant."""
    rng = random.Random(1)
    waiting, expected = [], 0
    for k in range(5000):
        waiting.append(submission.submit(client, submission.TaskOptions(function), (k,)))
        if rng.random() < 0.5:
            task = tasks.claim_for(client, waiting.pop(rng.randrange(len(waiting))))
            if task >= 0:
                tasks.finish_scalar(client, task, None)
                expected += 1
    while (task := tasks.next_task(client, 0.0, 0.0)) >= 0:
        tasks.finish_scalar(client, task, None)
        expected += 1
    assert expected == 5000
    assert all(handles.is_ready(client, ref) for ref in waiting)


def test_two_submitters_and_two_takers_lose_and_double_nothing(node, client):
    submitters, takers = [node.peer(), node.peer()], [node.peer(), node.peer()]
    name = handles.put_scalar(client, b"function")
    each = 20_000
    for k, peer in enumerate(submitters):
        peer.start(
            f"""
f = handles.acquire(client, {name.objref}, {name.index})
for k in range({each}):
    while True:
        try:
            submission.submit(client, submission.TaskOptions(f, 0), ({k * each} + k,))
            break
        except Exception as exc:
            assert type(exc).__name__ == "ObjectStoreFullError"
"""
        )
    for peer in takers:
        peer.start(
            """
got = []
while (t := tasks.next_task(client, 1.0, 0.0)) >= 0:
    got.append(tasks.arguments(client, t)[1][0])
    tasks.finish(client, t)
json.dumps(got)
"""
        )
    for peer in submitters:
        peer.finish()
    got = [json.loads(peer.finish()) for peer in takers]
    assert sorted(got[0] + got[1]) == list(range(2 * each))
    for values in got:  # each taker sees each submitter's tasks in order
        for k in range(2):
            mine = [value for value in values if value // each == k]
            assert mine == sorted(mine)


@pytest.mark.long
def test_result_that_is_polled_for_is_never_seen_half_written(node, client, function):
    """What a value is must be read after whether it is there: a result that is not sealed yet looks like None."""
    peer, count = node.peer(), 20_000
    peer.start(
        f"""
for k in range({count}):
    t = tasks.next_task(client, 20.0, 1.0)
    tasks.finish_scalar(client, t, 7)
"""
    )
    missing = object()
    for _ in range(count):
        ref = submission.submit(client, submission.TaskOptions(function), ())
        value = missing
        while value is missing:
            value = handles.read_scalar(client, ref, missing)
        assert value == 7
    peer.finish()


def submit_ranked(client, function, value, priority):
    return submission.submit(client, submission.TaskOptions(function, 0, priority=priority), (value,))


def take_all(client) -> list[int]:
    return list(iter(lambda: take(client), None))


def test_higher_priorities_go_first_and_equal_ones_in_order(node, client, function):
    """Beside a sorted list, whatever is submitted and taken in between."""
    rng = random.Random(2)
    waiting: list[tuple[int, int]] = []
    for k in range(3000):
        priority = rng.choice((0, 0, 1, -1, 5, 100, -100))
        submit_ranked(client, function, k, priority) if priority else submit(client, function, k)
        waiting.append((-priority, k))
        if rng.random() < 0.3:
            waiting.sort()
            assert take(client) == waiting.pop(0)[1]
        if k % 500 == 0:
            assert fsck.fsck(client, quiet=True) == []
    assert tasks.queued(client) == len(waiting)
    assert take_all(client) == [k for _, k in sorted(waiting)]
    assert tasks.queued(client) == 0


def test_equal_priorities_of_two_clients_go_in_the_order_of_submission(node, client, function):
    """Each client takes its ids in ranges of its own, but for such tasks."""
    peer = node.peer()
    peer.run(f"globals().update(f=handles.acquire(client, {function.objref}, {function.index}))")
    for k in range(0, 40, 2):
        submit_ranked(client, function, k, 3)
        peer.run(f"submission.submit(client, submission.TaskOptions(f, 0, priority=3), ({k + 1},))")
    assert take_all(client) == list(range(40))
    peer.run("globals().pop('f')")


def test_retried_and_waiting_tasks_keep_their_turn(node, client, function):
    first = submission.submit(client, submission.TaskOptions(function), (-1,))
    submit_ranked(client, function, 0, 7)
    waiting = submission.submit(client, submission.TaskOptions(function, 1, 2, priority=7), (1, first))
    submit_ranked(client, function, 2, 7)
    submit_ranked(client, function, 3, 8)
    assert tasks.finish_scalar(client, tasks.claim_for(client, first), None)
    assert [take(client), take(client)] == [3, 0]
    task = tasks.next_task(client, 0.0, 0.0)
    assert tasks.arguments(client, task)[1][0] == 1
    assert tasks.info(client, task)["priority"] == 7
    assert tasks.retry(client, task)
    assert tasks.next_task(client, 0.0, 0.0) == task
    assert tasks.finish_scalar(client, task, None)
    assert take_all(client) == [2]
    assert handles.is_ready(client, waiting)


def test_full_heap_drops_what_is_stale_and_keeps_the_rest(make_node):
    """Cancelled tasks leave their cells in the heap; below those that stay, nobody comes by to skip them."""
    node = make_node(tasks_max=8192)
    client = node.client
    function = handles.put_scalar(client, b"function")
    for k in range(4000):
        submit_ranked(client, function, k, 1)
    for k in range(20_000):
        ref = submission.submit(client, submission.TaskOptions(function, priority=-1), (k,))
        what, task, _ = tasks.cancel(client, ref)
        assert what == "ending"
        assert tasks.finish_scalar(client, task, None)
    assert tasks.queued(client) <= 8192
    for k in range(4000, 8000):  # whatever is stale must make room for them
        submit_ranked(client, function, k, 1)
    assert tasks.queued(client) <= 8192
    assert fsck.fsck(client, quiet=True) == []
    assert take_all(client) == list(range(8000))


def test_priority_out_of_range_is_refused(node, client, function):
    for priority in (submission.PRIORITY_MAX + 1, -submission.PRIORITY_MAX - 1):
        with pytest.raises(ValueError, match=f"priority is {priority}; it must be from -100 to 100"):
            submit_ranked(client, function, 1, priority)


class Pipeline:
    """A store of 16 MiB in which tasks wait for the values of others."""

    LARGE = 1 << 20

    def __init__(self, node, function):
        self.client, self.function = node.client, function
        self.held = [node.put(self.LARGE) for _ in range(5)]  # more than a quarter
        submit(self.client, function, "head")
        assert take(self.client) == "head"

    def waiting(self, name: str):
        """A task whose value does not exist yet, and the reference; the task is running."""
        ref = self.submit(name)
        task = tasks.next_task(self.client, 0.0, 0.0)
        assert tasks.arguments(self.client, task)[1] == (name,)
        return task, ref

    def submit(self, *args):
        return submission.submit(self.client, submission.TaskOptions(self.function), args)

    def end(self, task: int, nbytes: int) -> None:
        writer = handles.result(self.client, task, 0, nbytes, 16)
        writer.seal()
        tasks.finish(self.client, task)

    def names(self) -> list[str]:
        """The queued tasks in the order in which they are taken."""
        found = []
        while (task := tasks.next_task(self.client, 0.0, 0.0)) >= 0:
            found.append(next(arg for arg in tasks.arguments(self.client, task)[1] if isinstance(arg, str)))
            tasks.finish_scalar(self.client, task, None)
        return found


def test_task_with_a_large_fresh_argument_runs_first_while_memory_is_short(node, function):
    pipe = Pipeline(node, function)
    task, ref = pipe.waiting("make")
    others = [pipe.submit(f"other {k}") for k in range(3)]
    takers = [pipe.submit(ref, name) for name in ("total", "cut")]
    pipe.end(task, pipe.LARGE)
    assert pipe.names() == ["total", "cut", "other 0", "other 1", "other 2"]
    assert fsck.fsck(pipe.client, quiet=True) == []
    del others, takers


@pytest.mark.parametrize(("nbytes", "held"), [(1000, 5), (1 << 20, 2)])
def test_task_with_a_small_argument_or_in_an_empty_store_keeps_its_turn(node, function, nbytes, held):
    pipe = Pipeline(node, function)
    del pipe.held[held:]
    task, ref = pipe.waiting("make")
    others = [pipe.submit("other")]
    others.append(pipe.submit(ref, "taker"))
    pipe.end(task, nbytes)
    assert pipe.names() == ["other", "taker"]


def test_chain_of_large_values_does_not_keep_others_from_running(node, function):
    """At most 64 tasks in a row go before the others."""
    pipe = Pipeline(node, function)
    task, ref = pipe.waiting("start")
    other = pipe.submit("other")
    chain = [ref]
    for k in range(100):
        chain.append(pipe.submit(chain[-1], f"link {k}"))
    ran = []
    while task >= 0:
        if ran and ran[-1] == "other":
            tasks.finish_scalar(pipe.client, task, None)
        else:
            pipe.end(task, 20_000)
        task = tasks.next_task(pipe.client, 0.0, 0.0)
        if task >= 0:
            ran.append(next(arg for arg in tasks.arguments(pipe.client, task)[1] if isinstance(arg, str)))
    assert ran.index("other") == 64
    assert len(ran) == 101
    del other
