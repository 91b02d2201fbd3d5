"""Aimed runs: small programs and faults that lead straight to the places where few random runs come.

A random run has its faults at any moment, so a rare order of messages needs a seed that is known to have it, and any
change of the protocol takes it away. An aimed run has a program that brings the objects there, and strikes: faults that
come with a message of some kind from one node to another. Its seed still chooses all delays. Each is a family:
`--family` takes its name, and `Mutant.aim` says which one finds a mutant.
"""

from __future__ import annotations

import random
from dataclasses import replace

from .families import Family
from .program import EITHER, ENDLESS_S, ROOM, SLOTS, VALUE, ActorSpec, GroupSpec, Program, Shape, TaskSpec
from .strikes import Strike

LARGE = 50_000  # of a value that stays with its node
SMALL = 300


class Scene(Program):
    """A program that is written down, and not chosen.

    Args:
        rng: chooses durations.
    """

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng, 1, 0)
        self.ops = self.drivers[0]
        self._rng = rng

    def within(self, least: float, most: float) -> float:
        """Return seconds between these."""
        return self._rng.uniform(least, most)

    def make(self, key: str, holds: list[str], nbytes: int = 0) -> str:
        """Describe an object."""
        self.contents[key], self.sizes[key], self.outcome[key] = holds, nbytes, VALUE
        return key

    def put(self, key: str, holds: list[str], nbytes: int = 0) -> str:
        """Have the driver put an object."""
        self.ops.append(("put", self.make(key, holds, nbytes)))
        return key

    def task(
        self,
        where: int,
        args: list[str],
        holds: list[str] | None = None,
        nbytes: int = 0,
        puts: list[str] | None = None,
        kids: list[TaskSpec] | None = None,
        lasts: float = 0.0,
    ) -> TaskSpec:
        """Describe a task with one result; the objects that it puts are described before.

        Args:
            where: the number of its node, from 0.
            args, puts: their keys.
            holds, nbytes: what its result holds, and the size of that.
            kids: the tasks that it submits.
            lasts: how long it works.
        """
        spec = TaskSpec(len(self.tasks) + 1, args, where=where, puts=puts or [], duration_s=lasts)
        spec.kids = [kid.number for kid in kids or ()]
        spec.results = [self.make(f"t{spec.number}.0", holds or [], nbytes)]
        self.tasks[spec.number] = spec
        return spec

    def submit(self, spec: TaskSpec) -> str:
        """Have the driver submit a task; return the key of its result."""
        self.ops.append(("submit", spec.number))
        return spec.results[0]

    def actor(self, key: str, where: int = -1, room: int = 1) -> str:
        """Have the driver create an actor, which is started again as often as it takes."""
        self.actors[self.make(key, [])] = ActorSpec(key, -1, where=where, room=room)
        self.ops.append(("create", key))
        return key

    def call(self, actor: str) -> str:
        """Have the driver call an actor; return the key of the result."""
        spec = self.task(-1, [])
        spec.actor = actor
        return self.submit(spec)

    def reserve(self, key: str, bundles: list[float], strategy: str) -> str:
        """Have the driver create a placement group."""
        self.groups[key] = GroupSpec(key, bundles, strategy)
        self.ops.append(("reserve", key))
        return key

    def cancel(self, spec: TaskSpec) -> None:
        """Have the driver cancel a task."""
        self.ops.append(("cancel", spec.number))
        self.outcome[spec.results[0]] = EITHER

    def get(self, *keys: str) -> None:
        """Have the driver read objects; it knows what they hold then."""
        self.ops += [("get", key) for key in keys]

    def rest(self, seconds: float) -> None:
        """Have the driver wait."""
        self.ops.append(("sleep", seconds))


# ---- programs ----


def _relayed(rng: random.Random, reads: float = 0.5, others: float = 0.5, cancels: float = 0.5) -> Scene:
    """Make a program in which n1 knows a value of n3 by two names with one offer, both of which n4 uses.

    n1 has the value as a result, and as what came back over n2 and n3.

    Args:
        rng: chooses durations.
        reads: how often n4 reads it by both names.
        others: how often n5 reads it, too.
        cancels: how often n4 does not need the first name any more.
    """
    scene = Scene(rng)
    value = scene.task(2, [], nbytes=LARGE)
    hot = value.results[0]
    for key in ("v", "w", "x", "y"):
        scene.make(key, [hot])
    kids = [scene.task(where, ["y"], lasts=scene.within(0.1, 4.0) if reads else 4.0) for where in (3, 4)]
    kids += [scene.task(3, [hot], lasts=scene.within(0.0, 1.0))] * (rng.random() < reads)
    back = scene.task(0, ["x"], puts=["y"], kids=kids)
    third = scene.task(2, ["w"], back.results, puts=["x"], kids=[back])
    second = scene.task(1, ["v"], third.results, puts=["w"], kids=[third])
    scene.submit(value)
    scene.put("v", [hot])
    scene.submit(second)
    scene.get(*second.results, *third.results, *back.results)
    scene.rest(scene.within(0.0, 0.3))
    if rng.random() < others:
        scene.submit(scene.task(4, [hot]))
        scene.rest(scene.within(0.0, 0.1))
    wanting = scene.task(3, [hot])
    scene.submit(wanting)
    if rng.random() < cancels:
        scene.rest(scene.within(0.0, 0.8))
        scene.cancel(wanting)
    scene.rest(scene.within(1.0, 4.0))
    return scene


