"""Meetings that chance brings about too rarely: one process is stopped at a point, another acts, the first goes on.

Also the rule that a stopped process is not a dead one: whatever lock it holds, others wait or get LockStuck, nobody
takes the lock from it, and when it goes on everything is right.
"""

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import work
from scene import SHARED_BYTES, Child, Scene
from sharer import Board
from victim import Victim

from fastrt._core.memory import clients
from fastrt._core.memory.clients import Client
from fastrt._core.memory.segment import Segment
from fastrt._core.objects import handles
from fastrt._core.tasks import tasks
from fastrt.errors import LockStuck

CORE = Path(clients.__file__).parents[1]
_pause = threading.Event()
_kept: list[Any] = []


def place(points: list[str], file: str, op: str, text: str, source: Path) -> str:
    """The name of the point at the line of a core file that contains `text`."""
    (path,) = source.rglob(file)
    lines = [k for k, line in enumerate(path.read_text().splitlines(), 1) if text in line]
    found = [f"{file}:{k} {op}" for k in lines if f"{file}:{k} {op}" in points]
    if len(found) != 1:
        raise LookupError(f"{text!r} is the place of {found} in {file}: this race is to be looked at again")
    return found[0]


def wait_stopped(child: Child) -> bool:
    """Wait until it stops; False when it ends instead, because it did not come by."""
    until = time.monotonic() + work.PATIENCE_S
    while time.monotonic() < until:
        # Of a process that has just ended, a wait for stops alone says that there is no such child.
        found = os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if found is not None and found.si_code == os.CLD_STOPPED:
            return True
        if child.ended(0.0005):
            return False
    child.kill()
    raise work.Wrong("the process that should stop hung")


def go_on(child: Child) -> None:
    os.kill(child.pid, signal.SIGCONT)


class Actor:
    """A process of a race: it joins, is armed, and plays its part."""

    def __init__(self, scene: Scene, part: Callable[[Client, Any, Board], None], arm: Callable[[], None],
                 board: Board, job: int = 0) -> None:  # fmt: skip
        known = scene.known()

        def run() -> None:
            scene.client.abandon()
            segment = Segment.attach(scene.segment.name)
            index, gen = clients.admit(segment, os.getpid(), clients.KIND_WORKER, part.__name__)
            client = Client(segment, index, gen)
            client.adopt_job(job or client.job)
            function = handles.acquire(client, *known["function"])
            arm()
            part(client, function, board)

        self.child = Child(run)


# ---- parts ----


def drop(client: Client, function: Any, board: Board) -> None:
    ref = work.put(client, 11, 300)
    board.publish(0, ref.objref, handles.describe(client, ref)["index"], 11)
    del ref
    client.close()


def take(client: Client, function: Any, board: Board) -> None:
    name = board.name(0)
    assert name is not None
    _kept.append(handles.acquire(client, *name[:2]))  # it ends with it in the hand
    work.read(client, _kept[0], name[2])


def depend(client: Client, function: Any, board: Board) -> None:
    (first,) = work.submit(client, function, work.INT, 12)
    board.publish(0, first.objref, handles.describe(client, first)["index"], 12)
    (second,) = work.submit(client, function, work.SUM, 13, [first])
    until = time.monotonic() + work.PATIENCE_S
    while not handles.wait_all(client, [second], 0.001, 0.0) and time.monotonic() < until:
        work.run_all(client, function)
    if work.value_of(client, second) != work.answer(13) + work.answer(12):
        raise work.Wrong("the task that depends gave something else")


def seal(client: Client, function: Any, board: Board) -> None:
    name = board.name(0)
    assert name is not None
    task = tasks.claim_for(client, handles.acquire(client, *name[:2]))
    if task != tasks.NO_TASK:
        work.perform(client, function, task)


def idle(client: Client, function: Any, board: Board) -> None:
    until = time.monotonic() + work.PATIENCE_S
    while not board.stopped and time.monotonic() < until:
        task = tasks.next_task(client, 0.05, 0.0)
        if task != tasks.NO_TASK:
            work.perform(client, function, task)
            return
    raise work.Wrong("the idle worker was told of no task")


def offer(client: Client, function: Any, board: Board) -> None:
    work.submit(client, function, work.INT, 14)


def allocate(client: Client, function: Any, board: Board) -> None:
    _kept.append(work.put(client, 15, 40000))


def spill(client: Client, function: Any, board: Board) -> None:
    try:
        work.spill_some(client, 1)
    except LockStuck:
        return  # the bytes are where they were


class Race(NamedTuple):
    """`first` stops at a point; `second` acts and may die at a point; `first` goes on and may die at another."""

    first: Callable[[Client, Any, Board], None]
    stop: tuple[str, str, str]  # file, op, text
    second: Callable[[Client, Any, Board], None]
    second_dies: tuple[str, str, str]
    first_dies: tuple[str, str, str] | None
    waits: bool = False  # `second` cannot come to its end before `first` goes on
    side: str = "after"  # of the point where `first` stops


