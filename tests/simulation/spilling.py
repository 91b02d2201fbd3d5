"""Full stores: a node's spiller in virtual time, its disk, and processes that wait for room.

The deciding part of the spiller is the real one (`fastrt.node.spilling`), and so are the files, in a folder of the run.
The simulator takes the place of the threads: each step of a job comes after a delay of the seed, and a daemon that is
killed does no further step. What it was writing may be left as half a file.

A process that waits for room blocks inside a call of the real store: the world goes on without it (`blocking`).
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from fastrt._core.objects import remote, spill
from fastrt._core.repair import inspect
from fastrt.cluster import inbox
from fastrt.config import SHM_DIR
from fastrt.errors import NotInitializedError
from fastrt.node.spilling import Event, Job, Spilling
from fastrt.store import file_values, room
from fastrt.store.spill_files import SpillFiles

from .blocking import Killed

if TYPE_CHECKING:
    from .cluster import Cluster
    from .node import Node

EVENT_S = 100e-6  # until the deciding part gets an event, at most
STEP_S = (1e-4, 1e-3, 1e-2)  # of a job, at most; one of these
SLOW = 100.0  # factor for these on a slow disk
THREADS = 2  # that write, and as many that read
AHEAD_SHARE = 8
TORN = 0.5  # how often a daemon that is killed leaves half a file
KEEPS = 0.7  # how many disks have room for the files of restored values
SPARE_BYTES = 64 << 10
_VALUE = re.compile("[0-9a-f]{16}")  # the name of a value's file


class Disk:
    """The disk of a node.

    Args:
        node: the node.

    Attributes:
        folder: of spilled values.
        key_folder: of the session.
        is_full, slowness: faults.
        keeps: whether it has room for the files of restored values.
    """

    def __init__(self, node: Node) -> None:
        self._root = Path(tempfile.mkdtemp(prefix="simulated-disk-", dir=SHM_DIR))
        self.folder, self.key_folder = self._root / "spilled", self._root / "session"
        self.key_folder.mkdir(0o700)
        self.is_full, self.slowness = False, 1.0
        self.keeps = node.world.rng.random() < KEEPS

    def names(self) -> list[str]:
        """The files of values on it."""
        found = os.listdir(self.folder) if self.folder.exists() else []
        return sorted(name for name in found if _VALUE.fullmatch(name))

    def remove(self) -> None:
        """Remove the folder: the machine is lost, or the run has ended."""
        shutil.rmtree(self._root, ignore_errors=True)


class SimFiles(SpillFiles):
    """The files of a process on a disk that may be full.

    Args:
        disk: the disk.
    """

    def __init__(self, disk: Disk) -> None:
        super().__init__(disk.folder, disk.key_folder)
        self._disk = disk
        self.is_dying = False  # the process is killed within its next write

    def _check(self, objref: int) -> None:
        if self._disk.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"{objref:016x}")

    def write(self, objref: int, data: memoryview) -> None:
        self._check(objref)
        super().write(objref, data)
        if self.is_dying:
            os.truncate(self.path(objref), len(data) // 2)
            raise Killed

    def open_writer(self, writer: Any) -> None:
        self._check(writer.name())
        super().open_writer(writer)

    def may_keep(self) -> bool:
        return self._disk.keeps


class _Lane:
    """In the place of threads that carry out jobs in their order, several at once."""

    def __init__(self, spiller: SimSpiller) -> None:
        self._spiller = spiller
        self._waiting: deque[Job] = deque()
        self.running: dict[Iterator[None], None] = {}

    def put(self, job: Job) -> None:
        self._waiting.append(job)
        self._begin()

    def _begin(self) -> None:
        while self._waiting and len(self.running) < THREADS and not self._spiller.is_over:
            steps = self._waiting.popleft()()
            self.running[steps] = None
            self._later(steps)

    def _later(self, steps: Iterator[None]) -> None:
        node = self._spiller.node
        rng = node.world.rng
        after_s = rng.random() * rng.choice(STEP_S) * node.disk.slowness * min(node.slowness, SLOW)
        node.world.after(after_s, lambda: self._step(steps))

    def _step(self, steps: Iterator[None]) -> None:
        if self._spiller.is_over:
            return
        try:
            next(steps)
        except StopIteration:
            del self.running[steps]
            self._begin()
        else:
            self._later(steps)
        self._spiller.node.after_step()


class SimSpiller:
    """The spiller of one daemon.

    Args:
        node: the daemon's.

    Attributes:
        is_over: the daemon has died: no step follows.
    """

    def __init__(self, node: Node) -> None:
        self.node = node
        self.is_over = False
        self._files = SimFiles(node.disk)
        self._files.make_key()
        spill.configure(node.client, str(node.disk.folder), node.cluster.falls_back)
        self._writes, self._reads = _Lane(self), _Lane(self)
        self._last_at = 0.0
        self._looks_at: float | None = None
        self._died: list[BaseException] = []  # their frames keep the memory that the daemon was writing
        self._spilling = Spilling(
            node.client, self._files, 2 * THREADS, AHEAD_SHARE, self._post, self._writes.put, self._reads.put
        )
        self.make_room, self.restore = self._spilling.make_room, self._spilling.restore
        self.look_ahead = self._spilling.look_ahead

    def _post(self, event: Event) -> None:
        world = self.node.world
        self._last_at = max(self._last_at, world.now + EVENT_S * world.rng.random())
        world.at(self._last_at, lambda: self._turn(event))

    def _turn(self, event: Event) -> None:
        if self.is_over:
            return
        self._spilling.turn(event)
        patience_s = self._spilling.patience_s
        if patience_s is not None and self._looks_at is None:
            self._looks_at = self.node.world.now + patience_s
            self.node.world.at(self._looks_at, self._look)
        self.node.after_step()

    def _look(self) -> None:
        self._looks_at = None
        self._turn(lambda: None)

    def kill(self) -> None:
        """The daemon is killed: no job goes on; one may die within the write of a file."""
        self._files.is_dying = True
        for steps in self._writes.running if self.node.world.rng.random() < TORN else ():
            try:
                next(steps)
            except Killed as exc:
                self._died.append(exc)
            except StopIteration:
                pass
        self.is_over = True


class Sleeping:
    """Which processes of a cluster sleep: those that wait for a value, a task or room."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._outlook = spill.outlook

    def outlook(self, client: Any) -> tuple[int, set[int], int, int]:
        """Return what `spill.outlook` returns, but count processes that sleep in virtual time as asleep."""
        others, awake, mark, failed = self._outlook(client)
        node = node_of(self._cluster, client)
        asleep = {slot for slot, member in node.members.items() if member.sleeps} if node is not None else set()
        return others, awake - asleep, mark, failed


