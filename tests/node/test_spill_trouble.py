"""Spill folders on several file systems: full, read-only, unmounted, changed or removed while the session runs.

Each costs at most the values whose bytes it had, with an error that says why; the session goes on.
"""

import contextlib
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import fastrt
from fastrt._core.objects import spill
from fastrt._core.repair import fsck, inspect
from fastrt.store import client as store_client
from support.disks import small_disk, with_own_shm

MIB = 1 << 20
STORE = 32 * MIB
DISK = 12 * MIB


KINDS = ["tmpfs", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("ext4", "xfs"))]


@pytest.fixture(params=KINDS)
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path, DISK, request.param) as folder:
        yield folder


def client():
    return store_client.require().client


def array(k: int) -> np.ndarray:
    return np.full(MIB, k % 251, np.uint8)


def put_arrays(count: int, refs: list[fastrt.ObjectRef] | None = None) -> list[fastrt.ObjectRef]:
    refs = [] if refs is None else refs
    for k in range(len(refs), len(refs) + count):
        refs.append(fastrt.put(array(k)))
    return refs


def check(refs: list[fastrt.ObjectRef], those: list[int] | None = None) -> None:
    for k in range(len(refs)) if those is None else those:
        assert np.array_equal(fastrt.get(refs[k]), array(k))


def settle(wait_until) -> None:
    """Wait until nothing has been spilled for half a second: values are spilled ahead after the last put, too."""
    seen, since = -1, 0.0

    def is_quiet() -> bool:
        nonlocal seen, since
        now, count = time.monotonic(), spill.totals(client())["spilled_objects"]
        if count != seen or any(row["state"] == "spilling" for row in inspect.objects(client())):
            seen, since = count, now
        return now - since > 0.5

    wait_until(is_quiet, "spilling to end")


def split(refs: list[fastrt.ObjectRef]) -> tuple[list[int], list[int]]:
    """The numbers of the values in files, and of those in memory."""
    spilled = [k for k, ref in enumerate(refs) if spill.is_spilled(client(), ref)]
    return spilled, [k for k in range(len(refs)) if k not in spilled]


def test_full_disk_is_named_and_costs_nothing(disk):
    with fastrt.init(1, STORE, spill_dir=disk, advice=False):
        refs: list[fastrt.ObjectRef] = []
        with pytest.raises(fastrt.ObjectStoreFullError, match="No space left on device"):
            put_arrays(64, refs)
        assert len(refs) >= (STORE + DISK) // MIB - 6
        check(refs)
        del refs[:20]
        more = put_arrays(10)
        check(more)
        assert fsck.fsck(client()) == []
        del refs, more


def test_damaged_key_is_named_and_costs_nothing(tmp_path):
    refs: list[fastrt.ObjectRef] = []
    with fastrt.init(1, STORE, spill_dir=tmp_path, store_patience_s=0.2, advice=False):
        Path(store_client.require().socket_path).with_name("spill.key").write_bytes(b"short")
        with pytest.raises(fastrt.ObjectStoreFullError, match=r"spilling failed: .*spill\.key has 5 bytes, not 32"):
            put_arrays(40, refs)
        assert len(refs) >= 30
        check(refs)
        assert fsck.fsck(client()) == []
        del refs


def test_read_only_folder_is_named_and_its_values_are_read(disk, wait_until):
    with fastrt.init(1, STORE, spill_dir=disk, advice=False):
        refs = put_arrays(36)
        settle(wait_until)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(fastrt.ObjectStoreFullError, match="Read-only file system"):
            put_arrays(16, refs)
        check(refs)
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        put_arrays(2, refs)
        check(refs)
        del refs


def test_folder_on_a_memory_file_system_works():
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="test-spill-") as folder:
        with fastrt.init(1, STORE, spill_dir=folder, advice=False):
            refs = put_arrays(48)
            assert split(refs)[0]
            check(refs)
            del refs
        assert os.listdir(folder) == []


