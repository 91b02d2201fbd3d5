"""One process of the campaign: it does its share of the runs, one arena after the other, and reports in JSON lines.

    python lane.py '{"lane": 0, "lanes": 2, "seed": 1, "alone": 100, "janitor": 50, "pairs": 50, "live": 50, ...}'

Started by chaos.py with the failpoint build on its path and a table of points of its own. It says what it is about to
do before it does it, so that its starter can tell where it hung or crashed.
"""

import gc
import json
import os
import random
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import races
import work
from scene import SHARED_BYTES, STORE_BYTES, Child, Scene
from sharer import Board, Sharer
from victim import Victim

from fastrt._core.memory import clients
from fastrt._core.memory.segment import sweep
from fastrt.testing import SIDES, Failpoints

VICTIMS = (clients.KIND_WORKER, clients.KIND_DRIVER)
VICTIMS_PER_SCENE = 12  # of the live variant
SHARERS = 3
JITTER = 40
FAILURES_MAX = 10


class Order(NamedTuple):
    """Where a process dies."""

    point: str
    side: str
    hit: int
    kind: int = clients.KIND_WORKER
    turn: int = 0

    def __str__(self) -> str:
        kind = "driver" if self.kind == clients.KIND_DRIVER else "worker"
        return f"{self.side} {self.point!r} hit {self.hit} as {kind} turn {self.turn}"


def turn_after(order: Order) -> int:
    """With which step the second one begins: where both tables and payload grow under one lock, whoever meets it first
    mends it, so after a death in the payload's growth that comes first, by the last step."""
    return -1 if order.point.startswith("arena.pyx") else 0


