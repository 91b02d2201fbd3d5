"""How the cluster's decisions grow: one owner with many tasks, and 10 to 10,000 nodes. In virtual time.

`python -m tests.simulation.scale [--tasks N] [NODES...]`. The owner's placement (`node.placing` over the compiled
policy) and the head's and the owner's views (`cluster.views`) are the real ones; nodes, network and tasks are events of
a clock. Printed for each size: placement decisions a second of CPU, frames and reports a task, bytes a node, the head's
share of a core, and how long the owner takes to learn of a death. The tasks are so long that all CPUs are busy for
`WORK_S`, but at least `TASK_S`: so small sizes run fewer tasks.
"""

from __future__ import annotations

import argparse
import heapq
import random
import sys
import time
from collections import Counter
from typing import Any

from fastrt.cluster.views import Members, Views
from fastrt.net.grpc.descriptors import message_set
from fastrt.node.keys import TaskKey
from fastrt.node.placing import ELSEWHERE, GONE, Placing
from fastrt.store.messages import NodeRow
from fastrt.tasks.resources import CPU, Demand, parts_of

from .network import KEEPALIVE_S

_SET = message_set("node")
Report, View = _SET.message("fastrt.node.Report"), _SET.message("fastrt.node.View")
WORK_S = 20.0
TASK_S = 0.25
CPUS = 4
DELAY_S = 0.001
TICK_S = 0.005  # between two rounds of the owner's daemon
BACKLOG = 2  # ready tasks for each CPU: the owner's program submits further ones as they end
PART = 10_000


class Scale:
    """One size.

    Args:
        nodes: how many run tasks; the owner runs none.
        tasks: how many there are.
    """

    def __init__(self, nodes: int, tasks: int) -> None:
        self.rng = random.Random(nodes)
        tasks = min(tasks, int(WORK_S * nodes * CPUS / TASK_S))
        self.nodes, self.tasks, self.left, self.ended = nodes, tasks, tasks, 0
        self.duration_s = WORK_S * nodes * CPUS / tasks
        self.now = 0.0
        self.names = [f"{k:032x}" for k in range(nodes + 1)]  # the last one is the owner's
        self.free = [CPUS] * nodes
        self.queues = Counter[int]()
        self.dirty: dict[int, float] = {}  # nodes whose load has changed, and when they may report it
        self.reported_at = [0.0] * nodes
        self.ends: list[tuple[float, int, int]] = []
        self.arrivals: list[tuple[float, bytes]] = []
        self.views = Views("c" * 32)
        self.members = Members(lambda why: sys.exit(why))
        self.placing = Placing(self.names[nodes], {}, True)
        self.placing.has_uplink = True
        self.cpu = Counter[str]()
        self.count = Counter[str]()
        self.ids = 0
        for k in range(nodes + 1):
            self.views.report(k, self._report(k))
            self.count["reports"] += 1
        self._views()
        self._apply()
        self.join_bytes = self.count["view bytes"] / nodes  # each node reads all members once
        self.count.clear()

    def _report(self, k: int) -> Any:
        is_owner = k == self.nodes
        row = {} if is_owner else {CPU: CPUS * PART}
        free = {} if is_owner else {CPU: max(0, self.free[k]) * PART}
        return Report(
            node=self.names[k], address=f"10.{k >> 16}.{k >> 8 & 255}.{k & 255}:1", name=f"n{k}",
            workers=0 if is_owner else CPUS, total=row, free=free, looking=is_owner,
        )  # fmt: skip

    # ---- the head ----

    def _views(self) -> None:
        began = time.process_time()
        due = self.views.due(self.now)
        for stream, data in due:
            self.count["views"] += 1
            self.count["view bytes"] += len(data)
            if stream == self.nodes:
                self.count["owner's bytes"] += len(data)
                self.arrivals.append((self.now + DELAY_S, data))
            self.views.written(stream)
        self.cpu["head"] += time.process_time() - began

    def _reports(self) -> None:
        began = time.process_time()
        for k in [k for k, at in self.dirty.items() if at <= self.now]:
            del self.dirty[k]
            self.reported_at[k] = self.now
            self.views.report(k, self._report(k))
            self.count["reports"] += 1
        self.cpu["head"] += time.process_time() - began

    def _apply(self) -> None:
        """The owner takes the views that have arrived."""
        while self.arrivals and self.arrivals[0][0] <= self.now + DELAY_S:
            change = self.members.apply(View.FromString(self.arrivals.pop(0)[1]))
            others = [one for one in change.changed if one.node != self.names[self.nodes]]
            rows = [NodeRow(one.node, one.name, dict(one.total), dict(one.free), dict(one.labels)) for one in others]
            began = time.process_time()
            self.placing.see(rows, None if change.is_full else change.left)
            self.cpu["placing"] += time.process_time() - began

    # ---- the tasks ----

    def _changed(self, k: int) -> None:
        self.dirty.setdefault(k, max(self.now + DELAY_S, self.reported_at[k] + self.views.report_s))

    def _begin(self, k: int, task: int) -> None:
        if self.free[k] > 0:
            self.free[k] -= 1
            self._changed(k)
            at = self.now + DELAY_S + self.duration_s * (0.5 + self.rng.random())
            heapq.heappush(self.ends, (at, k, task))
        else:
            self.queues[k] += 1
            # It begins when one ends there; the time is that of a task of mean length.
            heapq.heappush(self.ends, (self.now + 2 * self.duration_s, ~k, task))

    def _round(self, waiting: int) -> int:
        """One round of the owner: what has ended, what is submitted, and the orders; return what waits."""
        placing, now = self.placing, self.now
        gone: list[TaskKey] = []
        frames = set()
        while self.ends and self.ends[0][0] <= now:
            _, k, task = heapq.heappop(self.ends)
            if k >= 0:
                self.free[k] += 1
                self._changed(k)
            frames.add(k)
            gone.append(TaskKey(task, 1))
        self.count["frames"] += len(frames)
        self.ended += len(gone)
        more = min(self.left, BACKLOG * CPUS * self.nodes - waiting)
        self.left -= max(0, more)
        keys = [TaskKey(self.ids + k, 1) for k in range(max(0, more))]
        self.ids += len(keys)
        began = time.process_time()
        for key in gone:
            placing.moved(key, GONE, now)
        for key in keys:
            placing.wait(key, DEMAND, now)
        orders = placing.decide(now)
        for order in orders:
            placing.moved(order.key, ELSEWHERE, now)
        self.cpu["placing"] += time.process_time() - began
        frames = set()
        for order in orders:
            k = int(order.node, 16)
            frames.add(k)
            self._begin(k, order.key.record)
        self.count["frames"] += len(frames)
        return waiting + len(keys) - len(orders)

    def run(self) -> None:
        """Run all tasks."""
        waiting = 0
        while self.ended < self.tasks:
            self.now += TICK_S
            self._reports()
            self._views()
            self._apply()
            waiting = self._round(waiting)
            assert self.now < 20 * WORK_S, "the tasks do not end"

    def death(self, noticed_s: float) -> float:
        """Let a node die whose stream to the head ends after a time, and join again; return when the owner knows."""
        began, dead = self.now, self.count["deaths"] % self.nodes
        self.count["deaths"] += 1
        ends_at: float | None = began + noticed_s
        while self.names[dead] in self.members.reports:
            self.now += 0.001
            if ends_at is not None and self.now >= ends_at:
                self.views.leave(dead)
                ends_at = None
            self._views()
            self._apply()
        known_s = self.now - began
        self.views.report(dead, self._report(dead))
        while self.names[dead] not in self.members.reports:
            self.now += 0.001
            self._views()
            self._apply()
        return known_s


