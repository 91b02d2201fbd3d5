"""fsck finds what is wrong: each kind of damage, written into the segment behind the core's back."""

import contextlib
import struct

import pytest

from fastrt._core.objects import handles
from fastrt._core.repair import fsck
from fastrt._core.tasks import generators, submission, tasks
from fastrt.errors import ArenaCorrupt

# Offsets of the superblock's fields, from include/layout.h (regions begin after eight sizes and the locks' offset).
REGIONS, STATE_AT = 56, 284
(LOCKS, CLIENTS, CTL, ENTRIES, TASK_WORDS, TASKS, FREE_OBJECTS, FREE_TASKS, RING, FUNCTIONS, PAGES, LINKS, OWNERS, BITS,
 TRACE, PAYLOAD) = range(16)  # fmt: skip
ENTRY_BYTES, CTL_WORDS = 128, 4


class Segment:
    """The segment's file, opened beside the core."""

    def __init__(self, node) -> None:
        self.file = open("/dev/shm" + node.segment.name, "r+b", buffering=0)  # noqa: SIM115
        self.file.seek(REGIONS)
        self.regions = struct.unpack("16Q", self.file.read(128))

    def at(self, region: int, offset: int) -> int:
        return self.regions[region] + offset

    def read(self, at: int, form: str) -> int:
        self.file.seek(at)
        return struct.unpack(form, self.file.read(struct.calcsize(form)))[0]

    def write(self, at: int, form: str, value: int) -> None:
        self.file.seek(at)
        self.file.write(struct.pack(form, value))


@pytest.fixture
def raw(node):
    raw = Segment(node)
    yield raw
    raw.file.close()


def damaged(client, raw, at: int, form: str, value: int, quiet: bool = True) -> list[str]:
    """What fsck says with one word changed; the word is put back."""
    old = raw.read(at, form)
    raw.write(at, form, value)
    bad = fsck.fsck(client, quiet)
    raw.write(at, form, old)
    assert fsck.fsck(client, quiet=True) == []
    return bad


def test_quiet_arena_is_whole_in_any_state(node, client, function):
    held = [node.put(n, function) for n in (0, 100, 5000, 100_000)]
    waiting = submission.submit(
        client, submission.TaskOptions(function), (submission.submit(client, submission.TaskOptions(function), ()),)
    )
    writer = handles.create(client, 5000, node.KIND, 3)
    task = tasks.next_task(client, 0.0, 0.0)
    assert fsck.fsck(client) == fsck.fsck(client, quiet=True) == []
    usage = fsck.usage(client)
    assert (usage["objects"], usage["tasks"]) == (7, 2)
    tasks.finish_scalar(client, task, 1)
    tasks.finish_scalar(client, tasks.next_task(client, 0.0, 0.0), 1)
    del held, waiting, writer


def test_damaged_object_words_are_found(node, client, raw):
    ref = node.put(5000)
    word = raw.at(CTL, ref.index * 8 * CTL_WORDS)
    entry = raw.at(ENTRIES, ref.index * ENTRY_BYTES)
    assert "state 99, which does not exist" in damaged(client, raw, word + 7, "B", 99)[0]
    assert "stamped by client 60" in damaged(client, raw, word + 4, "I", 1 << 24 | 60 << 8)[0]
    assert "held by client 5, which is gone" in damaged(client, raw, word + 8, "Q", 1 | 1 << 5)[0]
    assert "has no holder" in damaged(client, raw, word + 8, "Q", 0)[0]
    assert "lies in a block of 8192" in damaged(client, raw, entry + 8, "Q", 9000)[0]
    assert "whose owner word is 0" in damaged(client, raw, entry + 16, "Q", raw.at(PAYLOAD, 8192))[0]
    assert "whose owner word is 0" in damaged(client, raw, entry + 16, "Q", 1 << 50)[0]
    assert "is counted 7 times, 0 records name it" in damaged(client, raw, entry + 24, "I", 7)[0]