def _passed_on(rng: random.Random) -> Scene:
    """Make a program in which n3 has a generator of n1 from n2, which uses it no more, and reads it late."""
    scene = Scene(rng)
    generator = scene.task(0, [])
    generator.items = [scene.make(f"t{generator.number}:{k}", [], SMALL) for k in range(6)]
    generator.pause_s = 0.5
    for key in ("v", "w"):
        scene.make(key, generator.names)
    waits = scene.task(2, ["w"], lasts=scene.within(1.0, 2.0))
    waits.reads = [(generator.names[0], 100)]
    passes = scene.task(2, ["v"], puts=["w"], kids=[waits])
    scene.submit(generator)
    scene.put("v", generator.names)
    scene.submit(scene.task(1, ["v"], kids=[passes]))
    scene.ops += [("drop", key) for key in ("v", *generator.names)]
    scene.rest(scene.within(6.0, 8.0))
    return scene


def _circle(rng: random.Random) -> Scene:
    """Make a program in which n2 forwards a task whose result names what its argument holds, and has that one late."""
    scene = Scene(rng)
    scene.make("o", [], LARGE)
    holder = scene.task(0, [], ["o"], LARGE, ["o"], lasts=scene.within(0.2, 0.6))
    names = scene.task(0, holder.results, ["o"], SMALL)
    forwarded = scene.task(0, ["v"], names.results, kids=[names])
    parent = scene.task(1, ["v"], forwarded.results, kids=[forwarded])
    scene.submit(holder)
    scene.put("v", holder.results)
    scene.submit(parent)
    scene.get(*parent.results, *forwarded.results, *names.results)
    return scene


def _renamed(
    rng: random.Random, holds: list[str], names: bool = True, reads: float = 0.0, soon: float = 0.0, count: int = 6
) -> Scene:
    """Make a program in which n1 keeps an object of n2, and tasks of n2 name it to n1 again, all but the first one.

    Args:
        rng: chooses durations.
        holds: what the object holds.
        names: whether they do.
        reads: how many of them read it.
        soon: how much earlier they begin.
        count: of these tasks; a single one ends at once.
    """
    scene = Scene(rng)
    for key in holds:
        scene.make(key, [], SMALL)
    scene.make("o", holds, LARGE)
    scene.make("w", ["o"])
    kids = [scene.task(1, [], kids=[scene.task(0, [])], lasts=0.3)]
    for k in range(count):
        key, lasts = scene.make(f"z{k}", ["o"]), rng.choice((0.0, 1.0, 2.0)) * (count > 1)
        args = [] if not names else ["o"] if rng.random() < reads else [key]
        again = scene.task(0, args, lasts=lasts)
        kids.append(scene.task(1, ["w"], puts=[key], kids=[again], lasts=scene.within(0.3, 2.5) * (1 - soon)))
    first = scene.task(1, [], ["o"], puts=[*holds, "o", "w"], kids=kids)
    scene.submit(first)
    scene.get(*first.results)
    scene.rest(scene.within(6.0, 8.0))
    return scene


def _endless(rng: random.Random) -> Scene:
    """Make a program in which a task on n2 ends only by its cancellation."""
    scene = Scene(rng)
    forever = scene.task(1, [], lasts=ENDLESS_S)
    scene.submit(forever)
    scene.rest(scene.within(0.5, 2.0))
    scene.cancel(forever)
    scene.rest(scene.within(0.5, 2.0))
    return scene


def _away(rng: random.Random) -> Scene:
    """Make a program in which n1 calls its actor on n2 again and again."""
    scene = Scene(rng)
    actor = scene.actor("a0", 1)
    for _ in range(3):
        scene.get(scene.call(actor))
        scene.rest(scene.within(2.0, 3.0))
    return scene


def _too_large(rng: random.Random) -> Scene:
    """Make a program whose driver ends while its actor and its placement group wait for nodes that can hold them."""
    scene = Scene(rng)
    scene.actor("a0", room=ROOM + 1)
    scene.reserve("g0", [1.0] * (SLOTS + 1), "STRICT_PACK")
    scene.rest(scene.within(0.5, 2.0))
    return scene


def _scattered(rng: random.Random) -> Scene:
    """Make a program whose tasks may run anywhere; their large results stay there."""
    scene = Scene(rng)
    for _ in range(12):
        for _ in range(6):
            scene.submit(scene.task(-1, [], nbytes=LARGE, lasts=scene.within(0.05, 0.3)))
        scene.rest(scene.within(0.0, 0.6))
    scene.rest(4.0)
    return scene


