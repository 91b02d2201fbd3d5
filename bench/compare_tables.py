"""Parameter tables beside the same work on local arrays in NumPy, in turns in one run; judges the required ratios.

Run: python bench/compare_tables.py [--rows 10000000] [--rounds 15] [--mib 64]

A worker (this process) and one server, with the log that is kept by default and without one.

- *push + Adam*: a gradient of MIB of float32 is pushed and the optimizer's step made, beside Adam in this process in
  NumPy without temporaries. *push_pull* also maps the new version.
- *lookup*: 4,096 random keys of an embedding of ROWS rows of 64 float32, beside NumPy fancy indexing with as many
  random indexes into a local array of that size; both make a new array.
- *update*: as many rows pushed, with LazyAdam, beside the same in NumPy.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from fastrt import ps

F = np.float32
KEYS, DIM = 4096, 64
FILL = 50_000
# (row, the least ratio: NumPy's time over fastrt's)
REQUIRED = {"push + Adam": 0.5, "lookup": 0.4}


def numpy_adam(p: Any, g: Any, m: Any, v: Any, a: Any, b: Any) -> None:
    """Adam in NumPy, into scratch arrays."""
    np.multiply(m, F(0.9), out=m)
    np.multiply(g, F(0.1), out=a)
    np.add(m, a, out=m)
    np.multiply(v, F(0.999), out=v)
    np.multiply(g, g, out=a)
    np.multiply(a, F(0.001), out=a)
    np.add(v, a, out=v)
    np.sqrt(v, out=a)
    np.multiply(a, F(1.5), out=a)
    np.add(a, F(1e-8), out=a)
    np.divide(m, a, out=b)
    np.multiply(b, F(0.1), out=b)
    np.subtract(p, b, out=p)


def numpy_rows(param: Any, mean: Any, square: Any, rows: Any, grads: Any) -> None:
    """Lazy Adam in NumPy, of rows that occur once."""
    m = F(0.9) * mean[rows] + F(0.1) * grads
    v = F(0.999) * square[rows] + F(0.001) * (grads * grads)
    mean[rows], square[rows] = m, v
    param[rows] -= F(0.1) * m / (np.sqrt(v) + F(1e-8))


def timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def alternate(rounds: int, works: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Seconds of each, run in turns."""
    found: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        work()
    for _ in range(rounds):
        for name, work in works.items():
            found[name].append(timed(work))
    return found


def dense(mib: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Pushes of a whole table."""
    count = (mib << 20) // 4
    dice = np.random.default_rng(1)
    grad = dice.random(count, F)
    arrays = [np.zeros(count, F), grad, np.zeros(count, F), np.zeros(count, F), np.empty(count, F), np.empty(count, F)]
    with ps.start(1) as kept, ps.start(1, durability="none") as unkept:
        table = kept.table("w", (count,), optimizer=ps.Adam())
        other = unkept.table("w", (count,), optimizer=ps.Adam(), nan="pass")
        works = {
            "numpy": lambda: numpy_adam(*arrays),
            "push + Adam": lambda: table.push(grad),
            "push_pull + Adam": lambda: table.push_pull(grad),
            "push + Adam, no log, no look for NaN": lambda: other.push(grad),
        }
        found = alternate(rounds, works)
    return {name: {"ours": found[name], "numpy": found["numpy"]} for name in works if name != "numpy"}


def sparse(rows: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Lookups and pushes of some rows of many."""
    dice = np.random.default_rng(2)
    local = np.zeros((rows, DIM), F)
    states = [np.zeros((rows, DIM), F) for _ in range(2)]
    grads = dice.random((KEYS, DIM), F)
    local += F(0.5)  # so that its memory is allocated
    with ps.start(1, durability="none") as cluster:
        table = cluster.embedding("e", DIM, init=0.5)
        for begin in range(0, rows, FILL):
            table.pull(np.arange(begin, min(rows, begin + FILL)))
        picked: list[Any] = [None]

        def pick() -> None:
            picked[0] = dice.permutation(rows)[:KEYS] if rows < 1 << 20 else np.unique(dice.integers(0, rows, KEYS))

        found: dict[str, list[float]] = {name: [] for name in ("lookup", "indexing", "update", "rows in NumPy")}
        for _ in range(20 * rounds):
            for name, work in (
                ("lookup", lambda: table.pull(picked[0])),
                ("indexing", lambda: local[picked[0]]),
                ("update", lambda: table.push(picked[0], grads[: len(picked[0])])),
                ("rows in NumPy", lambda: numpy_rows(local, *states, picked[0], grads[: len(picked[0])])),
            ):
                pick()  # other rows each time: the previous ones are in the cache
                found[name].append(timed(work))
    return {
        "lookup": {"ours": found["lookup"], "numpy": found["indexing"]},
        "update": {"ours": found["update"], "numpy": found["rows in NumPy"]},
    }


def ratio(row: dict[str, list[float]]) -> float:
    """NumPy's time over fastrt's: the median of the rounds."""
    return statistics.median(theirs / ours for ours, theirs in zip(row["ours"], row["numpy"], strict=True))


@click.command()
@click.option("--rows", default=10_000_000, show_default=True, help="Rows of the embedding; 10^7 take 8 GB in all.")
@click.option("--rounds", default=15, show_default=True, help="Of each row.")
@click.option("--mib", default=64, show_default=True, help="Size of the dense table.")
@click.option("--json", "target", type=click.Path(path_type=Path), help="Also write all times there.")
def main(rows: int, rounds: int, mib: int, target: Path | None) -> None:
    """Measure and judge."""
    found = {**dense(mib, rounds), **sparse(rows, rounds)}
    shown = Table("work", "ours, p50 ms", "p99 ms", "NumPy, p50 ms", "x NumPy", "required", "", box=box.SIMPLE)
    missed = False
    for name, row in found.items():
        ranked = sorted(row["ours"])
        times = ranked[len(ranked) // 2], ranked[len(ranked) * 99 // 100], statistics.median(row["numpy"])
        share, least = ratio(row), REQUIRED.get(name)
        verdict = "" if least is None else "reached" if share >= least else "MISSED"
        missed = missed or verdict == "MISSED"
        cells = [f"{1e3 * one:.3g}" for one in times]
        shown.add_row(name, *cells, f"{share:.2f}", "" if least is None else f"{least:g}", verdict)
    Console(width=None if Console().is_terminal else 120).print(shown)
    if target is not None:
        target.write_text(json.dumps({"mib": mib, "rows": rows, "times": found}))
    sys.exit(missed)


if __name__ == "__main__":
    main()
