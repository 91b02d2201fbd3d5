"""The deciding part of the spiller without its threads: its jobs are carried out step by step."""

import os
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fastrt._core.memory import clients
from fastrt._core.memory.clients import Client
from fastrt._core.memory.segment import Segment
from fastrt._core.objects import handles, spill
from fastrt.errors import LockStuck
from fastrt.node.spiller import Spiller
from fastrt.node.spilling import Spilling
from fastrt.store.spill_files import SpillFiles

KIND = 6
NBYTES = 200_000
STORE = 1 << 20


class Node:
    """A small store, and the queues in which the decisions leave their work."""

    def __init__(self, folder: Path) -> None:
        self.segment = Segment.create(STORE, clients_max=64, objects_max=64, tasks_max=64)
        slot, gen = clients.admit(self.segment, os.getpid(), clients.KIND_DAEMON, "daemon")
        self.client = Client(self.segment, slot, gen)
        (folder / "key").mkdir(mode=0o700)
        files = SpillFiles(folder / "values", folder / "key")
        files.make_key()
        spill.configure(self.client, str(folder / "values"), False)
        self.events, self.writes, self.reads = deque(), deque(), deque()
        self.spilling = Spilling(self.client, files, 8, 8, self.events.append, self.writes.append, self.reads.append)

    def put(self) -> handles.Ref:
        writer = handles.create(self.client, NBYTES, KIND, 0, False)
        memoryview(writer)[:] = bytes(NBYTES)
        return writer.seal(())

    def turn(self) -> None:
        while self.events:
            self.spilling.turn(self.events.popleft())

    def finish(self, jobs: deque[Callable[[], Iterator[None]]]) -> None:
        """Carry jobs out to their ends, and then the events that they posted."""
        while jobs:
            for _ in jobs.popleft()():
                pass
        self.turn()

    def close(self) -> None:
        self.client.close()
        self.segment.unlink()
        self.__dict__.clear()  # pytest keeps the node, and it would keep the memory


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.close()


def fill(node: Node) -> list[handles.Ref]:
    return [node.put() for _ in range(STORE // NBYTES - 1)]


def test_a_round_ends_when_the_value_is_in_its_file(node: Node) -> None:
    refs = fill(node)
    before = spill.rounds(node.client)
    node.spilling.make_room(NBYTES)
    node.turn()
    assert node.writes
    assert spill.rounds(node.client) == before
    node.finish(node.writes)
    assert spill.rounds(node.client) == before + 1
    assert spill.last_round(node.client)[0] >= NBYTES
    assert sum(spill.is_spilled(node.client, ref) for ref in refs) >= 1


def test_a_restore_waits_for_the_write_of_its_file_without_a_thread(node: Node) -> None:
    refs = fill(node)
    node.spilling.make_room(NBYTES)
    node.turn()
    steps = node.writes.popleft()()
    next(steps)  # a thread writes the file now
    for ref in refs:
        node.spilling.restore(ref.index, ref.objref)
    for _ in range(len(refs)):  # as many threads as there are restores: none of them may wait for the write
        for _ in node.reads.popleft()():
            pass
    assert not node.reads
    for _ in steps:
        pass
    spilled = [ref for ref in refs if spill.is_spilled(node.client, ref)]
    assert len(spilled) == 1
    assert len(node.reads) == 1  # the restore comes again
    node.finish(node.reads)
    assert not spill.is_spilled(node.client, spilled[0])
    assert bytes(handles.read(node.client, spilled[0])[2]) == bytes(NBYTES)
    node.finish(node.writes)


def test_a_daemon_that_ends_between_two_steps_loses_no_value(node: Node, tmp_path: Path) -> None:
    refs = fill(node)
    node.spilling.make_room(NBYTES)
    node.turn()
    steps = node.writes.popleft()()
    next(steps)
    next(steps)  # the file is written, and the memory is not free
    assert len([name for name in os.listdir(tmp_path / "values") if name[0] != "."]) == 1
    steps.close()
    del steps
    node.writes.clear()  # and the jobs that had not begun
    assert not any(spill.is_spilled(node.client, ref) for ref in refs)
    assert all(bytes(handles.read(node.client, ref)[2]) == bytes(NBYTES) for ref in refs)
    del refs
    assert [name for name in os.listdir(tmp_path / "values") if name[0] != "."] == []


def stuck() -> Iterator[None]:
    raise LockStuck("by a stopped process")
    yield


def test_spiller_goes_on_after_a_process_was_stopped_inside_a_lock(
    node: Node, tmp_path: Path, wait_until, capfd
) -> None:
    """The spiller ended at the first such error. Each later put into the full store then waited a minute for it."""
    refs = fill(node)
    spiller = Spiller(node.client, tmp_path / "others", tmp_path / "key", False)
    spiller._events.put(lambda: next(stuck()))
    for _ in range(8):  # more often than there are threads
        spiller._writers.put(stuck)
    spiller.make_room(NBYTES)
    wait_until(lambda: spill.totals(node.client)["spilled_objects"], "a value to be spilled")
    assert capfd.readouterr().err.count("a value was not spilled or restored: by a stopped process") == 9
    del refs
    spiller.close()
