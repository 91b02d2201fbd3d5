"""Memory pressure in a real session: more values than memory, and files that fail in every way."""

import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import fastrt
from fastrt._core.objects import spill
from fastrt._core.repair import fsck
from fastrt.store import client as store_client

MIB = 1 << 20
STORE = 32 * MIB


@pytest.fixture
def spills(tmp_path: Path) -> Iterator[Path]:
    """A session with a store of 32 MiB; the folder of its spilled values."""
    with fastrt.init(num_workers=1, object_store_memory=STORE, spill_dir=tmp_path):
        yield Path(spill.directory(client()))


def client():
    return store_client.require().client


def array(i: int, nbytes: int = MIB) -> np.ndarray:
    return np.full(nbytes, i % 251, dtype=np.uint8)


def put_arrays(count: int) -> list[fastrt.ObjectRef]:
    return [fastrt.put(array(i)) for i in range(count)]


def first_spilled(refs: list[fastrt.ObjectRef]) -> fastrt.ObjectRef:
    return next(ref for ref in refs if spill.is_spilled(client(), ref))


def restore(ref: fastrt.ObjectRef, wait_until) -> None:
    """Read a value so often that the daemon restores it."""
    for _ in range(3):
        fastrt.get(ref)
    wait_until(lambda: not spill.is_spilled(client(), ref), "the value to be restored")


def file_of(spills: Path, ref: fastrt.ObjectRef) -> Path:
    return spills / f"{ref.objref:016x}"


def test_twice_the_store_is_read_back_right(spills):
    refs = put_arrays(64)
    assert spill.totals(client())["spilled_objects"] >= 32
    for i, ref in enumerate(refs):
        assert np.array_equal(fastrt.get(ref), array(i))
    assert spill.totals(client())["restored_objects"] == 0  # without room their files are mapped
    del refs[32:]
    for _ in range(3):  # the third time they are restored
        assert [fastrt.get(ref)[0] for ref in refs] == list(range(32))
    assert spill.totals(client())["restored_objects"] >= 16
    assert fsck.fsck(client()) == []


def test_restored_value_keeps_its_file_and_is_not_written_again(spills, wait_until):
    refs = put_arrays(40)
    victim = first_spilled(refs)
    del refs
    restore(victim, wait_until)
    about = os.statvfs(spills)
    if about.f_bavail < 0.11 * about.f_blocks:
        pytest.skip("the disk is nearly full: files of restored values are removed")
    before = file_of(spills, victim).stat()
    spill.tick(client())
    counted = spill.totals(client())["spilled_objects"]
    more = put_arrays(48)
    assert spill.is_spilled(client(), victim)
    after = file_of(spills, victim).stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    wait_until(
        lambda: spill.totals(client())["spilled_objects"] - counted == len(list(spills.glob("[0-9a-f]*"))) - 1, "counts"
    )
    assert fastrt.get(victim)[0] == fastrt.get(victim)[-1]
    assert fastrt.get(more[-1])[0] == 47
    del victim, more
    wait_until(lambda: not list(spills.glob("[0-9a-f]*")), "no file left")


def test_kept_file_that_was_replaced_meanwhile_is_written_again(spills, wait_until):
    refs = put_arrays(40)
    victim = first_spilled(refs)
    value = fastrt.get(victim, copy=True)
    del refs
    restore(victim, wait_until)
    path = file_of(spills, victim)
    path.unlink(missing_ok=True)
    path.write_bytes(b"something else")
    spill.tick(client())
    more = put_arrays(48)
    assert spill.is_spilled(client(), victim)
    assert np.array_equal(fastrt.get(victim), value)
    del more


def test_files_go_with_their_values(spills, wait_until):
    refs = put_arrays(64)
    assert len(list(spills.glob("[0-9a-f]*"))) >= 32
    del refs
    wait_until(lambda: not list(spills.glob("[0-9a-f]*")), "no file left")
    assert fsck.usage(client())["objects"] == 0
    assert fsck.fsck(client(), True) == []


def test_tasks_make_and_read_more_than_fits(spills):
    @fastrt.remote
    def make(i: int) -> np.ndarray:
        return array(i)

    @fastrt.remote
    def last(values: np.ndarray) -> int:
        return int(values[-1])

    made = [make.remote(i) for i in range(64)]
    assert fastrt.get([last.remote(ref) for ref in made]) == [i % 251 for i in range(64)]