class Lane:
    """Runs of all variants, with what they have shown so far."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.points = Failpoints.attach(os.environ["FASTRT_FAILPOINTS_FILE"])
        self.random = random.Random(spec["seed"] * 1000 + spec["lane"])
        self.reached: dict[tuple[str, str], int] = {}  # deaths by (point, side)
        self.recovery: dict[Order, dict[tuple[str, str], int]] = {}  # what recovering from it went through
        self.meetings: dict[Order, dict[tuple[str, str], int]] = {}  # what another one's walk went through after it
        self.undisturbed: dict[tuple[str, str], int] = {}
        self.totals = {"runs": 0, "kills": 0, "failures": 0, "compared": 0}
        self.stall_s = 0.0
        self.most = 1 if "first" in spec else FAILURES_MAX

    # ---- where to die ----

    def hits(self) -> dict[tuple[str, str], int]:
        return {
            (name, side): count
            for name, counts in self.points.points().items()
            for side, count in zip(SIDES, counts, strict=True)
            if count
        }

    def discover(self, kind: int, turn: int, make: bool) -> dict[tuple[str, str], int]:
        """How often an undisturbed walk comes by each point."""
        scene = self.scene()
        child = scene.victim(kind, turn, self.points.clear, make, spills=make)
        killed = child.end("an undisturbed walk")
        found = self.hits()
        assert not killed
        self.finish(scene, [child])
        return found

    def orders(self, per_side: int) -> list[Order]:
        """For each point and side that a walk comes by: the first hit, the last, and others by chance."""
        found: dict[tuple[str, str], list[tuple[int, int, int]]] = {}
        self.undisturbed = self.discover(clients.KIND_WORKER, 0, False)
        for kind in VICTIMS:
            for turn in (0, 4):
                for where, count in self.discover(kind, turn, True).items():
                    found.setdefault(where, []).append((kind, turn, count))
        orders = []
        for where, walks in sorted(found.items()):
            chosen = set()
            for k in range(per_side * 3):
                if len(chosen) < per_side:
                    kind, turn, count = self.random.choice(walks)
                    hit = (1, count)[k] if k < 2 and per_side > 2 else self.random.randint(1, count)
                    chosen.add(Order(*where, hit, kind, turn))
            orders += sorted(chosen)
        return orders

    def arm(self, order: Order) -> Callable[[], None]:
        return lambda: self.points.arm(order.point, order.side, pid=os.getpid(), hit=order.hit)

    def kill(self, scene: Scene, order: Order, what: str = "the victim", spills: bool = False) -> Child:
        """Let a walking victim die there; or come to its end, if it does not come by."""
        make = order.point.startswith("segment.pyx")
        child = scene.victim(order.kind, order.turn, self.arm(order), make, spills)
        self.ended(child, what, order)
        return child

    def ended(self, child: Child, what: str, order: Order) -> bool:
        killed = child.end(what)
        self.points.disarm()
        if killed:
            self.totals["kills"] += 1
            self.reached[order.point, order.side] = self.reached.get((order.point, order.side), 0) + 1
            if order.point.startswith("segment.pyx"):
                sweep()
        return killed

    # ---- the variants ----

    def scene(self, store_bytes: int = STORE_BYTES) -> Scene:
        scene = Scene(store_bytes)
        scene.leave_one_dead()
        scene.leave_one_cancelled()
        scene.submit_all()
        scene.call_all()
        scene.stream_all()
        if self.totals["runs"] % 3 == 0:  # it costs a process
            scene.end_one_late(self.totals["runs"] % 2 == 0)
        return scene

    def finish(self, scene: Scene, dead: list[Child]) -> None:
        try:
            for child in dead:
                scene.bury(child)
            scene.settle()
            scene.account()
        finally:
            scene.close()
        self.stall_s = max(self.stall_s, scene.stall_s)

    def alone(self, order: Order) -> None:
        """One dies; the survivor recovers it, finishes the work and accounts for everything."""
        scene = self.scene()
        child = self.kill(scene, order, spills=True)
        self.points.clear()
        try:
            self.finish(scene, [child])
        finally:
            self.recovery[order] = self.hits()

    def meet(self, order: Order) -> None:
        """As `alone`, and another one walks before anybody recovers; what it comes by is noted."""
        scene = self.scene(SHARED_BYTES)
        dead = [self.kill(scene, order)]
        dead.append(scene.victim(clients.KIND_WORKER, turn_after(order), self.points.clear))
        dead[1].end("the second one")
        self.meetings[order] = self.hits()
        self.finish(scene, dead)

    def janitor(self, order: Order, second: Order) -> None:
        """The one who recovers dies, too; a third finishes."""
        scene = self.scene()
        child = self.kill(scene, order, spills=True)
        known = scene.known()
        slots = scene.slots_of(child.pid)

        def bury() -> None:
            scene.client.abandon()
            self.arm(second)()
            janitor = Victim(scene.segment.name, clients.KIND_DAEMON, {**known, "dead": slots + known["dead"]})
            janitor.bury()
            work.run_all(janitor.client, janitor.function)
            janitor.client.close()

        helper = Child(bury)
        self.ended(helper, "the janitor", second)
        dead = [child, helper]
        self.random.shuffle(dead)
        self.finish(scene, dead)

    def pair(self, order: Order, second: Order) -> None:
        """Two die, and nobody has recovered the first when the second comes."""
        scene = self.scene(SHARED_BYTES)
        dead = [self.kill(scene, order), self.kill(scene, second, "the second victim")]
        self.random.shuffle(dead)
        self.finish(scene, dead)

    def live(self, orders: list[Order]) -> None:
        """Several die one after the other among processes that go on working."""
        scene = self.scene(SHARED_BYTES)
        board = Board()
        known, job = scene.known(), scene.client.job
        sharers = []
        for k in range(SHARERS):

            def share(k: int = k) -> None:
                scene.client.abandon()
                Sharer(scene.segment.name, k, board, known, job, self.totals["runs"] * 8 + k).run()

            sharers.append(Child(share))
        try:
            for tenant in scene.dead:
                scene.recover(*tenant)
            scene.dead.clear()
            for order in orders:
                self.say(f"live: {order}")
                child = self.kill(scene, order)
                scene.bury(child)
                for sharer in sharers:
                    if sharer.ended(0.0):
                        sharer.end("a sharer")
                        raise work.Wrong("a sharer ended before it was told to")
            board.stop()
            for sharer in sharers:
                sharer.end("a sharer")
            self.finish(scene, sharers)
        finally:
            for sharer in sharers:
                sharer.kill()
            scene.close()
        self.totals["compared"] += board.counted()
        self.stall_s = max(self.stall_s, board.longest)

    # ---- the plan ----

    def run(self) -> None:
        spec = self.spec
        if "only" in spec:
            orders = [Order(*order) for order in spec["only"]]
            self.attempt(spec["variant"], str(orders), *([orders] if spec["variant"] == "live" else orders))
            return
        orders = self.orders(spec["per_side"])
        walked = {order[:2] for order in orders}
        orders = orders[spec["lane"] :: spec["lanes"]]
        self.random.shuffle(orders)
        orders.sort(key=lambda order: not order.point.startswith(spec.get("prefer", "")))
        for order in orders:
            self.attempt("alone", str(order), order)
        for tries in range(8):  # whoever walks beside what others left may come by less often than alone, or not at all
            for order in [order for order in orders if not self.reached.get(order[:2])]:
                again = order._replace(hit=1 + tries // 4, kind=VICTIMS[tries % 2], turn=(tries // 2 % 2) * 4)
                self.attempt("alone", str(again), again)
        for tries in range(5):  # whether the recovery comes by may hang on chance: it is tried again
            for order, second in self.after(self.recovery, spec["per_recovery"] + tries):
                if second[:2] in walked:  # the other lanes have these as well
                    wanted = tries == 0 and zlib.crc32(repr(second[:2]).encode()) % spec["lanes"] == spec["lane"]
                else:
                    wanted = tries == 0 or not self.reached.get(second[:2])
                if wanted:
                    self.attempt("janitor", f"{order}; then {second}", order, second)
        for order in orders:
            # It dies with the lock, or with a plan that the next one must carry out.
            if (order.point.endswith("take") and order.side == "after") or order.point.startswith("fifo.h"):
                order = order._replace(hit=1, turn=4)  # early: the next one has the same still to do
                self.attempt("meet", str(order), order)
        for tries in range(5):  # the same for the second one
            for order, second in self.after(self.meetings, spec["per_recovery"] + tries):
                if not self.reached.get(second[:2]) and (tries == 0 or second[:2] not in walked):
                    second = second._replace(turn=turn_after(order))
                    self.attempt("pair", f"{order}; then {second}", order, second)
        for _ in range(spec["pairs"]):
            order, second = self.random.choice(orders), self.random.choice(orders)
            self.attempt("pair", f"{order}; then {second}", order, second)
        self.play()
        self.points.jitter(JITTER)
        absent = ("recovery.pyx", "spill.pyx")  # the survivor has recovered all; and only one process may spill
        orders = [order for order in orders if not order.point.startswith(absent)]
        until = self.totals["kills"] + spec["live"]
        while self.totals["kills"] < until and not self.late():
            chosen = [self.random.choice(orders) for _ in range(VICTIMS_PER_SCENE)]
            # Others do a part of what the undisturbed walk did alone, so that late hits would never come.
            chosen = [order._replace(hit=self.random.randint(1, (order.hit + 1) // 2)) for order in chosen]
            self.attempt("live", "; ".join(map(str, chosen)), chosen)
        self.points.jitter(0)

    def order(self, point: str, side: str, hit: int) -> Order:
        return Order(point, side, hit)

    def play(self) -> None:
        names, source = list(self.points.points()), Path(self.spec["source"])
        mine = slice(self.spec["lane"], None, self.spec["lanes"])
        for race, case in races.cases(names, source, strict="first" not in self.spec)[mine]:
            self.attempt("race", str(case), race, case)
        walked = {name for name in races.locks(names) if self.undisturbed.get((name, "before"))}
        self.attempt("stopped", "", sorted(walked)[mine])

    def race(self, race: races.Race, case: dict[str, Any]) -> None:
        races.run(self, race, case)

    def stopped(self, points: list[str]) -> None:
        races.stopped(self, points)

    def after(self, ways_by_order: dict[Order, dict[tuple[str, str], int]], most: int) -> list[tuple[Order, Order]]:
        """For each point that somebody came by after a death: deaths there, after different first deaths."""
        ways: dict[tuple[str, str], list[tuple[Order, int]]] = {}
        for order, found in ways_by_order.items():
            for where, count in found.items():
                ways.setdefault(where, []).append((order, count))
        runs = []
        for where, choices in sorted(ways.items()):
            for order, count in self.random.sample(choices, min(most, len(choices))):
                runs.append((order, Order(*where, self.random.randint(1, count))))
        self.random.shuffle(runs)
        return runs

    def attempt(self, variant: str, what: str, *args: Any) -> None:
        """One run; a failure is reported, and the next begins with an arena of its own."""
        if self.late():
            return
        self.say(f"{variant}: {what}")
        self.totals["runs"] += len(args[0]) if variant == "live" else 1
        try:
            getattr(self, variant)(*args)
        except Exception as exc:  # whatever it is, the campaign goes on and counts it
            self.totals["failures"] += 1
            self.points.disarm()
            emit(failure=f"{type(exc).__name__}: {exc}", variant=variant, what=what, trace=traceback.format_exc())

    def late(self) -> bool:
        """Whether the time that the lane was given is over, or there is something to look at."""
        return time.monotonic() > self.spec.get("until", float("inf")) or self.totals["failures"] >= self.most

    def say(self, what: str) -> None:
        emit(doing=what)

    def report(self) -> None:
        names = {name: [self.reached.get((name, side), 0) for side in SIDES] for name in self.points.points()}
        emit(totals=self.totals, points=names, stall_s=self.stall_s)


def emit(**message: Any) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


def main() -> None:
    gc.disable()  # references must go when they are dropped, and nothing here makes cycles that hold any
    spec = json.loads(sys.argv[1])
    lane = Lane(spec)
    with tempfile.TemporaryDirectory(prefix="frt-spill-", dir=spec.get("folder")) as work.FOLDER[0]:
        try:
            lane.run()
        finally:
            lane.report()


if __name__ == "__main__":
    main()
