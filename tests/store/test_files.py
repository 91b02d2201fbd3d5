"""Fallback memory: values that find no room in the store are in files, and are used like any others."""

import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import fastrt
from fastrt._core.objects import handles, spill
from fastrt._core.repair import fsck
from fastrt.store import client as store_client

MIB = 1 << 20
STORE = 16 * MIB


@pytest.fixture(scope="module")
def rt(runtime_dir: Path) -> Iterator[None]:
    with fastrt.init(2, STORE, runtime_dir=runtime_dir, spill_dir=runtime_dir.parent / "spill", store_patience_s=0.4):
        yield


@pytest.fixture
def folder(rt, wait_until) -> Iterator[Path]:
    """The folder of the files; the store and the folder are empty and sound after the test."""
    found = Path(spill.directory(client()))
    yield found
    wait_until(lambda: not list(found.glob("[0-9a-f]*")), "no file left")
    wait_until(lambda: not fsck.fsck(client(), True), "a sound store")


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fastrt.PerformanceWarning)
        yield


def client():
    return store_client.require().client


def array(nbytes: int, value: int = 1) -> np.ndarray:
    made = np.full(nbytes, value, np.uint8)
    made[-1] = value + 1
    return made


def files(folder: Path) -> int:
    return len(list(folder.glob("[0-9a-f]*")))


@fastrt.remote
def total(value) -> int:
    return int(np.sum(value, dtype=np.int64))


@fastrt.remote
def make(nbytes: int, value: int) -> np.ndarray:
    return array(nbytes, value)


def test_value_of_four_times_the_store_is_put_and_read_by_all(folder):
    ref = fastrt.put(array(4 * STORE))
    assert files(folder) == 1
    found = fastrt.get(ref)
    assert np.array_equal(found, array(4 * STORE))
    assert not found.flags.writeable
    assert found.ctypes.data % 64 == 0
    assert fastrt.get([total.remote(ref), total.remote(ref)]) == [4 * STORE + 1] * 2
    assert handles.describe(client(), ref)["pins"] == []


def test_arguments_and_results_are_larger_than_the_store(folder):
    assert fastrt.get(total.remote(array(2 * STORE))) == 2 * STORE + 1
    ref = make.remote(2 * STORE, 3)
    assert np.array_equal(fastrt.get(ref), array(2 * STORE, 3))
    assert fastrt.get(total.remote(make.remote(2 * STORE, 1))) == 2 * STORE + 1

    @fastrt.remote
    class Keeper:
        def __init__(self, value):
            self.value = value

        def give(self):
            return self.value

        def parts(self):
            for k in range(2):
                yield array(2 * STORE, k)

    keeper = Keeper.remote(array(2 * STORE, 7))
    assert fastrt.get(keeper.give.remote())[-1] == 8
    items = keeper.parts.options(num_returns="streaming").remote()
    assert [int(fastrt.get(item)[-1]) for item in items] == [1, 2]


def test_same_file_is_mapped_once_and_lives_as_long_as_a_view(folder):
    ref = fastrt.put(array(2 * STORE))
    first, second = fastrt.get(ref), fastrt.get(ref)
    assert first.ctypes.data == second.ctypes.data
    del ref, second
    assert files(folder) == 0
    assert np.array_equal(first, array(2 * STORE))


def test_values_of_all_kinds_come_back(folder):
    inner = fastrt.put(5)
    many = [fastrt.put(k) for k in range(20)]
    refs = [
        fastrt.put("\xe4" * STORE), fastrt.put(bytes(STORE + 1)), fastrt.put([array(STORE + MIB), inner]),
        fastrt.put([array(STORE + MIB), many]),
    ]  # fmt: skip
    del inner, many
    text, data, box, other = fastrt.get(refs)
    assert (text, data) == ("\xe4" * STORE, bytes(STORE + 1))
    assert fastrt.get(box[1]) == 5
    assert fastrt.get(other[1]) == list(range(20))
    box[0][0] = 9  # an array inside of a value is private
    assert fastrt.get(refs[2])[0][0] == 1
    own = fastrt.get(refs[2], copy=True)
    refs.clear()
    assert own[0][-1] == 2

    @fastrt.remote
    def write(nbytes: int) -> str:
        return "x" * nbytes

    assert len(fastrt.get(write.remote(STORE + 1))) == STORE + 1