@pytest.mark.long
@pytest.mark.parametrize("falls_back", [True, False], ids=["mapped", "restored"])
@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_folder_on_another_file_system_works(tmp_path, kind, falls_back):
    with small_disk(tmp_path, 6 * STORE, kind) as folder:
        with fastrt.init(1, STORE, spill_dir=folder, spill_fallback=falls_back, advice=False):
            refs = put_arrays(48)
            assert split(refs)[0]
            check(refs)
            if falls_back:
                large = np.arange(2 * STORE // 8)
                assert np.array_equal(fastrt.get(fastrt.put(large)), large)
            assert fsck.fsck(client()) == []
            del refs
        assert set(os.listdir(folder)) <= {"rest", "lost+found"}


def test_disk_that_is_unmounted_costs_the_values_on_it(disk, wait_until):
    with fastrt.init(1, STORE, spill_dir=disk, advice=False):
        refs = put_arrays(36)
        settle(wait_until)
        spilled, inside = split(refs)
        subprocess.run(["umount", "-l", str(disk)], check=True)
        with pytest.raises(fastrt.ObjectLostError, match="cannot be read back"):
            fastrt.get(refs[spilled[0]])
        check(refs, inside)
        more = put_arrays(48)
        check(more)
        assert fsck.fsck(client()) == []
        del refs, more


@pytest.mark.parametrize("falls_back", [True, False], ids=["mapped", "restored"])
def test_removed_folder_costs_the_values_in_it_and_is_made_again(tmp_path, falls_back, wait_until):
    with fastrt.init(1, STORE, spill_dir=tmp_path, spill_fallback=falls_back, advice=False):
        refs = put_arrays(44)
        settle(wait_until)
        spilled, inside = split(refs)
        shutil.rmtree(spill.directory(client()))
        for k in spilled[:3]:
            with pytest.raises(fastrt.ObjectLostError, match="cannot be read back"):
                fastrt.get(refs[k])
        check(refs, inside)
        more = put_arrays(48)
        check(more)
        assert list(tmp_path.iterdir())
        del refs, more


@pytest.mark.parametrize("of_others", [False, True], ids=["mode", "owner"])
def test_folder_that_others_may_enter_is_not_used_until_that_is_mended(tmp_path, wait_until, of_others):
    if of_others and os.getuid() != 0:
        pytest.skip("only root can give a folder away")
    why = "belongs to uid 65534, not to uid 0" if of_others else "mode 755 lets other users in"
    with fastrt.init(1, STORE, spill_dir=tmp_path, advice=False):
        refs = put_arrays(44)
        folder = Path(spill.directory(client()))
        settle(wait_until)
        spilled, inside = split(refs)
        if of_others:
            os.chown(folder, 65534, 65534)
        else:
            folder.chmod(0o755)
        with pytest.raises(fastrt.ObjectLostError, match=why):
            fastrt.get(refs[spilled[0]])
        check(refs, inside)
        with pytest.raises(fastrt.ObjectStoreFullError, match=why):
            put_arrays(48)
        os.chown(folder, os.getuid(), os.getgid())
        folder.chmod(0o700)
        check(refs)
        del refs


@pytest.mark.parametrize("damage", ["missing", pytest.param("short", marks=pytest.mark.long), "changed"])
def test_damaged_file_that_the_daemon_reads_costs_its_value_only(tmp_path, damage):
    with fastrt.init(1, STORE, spill_dir=tmp_path, spill_fallback=False, advice=False):
        refs = put_arrays(44)
        victim = split(refs)[0][0]
        path = Path(spill.directory(client())) / f"{refs[victim].objref:016x}"
        if damage == "missing":
            path.unlink()
        else:
            size = path.stat().st_size
            with path.open("r+b") as file:
                file.truncate(size - (damage == "short"))
                file.seek(size // 2)
                file.write(b"??")
        with pytest.raises(fastrt.ObjectLostError, match=str(tmp_path)):
            fastrt.get(refs[victim])
        check(refs, [k for k in range(44) if k != victim])
        assert fsck.fsck(client()) == []
        del refs


def test_shared_memory_with_less_room_than_the_store_is_named():
    program = (
        "import fastrt, numpy as np\n"
        "with fastrt.init(1, '256MiB', spill_fallback=False, store_patience_s=0.5, advice=False):\n"
        "    refs = [fastrt.put(np.ones(1 << 20)) for _ in range(3)]\n"
        "    views = fastrt.get(refs)\n"
        "    more = [fastrt.put(np.ones(1 << 20)) for _ in range(9)]\n"
        "    views += fastrt.get(more)\n"
    )
    command = [*with_own_shm("64m"), sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    (line,) = [line for line in ended.stderr.splitlines() if "ObjectStoreFullError: " in line]
    assert "of 256.0 MiB, of which /dev/shm has room for " in line
    assert "or remove files in /dev/shm, or give it more room" in line


def test_values_that_the_daemon_cannot_read_back_for_lack_of_descriptors_are_not_lost(tmp_path):
    with fastrt.init(1, STORE, spill_dir=tmp_path, advice=False) as rt:
        refs = put_arrays(64)
        spilled = [k for k in split(refs)[0] if k >= 32]
        assert spilled
        refs[:32] = [None] * 32  # room, so that values are restored
        resource.prlimit(rt._processes.daemon.pid, resource.RLIMIT_NOFILE, (1, 1))
        for _ in range(4):  # the third read has the daemon restore a value
            check(refs, spilled)
        assert fsck.fsck(client()) == []


@fastrt.remote
def read_without_descriptors(warm: list[fastrt.ObjectRef], refs: list[fastrt.ObjectRef]) -> list[int]:
    """The first byte of each value, read while this process can open no file."""
    fastrt.get(warm[0])  # what a reader imports
    before, taken = resource.getrlimit(resource.RLIMIT_NOFILE), []
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 8, before[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        return [int(fastrt.get(ref)[0]) for ref in refs]
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("has_room", [True, False])
def test_process_that_can_open_no_file_reads_what_the_daemon_restores_for_it(tmp_path, wait_until, has_room):
    """It raised ObjectLostError, although no value was lost."""
    with fastrt.init(1, STORE, spill_dir=tmp_path, advice=False):
        refs = put_arrays(80)
        settle(wait_until)
        spilled, resident = split(refs)
        if has_room:
            for k in resident[::-1]:
                del refs[k]
        warm, wanted = [refs[spilled[0]]], [refs[k] for k in spilled[1:4]]
        pinned = []
        while not has_room and not spill.is_spilled(client(), (filler := put_arrays(1)[0])):
            pinned.append(fastrt.get(filler))
        read = read_without_descriptors.remote(warm, wanted)
        if has_room:
            assert fastrt.get(read, timeout=30) == spilled[1:4]
        else:
            with pytest.raises(OSError, match="Too many open files"):
                fastrt.get(read, timeout=60)
            check(refs)
        del pinned