DEMAND = Demand(parts_of({CPU: 1}))


def main() -> None:
    """Print one row for each size."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tasks", type=int, default=100_000)
    parser.add_argument("nodes", type=int, nargs="*", default=[10, 100, 1000, 10_000])
    args = parser.parse_args()
    if min(args.nodes) < 1:
        parser.error("a size is at least one node")
    say = sys.stdout.write
    say(f"at most {args.tasks:,} tasks; CPU time of this machine, all other times virtual\n")
    say("  nodes    tasks  decisions/s  frames/task  reports/task  join B/node  head B/s/node  owner B/s  head cores")
    say("  killed   cut off\n")
    for nodes in args.nodes:
        scale = Scale(nodes, args.tasks)
        scale.run()
        seconds, cpu, count = scale.now, scale.cpu.copy(), scale.count.copy()
        killed = max(scale.death(DELAY_S) for _ in range(3))
        cut = max(scale.death(KEEPALIVE_S[1]) for _ in range(3))
        sent, read = count["view bytes"] / nodes / seconds, count["owner's bytes"] / seconds
        say(f"{nodes:7,} {scale.tasks:8,} {scale.tasks / cpu['placing']:12,.0f} {count['frames'] / scale.tasks:12.2f} ")
        say(f"{count['reports'] / scale.tasks:13.2f} {scale.join_bytes:12,.0f} {sent:14,.0f} {read:10,.0f} ")
        say(f"{cpu['head'] / seconds:11.3f} {killed:6.2f} s {cut:6.2f} s\n")


if __name__ == "__main__":
    main()
