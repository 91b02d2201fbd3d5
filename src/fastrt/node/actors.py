"""The daemon's part in actors: it starts their processes, restarts them, and ends actors that stay dead.

All decisions depend on records in the arena, so a daemon that takes over continues where the dead one was. Calls of
actors do not pass through it.
"""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastrt._core.memory import clients
from fastrt._core.objects import handles, unread
from fastrt._core.tasks import actors, tally
from fastrt._core.tasks import tasks as core
from fastrt._core.tasks.unheld_actors import let_go_unheld
from fastrt.errors import StaleReferenceError
from fastrt.store.client import Store
from fastrt.tasks.actor_records import class_name, death_of

_STARTING_MAX = 64  # processes that start at once: more would only wait for each other
_DESCRIPTORS_EACH = 4  # of the daemon, for each process: a pidfd, a connection and two pipes
_DESCRIPTORS_KEPT = 128
_STARTS_MAX = 3  # processes in a row that end before they have joined
_QUICK_MAX = 3  # processes in a row that end soon and are restarted without a pause
_SOON_S = 10.0
_PAUSE_S, _PAUSE_MAX_S = 0.1, 30.0
_UNHELD_S = 0.5  # between looks for waiting actors without a handle: nothing wakes the daemon when the last one goes
_FULL_MAX_S = 10.0  # how long actors wait for a place where no actor has one that could become free


@dataclass
class Restarts:
    """The last restarts of an actor: the pauses grow after processes that end soon without having ended a call.

    Attributes:
        began: when its last process was started, by the clock.
        quick: processes in a row that ended soon.
        due: when the next one may start; 0: none waits to start.
    """

    began: float
    quick: int = 0
    due: float = 0.0

    def fall(self, now: float) -> None:
        """Choose when the next process may start, after one has ended."""
        self.quick = self.quick + 1 if now - self.began < _SOON_S else 1
        pause = _PAUSE_S * 2.0 ** min(self.quick - _QUICK_MAX - 1, 30) if self.quick > _QUICK_MAX else 0.0
        self.due = now + min(pause, _PAUSE_MAX_S)


