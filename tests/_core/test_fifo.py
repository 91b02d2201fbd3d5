"""Queues in the bytes of objects: order, the ring's end, growth, limits, and what is refused; against a model."""

import random
from collections import deque

import pytest

from fastrt._core.objects import fifo, handles
from fastrt._core.objects.fifo import Fifo
from fastrt.errors import ArenaCorrupt, FastrtError

KIND = 16


def segment_of(client, nbytes):
    room = handles.create(client, fifo.SEGMENT_BYTES + nbytes, KIND)
    fifo.write_segment(room)
    return room.seal()


def view_of(client, ref):
    return handles.read(client, ref, True)[2]


def attach(client, queue, segments, tail):
    objref, index = queue.place(tail)
    queue.use(tail, objref, index, view_of(client, segments[objref]))


@pytest.fixture
def make(client):
    def make(most=0, nbytes=256):
        segment = segment_of(client, nbytes)
        room = handles.create(client, fifo.ROOT_BYTES, KIND)
        fifo.write_root(room, most, segment)
        return room.seal(), {segment.objref: segment}

    return make


def test_values_come_in_order_and_the_codes_say_what_is_missing(client, make):
    root, segments = make(most=3)
    queue = Fifo(client, view_of(client, root))
    assert (queue.put(1), queue.get()) == (fifo.MOVED, fifo.MOVED)
    attach(client, queue, segments, True)
    attach(client, queue, segments, False)
    assert queue.get() is None
    assert [queue.put(value) for value in (1, "two", None)] == [fifo.OK] * 3
    assert queue.put(4) == queue.put_bytes(KIND, b"4") == fifo.FULL
    assert queue.put([1]) is None
    assert (queue.room(), queue.size()) == (0, (3, 3, False))
    assert [queue.get(), queue.get(), queue.get(), queue.get()] == [(3, 1), (5, "two"), (0, None), None]
    assert queue.put_bytes(KIND, bytes(1000)) == fifo.GROW
    queue.wait_item(0.0)
    queue.wait_room(0.0)
    queue.close()
    assert (queue.put(1), queue.get(), queue.size()) == (fifo.CLOSED, fifo.CLOSED, (0, 3, True))


def test_two_processes_use_of_it_agrees_with_a_model_through_growth(client, make):
    root, segments = make(nbytes=256)
    ends = [Fifo(client, view_of(client, root)) for _ in range(2)]  # as two processes would have
    model, dice = deque(), random.Random(5)
    for step in range(6000):
        queue = dice.choice(ends)
        if dice.random() < (0.6 if step % 2000 < 1000 else 0.3):
            data = bytes([step % 251]) * dice.choice([0, 1, 7, 8, 9, 50, 200])
            while (code := queue.put_bytes(KIND, data)) != fifo.OK:
                if code == fifo.MOVED:
                    attach(client, queue, segments, True)
                else:
                    assert code == fifo.GROW
                    new = segment_of(client, 2 * queue.capacity())
                    segments[new.objref] = new
                    assert queue.grow(new)
            model.append(data)
        else:
            while (found := queue.get()) == fifo.MOVED:
                attach(client, queue, segments, False)
            assert found == ((KIND, model.popleft()) if model else None)
        for objref in queue.drained():
            del segments[objref]  # nobody may want it again
        assert queue.size()[0] == len(model)
    assert len(segments) < 4


def test_what_is_no_queue_is_refused(client, make):
    root, _ = make()
    with pytest.raises(FastrtError, match="not a queue"):
        Fifo(client, view_of(client, segment_of(client, 256)))
    with pytest.raises(ValueError, match="a segment cannot have"):
        fifo.write_segment(bytearray(8))
    with pytest.raises(ValueError, match="the root of a queue has"):
        fifo.write_root(bytearray(8), 0, root)
    with pytest.raises(ArenaCorrupt):
        Fifo(client, view_of(client, root)).use(True, 1, 1, view_of(client, root))
