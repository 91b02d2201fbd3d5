"""Large values of libraries: `python bench/large_values.py --mib 256`. Needs PyArrow, Polars or torch for their rows.

For each kind of value: `put` beside a memcpy of as many bytes, and `get`, which gives a view (torch: private pages).
Then one value of four times the store: put and read, beside a copy of a file of that size by `dd` in the same folder.
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
    array = np.arange(4 * store // 8)
    put_s, ref = seconds(fastrt.put, array)
    read_s, total = seconds(lambda one: int(fastrt.get(one).sum()), ref)
    assert total == int(array.sum())
    del ref
    name, count = Path(folder) / "dd", array.nbytes // MIB
    command = ["dd", "if=/dev/zero", f"of={name}", "bs=1M", f"count={count}", "status=none"]
    disk_s, _ = seconds(subprocess.run, command)
    name.unlink()
    click.echo(f"4 x the store, {array.nbytes // MIB} MiB: put {put_s:.2f} s, sum {read_s:.2f} s, dd {disk_s:.2f} s")


@click.command()
@click.option("--mib", default=256, show_default=True, help="of each value; the last one has twice as many")
def main(mib: int) -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        with fastrt.init(num_workers=1, object_store_memory=2 * mib * MIB, spill_dir=Path(folder) / "spill"):
            click.echo("| value | put, of memcpy's speed | get, us |\n|---|---|---|")
            for name, value in values(mib * MIB):
                put, copy, get = measure(value, mib * MIB)
                click.echo(f"| {name} | {copy / put:.2f} | {get * 1e6:.0f} |")
        with fastrt.init(num_workers=1, object_store_memory=mib // 2 * MIB, spill_dir=Path(folder) / "spill"):
            larger_than_the_store(mib // 2 * MIB, folder)


if __name__ == "__main__":
    main()