class Actors:
    """The actors of a node.

    Args:
        store: the daemon's attachment.
        fork: orders a process for the actor with that index.
        may_start: whether the resources of an actor are reserved for it here; the last argument says whether it is a
            restart.
        has_process: called with the index of each actor for which a process was forked.
        ended: called with the index of each actor that has ended.
        waiting: generations by index of the actors that may not start yet, as `may_start` has decided.
        say: prints a line at the drivers.
    """

    def __init__(
        self,
        store: Store,
        fork: Callable[[int], None],
        may_start: Callable[[int, dict[str, Any], bool], bool],
        has_process: Callable[[int], None],
        ended: Callable[[int], None],
        waiting: dict[int, int],
        say: Callable[[str], None],
    ) -> None:
        self._store = store
        self._client = store.client
        self._fork, self._may_start, self._report_end, self._waiting = fork, may_start, ended, waiting
        self._report_process = has_process
        self._say = say
        self._processes: dict[int, int] = {}  # by actor: the pid of the process ordered for it; 0 until it is known
        self._actor_of: dict[int, int] = {}  # by pid
        self._starting: set[int] = set()  # actors whose process has not joined yet
        self._full = ""  # why no other process can be started for now
        self._unheld_due = 0.0
        self._full_since = 0.0  # when that began while no actor had a process; 0: not so
        self._has_said = False
        self._failed: dict[int, int] = {}
        self._how: dict[int, str] = {}  # by actor: how the last of these ended
        self._restarts: dict[int, Restarts] = {}  # by actor

    def __contains__(self, pid: int) -> bool:
        return pid in self._actor_of

    def started(self, actor: int, pid: int, has_joined: bool) -> None:
        """Note the process that the zygote has forked for an actor."""
        self._processes[actor] = pid
        self._actor_of[pid] = actor
        if has_joined:
            self._starting.discard(actor)
        self._report_process(actor)

    def refused(self, actor: int, why: str) -> None:
        """Count a process that the zygote could not fork."""
        self._processes.pop(actor, None)
        self._starting.discard(actor)
        self._failed[actor] = self._failed.get(actor, 0) + 1
        self._how[actor] = why

    def joined(self, pid: int) -> None:
        """Note that a process has joined; it may be an actor's."""
        self._starting.discard(self._actor_of.get(pid, -1))

    def ended(self, pid: int, how: str) -> None:
        """Note that a process has ended; it may be an actor's."""
        actor = self._actor_of.pop(pid, None)
        if actor is None or self._processes.get(actor) != pid:
            return
        del self._processes[actor]
        self._starting.discard(actor)
        if actors.info(self._client, actor)["state"] == actors.WANTED:
            self._failed[actor] = self._failed.get(actor, 0) + 1
            self._how[actor] = how.partition("\n")[0]

    def fell(self, client: int, pid: int, how: str) -> None:
        """Record in its actors how a client has ended, before its slot is recovered."""
        cause = how.partition("\n")[0]  # without a table of memory
        for actor in actors.of_client(self._client, client):
            is_remote = actors.info(self._client, actor)["state"] == actors.AWAY
            process = "the process that forwarded its calls," if is_remote else "its process"
            actors.tell_how(self._client, actor, f"{process} {pid} {cause}")
            self._failed.pop(actor, None)  # its process had started
            rows = clients.table(self._client.segment, client)
            if not is_remote and any(row["tasks_done"] for row in rows):
                self._restarts.pop(actor, None)  # a process that has ended calls is not part of a crash loop

    def patience_s(self) -> float:
        """Seconds until the next process of an actor may start, or is given up; infinite when none waits for that."""
        due = [one.due for one in self._restarts.values() if one.due]
        due += [self._full_since + _FULL_MAX_S] if self._full_since else []
        return max(0.0, min(due) - time.monotonic()) if due else float("inf")

    def tend(self) -> None:
        """Start, restart and end the actors whose records ask for it."""
        self._full = ""
        wanted: dict[int, int | None] = {}
        for actor, state in actors.attention(self._client, self._waiting):
            if state == actors.WANTED:
                wanted[actor] = None
            if (self._full or actor in self._processes) and actors.lacks_process(self._client, actor):
                continue  # thousands may wait here: do not read each record
            info = actors.info(self._client, actor)
            if info["state"] != state:
                continue  # its process has joined meanwhile
            if state == actors.WANTED:
                self._start(actor, info)
            elif state == actors.LIVE:  # a bundle that has the order to end
                actors.drop(self._client, actor)
                self._decide(actor, info)
            elif state == actors.DOWN:
                self._decide(actor, info)
            else:  # an earlier daemon declared it dead, and died before it ended its calls
                self._end(actor, "")
        self._end_unheld(wanted)
        if self._processes or not self._full:
            self._full_since = 0.0
        elif not self._full_since:
            self._full_since = time.monotonic()

    def _end_unheld(self, wanted: dict[int, int | None]) -> None:
        """End actors that wait for resources or for a place, and that nothing refers to any more.

        Those that wait only because many others start at this moment have their turn.
        """
        if time.monotonic() < self._unheld_due or len(self._starting) >= _STARTING_MAX:
            return
        self._unheld_due = time.monotonic() + _UNHELD_S
        some = {**self._waiting, **wanted}
        for actor in let_go_unheld(self._client, {a: some[a] for a in some if a not in self._processes}):
            self._end(actor, "its last handle is gone")

    def _start(self, actor: int, info: dict[str, Any], again: bool = False) -> None:
        if info["ended"] or info["released"]:
            self._end(actor, "its last handle is gone")
        elif self._failed.get(actor, 0) >= _STARTS_MAX:
            self._end(actor, f"{_STARTS_MAX} processes in a row could not start it; the last one {self._how[actor]}")
        elif info["bare"]:
            if self._may_start(actor, info, again):
                actors.hold(self._client, actor)
            else:
                actors.let_go(self._client, actor)
        elif actor not in self._processes and self._may_start(actor, info, again):
            if self._has_slot():
                self._restarts.setdefault(actor, Restarts(0.0)).began = time.monotonic()
                self._fork(actor)
                self._processes[actor] = 0
                self._starting.add(actor)
            elif self._full_since and time.monotonic() > self._full_since + _FULL_MAX_S:
                self._end(actor, f"no process could be started for it: {self._full}; raise the limit")
                self._full = ""  # so that the next one is examined

    def _has_slot(self) -> bool:
        """Whether another process can be started; if not, the actor waits until others have ended."""
        used, tools, most = clients.occupancy(self._client.segment)
        there = used + len(self._starting)
        openable = max(0, (resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _DESCRIPTORS_KEPT) // _DESCRIPTORS_EACH)
        if len(self._starting) >= _STARTING_MAX:
            self._full = f"{_STARTING_MAX} processes start"
        elif there >= min(most - max(actors.SLOTS_KEPT - tools, 0), openable):
            self._full = f"{most} client slots are taken (clients_max)"
            if openable < most:
                self._full = f"the daemon may open no more files ({openable} processes, by ulimit -n)"
            if not self._has_said:
                self._has_said = True
                self._say(
                    f"fastrt: an actor waits until another process ends: {self._full}; raise the limit, or end actors\n"
                )
        return not self._full

    def _decide(self, actor: int, info: dict[str, Any]) -> None:
        """Restart an actor whose process has died, or declare it dead."""
        how = info["how"] or "its process ended"
        most = info["max_restarts"]
        if not info["ended"] and (most < 0 or info["restarts"] < most):
            if not info["bare"] and self._pauses(actor):
                return
            if actors.start_again(self._client, actor):
                self._start(actor, info, True)
                return
        if info["restarts"]:
            how += f"; it had been started again {info['restarts']} times (max_restarts={most})"
        self._end(actor, how)

    def _pauses(self, actor: int) -> bool:
        """Whether an actor whose process has ended must wait before the next one starts."""
        restarts = self._restarts.setdefault(actor, Restarts(0.0))
        now = time.monotonic()
        if not restarts.due:
            restarts.fall(now)
        actors.let_go(self._client, actor)
        if restarts.due > now and not actors.info(self._client, actor)["released"]:
            return True
        restarts.due, restarts.began = 0.0, now
        return False

    def _end(self, actor: int, reason: str) -> None:
        info = actors.info(self._client, actor)
        reason = info["reason"] or reason
        held = None
        if actors.has_calls(self._client, actor):
            with contextlib.suppress(StaleReferenceError):
                held = handles.acquire(self._client, *info["object"])
        name = class_name(self._store, actor)  # once it is dead, its record may be another actor's
        ending = actors.end(self._client, actor, reason)
        if ending is None:
            return  # its process has joined meanwhile; it ends by itself when the last handle is gone
        if held is not None:  # its calls report the error
            unread.mark(self._client, [held])
        self._failed.pop(actor, None)
        self._how.pop(actor, None)
        self._restarts.pop(actor, None)
        for task in ending:
            error = death_of(info, name, reason)
            error.attempts = core.info(self._client, task)["attempts"]  # of a call that was to be retried
            self._store.put_error(task, error)
            core.finish(self._client, task, tally.CRASHED)
        self._report_end(actor)