def test_array_of_empty_is_filled_in_its_file(folder, wait_until):
    made = fastrt.empty(2 * STORE, np.uint8)
    made[:] = 4
    ref = fastrt.put(made)
    assert not made.flags.writeable
    assert fastrt.get(total.remote(ref)) == 8 * STORE
    del ref, made
    wait_until(lambda: files(folder) == 0, "the worker to drop its argument")
    never = fastrt.empty(2 * STORE, np.uint8)
    assert files(folder) == 1
    del never
    assert files(folder) == 0


def test_values_that_are_in_use_leave_no_room_and_the_next_goes_to_a_file(folder):
    views = [fastrt.get(fastrt.put(array(5 * MIB, k))) for k in range(6)]
    small = fastrt.put(array(MIB // 4, 5))
    assert fastrt.get(small)[-1] == 6
    assert [int(view[-1]) for view in views] == [1, 2, 3, 4, 5, 6]
    totals = spill.totals(client())
    del views, small
    assert totals["mapped_objects"] >= 3


def test_spilled_values_are_mapped_and_restored_when_they_are_read_again_and_there_is_room(folder, wait_until):
    refs = [fastrt.put(array(4 * MIB, k)) for k in range(8)]
    before = spill.totals(client())["restored_objects"]
    values = fastrt.get(refs)
    assert [int(value[-1]) for value in values] == list(range(1, 9))
    assert any(spill.is_spilled(client(), ref) for ref in refs)
    assert spill.totals(client())["restored_objects"] == before
    spilled = next(ref for ref in refs if spill.is_spilled(client(), ref))
    refs.clear()
    del values

    def restored() -> int:
        fastrt.get(spilled)
        return spill.totals(client())["restored_objects"] - before

    wait_until(restored, "the value to be in the store again")
    fastrt.get(spilled)
    assert restored() == 1


def test_workers_whose_arguments_and_results_exceed_the_store_do_not_stand_still(folder):
    """All of them run at once: their arguments are read from files, and their results go to files."""

    @fastrt.remote
    def join(one: np.ndarray, two: np.ndarray) -> np.ndarray:
        return one + two

    made = [make.remote(5 * MIB, k) for k in range(6)]
    joined = [join.remote(made[k], made[k - 1]) for k in range(6)]
    joined = [join.remote(joined[k], joined[k - 1]) for k in range(6)]
    found = fastrt.get([total.remote(ref) for ref in joined])
    values = range(6)
    sums = [values[k] + 2 * values[k - 1] + values[k - 2] for k in values]
    assert found == [one * 5 * MIB + 4 for one in sums]  # the last byte of each made array is one larger


def test_tasks_that_take_large_values_run_before_those_that_make_more(folder):
    """A quarter of the store is filled first; 60 MiB of the 80 MiB were written when all values were made first."""
    before = spill.totals(client())
    made = [make.remote(2 * MIB, 1) for _ in range(40)]
    found = [total.remote(ref) for ref in made]
    del made
    assert fastrt.get(found) == [2 * MIB + 1] * 40
    after = spill.totals(client())
    written = sum(after[name] - before[name] for name in ("spilled_bytes", "mapped_bytes"))
    assert written < 30 * MIB, after


@pytest.mark.parametrize("store_parts", [1, 3])
def test_sort_of_four_times_the_store_is_right(folder, store_parts):
    @fastrt.remote
    def cut(values: np.ndarray, bounds: list[int]) -> list[np.ndarray]:
        return np.split(np.sort(values), np.searchsorted(np.sort(values), bounds))

    @fastrt.remote
    def merge(*parts: np.ndarray) -> np.ndarray:
        return np.sort(np.concatenate(parts))

    parts = 2 * store_parts
    rng = np.random.default_rng(store_parts)
    data = [rng.integers(0, 1 << 30, 4 * STORE // 8 // parts) for _ in range(parts)]
    bounds = [(1 << 30) * k // parts for k in range(1, parts)]
    runs = [cut.options(num_returns=parts).remote(fastrt.put(part), bounds) for part in data]
    made = np.concatenate(fastrt.get([merge.remote(*[run[k] for run in runs]) for k in range(parts)]))
    assert np.array_equal(made, np.sort(np.concatenate(data)))
    del runs


def test_full_disk_is_the_last_word_and_is_named(folder):
    with pytest.raises(fastrt.ObjectStoreFullError, match=r"larger than the whole store.*No space left on device"):
        fastrt.empty(1 << 43, np.uint8)
    view = fastrt.get(fastrt.put(array(10 * MIB)))
    assert view[-1] == 2
    assert files(folder) == 0


@pytest.mark.parametrize("damage", ["missing", "short", "long", "changed", "tag", "other", "link"])
def test_damaged_file_costs_its_value_only(folder, damage):
    refs = [fastrt.put(array(2 * STORE, k)) for k in range(2)]
    victim, other = (folder / f"{ref.objref:016x}" for ref in refs)
    if damage in ("missing", "link", "other"):
        victim.unlink()
    if damage == "link":
        victim.symlink_to(other)
    elif damage == "other":
        shutil.copyfile(other, victim)
    elif damage != "missing":
        size = victim.stat().st_size
        with open(victim, "r+b") as file:
            file.seek({"changed": size // 2, "tag": size - 1, "short": 0, "long": size}[damage])
            file.write(b"?" if damage != "short" else b"")
            if damage == "short":
                file.truncate(size - 1)
    with pytest.raises(fastrt.ObjectLostError, match=str(folder)):
        fastrt.get(refs[0])
    with pytest.raises(fastrt.ObjectLostError):
        fastrt.get(total.remote(refs[0]))
    assert fastrt.get(refs[1])[-1] == 2
    assert fastrt.get(total.remote(refs[1])) == 2 * STORE + 1


def test_folder_that_is_removed_costs_the_values_in_it_and_no_other(folder):
    refs = [fastrt.put(array(2 * STORE, k)) for k in range(2)]
    view = fastrt.get(refs[0])
    shutil.rmtree(folder)
    assert view[-1] == 1
    assert fastrt.get(refs[0])[-1] == 1  # mapped already
    with pytest.raises(fastrt.ObjectLostError, match="No such file"):
        fastrt.get(refs[1])
    again = fastrt.put(array(2 * STORE, 5))
    assert fastrt.get(total.remote(again)) == 5 * 2 * STORE + 1


def test_commands_show_values_in_files(folder):
    ref = fastrt.put(array(2 * STORE))
    runtime = str(Path(store_client.require().socket_path).parent.parent)

    def shown(command: str) -> str:
        run = [sys.executable, "-c", "from fastrt.cli.main import main; main()", command]
        env = {**os.environ, "FASTRT_RUNTIME_DIR": runtime}
        return " ".join(subprocess.run(run, env=env, capture_output=True, text=True, check=True).stdout.split())

    assert "found no room and went to files in" in shown("status")
    assert "spilled 1 objects 32.0 MiB only in files in" in shown("memory")
    assert fastrt.get(ref)[-1] == 2


def test_child_process_reads_a_file_value(folder):
    ref = fastrt.put(array(2 * STORE))
    view = fastrt.get(ref)
    pid = os.fork()
    if pid == 0:
        os._exit(0 if view[-1] == 2 and fastrt.get(ref)[-1] == 2 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
