"""A process that goes on working while others die around it, and compares everything that it gets to see."""

import mmap
import os
import random
import struct
import time
from typing import Any

import work
from work import Expected, Wrong

from fastrt._core.memory import clients
from fastrt._core.memory.clients import Client
from fastrt._core.memory.segment import Segment
from fastrt._core.objects import handles
from fastrt._core.tasks import tasks
from fastrt.errors import ObjectStoreFullError, StaleReferenceError

_NAME = struct.Struct("<QIIQ")  # objref, index, seed, their sum: a half-written name is not believed
_HEADER_BYTES = 64
PLACES = 64


class Board:
    """Where sharers tell each other what they have put, and hear when to stop; shared with forked children."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, _HEADER_BYTES + PLACES * _NAME.size)

    def stop(self) -> None:
        self._map[0] = 1

    @property
    def stopped(self) -> bool:
        return self._map[0] != 0

    def count(self, k: int, n: int) -> None:
        """Sharer k has compared n things, and its longest step took a time that `stall` told."""
        struct.pack_into("<I", self._map, 8 + 4 * k, n)

    def counted(self) -> int:
        return sum(struct.unpack_from("<4I", self._map, 8))

    def stall(self, seconds: float) -> None:
        """The longest step of all; two at once may overwrite each other, which loses little."""
        if seconds > self.longest:
            struct.pack_into("<d", self._map, 32, seconds)

    @property
    def longest(self) -> float:
        return struct.unpack_from("<d", self._map, 32)[0]

    def publish(self, place: int, objref: int, index: int, seed: int) -> None:
        _NAME.pack_into(self._map, _HEADER_BYTES + place * _NAME.size, objref, index, seed, objref + index + seed)

    def name(self, place: int) -> tuple[int, int, int] | None:
        objref, index, seed, total = _NAME.unpack_from(self._map, _HEADER_BYTES + place * _NAME.size)
        return (objref, index, seed) if objref and objref + index + seed == total else None


class Sharer:
    """One process's endless mix of everything, until the board says stop."""

    def __init__(self, name: str, k: int, board: Board, known: dict[str, Any], job: int, seed: int) -> None:
        self.segment = Segment.attach(name)
        first = work.DENSE * (k % 2)
        index, gen = clients.admit(self.segment, os.getpid(), clients.KIND_WORKER, f"sharer {k}", first=first)
        self.client = Client(self.segment, index, gen)
        self.job = job
        self.k = k
        self.board = board
        self.random = random.Random(seed)
        self.function = handles.acquire(self.client, *known["function"])
        self.shared = [(s, handles.acquire(self.client, *name)) for s, name in known["shared"]]
        self.outstanding: list[Expected] = []
        self.held: list[Any] = []
        self.seed = (k + 1) << 20
        self.compared = 0

    def run(self) -> None:
        steps = [self.put, self.peek, self.submit, self.submit, self.read_shared, self.work, self.collect]
        try:
            while not self.board.stopped:
                begun = time.monotonic()
                try:
                    self.random.choice(steps)()
                except ObjectStoreFullError:
                    self.held.clear()
                self.board.stall(time.monotonic() - begun)
                self.board.count(self.k, self.compared)
        finally:
            self.held.clear()
        while self.outstanding:
            self.collect()
        self.shared.clear()
        self.client.close()

    def next_seed(self) -> int:
        self.seed += 10
        return self.seed

    def put(self) -> None:
        seed = self.next_seed()
        inner = [ref for _, ref in self.held[-2:]]
        ref = work.put(self.client, seed, self.random.choice(work.SIZES[:-1]), inner)
        place = self.random.randrange(PLACES)
        self.board.publish(place, ref.objref, handles.describe(self.client, ref)["index"], seed)
        self.held.append((seed, ref))
        if len(self.held) > 8:
            del self.held[self.random.randrange(4) :]

    def peek(self) -> None:
        """What others have published may be gone, but never be anything else."""
        for _ in range(4):
            name = self.board.name(self.random.randrange(PLACES))
            if name is not None:
                try:
                    ref = handles.acquire(self.client, *name[:2])
                except StaleReferenceError:
                    continue
                work.read(self.client, ref, name[2])
                self.compared += 1

    def read_shared(self) -> None:
        for seed, ref in self.shared:
            work.read(self.client, ref, seed)
        for seed, ref in self.held:
            work.read(self.client, ref, seed)
        self.compared += len(self.shared) + len(self.held)

    def submit(self) -> None:
        if len(self.outstanding) > 8:
            self.collect()
        op, seed = self.random.randrange(work.KINDS), self.next_seed()
        refs, addends = [], 0
        if op == work.SUM:
            before = [e for e in self.outstanding if e.op in (work.INT, work.RETRY, work.BYTES)][-2:]
            refs = [e.refs[0] for e in before]
            addends = sum(e.seed if e.op == work.BYTES else work.answer(e.seed) for e in before)
        big = self.random.choice((0, 0, 300))
        self.client.adopt_job(self.job)  # running a task has made its job ours
        made = work.submit(self.client, self.function, op, seed, refs, big)
        self.outstanding.append(Expected(made, op, seed, addends))

    def work(self) -> None:
        work.run_all(self.client, self.function, 3)
        task = tasks.next_task(self.client, 0.0005, 0.0001)
        if task != tasks.NO_TASK:
            work.perform(self.client, self.function, task)

    def collect(self) -> None:
        """Wait for the oldest task, working meanwhile, and compare its results."""
        if not self.outstanding:
            return
        expected = self.outstanding.pop(0)
        until = time.monotonic() + work.PATIENCE_S
        while not handles.wait_all(self.client, expected.refs, 0.001, 0.0):
            work.run_all(self.client, self.function, 2)
            if time.monotonic() > until:
                raise Wrong(f"the task with seed {expected.seed} (op {expected.op}) was lost")
        if expected.op != work.FAIL:  # wait_all ends early for errors
            expected.check(self.client)
        self.compared += 1