def test_large_bytes_and_text_come_back(spills):
    values = [bytes([i]) * MIB for i in range(40)] + ["ä" * MIB]
    refs = [fastrt.put(value) for value in values]
    assert fastrt.get(refs[0]) == values[0]
    assert fastrt.get(refs) == values


def test_least_recently_used_goes_first(spills):
    refs = put_arrays(28)
    spill.tick(client())
    for ref in refs[:14]:
        fastrt.get(ref)
    more = put_arrays(12)
    gone = [spill.is_spilled(client(), ref) for ref in refs]
    assert not any(gone[:14])
    assert sum(gone[14:]) >= 6
    assert len(more) == 12


def test_views_in_use_stay_and_a_full_store_says_who_holds_it(spills):
    spill.configure(client(), str(spills), False)
    refs = put_arrays(28)
    views = [fastrt.get(ref) for ref in refs]
    with pytest.raises(fastrt.ObjectStoreFullError, match=f"pid {os.getpid()}"):
        views += [fastrt.get(ref) for ref in put_arrays(8)]
    assert all(np.array_equal(view, array(i)) for i, view in enumerate(views))
    del views
    assert len(put_arrays(28)) == 28


def test_waits_count_a_spilled_value_as_ready(spills):
    refs = put_arrays(40)
    ready, others = fastrt.wait(refs, num_returns=40, timeout=0)
    assert (len(ready), others) == (40, [])


@pytest.mark.parametrize(
    "damage", ["missing", "changed", *[pytest.param(how, marks=pytest.mark.long) for how in ("short", "empty")]]
)
def test_damaged_file_costs_its_value_only(spills, damage):
    refs = put_arrays(48)
    victim = first_spilled(refs)
    path = file_of(spills, victim)
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes({"short": content[:-9], "empty": b"", "changed": content[:500] + b"?" + content[501:]}[damage])
    with pytest.raises(fastrt.ObjectLostError, match=str(spills)):
        fastrt.get(victim)
    others = [(i, ref) for i, ref in enumerate(refs) if ref != victim]
    assert all(fastrt.get(ref)[0] == i % 251 for i, ref in others)
    assert fsck.fsck(client()) == []


def test_unusable_directory_is_named_and_nothing_is_lost(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with fastrt.init(num_workers=1, object_store_memory=STORE, spill_dir=blocked):
        refs = []
        with pytest.raises(fastrt.ObjectStoreFullError, match=r"spilling failed: .*file"):
            refs.extend(fastrt.put(array(i)) for i in range(64))
        kept = [fastrt.put(array(i, 1000)) for i in range(10)]
        assert [fastrt.get(ref)[0] for ref in kept] == list(range(10))
        assert fsck.fsck(client()) == []


def test_folder_that_cannot_be_used_is_named(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with fastrt.init(1, STORE, spill_dir=blocked):
        with pytest.raises(fastrt.ObjectStoreFullError, match=r"no file could take it: .*file"):
            fastrt.put(array(1, 2 * STORE))
        assert fastrt.get(fastrt.put(array(7)))[-1] == 7


def test_switched_off_it_leaves_an_error(tmp_path):
    with fastrt.init(1, STORE, spill_dir=tmp_path, spill_fallback=False):
        with pytest.raises(fastrt.ObjectStoreFullError, match="larger than the whole store"):
            fastrt.put(array(1, 2 * STORE))
        assert list(tmp_path.iterdir()) == []


def test_program_is_warned_once(tmp_path):
    with fastrt.init(1, STORE, spill_dir=tmp_path, advice=True), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        refs = [fastrt.put(array(k, 2 * STORE)) for k in range(2)]
        assert [str(each.message).count("object_store_memory") for each in caught] == [1]
        assert caught[0].filename == __file__
        del refs


def test_session_leaves_no_folder(tmp_path):
    with fastrt.init(num_workers=1, object_store_memory=STORE, spill_dir=tmp_path):
        refs = put_arrays(48)
        assert list(tmp_path.iterdir())
        del refs
    assert list(tmp_path.iterdir()) == []
