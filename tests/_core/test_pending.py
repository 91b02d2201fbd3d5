"""Results to come: one thread that waits for many of them, and tasks that are taken back before they begin."""

import threading

from fastrt._core.objects import handles, pending
from fastrt._core.repair import fsck
from fastrt._core.tasks import submission, tasks


def submit(client, function, *args):
    return submission.submit(client, submission.TaskOptions(function), args)


def end(client, task):
    handles.result(client, task, 0, 0, 16, 0, True).seal()
    tasks.finish(client, task)


def test_watch_returns_what_is_ready_once(client, function):
    watch = pending.Watch(client)
    refs = [submit(client, function, k) for k in range(300)]  # more than its table has room for at first
    for k, ref in enumerate(refs):
        watch.add(ref, k)
    watch.add(handles.put_scalar(client, 5), "value")
    assert len(watch) == 301
    assert [who for _, who in watch.wait(0)] == ["value"]
    assert watch.wait(0) == []
    for _ in range(3):
        tasks.finish_scalar(client, tasks.next_task(client, 0.0, 0.0), None)
    found = watch.wait(5)
    assert sorted(who for _, who in found) == [0, 1, 2]
    assert len(watch) == 297 == len(watch.take_all())
    assert len(watch) == 0
    del found, refs
    for _ in range(297):
        tasks.finish_scalar(client, tasks.next_task(client, 0.0, 0.0), None)


def test_watch_sleeps_until_news_and_returns_when_poked(client, function, wait_until):
    watch = pending.Watch(client)
    came = []

    def wait():
        while found := watch.wait(30):
            came.extend(who for _, who in found)

    thread = threading.Thread(target=wait)
    thread.start()
    first, second = submit(client, function, 1), submit(client, function, 2)
    watch.add(first, "first")
    tasks.finish_scalar(client, tasks.next_task(client, 0.0, 0.0), None)
    wait_until(lambda: came == ["first"], "the first")
    watch.add(second, "second")  # while it sleeps: the one who seals it wakes it
    tasks.finish_scalar(client, tasks.next_task(client, 0.0, 0.0), None)
    wait_until(lambda: came == ["first", "second"], "the second")
    watch.add(handles.put_scalar(client, 0), "ready")
    wait_until(lambda: came == ["first", "second", "ready"], "what was ready before")
    watch.poke()
    thread.join(60)
    assert not thread.is_alive()


def test_task_is_withdrawn_only_before_somebody_claims_it(client, function):
    running, queued = submit(client, function, 1), submit(client, function, 2)
    waiting = submit(client, function, queued)
    assert [pending.stage(client, ref) for ref in (running, queued, waiting)] == [pending.QUEUED] * 3
    task = tasks.next_task(client, 0.0, 0.0)
    assert pending.stage(client, running) == pending.RUNNING
    assert pending.withdraw(client, running) == -1
    for ref in (waiting, queued):
        mine = pending.withdraw(client, ref)
        assert tasks.info(client, mine)["state"] == 7
        assert pending.withdraw(client, ref) == -1
        end(client, mine)
        assert pending.stage(client, ref) == pending.DONE
        assert pending.withdraw(client, ref) == -1
    assert tasks.next_task(client, 0.0, 0.0) == tasks.NO_TASK
    tasks.finish_scalar(client, task, 5)
    assert pending.stage(client, running) == pending.DONE
    assert pending.stage(client, handles.put_scalar(client, 1)) == pending.DONE
    assert fsck.usage(client)["tasks"] == 0
