"""Spilling beside `dd` on the same disk: `python bench/spilling.py --mib 1024 --store-mib 256 --value-mib 32`.

Prints the rates at which values beyond the store are put, read from their files with a cold and a warm page cache, and
restored to memory; and those of `dd` with blocks as large as a value. Each row is measured in turn in every round,
because the speed of a disk that others use changes from second to second. Then the times of small operations: quiet,
beside puts that find room, and beside puts that spill. They are made one after the other without a pause, and with
0.5 ms between two: then caches are cold, as other work in between evicts their lines. The controls are a thread that
copies as many bytes in its own memory, and one that also writes each copy to a file in one call.
"""

import mmap
import os
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import click
import numpy as np

import fastrt
from fastrt._core.objects import spill
from fastrt.store import client as store_client
from fastrt.store.messages import Restore

MIB = 1 << 20
SMALL_S = 4.0
DD = {
    "write, direct": ("write", ["oflag=direct"]),
    "write, buffered": ("write", []),
    "write, buffered + fdatasync": ("write", ["conv=fdatasync"]),
    "read, direct": ("read", ["iflag=direct"]),
    "read, buffered, cold": ("read", []),
}


def dd(folder: Path, way: str, options: list[str], nbytes: int, block: int) -> float:
    """The seconds that dd takes to write or read a file."""
    path = folder / "dd"
    if way == "write":
        path.unlink(missing_ok=True)
        ends = ["if=/dev/zero", f"of={path}"]
    else:
        forget(path)
        ends = [f"if={path}", "of=/dev/null"]
    start = time.perf_counter()
    run = ["dd", *ends, f"bs={block}", f"count={nbytes // block}", *options]
    subprocess.run(run, check=True, capture_output=True)
    return time.perf_counter() - start


