"""Streams, seen from the core: items in order, to readers who wait or come later; an end; room; and deaths."""

import pytest

from fastrt._core.objects import handles
from fastrt._core.repair import fsck, recovery
from fastrt._core.tasks import generator_relay, generators, submission, tasks
from fastrt._core.tasks.generators import Producer
from fastrt.errors import FastrtError


def submit(client, function, limit=0, retries=3):
    """A stream, its end, and the task that shall fill it, claimed."""
    stream = generators.create(client, limit)
    end = submission.submit(client, submission.TaskOptions(function, 1, retries), (1,), stream)
    return stream, end


def next_task(client) -> int:
    return tasks.next_task(client, 0.0, 0.0)


def take(client, stream, end):
    return generators.take(client, stream, end, 0, 0.0)


def value(client, ref):
    return handles.read(client, ref)[2]


def test_items_come_in_order_and_then_the_end(client, function):
    stream, end = submit(client, function)
    assert take(client, stream, end) is False
    task = next_task(client)
    assert tasks.arguments(client, task) == (1, (1,), [])
    producer = Producer(client, task)
    assert producer.add("a")
    assert not producer.add([1])
    producer.add_ref(handles.put_scalar(client, "b"))
    assert generators.info(client, stream) == {"taken": 0, "produced": 2, "limit": 0, "unread": 2}
    assert generators.is_ready(client, stream, end)
    assert value(client, take(client, stream, end)) == "a"
    assert fsck.fsck(client, True) == []
    assert value(client, take(client, stream, end)) == "b"
    assert take(client, stream, end) is False
    assert producer.add(3)
    assert tasks.finish_scalar(client, task, None)
    assert value(client, take(client, stream, end)) == 3
    assert take(client, stream, end) is None


def test_waiting_for_some_of_streams_and_values_finds_those_that_are_ready(client, function):
    one, other = submit(client, function), submit(client, function)
    there = handles.put_scalar(client, 1)
    things = [one, there, other, there]

    def ready(count, timeout_s=0):
        return generators.wait_some(client, things, count, timeout_s, 0.0)

    assert ready(4) == [1, 3]
    assert ready(1, None) == [1]
    assert ready(3, 0.001) == [1, 3]
    first, second = next_task(client), next_task(client)
    Producer(client, second).add(1)
    assert ready(3, None) == [1, 2, 3]
    take(client, *other)
    assert ready(4) == [1, 3]
    assert tasks.finish_scalar(client, first, None)
    assert ready(3, None) == [0, 1, 3]
    with pytest.raises(FastrtError, match="no stream's"):
        generators.wait_some(client, [(there, there)], 1, 0, 0.0)
    with pytest.raises(TypeError):
        generators.wait_some(client, [there, 1], 1, 0, 0.0)
    assert tasks.finish_scalar(client, second, None)


def test_error_stands_after_the_items_that_came_before_it(client, function):
    stream, end = submit(client, function)
    task = next_task(client)
    Producer(client, task).add(1)
    writer = handles.result(client, task, 0, 3, 16, 0, True)
    writer.copy(0, b"bad")
    writer.seal()
    tasks.finish(client, task)
    assert value(client, take(client, stream, end)) == 1
    assert take(client, stream, end) is end


def test_producer_waits_where_there_is_no_room_until_somebody_reads_or_nobody_will(client, function):
    stream, end = submit(client, function, limit=2)
    task = next_task(client)
    producer = Producer(client, task)
    producer.add(1)
    assert not producer.full
    producer.add(2)
    assert producer.full
    assert not producer.wait(0.001, 0.0)
    take(client, stream, end)
    assert producer.wait(None, 0.0)
    producer.add(3)
    assert producer.wanted == generators.ITEMS
    del stream
    assert producer.wanted == generators.END
    assert producer.wait(None, 0.0)
    del end
    assert producer.wanted == generators.NOTHING
    assert tasks.finish_scalar(client, task, None)


def test_items_passed_on_are_unread_until_readers_elsewhere_tell(client, function):
    stream, end = submit(client, function, limit=2)
    task = next_task(client)
    producer = Producer(client, task)
    assert generator_relay.pass_on(client, stream, end) is False
    producer.add(1)
    producer.add(2)
    assert value(client, generator_relay.pass_on(client, stream, end)) == 1
    assert value(client, generator_relay.pass_on(client, stream, end)) == 2
    assert producer.taken == 2
    assert producer.full
    generator_relay.note_readers(client, stream, 1, generators.ITEMS)
    assert not producer.full
    assert producer.wanted == generators.ITEMS
    assert fsck.fsck(client, True) == []
    generator_relay.note_readers(client, stream, 2, generators.END)
    assert producer.wanted == generators.END
    assert producer.wait(None, 0.0), "nobody makes room any more, and nobody needs it"
    generator_relay.note_readers(client, stream, 2, generators.NOTHING)
    assert producer.wanted == generators.NOTHING
    generator_relay.note_readers(client, stream, 0, generators.ITEMS)
    del stream
    assert producer.wanted == generators.END, "not more than whoever reads here"
    assert tasks.finish_scalar(client, task, None)


