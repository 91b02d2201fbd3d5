"""Copies of stored values to a GPU, beside Ray's: `python bench/gpu_copy.py --mib 1024`. Needs torch and a GPU.

Rows are GB/s of `torch.from_numpy(get(ref)).to("cuda")`: medians of the rounds, in each of which all kinds take turns.
The memory of fastrt's store is copied as it is, and page-locked by cudaHostRegister, which a process does once for a
value that it copies often; its time is printed too. Without a GPU or torch the command says so, and measures nothing.
docs/resources.md has figures.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import click
import numpy as np

import fastrt

MIB = 1 << 20
ROUNDS = 9
_READ_ONLY = 0x08  # cudaHostRegisterReadOnly: the views of the store are


def missing() -> str:
    """Return why nothing can be measured here; "": it can."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch

    return "" if torch.cuda.is_available() else "torch finds no GPU"


def copy_s(view: np.ndarray[Any, Any]) -> float:
    """Copy a view to the GPU; return the seconds that it took.

    Raises:
        AssertionError: the copy has other values.
    """
    import torch

    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of arrays that cannot be written
        start = time.perf_counter()
        there = torch.from_numpy(view).to("cuda")
        torch.cuda.synchronize()
        took = time.perf_counter() - start
    assert float(there[-1]) == float(view[-1])
    return took


def lock_s(view: np.ndarray[Any, Any]) -> float:
    """Page-lock the memory of a view; return the seconds that it took.

    Raises:
        click.ClickException: CUDA refuses.
    """
    import torch

    start = time.perf_counter()
    code = int(torch.cuda.cudart().cudaHostRegister(view.ctypes.data, view.nbytes, _READ_ONLY))
    if code:
        raise click.ClickException(f"cudaHostRegister fails with error {code}")
    return time.perf_counter() - start


@click.command()
@click.option("--mib", default=1024, show_default=True, help="Size of the value.")
def main(mib: int) -> None:
    """Measure copies of one value to the GPU."""
    why = missing()
    if why:
        click.echo(f"nothing is measured: {why}")
        return
    import torch

    array = np.arange(mib * MIB // 8, dtype=np.float64)
    kinds: dict[str, Callable[[], float]] = {}
    with ExitStack() as stack:
        stack.enter_context(fastrt.init(num_workers=1, object_store_memory=3 * mib * MIB))
        plain, locked = fastrt.get([fastrt.put(array), fastrt.put(array)])
        click.echo(f"page-locking {mib} MiB of the store: {1000 * lock_s(locked):.1f} ms")
        stack.callback(torch.cuda.cudart().cudaHostUnregister, locked.ctypes.data)
        kinds = {"fastrt": lambda: copy_s(plain), "fastrt, page-locked": lambda: copy_s(locked)}
        if importlib.util.find_spec("ray") is None:
            click.echo("no rows of Ray: it is not installed")
        else:
            import ray

            ray.init(num_cpus=1, object_store_memory=2 * mib * MIB, include_dashboard=False, log_to_driver=False)
            stack.callback(ray.shutdown)
            theirs = ray.get(ray.put(array))
            kinds["Ray"] = lambda: copy_s(theirs)
        seconds: dict[str, list[float]] = {name: [] for name in kinds}
        for _ in range(ROUNDS):
            for name, copy in kinds.items():
                seconds[name].append(copy())
    for name, times in seconds.items():
        click.echo(f"{name + ':':<22} {array.nbytes / statistics.median(times) / 1e9:6.1f} GB/s")


if __name__ == "__main__":
    main()
