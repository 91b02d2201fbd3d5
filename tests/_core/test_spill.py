"""Spilling as the core sees it: who may take bytes away and bring them back, and against whom."""

import pytest

from fastrt._core.objects import handles, spill
from fastrt._core.repair import fsck
from fastrt._core.tasks import submission, tasks
from fastrt.errors import FastrtError, ObjectStoreFullError, StaleReferenceError

LARGE = 100_000  # above FRT_SPILL_BYTES_MIN


@pytest.fixture
def directory(client, tmp_path):
    spill.configure(client, str(tmp_path))
    return tmp_path


def spill_out(client, ref) -> int:
    """What the spiller does, with the file left out."""
    data = spill.begin(client, ref.index, ref.objref)
    assert data is not None
    files[ref.objref] = bytes(data)
    return spill.commit(client, data)


def restore(client, ref) -> None:
    room = spill.begin_restore(client, ref.index, ref.objref)
    memoryview(room)[:] = files[ref.objref]
    del room
    spill.finish_restore(client, ref.index, True)


files: dict[int, bytes] = {}


def test_spilled_value_gives_its_memory_back_and_returns_whole(node, client):
    ref = node.put(LARGE)
    data = bytes(handles.read(client, ref)[2])
    assert spill_out(client, ref) == 7 * node.PAGE
    assert fsck.usage(client)["bytes_used"] == 0
    assert spill.is_spilled(client, ref)
    assert handles.is_ready(client, ref)
    assert handles.read(client, ref) is None
    assert handles.read(client, ref, raw=True) is None
    assert handles.read_scalar(client, ref, "missing") == "missing"
    assert fsck.fsck(client, quiet=True) == []
    assert not spill.wait_restored(client, ref, 0.01)
    restore(client, ref)
    assert spill.wait_restored(client, ref, 0.0)
    assert bytes(handles.read(client, ref)[2]) == data
    totals = spill.totals(client)
    assert totals == {
        "spilled_objects": 1, "spilled_bytes": LARGE, "restored_objects": 1, "restored_bytes": LARGE,
        "mapped_objects": 0, "mapped_bytes": 0,
    }  # fmt: skip


def test_candidates_are_what_has_not_been_used_for_longest(node, client, function):
    refs = [node.put(LARGE) for _ in range(3)]
    small, box = node.put(10_000), node.put(LARGE, function)
    pin = handles.read(client, node.put(LARGE))[2]
    spill.tick(client)
    handles.read(client, refs[0])
    spill.tick(client)
    handles.read(client, refs[2])
    assert [row[3] for row in spill.candidates(client)] == [refs[k].index for k in (1, 0, 2)]
    del small, box, pin


def test_pin_during_the_spilling_keeps_the_bytes(node, client):
    ref = node.put(LARGE)
    data = spill.begin(client, ref.index, ref.objref)
    pin = handles.read(client, ref)[2]
    assert spill.commit(client, data) == 0
    assert bytes(pin) == bytes(data)
    assert spill.begin(client, ref.index, ref.objref) is None
    del pin, data
    assert spill_out(client, ref) > 0


def test_reference_dropped_at_any_time_frees_the_value(node, client, directory):
    def dropped_while_spilling(ref):
        data = spill.begin(client, ref.index, ref.objref)
        assert data is not None
        return lambda: spill.commit(client, data)

    def dropped_while_spilling_in_vain(ref):
        data = spill.begin(client, ref.index, ref.objref)
        return lambda: spill.give_up(client, data)

    def dropped_while_spilling_without_an_end(ref):
        data = [spill.begin(client, ref.index, ref.objref)]
        return data.clear

    def read_and_dropped_while_spilling(ref):
        data = spill.begin(client, ref.index, ref.objref)
        handles.read(client, ref)
        return lambda: spill.commit(client, data)

    def dropped_when_spilled(ref):
        spill_out(client, ref)
        return lambda: None

    def dropped_while_a_restore_fails(ref):
        spill_out(client, ref)
        assert spill.begin_restore(client, ref.index, ref.objref) is not None
        index = ref.index
        return lambda: spill.cancel_restore(client, index)

    def dropped_while_restoring(ref):
        spill_out(client, ref)
        path = directory / f"{ref.objref:016x}"
        assert spill.begin_restore(client, ref.index, ref.objref) is not None
        path.unlink()  # the spiller removes the file of a value that is back
        index = ref.index
        return lambda: spill.finish_restore(client, index, True)

    for begin in (
        dropped_while_spilling, dropped_while_spilling_in_vain, dropped_while_spilling_without_an_end,
        read_and_dropped_while_spilling, dropped_when_spilled, dropped_while_restoring,
        dropped_while_a_restore_fails,
    ):  # fmt: skip
        for is_late in (False, True):  # a spiller may make the file after the last reference has gone
            ref = node.put(LARGE)
            path = directory / f"{ref.objref:016x}"
            path.touch()
            end = begin(ref)
            if is_late:
                path.unlink(missing_ok=True)
            del ref
            if is_late and "while_spilling" in begin.__name__:
                path.touch()
            end()
            left = fsck.usage(client)
            assert (left["objects"], left["bytes_used"]) == (0, 0), (begin, is_late)
            assert list(directory.iterdir()) == [], (begin, is_late)


