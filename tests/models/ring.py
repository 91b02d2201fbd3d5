"""The ready queue when it is full: two records and a ring of two cells for each, with cells that mean nobody any more.

One task stays queued while another is submitted and cancelled again and again, each time in the same record. The last
time it goes to the front.
"""

from collections.abc import Callable
from typing import ClassVar

from .explorer import BLOCKED, Memory, Model, Program, at, bit_on, get, load, lock, put, store, unlock

S, T, Q = "submission.", "tasks.", "queue."


class Ring(Model):
    CELLS = 4
    LOCKS = ("queue",)
    SCENARIOS: ClassVar = {"full": 1}
    MUTANTS: ClassVar = {"a cell means one tenant only": "full"}

    def memory(self) -> Memory:
        return {"ready": (False, False), "gen": (0, 0), "cells": ((0, -1),) * self.CELLS, "head": 0, "tail": 0,
                "queue": 0, "dead": 0, "seen": 0}  # fmt: skip

    def programs(self) -> list[tuple[str, Callable[[int], Program]]]:
        return [("submitter", self.submitter), ("worker", self.worker)]

    def check(self, s: Memory) -> str | None:
        return "more cells than there are" if s["tail"] - s["head"] > self.CELLS else None

    def quiet(self, s: Memory, asleep: list[str]) -> str | None:
        return "a task is READY and not queued" if s["ready"][0] and s["seen"] and not s["dead"] & 2 else None

    def means(self, s: Memory, cell: int) -> tuple[tuple[int, int], bool]:
        t, gen = s["cells"][cell % self.CELLS]
        return (t, gen), s["ready"][t] and (s["gen"][t] == gen or self.no("a cell means one tenant only"))

    def push(self, me: int, t: int, first: bool) -> Program:
        gen = yield at(Q + "queue_push: a64_load_acq(x.task_words + t)"), get, "gen", t
        yield at(Q + "_lock: frt_lock_take"), lock, "queue", me
        tail = yield at(Q + "queue_push: sb.ring_tail - sb.ring_head"), load, "tail"
        head = yield at(Q + "queue_push: sb.ring_tail - sb.ring_head"), load, "head"
        if tail - head == self.CELLS:
            yield from self.drop_stale(tail)
            head = yield at(Q + "queue_push: first and sb.ring_head"), load, "head"
        if first and head:
            yield at(Q + "queue_push: x.ring[(sb.ring_head - 1)"), put, "cells", (head - 1) % self.CELLS, (t, gen)
            yield at(Q + "queue_push: a64_store_sc(&sb.ring_head"), store, "head", head - 1
        else:
            yield at(Q + "queue_push: x.ring[sb.ring_tail"), put, "cells", tail % self.CELLS, (t, gen)
            yield at(Q + "queue_push: a64_store_sc(&sb.ring_tail"), store, "tail", tail + 1
        yield at(Q + "queue_push: frt_lock_give"), unlock, "queue"

    def drop_stale(self, tail: int) -> Program:
        to = tail
        for k in range(self.CELLS):
            cell, good = yield at(Q + "_drop_stale: cell = x.ring"), self.means, tail - 1 - k
            if good:
                to -= 1
                yield at(Q + "_drop_stale: x.ring[h & mask]"), put, "cells", to % self.CELLS, cell
        yield at(Q + "_drop_stale: a64_store_rel(&x.sb.ring_head"), store, "head", to

    def submitter(self, me: int) -> Program:
        for k in range(6):
            t = min(k, 1)
            yield at("records.task_done: FRT_TASK_RESERVED"), self.recycle, t
            yield at(S + "_commit_task: a64_store_sc(x.task_words"), put, "ready", t, True
            yield from self.push(me, t, k == 5)
            yield "ghost: queued", bit_on, "seen", t

    def recycle(self, s: Memory, t: int) -> None:
        """The task was cancelled; its record serves the next one."""
        put(s, "ready", t, False)
        put(s, "gen", t, s["gen"][t] + 1)

    def worker(self, me: int) -> Program:
        """Comes late: when the submitter is done, or dead."""
        yield "waits", lambda s: None if s["dead"] or (s["tail"] >= 5 and not s["queue"]) else BLOCKED
        yield at(Q + "_lock: frt_lock_take"), lock, "queue", me
        while True:
            head = yield at(Q + "queue_pop: sb.ring_head != sb.ring_tail"), load, "head"
            if head == (yield at(Q + "queue_pop: sb.ring_head != sb.ring_tail"), load, "tail"):
                return
            cell, good = yield at(Q + "queue_pop: word = a64_load_acq"), self.means, head
            if good:
                yield at(Q + "queue_pop: FRT_TASK_CLAIMED"), put, "ready", cell[0], False
            yield at(Q + "queue_pop: a64_store_rel(&sb.ring_head"), store, "head", head + 1
