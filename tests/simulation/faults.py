"""The faults that a seed chooses: when each begins, and how long it lasts."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from .heads import start_standby
from .network import Trap
from .node import Node
from .spilling import SLOW

if TYPE_CHECKING:
    from .cluster import Cluster

BEGIN_S = 1000.0
WORK_S = 5.0  # in which faults may come
TRAP_S = 3.0  # in which a fault waits for its message
MESSAGES = ("task", "value", "value", "release", "ended", "claim", "named", "where", "from", "copy", "again", "taken",
            "cancel", "function", "forget", "hello")  # fmt: skip

MORE_MESSAGES = ("actor", "call", "plan", "kill", "gone", "fallen", "unhost", "reads", "over")  # of actors, generators


class Faults:
    """The faults of one cluster.

    Args:
        cluster: the simulated cluster.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def plan_all(self) -> float:
        """Plan the faults of the seed; return when the last one has ended."""
        rng = random.Random(self.cluster.plan.seed ^ 0xFA17)
        kinds: list[Callable[[random.Random], tuple[str, Callable[[], None], float]]] = [
            self._kill_uplink, self._kill_uplink, self._kill_worker, self._cut, self._cut, self._kill_head, self._slow,
            self._drop_copies, self._break,
        ]  # fmt: skip
        if self.cluster.plan.machines:
            kinds += [self._lose_node, self._long_cut, self._kill_driver]
        if self.cluster.family.faults:
            kinds = [getattr(self, f"_{name}") for name in self.cluster.family.faults]
        last = 0.0
        for number in range(self.cluster.plan.faults):
            at = rng.random() ** (2 if self.cluster.family.work_s == WORK_S else 1) * self.cluster.family.work_s
            name, fault, lasts = rng.choice(kinds)(rng)
            if number in self.cluster.plan.skip:
                continue
            self.cluster.faults.append(f"{number}: {at:.3f} {name}")
            last = max(last, at + lasts)

            def begin(name: str = name, fault: Callable[[], None] = fault) -> None:
                self.cluster.world.say(f"FAULT {name}")
                fault()

            self.cluster.world.at(BEGIN_S + at, begin)
        return last

    def _kill_uplink(self, rng: random.Random) -> Any:
        k = rng.randrange(self.cluster.plan.nodes)

        def fault() -> None:
            node = self.cluster.nodes[k]
            if node.alive and node.uplink.process.alive:
                node.kill(node.uplink)

        return f"kill the uplink of n{k + 1}", fault, 1.0

    def _set(self, k: int, trap: Trap) -> None:
        """Have a fault wait for its message, for a while."""
        traps = self.cluster.world.network.traps.setdefault(f"n{k + 1}", [])
        traps.append(trap)
        self.cluster.world.after(TRAP_S, lambda: traps.remove(trap) if trap in traps else None)

    def _trap(self, rng: random.Random, what: str) -> tuple[int, Trap, str]:
        k = rng.randrange(self.cluster.plan.nodes)
        shape = self.cluster.family.shape
        kinds = MESSAGES + MORE_MESSAGES * bool(shape.actors or shape.streams)
        kind, left = rng.choice(kinds), 1 + int(rng.random() ** 2 * 12)
        trap = Trap(kind, left, rng.choice((0.0, 1e-4, 1e-3, 1e-2, 0.05)) * rng.random(), lambda host: None)
        return k, trap, f"{what} n{k + 1} {trap.delay_s:.5f} s after its {left}. {kind!r} from then on"

    def _kill_at(self, rng: random.Random) -> Any:
        """Kill an uplink just after it has sent a message of some kind."""
        k, trap, name = self._trap(rng, "kill the uplink of")
        is_receiver = rng.random() < 0.3

        def then(host: str) -> None:
            node = (
                next((one for one in self.cluster.nodes if one.host == host), None)
                if is_receiver
                else self.cluster.nodes[k]
            )
            if node is not None and node.alive and node.uplink.process.alive:
                node.kill(node.uplink)

        trap.then = then
        name += ", or of its receiver" * is_receiver
        return name, partial(self._set, k, trap), TRAP_S

    def _break_at(self, rng: random.Random) -> Any:
        """Break the streams between two nodes just after a message of some kind."""
        k, trap, name = self._trap(rng, "break a stream of")
        seconds = rng.random() * rng.choice((0.1, 2.0, 8.0))
        trap.then = lambda host: self.cluster.world.network.reset(*rng.sample((f"n{k + 1}", host), 2), seconds)
        name += f"; the second end notices {seconds:.2f} s later"
        return name, partial(self._set, k, trap), TRAP_S + seconds

    def _kill_and_cut(self, rng: random.Random) -> Any:
        a, b = rng.sample(range(self.cluster.plan.nodes), 2)
        seconds = rng.uniform(3.0, 12.0)

        def fault() -> None:
            node = self.cluster.nodes[a]
            if node.alive and node.uplink.process.alive:
                node.kill(node.uplink)
                self.cluster.world.network.cut(f"n{a + 1}", f"n{b + 1}", seconds, True)

        return f"kill the uplink of n{a + 1} and cut n{a + 1} - n{b + 1} for {seconds:.2f} s", fault, seconds + 1.0

    def _kill_worker(self, rng: random.Random) -> Any:
        k, which = rng.randrange(self.cluster.plan.nodes), rng.random()

        def fault() -> None:
            node = self.cluster.nodes[k]
            if node.alive and node.workers:
                node.kill(node.workers[int(which * len(node.workers))])

        return f"kill a worker of n{k + 1}", fault, 1.0

    def _kill_daemon(self, rng: random.Random) -> Any:
        k = rng.randrange(self.cluster.plan.nodes)
        return f"kill the daemon of n{k + 1}", lambda: self.cluster.nodes[k].daemons.kill(), 1.5

    def _kill_both(self, rng: random.Random) -> Any:
        """Kill the daemon and the uplink of a node together."""
        k = rng.randrange(self.cluster.plan.nodes)

        def fault() -> None:
            node = self.cluster.nodes[k]
            node.daemons.kill()
            if node.alive and node.uplink.process.alive:
                node.kill(node.uplink)

        return f"kill the daemon of n{k + 1}, and kill the uplink of n{k + 1}", fault, 2.5

    def _kill_actor(self, rng: random.Random) -> Any:
        k, which = rng.randrange(self.cluster.plan.nodes), rng.random()

        def fault() -> None:
            hosts = self.cluster.nodes[k].hosts
            if self.cluster.nodes[k].alive and hosts:
                self.cluster.nodes[k].kill(hosts[int(which * len(hosts))])

        return f"kill an actor of n{k + 1}", fault, 1.0

    def _kill_driver(self, rng: random.Random) -> Any:
        k = rng.randrange(self.cluster.plan.nodes)

        def fault() -> None:
            for driver in self.cluster.nodes[k].drivers:
                self.cluster.nodes[k].kill(driver)

        return f"kill the drivers of n{k + 1}", fault, 1.0

    def _cut(self, rng: random.Random) -> Any:
        hosts = ["head"] * (not self.cluster.family.faults) + [f"n{k + 1}" for k in range(self.cluster.plan.nodes)]
        a, b = rng.sample(hosts, 2)
        seconds, both = rng.choice((0.05, 1.0, 6.0, 14.0)) * rng.random(), rng.random() < 0.5
        fault = partial(self.cluster.world.network.cut, a, b, seconds, both)
        return f"cut {a} {'-' if both else '>'} {b} for {seconds:.2f} s", fault, seconds

    def _break(self, rng: random.Random) -> Any:
        a, b = rng.sample(range(self.cluster.plan.nodes), 2)
        seconds = rng.random() * rng.choice((0.1, 2.0, 8.0))
        hosts = f"n{a + 1}", f"n{b + 1}"
        fault = partial(self.cluster.world.network.reset, *hosts, seconds)
        return f"{hosts[1]} notices {seconds:.2f} s after {hosts[0]} that their streams are broken", fault, seconds

    def _long_cut(self, rng: random.Random) -> Any:
        a, b = rng.sample([f"n{k + 1}" for k in range(self.cluster.plan.nodes)], 2)
        seconds = rng.uniform(30.0, 60.0)
        return (
            f"cut {a} - {b} for {seconds:.0f} s",
            partial(self.cluster.world.network.cut, a, b, seconds, True),
            seconds,
        )

    def _kill_head(self, rng: random.Random) -> Any:
        seconds = rng.random() * 3
        return f"kill the head for {seconds:.2f} s", partial(self._end_head, seconds), seconds + 1

    def _lose_head(self, rng: random.Random) -> Any:
        """Lose the head for longer than a standby waits."""
        seconds = rng.uniform(4.0, 40.0)
        return f"lose the head for {seconds:.2f} s", partial(self._end_head, seconds), seconds + 1

    def _end_head(self, seconds: float) -> None:
        """Kill the head, if it runs, and start it again later."""
        if self.cluster.head is not None and self.cluster.head.alive:
            self.cluster.head.kill()
            self.cluster.world.after(seconds, self.cluster.start_head)

    def _kill_standby(self, rng: random.Random) -> Any:
        k, seconds = rng.randrange(self.cluster.plan.nodes), rng.random() * 3

        def again(node: Node) -> None:
            node.standby = start_standby(node) if node.alive else None

        def fault() -> None:
            node = self.cluster.nodes[k]
            if node.alive and node.standby is not None and node.standby.alive:
                node.standby.kill()
                self.cluster.world.after(seconds, partial(again, node))

        return f"kill the standby head of n{k + 1} for {seconds:.2f} s", fault, seconds + 1

    def _cut_head(self, rng: random.Random) -> Any:
        k, seconds, both = rng.randrange(self.cluster.plan.nodes), rng.uniform(1.0, 25.0), rng.random() < 0.5
        fault = partial(self.cluster.world.network.cut, "head", f"n{k + 1}", seconds, both)
        return f"cut head {'-' if both else '>'} n{k + 1} for {seconds:.2f} s", fault, seconds

    def _slow(self, rng: random.Random) -> Any:
        k, factor, seconds = rng.randrange(self.cluster.plan.nodes), rng.choice((20, 200, 1000)), rng.random() * 3

        def set_to(slowness: float) -> None:
            node = self.cluster.nodes[k]
            node.slowness = slowness
            for member in node.members.values():
                member.process.slowness = slowness

        def fault() -> None:
            set_to(factor)
            self.cluster.world.after(seconds, lambda: set_to(1.0))

        return f"n{k + 1} is {factor} times slower for {seconds:.2f} s", fault, seconds

    def _drop_copies(self, rng: random.Random) -> Any:
        k = rng.randrange(self.cluster.plan.nodes)

        def fault() -> None:
            if self.cluster.nodes[k].alive:
                self.cluster.nodes[k].drop_copies()

        return f"n{k + 1} drops copies", fault, 0.0

    def _fill_disk(self, rng: random.Random) -> Any:
        k, seconds = rng.randrange(self.cluster.plan.nodes), rng.random() * rng.choice((0.1, 1.0, 4.0))

        def fault() -> None:
            disk = self.cluster.nodes[k].disk
            disk.is_full = True
            self.cluster.world.after(seconds, lambda: setattr(disk, "is_full", False))

        return f"the disk of n{k + 1} is full for {seconds:.2f} s", fault, seconds

    def _slow_disk(self, rng: random.Random) -> Any:
        k, seconds = rng.randrange(self.cluster.plan.nodes), rng.random() * 3

        def fault() -> None:
            disk = self.cluster.nodes[k].disk
            disk.slowness = SLOW
            self.cluster.world.after(seconds, lambda: setattr(disk, "slowness", 1.0))

        return f"the disk of n{k + 1} is slow for {seconds:.2f} s", fault, seconds

    def _leave(self, rng: random.Random) -> Any:
        """Have a node without drivers leave in order; another one comes in its place. Nothing is lost by that."""
        k, seconds = rng.randrange(self.cluster.plan.nodes), rng.random() * 3

        def again() -> None:
            self.cluster.nodes[k] = Node(self.cluster, k + 1, 1 + k % 2)

        def left(node: Node) -> None:
            node.lose()
            self.cluster.lost.append(node)
            self.cluster.world.after(seconds, again)

        def fault() -> None:
            node = self.cluster.nodes[k]
            if k >= self.cluster.plan.drivers and node.alive and node.uplink.process.alive and node.uplink.uplink:
                node.uplink.on_left = partial(left, node)
                node.uplink.process.call(node.uplink.uplink.leave)

        return f"n{k + 1} leaves, and another one comes {seconds:.2f} s later", fault, seconds + 5.0

    def _lose_guest(self, rng: random.Random) -> Any:
        """Lose a node without drivers, if there is one: the program goes on."""
        return self._lose_node(rng, min(self.cluster.plan.drivers, self.cluster.plan.nodes - 1))

    def _lose_node(self, rng: random.Random, first: int = 0) -> Any:
        k, seconds = rng.randrange(first, self.cluster.plan.nodes), rng.random() * 8

        def again() -> None:
            self.cluster.nodes[k] = Node(self.cluster, k + 1, 1 + k % 2)

        def fault() -> None:
            node = self.cluster.nodes[k]
            if node.alive:
                node.lose()
                self.cluster.lost.append(node)
                self.cluster.world.after(seconds, again)

        return f"lose n{k + 1}, back after {seconds:.2f} s", fault, seconds + 1