def test_entry_has_no_other_value_while_its_bytes_are_written(node, client):
    """The spiller of a value that was freed meanwhile would free the memory of the next value of the entry."""
    ref = node.put(LARGE)
    data = spill.begin(client, ref.index, ref.objref)
    handles.read(client, ref)
    del ref
    others = [node.put(LARGE + k) for k in range(4)]
    written = [spill.begin(client, other.index, other.objref) for other in others]
    assert spill.commit(client, data) == 0
    assert [bytes(one)[:100] for one in written] == [bytes(handles.read(client, other)[2])[:100] for other in others]
    assert not any(spill.is_spilled(client, other) for other in others)


def test_spilling_ends_once(node, client):
    ref = node.put(LARGE)
    data = spill.begin(client, ref.index, ref.objref)
    spill.give_up(client, data)
    for call in (spill.commit, spill.give_up):
        with pytest.raises(FastrtError, match="not the bytes of a value that this client is spilling"):
            call(client, data)
    assert bytes(handles.read(client, ref)[2]) == bytes(data)


def test_value_of_a_file_that_is_gone_is_lost(node, client):
    ref = node.put(LARGE)
    spill_out(client, ref)
    spill.begin_restore(client, ref.index, ref.objref)
    spill.finish_restore(client, ref.index, False)
    kind, error, data = handles.read(client, ref)
    assert (kind, error, bytes(data)) == (spill.KIND_LOST, True, b"")
    assert fsck.usage(client)["bytes_used"] == 0


def test_value_of_a_file_that_cannot_be_read_now_stays_in_the_file(node, client):
    ref = node.put(LARGE)
    data = bytes(handles.read(client, ref)[2])
    spill_out(client, ref)
    spill.begin_restore(client, ref.index, ref.objref)
    spill.cancel_restore(client, ref.index)
    assert spill.is_spilled(client, ref)
    assert fsck.usage(client)["bytes_used"] == 0
    with pytest.raises(FastrtError, match="not being restored"):
        spill.cancel_restore(client, ref.index)
    restore(client, ref)
    assert bytes(handles.read(client, ref)[2]) == data


def test_file_left_by_a_death_after_the_restore_goes_with_the_value(node, client, directory):
    ref = node.put(LARGE)
    spill_out(client, ref)
    file = directory / f"{ref.objref:016x}"
    file.touch()
    restore(client, ref)  # whoever did it is killed before it removes the file
    del ref
    assert not file.exists()


def test_restore_into_a_full_store_leaves_the_value_spilled(make_node):
    node = make_node(store_bytes=1 << 20)
    client = node.client
    ref = node.put(600_000)
    spill_out(client, ref)
    filler = node.put(600_000)
    with pytest.raises(ObjectStoreFullError):
        spill.begin_restore(client, ref.index, ref.objref)
    assert spill.is_spilled(client, ref)
    del filler
    restore(client, ref)
    assert bytes(handles.read(client, ref)[2]) == files[ref.objref]