def node_of(cluster: Cluster, client: Any) -> Node | None:
    """Return the node of an attachment."""
    return next((node for node in cluster.nodes if node.alive and node.segment is client.segment), None)


def changes(cluster: Cluster) -> list[tuple[Any, str, Any]]:
    """The simulator's replacements of sleeps and files, for `patched`."""
    world = cluster.world

    def wait_round(client: Any, seen: int, timeout_s: float) -> bool:
        return world.turns.block(lambda: spill.rounds(client) != seen, timeout_s)

    def wait_restored(client: Any, ref: Any, timeout_s: float) -> bool:
        def is_over() -> bool:
            try:
                return not spill.is_spilled(client, ref)
            except NotInitializedError:  # its process was killed, of which a thread of its native stream knows nothing
                return True

        return world.turns.block(is_over, timeout_s)

    def files(folder: Path, key_folder: Path) -> SimFiles:
        return SimFiles(next(node.disk for node in cluster.nodes if node.alive and node.disk.folder == folder))

    def pause(seconds: float) -> None:
        world.turns.block(lambda: False, seconds)

    room_for = inbox.Arrivals.room_for

    async def room_for_noted(self: Any, frame: Any) -> None:
        self._exchange.waits_for_room = True
        await room_for(self, frame)
        self._exchange.waits_for_room = False

    return [
        (spill, "wait_round", wait_round),
        (spill, "wait_restored", wait_restored),
        (spill, "nap", lambda client, seconds: pause(seconds)),
        (spill, "outlook", Sleeping(cluster).outlook),
        (room, "_has_threads", lambda: False),
        (file_values, "time", SimpleNamespace(monotonic=world.monotonic, sleep=pause)),
        (file_values, "SpillFiles", files),
        (inbox, "_SPARE_BYTES", SPARE_BYTES),
        (inbox.Arrivals, "room_for", room_for_noted),
        (remote, "drop_copy", drop_noted(cluster)),
    ]


def drop_noted(cluster: Cluster) -> Callable[..., int]:
    """Return a replacement of `remote.drop_copy` that checks that no last copy is dropped."""
    drop: Callable[..., int] = remote.drop_copy

    def noted(client: Any, index: int, objref: int) -> int:
        found = next((row for row in remote.sources(client) if row[:2] == (index, objref)), None)
        freed = drop(client, index, objref)
        if freed and found is not None and not cluster.may_lose and not _has_bytes(cluster, found[2], found[3]):
            cluster.world.violation(f"the last copy of object {found[3]:#x} of node {found[2][:8]} is dropped")
        return freed

    return noted


def _has_bytes(cluster: Cluster, session: str, objref: int) -> bool:
    """Return whether a node has the bytes of an object, or the node that it has named for them."""
    seen: set[tuple[str, int]] = set()  # one node can have a value under several names
    while (session, objref) not in seen:
        seen.add((session, objref))
        node = next((one for one in cluster.nodes if one.alive and one.segment.session == session), None)
        if node is None:
            return False
        client = next(one.client for one in [node, *node.members.values()] if not one.client.closed)
        row = next((row for row in inspect.objects(client) if row["objref"] == objref), None)
        if row is None:
            return True  # it was released: its value is not needed any more
        if not row["node"] or row["state"] not in ("remote", "restoring"):
            return True
        source = next(one for one in remote.sources(client) if one[1] == objref)
        session, objref = source[2], source[3]
    return False
