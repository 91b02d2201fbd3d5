"""An exported function called through the seed's RPCs, from a foreign program to its result in that program's store.

Run: python bench/compare_seed.py [--rounds 5] [--before SRC]

The foreign program is this process: client and store in plain grpc (`foreign.py`). It calls `RemoteCall`, requests the
result for its own store by `RequestObj`, gets it by `StreamObj`, reports it by `ObjReady`, and drops its reference; the
scheduler then orders both stores to deallocate it. One at a time is timed from `RemoteCall` to the arrival of the
last byte; in flight, from the first call until all results have arrived. Printed beside: the RPCs that the foreign
program makes and serves for one call, and processor time of a call in each process.

The same program at a scheduler that answers and does nothing else takes its turn in each round: no scheduler that
speaks gRPC is faster. An empty unary handler of plain grpc ends the run. `--before` names the `src` folder of another
build of fastrt, whose node takes turns with this one's.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import click
from foreign import Cluster, Empty, Foreign, Nothing, cpu_s

ALONE, MANY, IN_FLIGHT = 150, 800, 100
REQUIRED_MS, REQUIRED_RATE = 1.5, 1200.0
DROP_S = 30.0


class Side:
    """One scheduler, a foreign program at it, and the figures of its rounds.

    Args:
        name: printed.
        cluster: the scheduler.
        stack: ends the program.
    """

    def __init__(self, name: str, cluster: Cluster | Nothing, stack: ExitStack) -> None:
        self.name = name
        self._cluster = cluster
        self._foreign = Foreign(self._cluster, stack)
        self._number = 0
        self.figures: dict[str, list[float]] = {}
        self.alone: list[float] = []

    def round(self, keep: bool) -> None:
        """Measure once."""
        alone = self._costs("one at a time", ALONE, self._one_by_one)
        flight = self._costs(f"{IN_FLIGHT} in flight", MANY, self._in_flight)
        if keep:
            self.alone += alone.pop("times")
            flight["rate"] = MANY / flight.pop("seconds")
            for key, value in (*alone.items(), *flight.items()):
                self.figures.setdefault(key, []).append(value)

    def _one_by_one(self) -> dict[str, Any]:
        times = []
        for _ in range(ALONE):
            call = self._next()
            began = time.perf_counter()
            ref, _ = self._foreign.fetch(call)
            times.append(time.perf_counter() - began)
            self._foreign.drop(ref)
        return {"times": times}

    def _in_flight(self) -> dict[str, Any]:
        calls = [self._next() for _ in range(MANY)]
        began = time.perf_counter()
        self._foreign.run(calls, IN_FLIGHT)
        return {"seconds": time.perf_counter() - began}

    def _next(self) -> Any:
        self._number += 1
        return self._foreign.square(self._number)

    def _costs(self, name: str, count: int, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Run, and add RPCs and processor time of a call; until the store has dropped all results."""
        foreign = self._foreign
        rpcs, dropped = foreign.rpcs.total(), foreign.dropped
        before, own = self._cluster.cpu_s(), cpu_s(os.getpid())
        found = run()
        until = time.monotonic() + DROP_S
        while foreign.dropped < dropped + count:
            if time.monotonic() > until:
                raise TimeoutError(f"{dropped + count - foreign.dropped} objects were not deallocated")
            time.sleep(0.001)
        after, mine = self._cluster.cpu_s(), cpu_s(os.getpid())
        for process, used in after.items():
            found[f"{name}: {process}"] = (used - before[process]) / count * 1e3
        found[f"{name}: foreign program"] = (mine - own) / count * 1e3
        found[f"{name}: RPCs"] = (foreign.rpcs.total() - rpcs) / count
        return found

    def show(self) -> None:
        """Print the medians."""
        ranked = sorted(self.alone)
        p50, p99 = ranked[len(ranked) // 2], ranked[len(ranked) * 99 // 100]
        rate = statistics.median(self.figures["rate"])
        print(f"{self.name}: one at a time p50 {p50 * 1e3:.2f} ms, p99 {p99 * 1e3:.2f} ms (required {REQUIRED_MS} ms)")
        print(f"{self.name}: {rate:.0f} a second with {IN_FLIGHT} in flight (required {REQUIRED_RATE:.0f})")
        for name in ("one at a time", f"{IN_FLIGHT} in flight"):
            mine = {key.split(": ")[1]: statistics.median(each) for key, each in self.figures.items() if name in key}
            rpcs = mine.pop("RPCs")
            words = ", ".join(f"{process} {ms:.2f}" for process, ms in mine.items())
            print(f"{self.name}, {name}: {rpcs:.1f} RPCs of the foreign program; processor ms a call: {words}")


def show_empty(empty: Empty) -> None:
    """Print the cost of an empty handler."""
    before, own, began = cpu_s(empty.pid), cpu_s(os.getpid()), time.perf_counter()
    for _ in range(MANY):
        empty()
    seconds = time.perf_counter() - began
    server_ms, client_ms = (each / MANY * 1e3 for each in (cpu_s(empty.pid) - before, cpu_s(os.getpid()) - own))
    print(
        f"an empty handler of plain grpc: {seconds / MANY * 1e3:.2f} ms a call; processor ms: client {client_ms:.2f}, "
        f"server {server_ms:.2f}"
    )


@click.command()
@click.option("--rounds", default=5, show_default=True, help="How often each is run, after once to warm up.")
@click.option("--before", help="The src folder of another build of fastrt.")
def main(rounds: int, before: str | None) -> None:
    """Measure in turns, and print the medians."""
    with ExitStack() as stack:
        empty = Empty(stack)
        sides = [Side("before", Cluster(stack, before), stack)] if before else []
        sides.append(Side("now", Cluster(stack), stack))
        sides.append(Side("a scheduler that does nothing", Nothing(stack), stack))
        for turn in range(rounds + 1):
            for side in sides:
                side.round(turn > 0)
        for side in sides:
            side.show()
        show_empty(empty)


if __name__ == "__main__":
    main()