def test_spilled_arguments_of_the_next_tasks_are_listed_in_the_order_of_the_queue(node, client, function, directory):
    refs = [node.put(LARGE) for _ in range(5)]
    small = node.put(10)
    for ref in (refs[0], refs[2], refs[3], refs[4]):
        spill_out(client, ref)

    def submit(*args, **options):
        return submission.submit(client, submission.TaskOptions(function, 1, 0, 0, **options), args)

    made = [submit(refs[2], small, refs[1]), submit(7, refs[0]), submit(refs[3])]

    def listed(count):
        return [row[1] for row in spill.wanted_next(client, count)]

    assert spill.wanted_next(client, 0) == []
    assert spill.wanted_next(client, 1) == [(refs[2].index, refs[2].objref, LARGE)]
    assert listed(2) == [refs[k].objref for k in (2, 0)]
    assert listed(100) == [refs[k].objref for k in (2, 0, 3)]
    made.append(submit(refs[4], priority=5))
    assert listed(1) == [refs[k].objref for k in (4, 2)]
    task = tasks.next_task(client, 0.0, 0.0)
    assert listed(100) == [refs[k].objref for k in (2, 0, 3)]
    assert tasks.finish_scalar(client, task, 1)
    restore(client, refs[2])
    assert listed(100) == [refs[k].objref for k in (0, 3)]
    while (task := tasks.next_task(client, 0.0, 0.0)) >= 0:
        assert tasks.finish_scalar(client, task, 1)
    assert listed(100) == []
    del made


def test_name_that_means_something_else_is_left_alone(node, client):
    ref = node.put(LARGE)
    for index, objref in ((ref.index, ref.objref + 1), (1 << 20, ref.objref), (0xFFFFFFFF, 1)):
        assert spill.begin(client, index, objref) is None
        assert spill.begin_restore(client, index, objref) is None
    assert spill.begin_restore(client, ref.index, ref.objref) is None
    spill_out(client, ref)
    assert spill.begin(client, ref.index, ref.objref) is None
    assert spill.begin_restore(client, ref.index, ref.objref + 1) is None
    with pytest.raises(FastrtError, match="not being restored"):
        spill.finish_restore(client, ref.index, True)
    restore(client, ref)


@pytest.mark.parametrize("nbytes", [0, 256, 10_000])
def test_path_of_the_files_is_kept_or_refused(client, nbytes):
    path = "/" + "x" * nbytes
    if nbytes > 250:
        with pytest.raises(ValueError, match="more than 255"):
            spill.configure(client, path)
    else:
        spill.configure(client, path)
        assert spill.directory(client) == path
        spill.configure(client, "")


# ---- several processes ----


def test_readers_wait_until_the_value_is_back(node, client, wait_until):
    peer = node.peer()
    ref = node.put(LARGE)
    peer.run(f"ref = handles.acquire(client, {ref.objref}, {ref.index})")
    spill_out(client, ref)
    assert peer.run("handles.read(client, ref)") is None
    peer.start("spill.wait_restored(client, ref, 10.0)")
    wait_until(peer.is_asleep, "the peer to sleep")
    restore(client, ref)
    assert peer.finish() is True
    assert peer.run("len(handles.read(client, ref)[2])") == LARGE


def test_client_that_waits_for_room_is_told_of_each_round(node, client, wait_until):
    peer = node.peer()
    seen = peer.run("spill.rounds(client)")
    peer.start(f"spill.wait_round(client, {seen}, 10.0)")
    wait_until(peer.is_asleep, "the peer to sleep")
    spill.end_round(client, 4096, "trouble " + "ä" * 200)
    assert peer.finish() is True
    freed, trouble = spill.last_round(client)
    assert freed == 4096
    assert trouble.startswith("trouble ää")
    assert not spill.wait_round(client, spill.rounds(client), 0.01)


@pytest.mark.parametrize(
    ("code", "spilled"),
    [
        ("data = spill.begin(client, {i}, {o})", False),
        ("spill.commit(client, spill.begin(client, {i}, {o}))", True),
        ("spill.commit(client, spill.begin(client, {i}, {o}))\nroom = spill.begin_restore(client, {i}, {o})", True),
    ],
    ids=["spilling", "spilled", "restoring"],
)
@pytest.mark.parametrize("held", [False, True])
def test_death_of_the_spiller_loses_nothing(node, client, code, spilled, held):
    ref = node.put(LARGE)
    name = ref.objref, ref.index
    data = bytes(handles.read(client, ref)[2])
    files[ref.objref] = data
    peer = node.peer()
    peer.run(code.format(i=ref.index, o=ref.objref))
    if not held:
        del ref
    node.bury(peer)
    assert fsck.fsck(client, quiet=True) == []
    if not held:
        with pytest.raises(StaleReferenceError):
            handles.acquire(client, *name)
        return
    assert spill.is_spilled(client, ref) is spilled
    if spilled:
        assert fsck.usage(client)["bytes_used"] == 0
        restore(client, ref)
    assert bytes(handles.read(client, ref)[2]) == data


