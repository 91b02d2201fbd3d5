"""Spilling beside `dd` on the same disk: `python bench/spilling.py --mib 1024 --store-mib 256 --value-mib 32`.

Prints the rates at which values beyond the store are put, read from their files with a cold and a warm page cache, and
restored to memory; and those of `dd` with blocks as large as a value. Each row is measured in turn in every round,
because the speed of a disk that others use changes from second to second. Then the times of small operations: quiet,
beside puts that find room, and beside puts that spill.
"""

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
SMALL_S = 2.0
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
        peer = rows[f"dd: {'write' if 'put' in title else 'read'}, direct"]
        ratio = statistics.median(mine / other for mine, other in zip(rates, peer, strict=True))
        shown = ", ".join(f"{rate:.0f}" for rate in rates)
        print(f"{title:32} {statistics.median(rates):7.0f} MB/s, {ratio:4.2f} x dd, direct  ({shown})")


@fastrt.remote
class Putter:
    """Puts values as quickly as it can, and keeps the last ones."""

    def start(self, nbytes: int, keep: int) -> None:
        self.data, self.keep, self.done = np.ones(nbytes, np.uint8), keep, 0
        self.ends = threading.Event()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        refs: list[fastrt.ObjectRef] = []
        while not self.ends.is_set():
            refs.append(fastrt.put(self.data))
            del refs[: -self.keep]
            self.done += 1

    def end(self) -> int:
        self.ends.set()
        self.thread.join()
        return self.done


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
    found: dict[str, list[float]] = {name: [] for name in ops}
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        for name, op in ops.items():
            start = time.perf_counter()
            op()
            found[name].append((time.perf_counter() - start) * 1e6)
        time.sleep(0.0005)
    return found


def small(folder: Path, store_mib: int, value_mib: int, rounds: int) -> None:
    """Print the times of small operations beside the work of a putter."""
    with fastrt.init(2, f"{store_mib}MiB", spill_dir=folder, advice=False):
        client = store_client.require().client
        putter = Putter.remote()
        held = {"quiet": 0, "beside puts in memory": 1, "beside puts that spill": 2 * store_mib // value_mib}
        times: dict[str, dict[str, list[float]]] = {title: {} for title in held}
        rates: dict[str, list[float]] = {title: [] for title in held}
        small_times(0.5)
        for _ in range(rounds):
            for title, keep in held.items():
                if keep:
                    fastrt.get(putter.start.remote(value_mib * MIB, keep))
                    time.sleep(0.5)
                before = spill.totals(client)["spilled_bytes"]
                for name, found in small_times(SMALL_S).items():
                    times[title].setdefault(name, []).extend(found)
                rates[title].append((spill.totals(client)["spilled_bytes"] - before) / SMALL_S / 1e6)
                if keep:
                    fastrt.get(putter.end.remote())
                    time.sleep(0.5)
    for title, found in times.items():
        for name, us in found.items():
            ranked = sorted(us)
            p50, p99 = (ranked[int(len(ranked) * share)] for share in (0.5, 0.99))
            rate = statistics.median(rates[title])
            print(f"{name:16} {title:24} p50 {p50:7.0f} us  p99 {p99:7.0f} us  ({rate:.0f} MB/s spilled)")


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
