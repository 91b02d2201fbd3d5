"""CPUs that tasks without demands use, for what takes several: tasks with `num_cpus` above 1, and bundles.

A task without a demand takes a worker, and no daemon hears of it, so the resources in use do not include its CPU.
A task of several CPUs lets those begin that were queued before it, for `_TURN_MOST_S` at most. Then workers are parked:
they end the task that they run and take no other one. It begins once the tasks that still run leave it enough CPUs.

Workers are also parked while more of them can run than there are CPUs: those that were started in place of workers that
sleep in a get, or for tasks of less than a CPU. They end once no task is queued for them. While many tasks a second
sleep and wake, none are parked: each change costs more than such a task.

Parked workers stand idle, and a running task may wait for one that is queued. So the wait for CPUs has an end, after
which the workers go on for four times as long. A wait takes as long as the longest task that was seen to end since the
first wait, and `_WINDOW_S` more: so where tasks like those run, all of them end within it, and beside one that goes on
and on, others pause for `_WINDOW_S` only. When a task of several CPUs has ended and others are queued, they have a turn
that is as long as that task ran.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from fastrt._core.memory.clients import KIND_WORKER, Client, park, table
from fastrt._core.tasks import admission
from fastrt._core.tasks import tasks as core
from fastrt.config import RESOURCE_PARTS, Config
from fastrt.node.keys import Key, TaskKey, pair_of
from fastrt.node.members import Member
from fastrt.node.placing import GONE, HERE, WAITING, Placing
from fastrt.tasks.resources import CPU, Demand

_WINDOW_S, _WINDOW_MOST_S = 0.05, 5.0  # of a wait for CPUs beyond the longest task that ended, and of any
_REST = 4  # times as long the workers go on after a wait that was in vain
_TURN_LEAST_S, _TURN_MOST_S = 0.05, 5.0
_CALM_S, _CHANGES_A_WORKER = 0.1, 8  # beyond so many changes in that time, workers that are too many are not parked


@lru_cache(4096)
def cpu_parts(demand: Demand) -> int:
    """Return the parts of a CPU that a demand takes, apart from those of a placement group."""
    return dict(demand.amounts).get(CPU, 0)


class Workers(NamedTuple):
    """The workers of a node.

    Attributes:
        cpus: as many as it has CPUs.
        most: the greatest number; the other slots are for other processes.
        able: returns those that do not sleep in a get.
    """

    cpus: int
    most: int
    able: Callable[[], list[Member]]

    @classmethod
    def of(cls, config: Config, able: Callable[[], list[Member]]) -> Workers:
        """Return the workers of a node with these settings."""
        return cls(config.num_workers, max(config.num_workers, config.clients_dense // 2), able)


class CpuRoom:
    """Waits for the CPUs of tasks without demands, and keeps some from starting.

    Args:
        client: an attachment to the session.
        placing: the node's; tasks that wait here have their resources there already.
        workers: of the node.
    """

    def __init__(self, client: Client, placing: Placing, workers: Workers) -> None:
        self._client, self._placing, self._workers = client, placing, workers
        self._before: dict[Key, dict[int, int]] = {}  # by bundle: the tasks that were running when it was placed
        self._wide: dict[TaskKey, tuple[Demand, int]] = {}  # tasks that have not begun: their demands and devices
        self._behind: dict[TaskKey, tuple[int, float]] = {}  # the same: where the queue ended, and its latest turn
        self._begun: dict[TaskKey, float] = {}  # those that have, and when
        self._parked: set[int] = set()
        self._state: tuple[list[int], int] = [], 0  # the workers that could run at the last look, and how many should
        self._changes, self._window_at, self._calm_at = 0, 0.0, 0.0  # how often it changed until then; see `_count`
        self._window_end, self._rest_end = 0.0, 0.0
        self._seen: dict[int, tuple[int, float]] = {}  # by worker: the number of its running task, and since when
        self._looked_at, self._longest_s = 0.0, 0.0  # of the tasks that have ended meanwhile

    def take_over(self) -> None:
        """Let the workers go on that an earlier daemon has parked."""
        self._parked = {row["client"] for row in table(self._client.segment) if row["parked"]}

    @property
    def is_waiting(self) -> bool:
        """Whether something waits for CPUs."""
        return bool(self._wide or self._placing.unopened)

    def takes(self, key: Key, demand: Demand, devices: int) -> bool:
        """Take a task that has been placed here, if it needs several CPUs; `open` admits it."""
        if not isinstance(key, TaskKey) or cpu_parts(demand) <= RESOURCE_PARTS:
            return False
        self._wide[key] = demand, devices
        if key not in self._behind:
            first, end = core.queue_ends(self._client)
            has_priority = core.info(self._client, key.record)["priority"] > 0
            self._behind[key] = first if has_priority else end, time.monotonic() + _TURN_MOST_S
        return True

    def park(self) -> int:
        """Park the workers that take CPUs of others, let the others go on, and return how many there should be."""
        cpus, relief = self._workers.cpus, self._placing.relief
        is_waiting = bool(self._wide)
        if is_waiting and self._lets_others_go(time.monotonic()):
            relief -= sum(RESOURCE_PARTS - cpu_parts(demand) for demand, _ in self._wide.values())
            is_waiting = False
        # At least one if it has CPUs, however many actors have: tasks without demands must not wait until they end.
        size = max(min(cpus, 1), min(cpus - (-relief // RESOURCE_PARTS), self._workers.most))
        able = [member.index for member in self._workers.able()]
        count = self._count(able, size, time.monotonic())
        if is_waiting or relief < 0:
            self._park_all_but(0 if is_waiting else size, able)
        elif count is not None:
            self._park_all_but(count, able)
        return size

    def has_parked(self, worker: Member) -> bool:
        """Return whether a worker takes no task now."""
        return worker.index in self._parked

    def patience_s(self) -> float:
        """Return the seconds until `park` must be called again, if nothing happens until then."""
        able, size = self._state
        return max(0.0, self._calm_at - time.monotonic()) if len(able) > size else math.inf

    def _count(self, able: list[int], size: int, now: float) -> int | None:
        """Return how many of the workers that can run may take tasks of one CPU from now on; None: as many as before.

        Too many are parked once they have not changed for `_CALM_S`; then each change counts, until there are many. One
        that wakes has fallen asleep before, so it counts for two; those that are only gone may have been stopped, many
        at a time.
        """
        before, size_before = self._state
        if (able, size) == self._state:
            if len(able) <= size or now < self._calm_at:
                return None
            self._calm_at = math.inf
            return size
        if now >= self._window_at:
            self._changes, self._window_at = 0, now + _CALM_S
        self._changes += 2 * (not set(able) <= set(before)) + (size != size_before)
        self._state, self._calm_at = (able, size), now + _CALM_S
        if not self._parked:
            return None
        return size if self._changes <= _CHANGES_A_WORKER * max(size, 1) else len(able)

    def _park_all_but(self, count: int, able: list[int]) -> None:
        """Park workers so that at most `count` take tasks; idle ones are left for the queued tasks with demands."""
        before, parked = self._parked, set[int]()
        if count < len(able):
            running = self._running()
            idle = [worker for worker in able if worker not in running]
            busy = [worker for worker in able if worker in running]
            demands = self._placing.tasks_here - len(self._wide) - sum(own is None for own in running.values())
            free = min(len(idle), max(0, count - len(busy), demands if count else 0))
            for workers, left in ((idle, free), (busy, max(0, count - free))):
                workers.sort(key=lambda worker: worker not in before)
                parked.update(workers[: max(0, len(workers) - left)])
        for worker in {*able, *before}:
            park(self._client, worker, worker in parked)
        self._parked = parked

    def open(self, now: float) -> bool:
        """Open bundles, and admit tasks, whose CPUs are free of tasks without demands; whether there was any."""
        self._drop_gone(now)
        if not self.is_waiting:
            self._before.clear()
            if not self._is_resting(now):
                self._seen, self._longest_s = {}, 0.0
            return False
        if self._wide and core.queued(self._client):
            self.park()
        running = {worker: ended for worker, ended in self._running().items() if ended is not None}
        self._watch(running, now)
        placing = self._placing
        wanted = [(key, cpu_parts(demand)) for key, demand in placing.unopened.items()]
        tasks = [(key, cpu_parts(demand)) for key, (demand, _) in self._wide.items()]
        room = placing.total.get(CPU, 0) - placing.used.get(CPU, 0) + sum(parts for _, parts in [*wanted, *tasks])
        opened = False
        for key, parts in wanted:
            room -= parts
            before = self._before.setdefault(key, running)
            left = sum(running.get(client) == done for client, done in before.items())
            if not parts or left * RESOURCE_PARTS <= max(0, room):
                placing.open(key)
                opened = True
        self._before = {key: before for key, before in self._before.items() if key in placing.unopened}
        for task, parts in tasks:
            if self._is_behind(task, now):
                continue
            room -= parts
            if len(running) * RESOURCE_PARTS <= max(0, room):
                opened = True
                if self._is_resting(now):
                    self._rest_end = 0.0  # `open` comes again, and parks first
                    break
                self._begin(task, now)
        self._end_window(now)
        if opened:
            self.park()
        return opened

    def _begin(self, task: TaskKey, now: float) -> None:
        """Admit a task of several CPUs, before those that are queued."""
        _, devices = self._wide.pop(task)
        del self._behind[task]
        self._window_end = 0.0
        if not core.queued(self._client):
            self.park()  # before a worker takes the task: it would look idle, and be parked for the task's CPUs
        if admission.admit(self._client, task.record, task.id, devices, True):
            self._begun[task] = now
        else:
            self._placing.moved(task, GONE, now)

    def _end_window(self, now: float) -> None:
        """Let the workers go on for a while when the wait for their CPUs was in vain; others may have the resources."""
        if not self._wide or self._lets_others_go(now):
            return
        if not self._window_end:
            self._window_end = now + self._window_s()
        elif now > self._window_end:
            self._rest_end, self._window_end = now + _REST * self._window_s(), 0.0
            for task, (demand, _) in self._wide.items():
                self._placing.wait(task, demand, now)
            self._wide.clear()
            self.park()  # now: the daemon's next round may be a second away

    def _window_s(self) -> float:
        return min(self._longest_s + _WINDOW_S, _WINDOW_MOST_S)

    def _watch(self, running: dict[int, int], now: float) -> None:
        """Measure how long the tasks without demands run; one that is seen only once counts as short."""
        for worker, (number, since) in self._seen.items():
            if running.get(worker) != number:
                self._longest_s = max(self._longest_s, self._looked_at - since)
        seen, none = self._seen, (-1, now)
        self._seen = {
            worker: (number, seen[worker][1] if seen.get(worker, none)[0] == number else now)
            for worker, number in running.items()
        }
        self._looked_at = now

    def _drop_gone(self, now: float) -> None:
        """Forget the tasks that have ended or left this node."""
        place_of = self._placing.place_of
        for task in [task for task in self._wide if place_of(task) != HERE]:
            del self._wide[task]
        for task in [task for task in self._behind if task not in self._wide and place_of(task) != WAITING]:
            del self._behind[task]
        for task in [task for task in self._begun if place_of(task) == GONE]:
            ran = now - self._begun.pop(task)
            if core.queued(self._client):
                self._rest_end = now + min(max(ran, _TURN_LEAST_S), _TURN_MOST_S)

    def _lets_others_go(self, now: float) -> bool:
        """Whether the workers go on although tasks wait for their CPUs."""
        return self._is_resting(now) or all(self._is_behind(task, now) for task in self._wide)

    def _is_behind(self, task: TaskKey, now: float) -> bool:
        """Whether tasks that were queued before this one are still queued, and it has not waited for them too long."""
        end, turn = self._behind[task]
        return now < turn and core.queue_ends(self._client)[0] < end

    def _is_resting(self, now: float) -> bool:
        """Whether a turn of other tasks has not ended."""
        return now < self._rest_end

    def _running(self) -> dict[int, int | None]:
        """Workers that run a task, and the number that each had ended before it; None for a task with a demand."""
        tasks = [key for key in self._placing.placed() if isinstance(key, TaskKey)]
        states: list[tuple[int, int]] = admission.states(self._client, [pair_of(task) for task in tasks])
        admitted = {client for state, client in states if state == admission.RUNNING}
        rows = [row for row in table(self._client.segment) if row["kind"] == KIND_WORKER]
        busy = [row for row in rows if row["task"] is not None and not row["blocked"]]
        return {row["client"]: None if row["client"] in admitted else row["tasks_done"] for row in busy}