RACES = (
    Race(drop, ("objects.pyx", "swap", "if not a64_cas_sc(state, word, deleting):"),
         take, ("objects.pyx", "swap", "a64_cas_sc(state, word, frt_word_undeleted(word)"),
         ("objects.pyx", "swap", "a64_cas_sc(state, deleting, frt_word_undeleted(deleting))")),
    Race(depend, ("references.pyx", "store", "a32_store_sc(list, head)"),
         seal, ("objects.pyx", "store", "a64_store_sc(state, frt_word(sealed, client, frt_word_gen(word)))  # commit"),
         ("references.pyx", "store", "a32_store_sc(list, after)"), True),
    Race(depend, ("references.pyx", "store", "a32_store_sc(list, head)"),
         seal, ("objects.pyx", "store", "a64_store_sc(state, frt_word(sealed, client, frt_word_gen(word)))  # commit"),
         ("references.pyx", "store", "a32_store_sc(list, after)"), side="before"),
    Race(idle, ("wait.pyx", "or", "a64_or_sc(&x.sb.idle[x.me_word], x.me_bit)"),
         offer, ("queue.pyx", "and", "if a64_and_sc(&x.sb.idle[w], ~bit) & bit:"), None),
    Race(allocate, ("arena.pyx", "store", "a64_store_rel(x.pages + page, frt_page_word(kind, cls, n))"),
         spill, ("spill.pyx", "store", "        a64_store_sc(state, frt_word(FRT_OBJ_SEALED, 0, frt_word_gen(word)))"),
         None),
)  # fmt: skip


def cases(points: list[str], source: Path, strict: bool = True) -> list[tuple[Race, dict[str, Any]]]:
    """Every race with every combination of deaths in it. Unless `strict`, those whose places are gone are left out."""
    found = []
    for race in RACES:
        try:
            stop = place(points, *race.stop, source)
            second = place(points, *race.second_dies, source)
        except LookupError:
            if strict:
                raise
            continue
        first = None
        if race.first_dies:
            try:
                first = place(points, *race.first_dies, source)
            except LookupError:
                if strict:
                    raise
        for second_side in (None, "before", "after"):
            for first_side in (None, "before", "after") if first else (None,):
                found.append((race, {"stop": stop, "second": (second, second_side), "first": (first, first_side)}))
    return found


def run(lane: Any, race: Race, case: dict[str, Any]) -> None:
    """Play one case of a race; the lane counts the deaths."""
    scene = lane.scene(SHARED_BYTES)
    board = Board()
    job = scene.client.job if race.first is idle else 0
    for tenant in scene.dead:
        scene.recover(*tenant)
    if race.first is idle:
        scene.settle()  # nothing to do, so that it finds none

    def stop() -> None:
        lane.points.arm(case["stop"], race.side, pid=os.getpid(), action="stop")

    first = Actor(scene, race.first, stop, board, job).child
    second = None
    try:
        if not wait_stopped(first):
            raise work.Wrong("the first of a race did not come by its place")
        point, side = case["second"]

        def die() -> None:
            if side:
                lane.points.arm(point, side, pid=os.getpid())

        lane.points.clear()
        second = Actor(scene, race.second, die, board, job).child
        dies = lane.order(point, side or "", 1)
        if (side or not race.waits) and not lane.ended(second, "the second of a race", dies) and side:
            raise work.Wrong(f"the second did not come by {dies}")
        while not side and race.waits and not lane.points.points()[point][1] and not second.ended(0.001):
            pass  # it is about to wait for what the first one holds
        point, side = case["first"]
        if side:
            lane.points.arm(point, side, pid=first.pid)
        go_on(first)
        if second.code and race.first is depend:
            scene.bury(second)  # the first may wait for what it has left undone
        lane.ended(first, "the first of a race", lane.order(point or "", side or "", 1))
        second.end("the second of a race")
        lane.finish(scene, [second, first])
    finally:
        for child in (first, second):
            if child is not None:
                child.kill()
        scene.close()


# ---- stopped is not dead ----


def stopped(lane: Any, points: list[str]) -> None:
    """Stop one process at each of the points, all at once, each in an arena of its own; another one walks there."""
    plays: list[tuple[str, Scene, Child]] = []
    others: list[Child] = []
    try:
        for point in points:
            scene = lane.scene(SHARED_BYTES)
            side = "after" if point.endswith("take") else "before"

            def stop(point: str = point, side: str = side) -> None:
                lane.points.arm(point, side, pid=os.getpid(), action="stop")

            child = scene.victim(clients.KIND_WORKER, 0, stop)
            if wait_stopped(child):
                plays.append((point, scene, child))
            else:  # a walk with more room than the one that found this point
                lane.points.disarm()
                lane.finish(scene, [child])
        for point, scene, _ in plays:
            others.append(_walker(scene, point))
        _pause.wait(1.3)  # longer than a taker's patience in this build
        for _, _, child in plays:
            go_on(child)
        for (point, scene, child), other in zip(plays, others, strict=True):
            lane.say(f"stopped: {point}")
            for one, what in ((child, "the stopped process"), (other, "its neighbour")):
                if one.end(what):
                    raise work.Wrong(f"{what} was killed at {point}")
            lane.finish(scene, [child, other])
    finally:
        for _, scene, child in plays:
            child.kill()
            scene.close()
        for other in others:
            other.kill()


def _walker(scene: Scene, point: str) -> Child:
    known = scene.known()

    def run() -> None:
        scene.client.abandon()
        walker = None
        while walker is None:
            try:
                walker = Victim(scene.segment.name, clients.KIND_WORKER, known)
            except clients.AttachError:
                continue  # the client table is locked by the one that is stopped
        for step in walker.steps():
            try:
                step()
            except LockStuck:
                continue  # what it had begun stays stamped with its client, and is found with it

    return Child(run)


def locks(points: list[str]) -> list[str]:
    """The points with a lock in the hand: after it was taken, and before it is given back."""
    return [name for name in points if re.search(" (take|give)$", name) and not name.startswith("segment")]
