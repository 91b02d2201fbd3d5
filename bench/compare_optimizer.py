"""The optimizers' updates beside memory's speed and beside NumPy, alternating in one run.

    python bench/compare_optimizer.py [MIB]

An update of MIB (default 64) of float32, one thread. Its memory traffic is each array read once and written once;
memory's speed is that of memcpy between as many arrays of the same size: bytes read and written over its time. The
median of the rounds' ratios counts. NumPy does the same
update without temporaries, with scratch arrays made before.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from compare_tables import numpy_adam, timed

from fastrt._core.tables import optimizer

ROUNDS = 9
BAR = 0.7  # of memory's speed
F = np.float32
Arrays = list[np.ndarray[Any, Any]]


# name -> arrays that are read, arrays that are written, the update
UPDATES: dict[str, tuple[int, int, Callable[..., None]]] = {
    "sgd": (2, 1, lambda p, g, s, t: optimizer.sgd(p, g, 0.001)),
    "momentum": (3, 2, lambda p, g, s, t: optimizer.momentum(p, g, s, 0.001)),
    "nesterov": (3, 2, lambda p, g, s, t: optimizer.momentum(p, g, s, 0.001, nesterov=True)),
    "adagrad": (3, 2, lambda p, g, s, t: optimizer.adagrad(p, g, s, 0.001)),
    "adam": (4, 3, lambda p, g, s, t: optimizer.adam(p, g, s, t, 7, 0.001)),
    "adamw": (4, 3, lambda p, g, s, t: optimizer.adam(p, g, s, t, 7, 0.001, weight_decay=0.01)),
    "ftrl": (4, 3, lambda p, g, s, t: optimizer.ftrl(p, g, s, t, 0.1, 0.01, 0.01)),
}


def main() -> None:
    mib = int(sys.argv[1]) if len(sys.argv) > 1 else 64
    count = (mib << 20) // 4
    dice = np.random.default_rng(1)
    arrays = [dice.random(count, F) for _ in range(6)]
    nbytes = arrays[0].nbytes
    gbs: dict[str, list[float]] = {name: [] for name in UPDATES}
    shares: dict[str, list[float]] = {name: [] for name in UPDATES}
    against: list[float] = []

    def copy() -> float:
        """Bytes read and written a second by memcpy, over two pairs of arrays."""
        took = timed(lambda: (np.copyto(arrays[4], arrays[0]), np.copyto(arrays[5], arrays[1])))
        return 4 * nbytes / took

    for _ in range(ROUNDS):
        for name, (reads, writes, work) in UPDATES.items():
            before = copy()
            took = timed(lambda work=work: work(*arrays[:4]))
            speed = (reads + writes) * nbytes / took
            gbs[name].append(speed / 1e9)
            shares[name].append(speed / ((before + copy()) / 2))
            if name == "adam":
                against.append(timed(lambda: numpy_adam(*arrays)) / took)
    print(f"{mib} MiB of float32, one thread, {ROUNDS} rounds; medians")
    for name in UPDATES:
        share = statistics.median(shares[name])
        verdict = "reached" if share >= BAR else "MISSED"
        print(
            f"{name:9} {statistics.median(gbs[name]):6.1f} GB/s read and written, {share:5.2f} of memcpy's: {verdict}"
        )
    print(f"adam against NumPy without temporaries: {statistics.median(against):.1f} times as fast")


if __name__ == "__main__":
    main()
