"""An exported function called through the seed's RPCs, from a foreign program to its result in that program's store.

Run: python bench/compare_seed.py [--rounds 5] [--before SRC]

The foreign program is this process: client and store in plain grpc (`foreign.py`). It calls `RemoteCall`, requests the
result for its own store by `RequestObj`, gets it by `StreamObj`, reports it by `ObjReady`, and drops its reference; the
scheduler then orders both stores to deallocate it. One at a time is timed from `RemoteCall` to the arrival of the
last byte; in flight, from the first call until all results have arrived. Printed beside: the RPCs that the foreign
program makes and serves for one call, and processor time of a call in each process.

The same program at a scheduler that answers and does nothing else takes its turn in each round: no scheduler that
speaks gRPC is faster. The run ends with an empty unary handler of plain grpc, and with the least time that a call's
RPCs can take if each costs as much: with several in flight, their processor time on all processors; one at a time, also
the three that follow each other. `--before` names the `src` folder of another build of fastrt, whose node takes turns
with this one's.

Why the required figures are not reached here: the scheduler that does nothing misses them too (1.73 to 1.85 ms, 907 to
997 a second). The foreign program alone uses 0.75 to 1.1 ms of processor time a call, mostly under its interpreter's
lock, and switches threads 22 to 35 times. Tried, in turns beside the form in use, with the scheduler that does nothing:

    the foreign program by `grpc.aio`                             680 a second, 1.2 ms of processor time a call
    one thread for its server; a switch interval of 0.2 ms        769; 954 a second beside 976
    GRPC_EXPERIMENTS without the event engine's client, listener  0.95 of the time one at a time, 1.01 of the rate

With fastrt's: no polling before its server sleeps, no gain. A call between its own processes takes 305 us by a Unix
socket without TLS and 355 us as it is, and with 32 in flight 122 and 125 us. Of the processor time of a call 0.15 ms is
Python in the scheduler and 0.04 ms in the bridge (py-spy, samples that hold the lock); the rest is gRPC and the kernel.
One at a time, a call takes two messages of the link and 1.05 exchanges; with 100 in flight 1.2 and 0.33.
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
IN_TURN = 3  # RPCs of a call that follow each other: RemoteCall, RequestObj, StreamObj


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

    def rpcs(self) -> dict[str, float]:
        """RPCs of the foreign program for one call, by how many were in flight."""
        return {key.split(": ")[0]: statistics.median(each) for key, each in self.figures.items() if "RPCs" in key}

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


def show_empty(empty: Empty, rpcs: dict[str, float]) -> None:
    """Print the cost of an empty handler, and what follows from it for a call of so many RPCs."""
    for name, run in (
        ("one at a time", lambda: [empty() for _ in range(MANY)]),
        (f"{IN_FLIGHT} in flight", lambda: empty.run(MANY, IN_FLIGHT)),
    ):
        run()
        before, own, began = cpu_s(empty.pid), cpu_s(os.getpid()), time.perf_counter()
        run()
        ms = (time.perf_counter() - began) / MANY * 1e3
        server, client = (each / MANY * 1e3 for each in (cpu_s(empty.pid) - before, cpu_s(os.getpid()) - own))
        print(
            f"an empty handler of plain grpc, {name}: {ms:.2f} ms a call; processor ms: client {client:.2f}, "
            f"server {server:.2f}"
        )
        at_once = rpcs[name] * (server + client) / len(os.sched_getaffinity(0))
        least = max(IN_TURN * ms, at_once) if name == "one at a time" else at_once
        print(f"so {rpcs[name]:.1f} such RPCs take {least:.2f} ms at least, {1e3 / least:.0f} a second")


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
        show_empty(empty, sides[-1].rpcs())


if __name__ == "__main__":
    main()