def test_spiller_and_users_race_for_the_same_values(node, client):
    """Values are spilled and restored while other processes read and drop them: all bytes are right."""
    readers = [node.peer(), node.peer()]
    refs = [node.put(20_000) for _ in range(4)]
    for ref in refs:
        files[ref.objref] = bytes(memoryview(handles.read(client, ref)[2]))
    names = [(ref.objref, ref.index) for ref in refs]
    for seed, peer in enumerate(readers):
        peer.start(
            f"""
import random
rng = random.Random({seed})
good = 0
mine = [handles.acquire(client, *name) for name in {names}]
while good < 3000:
    ref = rng.choice(mine)
    got = handles.read(client, ref)
    if got is None:
        assert spill.wait_restored(client, ref, 10.0)
        continue
    assert bytes(memoryview(got[2])[:64]) == bytes([20_000 % 251]) * 64
    good += 1
    box = handles.create(client, 20_000, 16).seal()
    del box, got
del mine
good
"""
        )
    rounds = 0
    while not all(peer.answered() for peer in readers):
        for ref in refs:
            data = spill.begin(client, ref.index, ref.objref)
            if data is not None and spill.commit(client, data):
                rounds += 1
                restore(client, ref)
        for *_, index, objref in spill.candidates(client):
            if objref not in files:  # the peers' own, which go at any moment
                data = spill.begin(client, index, objref)
                if data is not None:
                    spill.commit(client, data)
    assert [peer.finish() for peer in readers] == [3000, 3000]
    assert rounds > 0
    del refs, ref


def test_call_with_a_closed_client_is_refused(node, client):
    other = node.attach()
    ref = handles.create(other, LARGE, node.KIND).seal()
    index, objref = ref.index, ref.objref
    data = spill.begin(other, index, objref)
    other.close()
    for call in (
        lambda: spill.begin(other, index, objref),
        lambda: spill.begin_restore(other, index, objref),
        lambda: spill.cancel_restore(other, index),
        lambda: spill.candidates(other),
        lambda: spill.free_runs(other),
        lambda: spill.commit(other, data),
        lambda: spill.configure(other, "/tmp"),
        lambda: spill.directory(other),
        lambda: spill.end_round(other, 0),
        lambda: spill.finish_restore(other, index, True),
        lambda: spill.give_up(other, data),
        lambda: spill.is_spilled(other, ref),
        lambda: spill.last_round(other),
        lambda: spill.rounds(other),
        lambda: spill.size(other, index),
        lambda: spill.tick(other),
        lambda: spill.totals(other),
        lambda: spill.wanted_next(other, 1),
        lambda: spill.wait_restored(other, ref, 0.0),
        lambda: spill.wait_round(other, 0, 0.0),
    ):
        with pytest.raises(FastrtError, match=r"shut down|fastrt\.init"):
            call()


def test_call_for_an_entry_that_does_not_exist_is_refused(client):
    for index in (8192, 1 << 25, 0xFFFFFFFF):
        with pytest.raises(IndexError, match=f"no entry {index}"):
            spill.finish_restore(client, index, True)
        assert spill.size(client, index) == 0


@pytest.mark.parametrize("timeout_s", [-1.0, 0.0, float("-inf")])
def test_wait_for_what_is_spilled_of_no_length_only_looks(node, client, timeout_s):
    ref = node.put(LARGE)
    assert spill.wait_restored(client, ref, timeout_s) is True
    spill_out(client, ref)
    assert spill.wait_restored(client, ref, timeout_s) is False
    assert spill.wait_round(client, spill.rounds(client), timeout_s) is False


def test_signal_ends_a_wait_for_what_is_spilled(node, client, alarm):
    ref = node.put(LARGE)
    spill_out(client, ref)
    for call in (
        lambda: spill.wait_restored(client, ref, float("inf")),
        lambda: spill.wait_round(client, spill.rounds(client), float("inf")),
    ):
        with pytest.raises(ZeroDivisionError):
            alarm(0.02, lambda: 1 / 0, call)
