"""Files of values on a disk and in memory: written and read past the page cache where that works."""

import mmap
import os
import random
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastrt.store.spill_files import SpillFiles
from fastrt.store.spill_storage import ObjectStorage

MIB = 1 << 20
SIZES = (0, 1, 5000, MIB, MIB + 1, 4 * MIB + 4096, 9 * MIB + 777)


@pytest.fixture(params=["disk", "memory"])
def files(request, tmp_path: Path, shm_folder: Path) -> SpillFiles:
    keys = tmp_path / "keys"
    keys.mkdir(mode=0o700)
    made = SpillFiles((tmp_path if request.param == "disk" else shm_folder) / "spill", keys)
    made.make_key()
    return made


@pytest.fixture
def shm_folder() -> Iterator[Path]:
    """A folder of a memory file system."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="test-spill-") as folder:
        yield Path(folder)


def memory(nbytes: int, at: int = 0) -> memoryview:
    """Bytes that begin `at` bytes after the start of a page."""
    room = memoryview(mmap.mmap(-1, nbytes + at + 1))[at : at + nbytes]
    room[:] = random.Random(nbytes).randbytes(nbytes)
    return room


def forget(path: Path) -> None:
    """Drop a file's pages from the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.mark.parametrize("at", [0, 64, 512], ids=["page", "unaligned", "sector"])
@pytest.mark.parametrize("nbytes", SIZES)
def test_value_of_any_size_and_place_comes_back(files, nbytes, at):
    data = memory(nbytes, at)
    files.write(7, data)
    path = files.path(7)
    assert path.stat().st_size == 4096 + nbytes + 16
    assert path.stat().st_mode & 0o777 == 0o600
    for is_cold in (True, False):
        if is_cold:
            forget(path)
        room = memory(nbytes, at)
        room[:] = bytes(nbytes)
        files.read(7, room)
        assert room == data
    if nbytes:
        assert bytes(memoryview(files.map(7, nbytes))) == data


@pytest.mark.parametrize("damage", ["header", "padding", "value", "last", "tag", "short", "long"])
@pytest.mark.parametrize("is_cold", [True, False])
def test_damage_anywhere_is_found(files, damage, is_cold):
    nbytes = 5 * MIB + 100
    files.write(7, memory(nbytes))
    path = files.path(7)
    size = path.stat().st_size
    place = {"header": 9, "padding": 4000, "value": 3 * MIB, "last": size - 17, "tag": size - 1}.get(damage)
    with path.open("r+b") as file:
        if place is not None:
            file.seek(place)
            old = file.read(1)
            file.seek(place)
            file.write(bytes([old[0] ^ 1]))
        else:
            file.truncate(size + (1 if damage == "long" else -1))
    if is_cold:
        forget(path)
    with pytest.raises(ValueError, match=r"header|ends after|not what this session wrote"):
        files.read(7, memory(nbytes))
    with pytest.raises(ValueError):
        files.map(7, nbytes)


def test_several_threads_write_and_read_their_own_files(files):
    data = [memory(3 * MIB + k) for k in range(4)]
    bad: list[int] = []

    def work(k: int) -> None:
        for _ in range(5):
            files.write(k, data[k])
            room = memory(len(data[k]))
            room[:] = bytes(len(room))
            files.read(k, room)
            if room != data[k]:
                bad.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert bad == []


def test_identity_names_one_file(files):
    assert files.identity(7) is None
    files.write(7, memory(MIB))
    before = files.identity(7)
    files.read(7, memory(MIB))
    assert files.identity(7) == before
    files.write(7, memory(MIB))
    assert files.identity(7) != before


KILLED = """
import os, sys
from pathlib import Path
from fastrt.store.spill_files import SpillFiles
from fastrt.store.spill_storage import ObjectStorage

class Killed(ObjectStorage):
    def write(self, name, parts):
        super().write(name, parts)
        os._exit(9)

files = SpillFiles(Path(sys.argv[1]), Path(sys.argv[2]), Killed(sys.argv[3], "session"))
files.make_key()
files.write(7, memoryview(bytes(100)))
"""


@pytest.mark.parametrize("is_freed_first", [False, True])
def test_object_of_a_daemon_that_was_killed_while_it_wrote_is_removed(tmp_path, is_freed_first):
    pytest.importorskip("fsspec", reason="fsspec is not installed: pip install 'fastrt[spill]'")
    spills, keys, objects = tmp_path / "spill", tmp_path / "keys", tmp_path / "objects"
    keys.mkdir(mode=0o700)
    url = f"file://{objects}"
    assert subprocess.run([sys.executable, "-c", KILLED, spills, keys, url]).returncode == 9
    stub = spills / f"{7:016x}"
    if is_freed_first:
        stub.unlink()
    files = SpillFiles(spills, keys, ObjectStorage(url, "session"))
    files.make_key()
    files.sweep_storage()
    assert [path.name for path in objects.rglob("*") if path.is_file()] == [stub.name]
    if not is_freed_first:
        stub.unlink()
        files.sweep_storage()
        assert not [path for path in objects.rglob("*") if path.is_file()]
    files.remove_all()
    assert not [path for path in objects.rglob("*") if path.is_file()]


def test_value_that_cannot_be_stored_leaves_no_stub(tmp_path):
    pytest.importorskip("fsspec", reason="fsspec is not installed: pip install 'fastrt[spill]'")
    keys = tmp_path / "keys"
    keys.mkdir(mode=0o700)
    files = SpillFiles(tmp_path / "spill", keys, ObjectStorage("no-such-scheme://bucket", "session"))
    files.make_key()
    with pytest.raises(OSError, match="cannot be written"):
        files.write(7, memoryview(bytes(100)))
    assert list((tmp_path / "spill").glob("[0-9a-f]*")) == []
