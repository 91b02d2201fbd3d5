"""The ready queue through the task records: push and pop in one process, and between two."""

import os
import select
import signal
import struct
from collections.abc import Iterator

import pytest

from fastrt._core.memory.clients import KIND_WORKER, Client, admit
from fastrt._core.memory.segment import Segment
from fastrt._core.objects import handles
from fastrt._core.tasks import submission
from fastrt._core.tasks import tasks as core_tasks

BATCH = 1000
SPIN_S = 20e-6
_SLOT = struct.Struct("<II")


def pop_and_finish(client: Client, timeout_s: float, spin_s: float) -> bool:
    """Take one task and seal its result without calling anything: the queue alone."""
    task = core_tasks.next_task(client, timeout_s, spin_s)
    return task >= 0 and core_tasks.finish_scalar(client, task, task)


@pytest.mark.benchmark(group="queue, one process")
def test_push_pop(measure, core: Client) -> None:
    options = submission.TaskOptions(handles.put_scalar(core, "function"))

    def push_pop() -> None:
        submission.submit(core, options, (1,))
        pop_and_finish(core, 0.0, 0.0)

    measure(push_pop)
    assert core_tasks.queued(core) == 0


@pytest.mark.benchmark(group="queue, one process")
def test_push_1000_pop_1000(measure, core: Client) -> None:
    options = submission.TaskOptions(handles.put_scalar(core, "function"))

    def push_pop() -> None:
        refs = [submission.submit(core, options, (k,)) for k in range(BATCH)]
        for _ in refs:
            pop_and_finish(core, 0.0, 0.0)

    measure(push_pop, per=BATCH)
    assert core_tasks.queued(core) == 0


@pytest.fixture
def popper(core: Client) -> Iterator[int]:
    """A second process that pops and finishes every pushed task; its process id."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            segment = Segment.attach(core.segment.name)
            client = Client(segment, *_SLOT.unpack(os.read(ours, _SLOT.size)))
            parent = os.getppid()
            while os.getppid() == parent:
                pop_and_finish(client, 0.1, SPIN_S)
        finally:
            os._exit(0)
    pidfd = os.pidfd_open(pid)
    os.write(theirs, _SLOT.pack(*admit(core.segment, pid, KIND_WORKER, "popper")))
    yield pid
    os.kill(pid, signal.SIGKILL)
    select.select([pidfd], [], [])
    os.waitpid(pid, 0)
    for fd in (pidfd, ours, theirs):
        os.close(fd)


@pytest.mark.benchmark(group="queue, two processes")
def test_round_trip(measure, core: Client, popper: int) -> None:
    """Push in this process, pop in the other, read the result in this one."""
    options = submission.TaskOptions(handles.put_scalar(core, "function"))

    def round_trip() -> None:
        ref = submission.submit(core, options, (1,))
        handles.wait_all(core, [ref], 10.0, SPIN_S)

    measure(round_trip)


@pytest.mark.benchmark(group="queue, two processes")
def test_1000_in_flight(measure, core: Client, popper: int) -> None:
    options = submission.TaskOptions(handles.put_scalar(core, "function"))

    def stream() -> None:
        refs = [submission.submit(core, options, (k,)) for k in range(BATCH)]
        handles.wait_all(core, refs, 10.0, SPIN_S)

    measure(stream, per=BATCH)