def test_stream_goes_on_where_an_attempt_elsewhere_has_ended(client, function):
    stream = generators.create(client, 2, (1 << 32) + 7)
    end = submission.submit(client, submission.TaskOptions(function), (1,), stream)
    task = next_task(client)
    producer = Producer(client, task)
    assert (producer.skip, producer.taken, producer.limit) == ((1 << 32) + 7, 7, 2)
    assert generator_relay.arm_produced(client, producer, 6)
    assert not generator_relay.arm_produced(client, producer, 7)
    assert not generator_relay.arm_items(client, stream, end)
    producer.add("x")
    assert generator_relay.arm_items(client, stream, end)
    assert generators.info(client, stream)["unread"] == 1
    assert fsck.fsck(client, True) == []
    assert value(client, take(client, stream, end)) == "x"
    assert tasks.finish_scalar(client, task, None)


def test_run_closes_an_iterator_that_nobody_reads(client, function):
    def count():
        try:
            for k in range(100):
                seen.append(k)
                if k == 3:
                    kept.clear()
                yield k
        finally:
            seen.append("closed")

    seen, kept = [], list(submit(client, function))
    task = next_task(client)
    Producer(client, task).run(count(), None, None)
    assert seen == [0, 1, 2, 3, "closed"]
    assert tasks.finish_scalar(client, task, None)


def test_items_that_nobody_can_read_are_not_kept_while_the_end_is_wanted(client, function):
    stream, end = submit(client, function)
    task = next_task(client)
    del stream
    before = fsck.usage(client)["objects"]
    Producer(client, task).run(iter(range(50)), None, None)
    assert fsck.usage(client)["objects"] == before
    assert tasks.finish_scalar(client, task, None)
    assert value(client, end) is None


def test_next_attempt_leaves_out_what_the_first_has_produced(node, client, function):
    stream, end = submit(client, function)
    worker = node.attach()
    first = Producer(worker, next_task(worker))
    for k in range(3):
        first.add(k)
    assert value(client, take(client, stream, end)) == 0
    worker.abandon()
    assert recovery.recover(client, worker.index)["ending"] == []
    assert fsck.fsck(client, True) == []
    task = next_task(client)
    again = Producer(client, task)
    assert again.skip == 3
    again.run(iter(range(5)), None, None)
    assert tasks.finish_scalar(client, task, None)
    assert [value(client, take(client, stream, end)) for _ in range(4)] == [1, 2, 3, 4]
    assert take(client, stream, end) is None


def test_unread_items_go_with_the_last_reader_however_deep(client, function):
    stream, end = submit(client, function)
    task = next_task(client)
    producer = Producer(client, task)
    before = fsck.usage(client)["objects"]
    for _ in range(300):
        inner = generators.create(client, 0)  # a stream in a stream's item
        writer = handles.create(client, 4, 16, 1)
        producer.add_ref(writer.seal([inner]))
    del inner, writer
    assert fsck.usage(client)["objects"] == before + 600
    assert tasks.finish_scalar(client, task, None)
    del stream, end
    assert fsck.usage(client)["objects"] <= before
    assert fsck.fsck(client, True) == []


def test_readers_share_the_items(node, client, function):
    stream, end = submit(client, function)
    task = next_task(client)
    Producer(client, task).run(iter(range(10)), None, None)
    other = node.attach()
    theirs = [handles.acquire(other, ref.objref, ref.index) for ref in (stream, end)]
    found = []
    for k in range(10):
        reader, pair = (client, (stream, end)) if k % 2 else (other, theirs)
        found.append(value(reader, take(reader, *pair)))
    assert found == list(range(10))
    assert take(other, *theirs) is False
    assert tasks.finish_scalar(client, task, None)


def test_producer_of_another_task_is_refused(client, function):
    ref = submission.submit(client, submission.TaskOptions(function), ())
    task = next_task(client)
    with pytest.raises(FastrtError, match="has no stream"):
        Producer(client, task)
    assert submission.flags_of(client, task) == 0
    with pytest.raises(FastrtError, match="is no stream's"):
        take(client, ref, ref)
    assert tasks.finish_scalar(client, task, None)
    with pytest.raises(FastrtError, match="not this client's"):
        submission.flags_of(client, task)
