"""Large values of libraries: `python bench/large_values.py --mib 256`. Needs PyArrow, Polars or torch for their rows.

For each kind of value: `put` beside a memcpy of as many bytes, and `get`, which gives a view (torch: private pages).
Then one value of four times the store: put and read, beside `dd` in the same folder, past the page cache.
"""

import importlib.util
import mmap
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np

import fastrt

MIB = 1 << 20
ROUNDS = 5


def values(nbytes: int) -> Iterator[tuple[str, Any]]:
    array = np.arange(nbytes // 8, dtype=np.float64)
    yield "NumPy array", array
    if importlib.util.find_spec("pyarrow"):
        import pyarrow as pa

        yield "Arrow table", pa.table({"a": array[: len(array) // 2], "b": array[len(array) // 2 :]})
    if importlib.util.find_spec("polars"):
        import polars as pl

        yield "Polars frame", pl.DataFrame({"a": array[: len(array) // 2], "b": array[len(array) // 2 :]})
    if importlib.util.find_spec("torch"):
        import torch

        yield "torch tensor", torch.from_numpy(array)


def seconds(function: Callable[..., Any], *args: Any) -> tuple[float, Any]:
    began = time.perf_counter()
    found = function(*args)
    return time.perf_counter() - began, found


def measure(value: Any, nbytes: int) -> tuple[float, float, float]:
    """Medians of the seconds of put and memcpy, both into memory that was used before, and the least of get."""
    source, target = np.ones(nbytes, np.uint8), np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
    rows, gets = [], []
    for _ in range(ROUNDS + 1):
        put_s, ref = seconds(fastrt.put, value)
        copy_s, _ = seconds(np.copyto, target, source)
        for _ in range(10):
            get_s, got = seconds(fastrt.get, ref)
            gets.append(get_s)
            del got
        rows.append((put_s, copy_s))
        del ref
    put, copy = (statistics.median(column) for column in zip(*rows[1:], strict=True))
    return put, copy, min(gets)


def larger_than_the_store(store: int, folder: str) -> None:
    """One value of four times the store beside `dd` past the page cache, in turn; the ratios' medians, and each row."""
    array, name = np.arange(4 * store // 8), Path(folder) / "dd"
    total, count = int(array.sum()), array.nbytes // MIB
    ends = ["status=none", "bs=1M", f"count={count}"]
    rows = []
    for _ in range(ROUNDS):
        put_s, ref = seconds(fastrt.put, array)
        read_s, found = seconds(lambda one: int(fastrt.get(one).sum()), ref)
        assert found == total
        del ref
        write_s, _ = seconds(subprocess.run, ["dd", "if=/dev/zero", f"of={name}", "oflag=direct", *ends])
        load_s, _ = seconds(subprocess.run, ["dd", f"if={name}", "of=/dev/null", "iflag=direct", *ends])
        name.unlink()
        rows.append((put_s, write_s, read_s, load_s))
        click.echo("put {:.2f} s, dd {:.2f} s; sum {:.2f} s, dd {:.2f} s".format(*rows[-1]), err=True)
    put, read = (statistics.median(row[k + 1] / row[k] for row in rows) for k in (0, 2))
    click.echo(f"4 x the store, {count} MiB: put {put:.2f} of dd's speed, sum {read:.2f}")


@click.command()
@click.option("--mib", default=256, show_default=True, help="of each value; the last one has twice as many")
@click.option("--part", type=click.Choice(["copies", "disk"]), multiple=True, default=["copies", "disk"])
def main(mib: int, part: tuple[str, ...]) -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        if "copies" in part:
            with fastrt.init(num_workers=1, object_store_memory=2 * mib * MIB, spill_dir=Path(folder) / "spill"):
                click.echo("| value | put, of memcpy's speed | get, us |\n|---|---|---|")
                for name, value in values(mib * MIB):
                    put, copy, get = measure(value, mib * MIB)
                    click.echo(f"| {name} | {copy / put:.2f} | {get * 1e6:.0f} |")
        if "disk" not in part:
            return
        with fastrt.init(num_workers=1, object_store_memory=mib // 2 * MIB, spill_dir=Path(folder) / "spill"):
            larger_than_the_store(mib // 2 * MIB, folder)


if __name__ == "__main__":
    main()