def test_damaged_pages_are_found(node, client, raw):
    refs = [node.put(100_000), node.put(300)]
    pages, owners = raw.at(PAGES, 0), raw.at(OWNERS, 0)
    first = next(p for p in range(1024) if raw.read(pages + 8 * p, "Q") >> 56 == 2)
    slab = next(p for p in range(1024) if raw.read(pages + 8 * p, "Q") >> 56 == 3)
    for count in (0, 5000):
        assert any("the walk over the arena" in line for line in damaged(client, raw, pages + 8 * first, "I", count))
    assert any("has no owner" in line for line in damaged(client, raw, owners + 256 * first, "I", 0))
    assert any("does not name it" in line for line in damaged(client, raw, owners + 256 * first, "I", 4000))
    assert any("bitmap" in line for line in damaged(client, raw, raw.at(BITS, 8 * slab), "Q", 0))
    free = 0
    while raw.read(pages + 8 * free, "Q") >> 56 != 1:
        free += raw.read(pages + 8 * free, "I")  # to the next run
    assert any("has owner 5" in line for line in damaged(client, raw, owners + 256 * free, "I", 5))
    del refs


def test_damaged_task_words_are_found(node, client, function, raw):
    ref = submission.submit(client, submission.TaskOptions(function), submission.PackedArgs(17, b"x" * 500, [], 0))
    _, task, _ = tasks.cancel(client, ref)
    word = raw.at(TASK_WORDS, 8 * task)
    assert "state 99, which does not exist" in damaged(client, raw, word + 7, "B", 99)[0]
    assert "stamped by client 60" in damaged(client, raw, word + 5, "B", 60)[0]
    assert "ready and not queued" in damaged(client, raw, word, "Q", 3 << 56 | 77)[0]
    assert "waits for task" in damaged(client, raw, word + 7, "B", 1)[0]
    block = raw.at(PAYLOAD, 8192)
    assert "which does not belong to it" in damaged(client, raw, raw.at(TASKS, 256 * task + 32), "Q", block)[0]
    node.end([task])


def test_damaged_lists_of_waiting_tasks_are_found(node, client, function, raw):
    first = submission.submit(client, submission.TaskOptions(function), (1,))
    refs = [submission.submit(client, submission.TaskOptions(function), (first, k)) for k in range(3)]
    held = [tasks.cancel(client, refs.pop(1))[1]]  # two wait, and are linked both ways
    node.end(held)
    one, other = (raw.read(raw.at(ENTRIES, ref.index * ENTRY_BYTES + 28), "I") - 1 for ref in refs)
    flags, after, before = 82, 68, 88  # in a task's record
    place = raw.at(TASKS, 0)
    assert "does not name the last" in damaged(client, raw, place + 256 * one + before, "I", one + 1)[0]
    assert "does not name the one before" in damaged(client, raw, place + 256 * other + before, "I", other + 1)[0]
    assert "does not name the last" in damaged(client, raw, place + 256 * one + after, "I", 0)[0]
    assert "goes on with task" in damaged(client, raw, place + 256 * other + after, "I", 1 << 30)[0]
    assert "does not wait for it" in damaged(client, raw, place + 256 * other + flags, "B", 1)[0]
    assert "2 tasks are linked" in damaged(client, raw, raw.at(ENTRIES, first.index * ENTRY_BYTES + 32), "I", 0)[0]
    node.end([tasks.cancel(client, refs[1])[1]])
    with changed(raw, place + 256 * one + before, "I", 0):
        tasks.cancel(client, refs[0])
        with pytest.raises(ArenaCorrupt, match="a list of waiting tasks is damaged"):
            handles.put_scalar(client, 1)
    raw.write(raw.at(ENTRIES, first.index * ENTRY_BYTES + 32), "I", 0)  # it was not taken out
    node.end([one, tasks.cancel(client, first)[1]])


def test_damaged_streams_are_found(node, client, function, raw):
    stream = generators.create(client, 0)
    end = submission.submit(client, submission.TaskOptions(function), (), stream)
    task = tasks.next_task(client, 0.0, 0.0)
    producer = generators.Producer(client, task)
    items = [handles.put_scalar(client, k) for k in range(3)]
    for item in items:
        producer.add_ref(item)
    entry = raw.at(ENTRIES, stream.index * ENTRY_BYTES)
    head, produced, last = (entry + ENTRY_BYTES - 72 + k for k in (0, 8, 16))
    after = raw.at(ENTRIES, items[1].index * ENTRY_BYTES + 44)
    assert "4 items produced, 0 taken, 3 unread" in damaged(client, raw, produced, "Q", 4)[0]
    assert "3 items produced, 1 taken, 3 unread" in damaged(client, raw, head + 4, "I", 1)[0]
    assert any("end with" in line for line in damaged(client, raw, last, "I", items[0].index + 1))
    assert any("go on with" in line for line in damaged(client, raw, after, "I", items[0].index + 1))
    assert any("is in state" in line for line in damaged(client, raw, after, "I", 5000))
    assert tasks.finish_scalar(client, task, None)
    del end, producer


