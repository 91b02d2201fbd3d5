"""The kinds of runs that a seed chooses from: of programs, faults and settings."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

from fastrt.cluster import uplink

from .faults import WORK_S
from .program import LARGE, Program, Shape
from .strikes import Strike

STORE_BYTES = 48 << 20  # more than any program needs


@dataclass(frozen=True)
class Family:
    """A kind of run: of programs, faults and settings.

    Attributes:
        shape: the kind of its programs.
        faults: the names of the faults that it chooses from; empty: all.
        tidy_s, idle_s, bytes_a_second, delay_s: one of these.
        retries: of each task; None: the seed chooses.
        work_s: in which faults may come.
        late: how often the thread that waits for objects runs late, and by how many seconds at most.
        standbys: how many nodes have a standby head.
        full_s: how often full stores drop copies of other nodes' values, on average; 0: they do not.
        store_bytes: of each node; one of these.
        spills: whether daemons spill.
        falls_back: whether values that find no room go to files.
        scene: makes the program, in place of one that the seed chooses (`aims`).
        strikes: the faults of an aimed run.
        nodes: of an aimed run.
        restless: whether each node forwards all tasks that no worker has begun.
    """

    shape: Shape = field(default_factory=Shape)
    faults: tuple[str, ...] = ()
    tidy_s: tuple[float, ...] = (uplink._TIDY_S, 0.1, 0.02)  # more often: more releases cross other messages
    idle_s: tuple[float, ...] = (4.0, 0.5)  # before an unused stream is closed
    bytes_a_second: tuple[float, ...] = (1e8,)  # of fetched values
    delay_s: tuple[float, ...] = (0.0002, 0.001, 0.01)  # the most, between two nodes
    retries: int | None = None
    work_s: float = WORK_S
    late: tuple[float, float] = (0.1, 0.05)
    full_s: float = 0.0
    standbys: int = 0
    store_bytes: tuple[int, ...] = (STORE_BYTES,)
    spills: bool = False
    falls_back: bool = True
    scene: Callable[[random.Random], Program] | None = None
    strikes: tuple[Strike, ...] = ()
    nodes: int = 0
    restless: bool = False


_HOT = Shape(LARGE, 3, 0.5, (0, 1, 1, 2), (0.01, 0.3, 1.5), 0.2, (0.01, 0.1, 0.3), functions=4)
_OF_ACTORS = ("break", "break_at", "kill_uplink", "kill_at", "kill_worker", "kill_actor", "kill_actor", "cut",
              "drop_copies")  # fmt: skip
_OF_STANDBYS = Shape(pinned=0.4, durations=(0.01, 0.5, 3.0), burst_s=(0.2, 2.0, 6.0), kids=(0, 1, 2))
_STANDBY_FAULTS = ("lose_head", "lose_head", "kill_standby", "break", "kill_uplink", "lose_node", "cut_head")
_OF_GROUPS = Shape(durations=(0.0005, 0.01, 0.1, 0.5), burst_s=(0.01, 0.2, 0.8), actors=0.1, groups=0.6,
                   kids=(0, 0, 1), cpus=(0,))  # fmt: skip
_GROUP_FAULTS = ("break", "break", "break_at", "kill_uplink", "kill_at", "kill_worker", "cut", "slow", "lose_node",
                 "lose_guest", "kill_driver")  # fmt: skip
_FULL = (0, 300, 5_000, 20_000, 50_000, 100_000, 200_000)
_FULL_FAULTS = ("fill_disk", "slow_disk", "kill_daemon", "kill_daemon", "kill_uplink", "kill_worker", "break",
                "break_at", "kill_at")  # fmt: skip
FAMILIES = {
    "": Family(),
    # No faults: no error is an excuse, and no task runs twice.
    "calm": Family(Shape(pinned=0.3, durations=(0.0005, 0.01, 0.05), burst_s=(0.02, 0.1, 0.5), functions=3, forget=0.5,
                         cancel=0.0, kids=(0, 0, 0, 1)), (), (1.0, 0.1, 0.02), (0.05, 0.02), retries=0,
                   delay_s=(0.01, 0.1, 0.4)),
    # Streams break again and again, while the same few objects are used everywhere.
    "breaks": Family(_HOT, ("break", "break_at", "break_at", "cut", "slow", "drop_copies"), (0.1, 0.02), (4.0, 0.1),
                     (1e8, 1e6, 1e5)),
    "uplinks": Family(_HOT, ("kill_uplink", "kill_at", "kill_at", "kill_at", "kill_and_cut", "break", "drop_copies"),
                      (0.1, 0.02), (4.0,)),
    # Several nodes fetch the same values slowly, and many stop.
    "wide": Family(Shape((50_000,), 2, 0.8, (0, 0, 1), (0.01, 0.1, 0.3), 0.2, (0.05, 0.3), cancel=0.4),
                   ("break", "drop_copies", "cut", "kill_uplink", "kill_at", "drop_copies"), (0.1, 0.02), (4.0,),
                   (1e6, 2e5, 5e4)),
    # The same tasks are lost several times.
    "losses": Family(Shape(LARGE, 2, 0.6, (0, 0, 1), (0.3, 1.0, 2.0), 0.05, (0.01, 0.5)),
                     ("lose_node", "lose_node", "kill_worker", "drop_copies"), work_s=15.0),
    # Nodes leave in order and others come: nothing is lost, and no task runs twice.
    "leaves": Family(Shape(LARGE, 2, 0.6, (0, 0, 1), (0.01, 0.1, 0.5), 0.1, (0.01, 0.2), cancel=0.0),
                     ("leave", "leave", "slow", "drop_copies"), (1.0, 0.1, 0.02), (4.0, 0.1), retries=0),
    # All nodes get more tasks than they can run, and know late how busy others are. "back": large results stay away.
    "herd": Family(Shape((0, 300), 1, 0.0, (0, 0, 2, 4), (0.05, 0.2, 0.5), 0.1, (0.0, 0.01), (1,)), ("slow",),
                   delay_s=(0.01, 0.1, 0.4)),
    "back": Family(Shape(LARGE, 1, 0.0, (0, 0, 2, 4), (0.05, 0.2, 0.5), 0.1, (0.0, 0.01), (1,)),
                   ("slow", "drop_copies", "break"), (0.02,), delay_s=(0.01, 0.1, 0.4)),
    # Actors on all nodes, whose handles are passed on; calls in order.
    "actors": Family(Shape(pinned=0.3, durations=(0.0005, 0.01, 0.1), burst_s=(0.01, 0.2, 0.8), actors=0.45, kill=0.06,
                           kids=(0, 0, 1, 2)), _OF_ACTORS, (0.1, 0.02), (4.0, 0.1)),
    # Daemons are killed, also together with what they know, and while they start and place.
    "daemons": Family(Shape(LARGE, 2, 0.5, (0, 0, 1, 2), (0.001, 0.05, 0.3), 0.15, (0.01, 0.2, 0.8), actors=0.3,
                            kill=0.05, cpus=(0, 0, 0.5, 1)),
                      ("kill_daemon", "kill_daemon", "kill_daemon", "kill_uplink", "kill_worker", "kill_actor", "break",
                       "cut", "drop_copies"), (0.1, 0.02), (4.0, 0.1)),
    # Actors that run several calls at once, some of which are cancelled, wait for others, or are generators.
    "crowds": Family(Shape(pinned=0.3, durations=(0.0005, 0.01, 0.1, 0.5), burst_s=(0.01, 0.2), actors=0.7, kill=0.05,
                           concurrent=0.8, streams=0.15, kids=(0, 0, 1)), _OF_ACTORS, (0.1, 0.02), (4.0, 0.1)),
    # Few names for the actors of all drivers; half of the seeds are without faults.
    "named": Family(Shape(pinned=0.3, durations=(0.0005, 0.01, 0.1), burst_s=(0.01, 0.2, 0.8), actors=0.6, kill=0.15,
                          named=0.6, forget=0.1, kids=(0, 0, 1)), (*_OF_ACTORS, "lose_guest"), (0.1, 0.02),
                    (4.0, 0.1)),
    # Generators, read on the node that submits them and on others, to the end or not.
    "streams": Family(Shape(pinned=0.5, durations=(0.0005, 0.01, 0.1), burst_s=(0.01, 0.2, 0.8), streams=0.5,
                            kids=(0, 0, 1)), ("break", "break_at", "kill_uplink", "kill_at", "kill_worker", "cut",
                            "drop_copies", "slow"), (0.1, 0.02), (4.0, 0.1)),
    "both": Family(Shape(LARGE, 0, 0.4, (0, 0, 1, 2), (0.001, 0.05, 0.3), 0.15, (0.01, 0.2, 0.8), actors=0.3, kill=0.05,
                         streams=0.3), (*_OF_ACTORS, "lose_node", "kill_driver"), (0.1, 0.02), (4.0, 0.1)),
    # No faults: actors die only when they are killed, and a generator's items all arrive.
    "still": Family(Shape(pinned=0.3, durations=(0.0005, 0.01, 0.05), burst_s=(0.02, 0.1, 0.5), cancel=0.0, actors=0.35,
                          streams=0.3, kids=(0, 0, 1)), (), (1.0, 0.1, 0.02), (0.05, 0.02), retries=0,
                    delay_s=(0.001, 0.01, 0.1)),
    # Tasks end with one result at a time, and fall between two of them; then the node that keeps the first one is lost.
    "parts": Family(Shape(LARGE, 2, 0.5, (0, 0, 1), (0.01, 0.1, 0.5), 0.05, (0.01, 0.5), (2, 3), gaps=(0.02, 0.2, 0.6)),
                    ("break", "break", "break_at", "lose_node", "lose_node", "kill_worker", "drop_copies"),
                    bytes_a_second=(1e8, 1e5), work_s=8.0),
    # A node is cut off while its uplink is started again: it is a member, and others must wait for it.
    "parted": Family(_HOT, ("kill_and_cut", "kill_and_cut", "drop_copies"), (0.1, 0.02), (4.0,)),
    # As "back", on nodes that are so busy that the threads which wait for objects run late.
    "late": Family(Shape(LARGE, 1, 0.0, (0, 0, 2, 4), (0.05, 0.2, 0.5), 0.1, (0.0, 0.01), (1,)),
                   ("slow", "drop_copies"), (0.02,), delay_s=(0.01, 0.1, 0.4), late=(0.5, 0.3)),
    # The same few large objects come to a node in several ways, in values that are passed on and read late.
    "relay": Family(Shape((300, 50_000, 50_000), 1, 0.8, (1, 2, 2), (0.001, 0.05, 0.2), 0.1, (0.01, 0.1), (1,),
                          functions=2, forget=0.1, cancel=0.1, holds=0.9),
                    ("break", "break_at"), (0.1, 0.02), (4.0,), (1e6, 1e5, 3e4), late=(0.3, 0.1), full_s=0.2),
    # The head is lost for longer than a standby waits. "heirs": what a node knows of the heads is lost, too.
    "standby": Family(_OF_STANDBYS, _STANDBY_FAULTS, (0.1, 0.02), (4.0, 0.1), work_s=30.0, standbys=2),
    "heirs": Family(_OF_STANDBYS, (*_STANDBY_FAULTS, "lose_head", "kill_both", "kill_both", "kill_both"), (0.1, 0.02),
                    (4.0, 0.1), work_s=30.0, standbys=2),
    # Placement groups compete for few slots. "regrouped": daemons are killed, too. "reserved": without faults.
    "groups": Family(_OF_GROUPS, _GROUP_FAULTS, (0.1, 0.02), (4.0, 0.1)),
    "regrouped": Family(_OF_GROUPS, _GROUP_FAULTS + ("kill_daemon",) * 3, (0.1, 0.02), (4.0, 0.1)),
    "reserved": Family(Shape(durations=(0.0005, 0.01, 0.1, 0.3), burst_s=(0.01, 0.2, 0.8), groups=0.6,
                             kids=(0, 0, 1), cpus=(0,), cancel=0.02), ("slow",), (1.0, 0.1), (4.0, 0.1), retries=0,
                       delay_s=(0.001, 0.01, 0.1)),
    # Streams break on a slow network: what is on its way crosses the claims, and one object has several names.
    "cross": Family(Shape((0, 50_000, 50_000), 3, 0.9, (0, 1), (0.01, 0.1, 0.3), 0.1, (0.3, 1.5), (1, 1, 2),
                          cancel=0.02),
                    ("break", "break", "break_at", "break_at", "lose_guest"), (0.1, 0.02), (4.0,), (1e6, 1e5),
                    (0.02, 0.1, 0.3), late=(0.3, 0.1), full_s=0.5),
    # Small objects are named in values, and uplinks are killed just then, on nodes whose threads run late.
    "small": Family(Shape((0, 300, 300), 0, 0.8, (0, 0, 1), (0.01, 0.1, 0.3), 0.1, (0.01, 0.2), (1,)),
                    ("kill_uplink", "kill_at", "kill_at"), (0.1, 0.02), (4.0,), late=(0.5, 0.3)),
    # Tasks submit tasks on further nodes, so that one value comes to a node in several ways, and the first nodes end.
    "chain": Family(Shape(LARGE, 2, 0.8, (1, 1, 2), (0.001, 0.05, 0.5), 0.2, (0.01, 0.1), (1,), forget=0.1, depth=4),
                    ("drop_copies", "slow"), (0.1, 0.02), (4.0,), (1e6, 1e5), late=(0.3, 0.1), full_s=0.5),
    # Many tasks are cancelled while they fetch large objects, which others name unread, and want, too.
    "stops": Family(Shape((300, 50_000, 50_000), 2, 0.8, (0, 1, 1), (0.01, 0.1, 0.3), 0.2, (0.01, 0.1), (1,),
                          functions=2, forget=0.1, cancel=0.4, interrupted=True, holds=0.7),
                    ("break", "kill_worker", "drop_copies"), (0.02,), (4.0,), (2e5, 1e5, 3e4), (0.02, 0.1, 0.3),
                    full_s=0.3),
    # Both: the names of one value, which it has from broken streams and from several nodes, are passed on.
    "mesh": Family(Shape((0, 50_000, 50_000), 3, 0.9, (1, 1, 2), (0.01, 0.1, 0.3), 0.1, (0.3, 1.5), (1, 1, 2),
                         cancel=0.02, depth=4),
                   ("break", "break_at"), (0.1, 0.02), (4.0,), (1e6, 1e5), (0.02, 0.1, 0.3), late=(0.3, 0.1),
                   full_s=0.5),
    # The values do not fit into the stores: copies are dropped, values spilled and restored, and arriving ones wait.
    # "full": those that find no room go to files. "tight": they wait.
    "full": Family(Shape(_FULL, 3, 0.4, (0, 0, 1, 1), (0.001, 0.05, 0.3), 0.05, (0.01, 0.1, 0.5), (1, 1, 2)),
                   _FULL_FAULTS, (0.1, 0.02), (4.0, 0.1), (1e8, 1e6), store_bytes=(1 << 20, 3 << 19), spills=True),
    "tight": Family(Shape((0, 50_000, 150_000, 200_000, 300_000), 3, 0.4, (0, 0, 1, 1), (0.001, 0.05, 0.3), 0.05,
                          (0.01, 0.1, 0.5), (1, 1, 2), bare=True),
                    _FULL_FAULTS, (0.1, 0.02), (4.0, 0.1), (1e8, 1e6), store_bytes=(1 << 20,), spills=True,
                    falls_back=False),
}  # fmt: skip


MIXTURE = "mixture"  # the name of the family whose settings come from the other ones
# Settings that no mixture changes
_SAME = ("bare", "store_bytes", "spills", "falls_back", "scene", "strikes", "nodes", "restless")
# They need settings of their own.
_NOT_MIXED = ("standby", "heirs", "leaves", "groups", "regrouped", "reserved", "full", "tight")
_FAULTS = ("break", "break", "break_at", "break_at", "kill_uplink", "kill_at", "kill_and_cut", "kill_worker", "cut",
           "slow", "drop_copies")  # fmt: skip
_SOMETIMES = ("actors", "streams", "kill", "named", "concurrent")  # of a shape: the others' programs are mostly without


def family_of(name: str, seed: int, machines: bool) -> Family:
    """Return a family by its name; each setting of a mixture comes from another family, as the seed chooses.

    Args:
        name: of the family.
        seed: of the run.
        machines: whether machines and drivers may be lost.
    """
    if name != MIXTURE:
        return FAMILIES[name]
    rng = random.Random(seed ^ 0x317E)
    others = [family for other, family in FAMILIES.items() if other not in _NOT_MIXED]

    def chosen(kind: type[Any], of: list[Any]) -> dict[str, Any]:
        return {one.name: getattr(rng.choice(of), one.name) for one in fields(kind) if one.name not in _SAME}

    shape = Shape(**chosen(Shape, [family.shape for family in others]) | {"groups": 0.0})
    if rng.random() < 0.7:
        shape = replace(shape, **dict.fromkeys(_SOMETIMES, 0.0))
    faults = rng.sample(_FAULTS, rng.randint(1, 4)) + ["lose_guest"] * machines
    settings = chosen(Family, others) | {"shape": shape, "faults": tuple(faults), "retries": None}
    return Family(**settings)