def forget(path: Path) -> None:
    """Drop a file's pages from memory."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def disk_round(folder: Path, mib: int, store_mib: int, value_mib: int) -> dict[str, float]:
    """MB/s of a session's puts, reads and restores."""
    nbytes, found = value_mib * MIB, {}
    data = np.random.default_rng(1).integers(0, 255, nbytes, np.uint8)
    with fastrt.init(1, f"{store_mib}MiB", spill_dir=folder, advice=False):
        client = store_client.require().client
        refs = [fastrt.put(data) for _ in range(store_mib // value_mib)]  # the store's memory is touched once
        del refs
        refs = [fastrt.put(data) for _ in range(store_mib // value_mib)]
        start = time.perf_counter()
        refs += [fastrt.put(data) for _ in range(mib // value_mib)]
        found["fastrt: put beyond the store"] = mib * MIB / (time.perf_counter() - start) / 1e6
        files = [ref for ref in refs if spill.is_spilled(client, ref)]
        place = Path(spill.directory(client))
        for ref in files:
            forget(place / f"{ref.objref:016x}")
        for title in ("fastrt: read, cold", "fastrt: read, warm"):
            start = time.perf_counter()
            for ref in files:
                assert fastrt.get(ref)[-1] == data[-1]
            found[title] = len(files) * nbytes / (time.perf_counter() - start) / 1e6
        some = files[: store_mib // value_mib // 2]
        del refs, files, ref
        for ref in some:
            forget(place / f"{ref.objref:016x}")
        tell = store_client.require().asks
        start = time.perf_counter()
        for ref in some:
            assert tell(Restore(ref.index, ref.objref))
        for ref in some:
            assert spill.wait_restored(client, ref, 60.0)
        found["fastrt: restore, cold"] = len(some) * nbytes / (time.perf_counter() - start) / 1e6
    return found


def disk(folder: Path, mib: int, store_mib: int, value_mib: int, rounds: int) -> None:
    """Measure the rates in turn, and print the medians."""
    rows: dict[str, list[float]] = {}
    for _ in range(rounds):
        for title, (way, options) in DD.items():
            took = dd(folder, way, options, mib * MIB, value_mib * MIB)
            rows.setdefault(f"dd: {title}", []).append(mib * MIB / took / 1e6)
        (folder / "dd").unlink()
        for title, rate in disk_round(folder, mib, store_mib, value_mib).items():
            rows.setdefault(title, []).append(rate)
    for title, rates in rows.items():
        peer = rows[f"dd: {'write' if 'put' in title or 'write' in title else 'read'}, direct"]
        ratio = statistics.median(mine / other for mine, other in zip(rates, peer, strict=True))
        shown = ", ".join(f"{rate:.0f}" for rate in rates)
        print(f"{title:32} {statistics.median(rates):7.0f} MB/s, {ratio:4.2f} x dd, direct  ({shown})")


@fastrt.remote
class Load:
    """Keeps a thread busy: with puts, or, as controls, with copies that may be written to a file past the page cache.

    Args:
        nbytes: of each value.
        folder: for the control's file.
    """

    def __init__(self, nbytes: int, folder: str) -> None:
        self.data, self.room = np.ones(nbytes, np.uint8), mmap.mmap(-1, nbytes)
        self.target = np.frombuffer(self.room, np.uint8)
        self.file = os.open(Path(folder) / "control", os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
        self.writes = 0
        self.refs: list[fastrt.ObjectRef] = []

    def start(self, step: str, keep: int) -> None:
        """Begin to repeat the method `step`, and to keep the last `keep` values."""
        self.keep, self.ends = keep, threading.Event()
        self.thread = threading.Thread(target=self.run, args=[getattr(self, step)])
        self.thread.start()

    def run(self, step: Callable[[], None]) -> None:
        while not self.ends.is_set():
            step()

    def put(self) -> None:
        self.refs.append(fastrt.put(self.data))
        del self.refs[: -self.keep]

    def copy(self) -> None:
        np.copyto(self.target, self.data)

    def copy_and_write(self) -> None:
        self.copy()
        os.pwrite(self.file, self.room, self.writes % 32 * len(self.data))
        self.writes += 1

    def end(self) -> None:
        self.ends.set()
        self.thread.join()
        self.refs.clear()


@fastrt.remote
def increment(value: int) -> int:
    return value + 1


def small_times(seconds: float) -> dict[str, list[float]]:
    """The times of small operations in microseconds."""
    data = b"x" * 1000
    ops: dict[str, Callable[[], object]] = {
        "put + get, 1 kB": lambda: fastrt.get(fastrt.put(data)),
        "task": lambda: fastrt.get(increment.remote(1)),
    }
    found: dict[str, list[float]] = {}
    until = time.perf_counter()
    for name, op in ops.items():
        until += seconds / 4
        while time.perf_counter() < until:
            timed(found.setdefault(name, []), op)
    until += seconds / 2
    while time.perf_counter() < until:
        for name, op in ops.items():
            timed(found.setdefault(f"{name}, paced", []), op)
        time.sleep(0.0005)
    return found


def timed(times: list[float], op: Callable[[], object]) -> None:
    """Call an operation, and note its time in microseconds."""
    start = time.perf_counter()
    op()
    times.append((time.perf_counter() - start) * 1e6)


def small(folder: Path, store_mib: int, value_mib: int, rounds: int) -> None:
    """Print the times of small operations beside loads: puts, and plain copies and writes of as many bytes."""
    with fastrt.init(2, f"{store_mib}MiB", spill_dir=folder, advice=False):
        client = store_client.require().client
        load = Load.remote(value_mib * MIB, str(folder))
        loads = {
            "quiet": None,
            "beside copies": ("copy", 0),
            "beside puts in memory": ("put", 1),
            "beside copies to disk": ("copy_and_write", 0),
            "beside puts that spill": ("put", 2 * store_mib // value_mib),
        }
        found: dict[tuple[str, str], list[list[float]]] = {}
        rates: dict[str, list[float]] = {title: [] for title in loads}
        small_times(0.5)
        for _ in range(rounds):
            for title, kind in loads.items():
                if kind:
                    fastrt.get(load.start.remote(*kind))
                    time.sleep(0.5)
                before = spill.totals(client)["spilled_bytes"]
                for name, times in small_times(SMALL_S).items():
                    found.setdefault((name, title), []).append(sorted(times))
                rates[title].append((spill.totals(client)["spilled_bytes"] - before) / SMALL_S / 1e6)
                if kind:
                    fastrt.get(load.end.remote())
                    time.sleep(0.5)
    for (name, title), ranked in found.items():
        p50, p99 = ([times[int(len(times) * share)] for times in ranked] for share in (0.5, 0.99))
        print(
            f"{name:23} {title:22} p50 {statistics.median(p50):5.1f} us  p99 {statistics.median(p99):5.1f} us "
            f"({min(p99):.1f} to {max(p99):.1f} in {rounds} rounds)  {statistics.median(rates[title]):.0f} MB/s spilled"
        )


@click.command()
@click.option("--mib", default=1024, show_default=True, help="Data beyond the store.")
@click.option("--store-mib", default=256, show_default=True, help="The store.")
@click.option("--value-mib", default=32, show_default=True, help="Each value, and dd's blocks.")
@click.option("--rounds", default=3, show_default=True, help="How often each row is measured.")
@click.option("--folder", default="/var/tmp", show_default=True, help="A folder on the disk.")
@click.option("--part", type=click.Choice(["disk", "small", "all"]), default="all", show_default=True)
def main(mib: int, store_mib: int, value_mib: int, rounds: int, folder: str, part: str) -> None:
    """Measure spilling."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        if part in ("disk", "all"):
            disk(Path(place), mib, store_mib, value_mib, rounds)
        if part in ("small", "all"):
            small(Path(place), store_mib, value_mib, rounds)


if __name__ == "__main__":
    main()