# ---- what the calls themselves make of it; tests/fuzz tries everything else ----


@contextlib.contextmanager
def changed(raw, at: int, form: str, value: int):
    """One word is another inside; at the end the segment is as if nothing had happened."""
    old, state = raw.read(at, form), raw.read(STATE_AT, "I")
    raw.write(at, form, value)
    yield
    raw.write(at, form, old)
    raw.write(STATE_AT, "I", state)


def test_impossible_state_under_a_lock_ends_the_session_for_all(node, client, function, raw):
    ref = submission.submit(client, submission.TaskOptions(function), ())
    peer = node.peer()
    assert peer.run("handles.put_scalar(client, 1) is not None")
    with changed(raw, raw.at(RING, 0), "Q", 1 << 30):
        with pytest.raises(ArenaCorrupt, match="names an impossible task"):
            tasks.next_task(client, 0.0, 0.0)
        with pytest.raises(ArenaCorrupt, match="names an impossible task"):
            handles.put_scalar(client, 1)
        with pytest.raises(AssertionError, match=r"ArenaCorrupt.*names an impossible task"):
            peer.run("handles.put_scalar(client, 1)")
    what, task, _ = tasks.cancel(client, ref)
    assert what == "ending"
    node.end([task])


@pytest.mark.parametrize(
    ("place", "form", "value"), [(8, "Q", 1 << 60), (16, "Q", 1 << 60), (16, "Q", 4096), (16, "Q", -64 & (1 << 64) - 1)]
)
def test_value_outside_of_the_arena_is_not_read(node, client, raw, place, form, value):
    ref = node.put(5000)
    with changed(raw, raw.at(ENTRIES, ENTRY_BYTES * ref.index + place), form, value), pytest.raises(ArenaCorrupt):
        handles.read(client, ref)


@pytest.mark.parametrize("value", [1, 9, 1 << 40])
def test_number_of_another_length_is_not_read(client, raw, value):
    ref = handles.put_scalar(client, 5)
    with changed(raw, raw.at(ENTRIES, ENTRY_BYTES * ref.index + 8), "Q", value), pytest.raises(ArenaCorrupt):
        handles.read(client, ref)
    assert handles.read(client, ref)[2] == 5


@pytest.mark.parametrize(
    ("place", "form", "value"), [(52, "I", 1 << 31), (56, "I", 1 << 20), (60, "I", 9), (32, "Q", 64)]
)
def test_body_outside_of_its_task_is_not_read(node, client, function, raw, place, form, value):
    ref = submission.submit(client, submission.TaskOptions(function), (1, "two"))
    task = tasks.next_task(client, 0.0, 0.0)
    with changed(raw, raw.at(TASKS, 256 * task + place), form, value), pytest.raises(ArenaCorrupt):
        tasks.arguments(client, task)
    node.end([task])
    del ref


def test_entry_with_another_tenant_is_not_claimed_for(node, client, function, raw):
    inner = submission.submit(client, submission.TaskOptions(function), ())
    outer = submission.submit(client, submission.TaskOptions(function), (inner,))
    with changed(raw, raw.at(ENTRIES, ENTRY_BYTES * inner.index), "Q", 77):
        assert tasks.claim_for(client, outer) == tasks.NO_TASK
    task = tasks.claim_for(client, outer)
    assert task >= 0
    node.end([task])
    task = tasks.next_task(client, 0.0, 0.0)
    node.end([task])


@pytest.mark.parametrize("call", [fsck.fsck, fsck.usage, fsck.holders])
def test_call_without_a_client_is_refused(call):
    with pytest.raises(TypeError):
        call(None)