# ---- aims ----

_RENAMED = Family(tidy_s=(0.1, 0.3), idle_s=(4.0,), bytes_a_second=(1e6, 1e5), delay_s=(0.001, 0.02, 0.1), nodes=3,
                  scene=lambda rng: _renamed(rng, []), strikes=(
                      Strike("task", 2, 1, (1,), 0.01, (("break_between", 2, 1, (1.0, 4.0)),)),
                  ))  # fmt: skip
# Tasks are forwarded again and again, also back to their owner, and the results are sent late.
_BACK = Family(Shape((LARGE,), 1, 0.0, (0,), (0.05, 0.2, 0.5), 0.1, (0.0, 0.01), (1,), cpus=(0,), cancel=0.0),
               tidy_s=(0.1,), delay_s=(0.001, 0.02), late=(0.9, 0.4), nodes=2, restless=True)  # fmt: skip
AIMS = {
    "relayed": Family(tidy_s=(0.1, 0.3), idle_s=(4.0,), bytes_a_second=(1e5, 3e4), delay_s=(0.001, 0.02), nodes=5,
                      scene=_relayed),
    "stopped": Family(tidy_s=(0.1, 0.3), idle_s=(4.0,), bytes_a_second=(3e4,), delay_s=(0.001, 0.02), nodes=5,
                      scene=lambda rng: _relayed(rng, 0.0, 0.0, 1.0)),
    "stopped, and its turn comes": Family(tidy_s=(0.1, 0.3), idle_s=(4.0,), bytes_a_second=(3e4,),
                                          delay_s=(0.001, 0.02), nodes=5,
                                          scene=lambda rng: _relayed(rng, 0.0, 1.0, 1.0)),
    "passed on": Family(tidy_s=(0.1,), idle_s=(4.0,), bytes_a_second=(1e8, 1e5), nodes=3, scene=_passed_on),
    "circle": Family(tidy_s=(0.1, 0.3), idle_s=(4.0,), bytes_a_second=(1e5, 3e4), nodes=2, scene=_circle),
    "renamed": _RENAMED,
    "renamed, and the uplink": replace(
        _RENAMED, scene=lambda rng: _renamed(rng, [], soon=0.6, count=1), tidy_s=(0.1,), delay_s=(0.001, 0.02),
        strikes=(
            Strike("task", 2, 1, (1,), 0.01, (("break_between", 2, 1, (4.0, 7.0)),)),
            Strike("release", 1, 2, (1, 2), 0.3, (("kill_uplink", 2),)),
        ),
    ),
    "renamed, and lost": replace(_RENAMED, scene=lambda rng: _renamed(rng, [], reads=0.5), strikes=(
        *_RENAMED.strikes, Strike("claim", 1, 2, (1,), 1.0, (("lose_node", 2),)),
    )),
    "crossing": replace(
        _RENAMED, bytes_a_second=(3e4,), delay_s=(0.1, 0.3), scene=lambda rng: _renamed(rng, ["q"], soon=0.6),
        strikes=(Strike("value", 2, 1, (1, 1, 2), 0.4, (("break_between", 2, 1, (0.0, 0.05)),)),),
    ),
    "claimed twice": replace(
        _RENAMED, scene=lambda rng: _renamed(rng, [], names=False), delay_s=(0.001, 0.02),
        strikes=(
            Strike("task", 2, 1, (1,), 0.01, (("break_between", 2, 1, (0.0, 0.05)),)),
            Strike("claim", 1, 2, (1,), 0.0, (("stall", 2, (1.0, 2.0)), ("break_later", 2, 1, 0.3, (5.0, 8.0)))),
            Strike("claim", 1, 2, (1,), 0.0, (("stall", 2, (2.5, 4.0)),)),
        ),
    ),
    "back again": _BACK,
    # The word that a result is an object of the receiver comes while that object's own node is cut off.
    "back again, and broken": replace(_BACK, nodes=3, scene=_scattered, strikes=(
        Strike("value.yours", 0, 0, (1,), 0.0, (("break_others", (0.5, 2.0)),)),
    ) * 20),
    "endless": Family(tidy_s=(0.1,), idle_s=(4.0,), delay_s=(0.001, 0.02), nodes=2, scene=_endless),
    "away, and lost": Family(tidy_s=(0.1,), idle_s=(4.0,), delay_s=(0.001, 0.02), nodes=2, scene=_away, strikes=(
        Strike("call", 1, 2, (1,), 1.0, (("kill_daemon", 1),)),
        Strike("call", 1, 2, (1,), 1.0, (("lose_node", 2),)),
    )),
    "too large": Family(tidy_s=(0.1,), idle_s=(4.0,), delay_s=(0.001, 0.02), nodes=2, scene=_too_large),
}  # fmt: skip
