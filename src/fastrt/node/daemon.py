"""The node daemon: makes the segment, admits clients, keeps the worker pool, buries the dead.

One thread, one selector. It is on no hot path: tasks and objects never pass through it, and they go on while it is
dead. What it must know lies in the arena and in the zygote, so another one can take its place. When the last driver
is gone it ends every worker and removes all that the session had.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import shutil
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from fastrt._core.memory import arena
from fastrt._core.memory.clients import (
    KIND_ACTOR,
    KIND_DAEMON,
    KIND_DRIVER,
    KIND_TOOL,
    KIND_WORKER,
    Client,
    admit,
    readmit,
    table,
    want_workers,
)
from fastrt._core.memory.segment import Segment, sweep
from fastrt._core.objects import functions, spill
from fastrt._core.tasks import tasks
from fastrt.config import RUNTIME_FOLDER, SHM_DIR, Config
from fastrt.errors import FastrtError, LockStuck
from fastrt.folders import UnsafeFolderError, has_private_folder, private_folder
from fastrt.node.actors import Actors
from fastrt.node.admission import Admission
from fastrt.node.advisor import Advisor
from fastrt.node.janitor import Janitor, explain
from fastrt.node.logs import Forwarding, LogPipe, Printed
from fastrt.node.memory_limit import KillCounters
from fastrt.node.spiller import Spiller
from fastrt.node.worker_pool import Pool, kill_group, pidfd_of
from fastrt.store import unread
from fastrt.store.client import Store
from fastrt.store.join import Link, answers, listen

_KINDS = {"driver": KIND_DRIVER, "worker": KIND_WORKER, "tool": KIND_TOOL, "actor": KIND_ACTOR, "child": KIND_TOOL}
_FORKED = ("worker", "actor")
_GUESTS = ("driver", "tool")  # processes that may leave and join again
_BEYOND = {"driver": 2, "tool": 4}  # slots above the limit that are kept for them: one can always look
_TICK_S = 0.5  # how often the daemon looks whether the arena should grow and workers should leave
_QUIET_TICK_S = 1.0  # the same, after so many looks at which nothing had happened
_QUIET_LOOKS = 4
_OPENING_S = 0.05  # while a placement group waits for tasks that run where it is reserved
_HURRY_S = 0.005  # while a death waits for the zygote's word
_AHEAD_BYTES = 64 << 20  # free memory that is kept ready, so that no put has to wait for the kernel
_STATUS_PATIENCE_S = 0.2  # between a pidfd and the zygote's report of the same death
_SURPLUS_PATIENCE_S = 2.0
_SWEEP_S = 1.0  # how often functions that nothing uses any more are dropped
_BACKLOG_BYTES = 1 << 20  # of output that a driver has not read yet
_LAST_WORDS_S = 1.0
_COMEBACK_S = 2.0  # in which drivers connect to a new daemon; what workers print waits for them
_STILLBORN_MAX = 5
_WORKERS_END_S = 1.5  # for tasks that run at the end of the session: a worker ends itself after 1 s
_LATE_S = 0.5  # an actor's process ends itself when its time is over; the daemon waits a little longer


class ZygoteEndedError(Exception):
    """The zygote was killed, and its workers with it; the session can go on with another one."""


class Member:
    """A process that has joined: its slot, its pidfd, its connection (None until it comes back to a new daemon)."""

    def __init__(self, pid: int, index: int, kind: str, pidfd: int, link: Link | None) -> None:
        self.pid = pid
        self.index = index
        self.kind = kind
        self.pidfd = pidfd
        self.link = link
        self.logs = ""  # which output of workers it reads, see `attach.join`
        self.left = False
        self.gone_at = 0.0


class Daemon:
    """A node's daemon.

    Args:
        config: the session's settings.
        pool: the worker pool; its zygote is starting at the same time.
        session: what workers are told besides where the session is: sys_path, preload.
        adopt: the segment of a session whose daemon died; None for a new session.
        cluster: whether the session is a node of a cluster.
    """

    def __init__(
        self, config: Config, pool: Pool, session: dict[str, Any], adopt: str | None = None, cluster: bool = False
    ) -> None:
        self._config = config
        self._pool = pool
        if adopt is None:
            sweep_sessions(config.runtime_dir, config.spill_dir)
        self._segment = create_segment(config) if adopt is None else Segment.attach(adopt)
        self._dir = config.runtime_dir / self._segment.session
        private_folder(self._dir, "the session's folder")
        self.socket_path = str(self._dir / "node.sock")
        index, gen = admit(self._segment, os.getpid(), KIND_DAEMON, "daemon", 4)  # its predecessor may have a slot yet
        self._client = Client(self._segment, index, gen)
        self._spiller = Spiller(self._client, config.spill_dir / self._segment.session, self._dir)
        self._janitor = Janitor(Store(self._client, 0.0))
        self._oom_kills = KillCounters(time.monotonic())
        self._members: dict[int, Member] = {}  # by pid
        self._admission = Admission(
            Store(self._client, 0.0), config.num_workers, config.resources if config.num_workers else {}, cluster,
            self._runs_tasks, self._is_blocked, self._want_actors, self._log,
        )  # fmt: skip
        self._advisor = Advisor(self._client, pool, self._log) if config.advice else None
        self._actors = Actors(
            Store(self._client, 0.0), self._fork, self._admission.may_start, self._on_actor_ended,
            self._admission.placing.waiting_actors, self._log,
        )  # fmt: skip
        self._actors_wanted = self._refresh_wanted = False
        self._refreshed_at = self._swept_at = 0.0
        self._quiet_looks = self._used = 0
        self._statuses: dict[int, int] = {}
        self._unreported: set[int] = set()  # workers that were buried before the zygote said how they ended
        self._had_driver = self._starter_left = False
        self._ended = self._ending = False
        self._comeback_until = 0.0
        self._surplus_since = 0.0
        self._selector = selectors.DefaultSelector()
        Path(self.socket_path).unlink(missing_ok=True)  # a dead daemon's
        self._listener = listen(self.socket_path)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(pool.control, selectors.EVENT_READ, self._on_zygote)
        self._selector.register(self._admission.news, selectors.EVENT_READ, self._admission.on_news)
        self._stillborn = 0  # workers in a row that ended before they joined
        self._unclaimed: list[LogPipe] = []  # of workers that the zygote has not named yet, in order
        self._pipes: dict[int, list[LogPipe]] = {}
        self._muted: list[LogPipe] = []  # not read while a driver is far behind
        self._forwarding = Forwarding()
        self._left_out = 0  # lines from other nodes, while a driver was far behind
        self._told_readers: tuple[Link, bool] | None = None
        if pool.zygote_is_new:
            pool.configure({
                **session, "socket": self.socket_path, "spin_s": config.spin_us / 1e6, "advice": config.advice,
                "patience_s": config.store_patience_s, "call_sites": config.record_call_sites,
                "library_threads": config.library_threads, "cleanup_timeout_s": config.cleanup_timeout_s,
            })  # fmt: skip
        if adopt is not None:
            self._take_over()

    def _take_over(self) -> None:
        """Learn from the client table and the zygote who is there; the dead predecessor is the first to be buried."""
        self._segment.take_over()
        self._comeback_until = time.monotonic() + _COMEBACK_S
        if not self._pool.zygote_is_new:
            self._pool.count()
        for row in table(self._segment):
            pid, index = row["pid"], row["client"]
            if index == self._client.index:
                continue
            if row["kind"] == KIND_DAEMON:
                self._janitor.bury(index, pid, explain(None))
                continue
            kind = next(name for name, number in _KINDS.items() if number == row["kind"])
            self._had_driver |= kind == "driver"
            if kind in _FORKED and self._pool.zygote_is_new:
                kill_group(pid)  # it ended with the old zygote, but not what its tasks have started
            elif row["blocked"]:
                self._pool.blocked.add(pid)
            self._watch(Member(pid, index, kind, pidfd_of(pid, row["start_time"]), None))
        self._janitor.wake_all()
        self._admission.take_over()

    def _watch(self, member: Member) -> None:
        self._members[member.pid] = member
        if member.pidfd < 0:
            member.gone_at = time.monotonic()
        else:
            self._selector.register(member.pidfd, selectors.EVENT_READ, lambda fd: self._on_death(member.pid))

    def run(self, starter: socket.socket) -> None:
        """Serve until the last driver has left, or until the process at `starter` dies before one has joined."""
        self._selector.register(starter, selectors.EVENT_READ, self._on_starter)
        self._staff()
        while not self._finished():
            self._serve(self._patience_s())
            self._staff()
            self._tend()
        self._end_processes()

    def _serve(self, patience_s: float) -> None:
        """Handle what has come, or comes in a while."""
        for key, _ in self._selector.select(patience_s):
            self._quiet_looks = 0
            if self._selector.get_map().get(key.fd) is key:  # not closed by one that came before it
                key.data(key.fileobj)
        self._bury_dead()

    def _end_processes(self) -> None:
        """Order workers and actors to end, and wait for a limited time: the cleanup code of users runs there."""
        self._ending = True
        started, ordered = time.monotonic(), set[int]()
        with contextlib.suppress(ZygoteEndedError, KeyboardInterrupt):
            while True:
                waited = time.monotonic() - started
                pids = {*self._pool.actors, *(self._pool.pids if waited < _WORKERS_END_S else ())}
                if not pids or waited > self._config.cleanup_timeout_s + _LATE_S:
                    return
                for pid in pids - ordered:
                    self._order_end(pid)
                ordered |= pids
                self._serve(_HURRY_S)
                self._tend()

    def _order_end(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGTERM)
        if pid in self._members:  # its sleep may have begun after the signal came
            self._client.wake(self._members[pid].index)

    def leave(self) -> None:
        """End the workers, and pass on what they have printed. The session stays, for another daemon."""
        self._pool.kill()
        unread.forward(self._post)
        for pipes in [*self._pipes.values(), self._unclaimed]:
            for pipe in pipes:
                pipe.drain()
        for member in self._members.values():
            if member.link is not None:
                member.link.flush(_LAST_WORDS_S if member.logs else 0.0)
                member.link.close()

    def close(self) -> None:
        """End the workers and remove everything the session had."""
        self.leave()
        self._admission.close()
        arena.discard(
            self._client, [m.index for m in self._members.values() if m.kind not in _FORKED and not m.gone_at]
        )
        self._spiller.close()
        if self._ended:  # drivers may still be there
            self._segment.poison("its node was stopped; start one, and call fastrt.init() again", closed=True)
        self._segment.unlink()
        shutil.rmtree(self._dir, ignore_errors=True)

    def _finished(self) -> bool:
        drivers = any(m.kind == "driver" and not m.left for m in self._members.values())
        return self._ended or (self._had_driver and not drivers)

    def _on_starter(self, starter: socket.socket) -> None:
        self._selector.unregister(starter)  # it only ever closes
        self._had_driver = self._starter_left = True

    def _patience_s(self) -> float:
        if any(member.gone_at for member in self._members.values()):
            return _HURRY_S
        return min(self._tick_s(), self._actors.patience_s())

    def _tick_s(self) -> float:
        if self._admission.placing.unopened:
            return _OPENING_S
        return _TICK_S if self._quiet_looks < _QUIET_LOOKS else _QUIET_TICK_S

    # ---- joining and leaving ----

    def _accept(self, listener: socket.socket) -> None:
        sock, _ = listener.accept()
        link = Link(sock)
        _, uid = link.peer()
        if uid != os.geteuid():
            link.send(error=f"this session belongs to uid {os.geteuid()}, not to {uid}")
            link.close()
            return
        self._selector.register(link, selectors.EVENT_READ, self._on_message)

    def _on_message(self, link: Link) -> None:
        try:
            message = link.receive(0)
            while message is not None:
                self._handle(link, message)
                message = link.receive(0) if link.waiting() else None
        except EOFError:
            self._admission.on_hang_up(link)
            self._selector.unregister(link)
            link.close()

    def _handle(self, link: Link, message: dict[str, Any]) -> None:
        pid, _ = link.peer()
        op = message.get("op")
        if op == "join":
            self._join(link, pid, message)
        elif op == "rejoin":
            self._rejoin(link, pid, message)
        elif op == "bye" and pid in self._members:
            self._members[pid].left = True
        elif op == "leave":
            self._leave(link, pid)
        elif op == "end":
            self._ended = True
        elif op == "blocked":
            self._pool.blocked.add(pid)
            self._admission.refresh()
        elif op == "unblocked":
            self._pool.blocked.discard(pid)
            self._admission.refresh()
        elif op == "cluster":
            try:
                self._admission.on_cluster(link, message)
            except (KeyError, TypeError, ValueError, AttributeError) as exc:
                link.send(error=f"this does not say who is in the cluster: {type(exc).__name__}: {exc}")
        elif op == "nodes":
            link.send(**self._admission.describe())
        elif op == "spill":
            self._spiller.make_room(_whole(message.get("bytes")))
        elif op == "restore":
            self._spiller.restore(_whole(message.get("index")), _whole(message.get("objref")))
        elif op == "unread":
            self._post(op="unread", objref=message.get("objref"), kind=message.get("kind"), data=message.get("data"))
        elif op == "actor":
            self._tend_actors()
        elif op == "groups":
            self._tend_actors()
            link.send(groups=self._admission.groups.rows())
        elif op == "remove_group":
            self._admission.remove_group(str(message.get("group")))
            self._tend_actors()
            self._admission.refresh()
            link.send(removed=True)
        elif op == "find_actor":
            self._admission.on_find(link, str(message.get("name", "")))
        elif op == "found_actor":
            self._admission.on_found(message)
        elif op == "output":
            self._log_from_elsewhere(message)
        elif op == "holds":
            self._admission.on_holds(message)
        elif op == "may_wait":
            link.send(answer=self._pool.may_grow())
        else:
            link.send(error=f"there is no operation {op!r}")

    def _join(self, link: Link, pid: int, message: dict[str, Any]) -> None:
        kind, name = str(message.get("kind")), str(message.get("name", ""))
        if kind not in _KINDS or pid in self._members:
            link.send(error=f"process {pid} cannot join as {kind!r}" + (" twice" if pid in self._members else ""))
            return
        try:
            # The pidfd first: from here on the process cannot be mistaken for another with its number.
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        try:
            index, gen = admit(self._segment, pid, _KINDS[kind], name, _BEYOND.get(kind, 0))
        except FastrtError as exc:
            os.close(pidfd)
            link.send(error=str(exc))
            return
        self._watch(Member(pid, index, kind, pidfd, link))
        self._actors.joined(pid)
        self._members[pid].logs = str(message.get("logs", "")) if self._config.log_to_driver else ""
        self._had_driver |= kind == "driver"
        link.send(segment=self._segment.name, index=index, gen=gen)

    def _rejoin(self, link: Link, pid: int, message: dict[str, Any]) -> None:
        if pid not in self._members:
            link.send(error=f"process {pid} has no client slot in this session")
            return
        member = self._members[pid]
        about = {}
        if message.get("kind") in _GUESTS and member.kind in _GUESTS:
            member.kind = message["kind"]
            self._had_driver |= member.kind == "driver"
            member.left = False
            gen = readmit(self._segment, member.index, _KINDS[member.kind], str(message.get("name", "")))
            about = {"index": member.index, "gen": gen}
        member.link = link
        member.logs = str(message.get("logs", "")) if self._config.log_to_driver else ""
        link.send(segment=self._segment.name, **about)

    def _leave(self, link: Link, pid: int) -> None:
        """End what a driver has begun. Its process keeps its slot, for views that it still has and to come back."""
        member = self._members.get(pid)
        if member is not None and member.kind in _GUESTS:
            try:
                self._janitor.end_job(member.index, pid)
            except LockStuck as exc:
                link.send(error=str(exc))
                return
            member.left, member.logs, member.link = True, "", None
        link.send(left=True)

    def _on_death(self, pid: int) -> None:
        member = self._members[pid]
        self._selector.unregister(member.pidfd)
        member.gone_at = time.monotonic()

    def _bury_dead(self) -> None:
        """Recover the slots of dead processes; a worker's once the zygote has said how it ended, if it does."""
        unread.forward(self._post)
        now = time.monotonic()
        before = len(self._members)
        for member in [m for m in self._members.values() if m.gone_at]:
            reported = member.kind not in _FORKED or member.pid in self._statuses
            if not reported and now - member.gone_at < _STATUS_PATIENCE_S:
                continue
            try:
                how = explain(self._statuses.get(member.pid), self._oom_kills.story())
                self._actors.fell(member.index, member.pid, how)
                self._janitor.bury(member.index, member.pid, how)
            except LockStuck:
                continue  # by a stopped process; the next look tries again
            self._actors.ended(member.pid, how)
            self._statuses.pop(member.pid, None)
            if not reported:
                self._unreported.add(member.pid)
            if member.pidfd >= 0:
                os.close(member.pidfd)
            del self._members[member.pid]
        if len(self._members) < before:
            self._janitor.wake_all()

    # ---- workers ----

    def _on_zygote(self, control: socket.socket) -> None:
        message = self._pool.receive()
        if message is None and self._starter_left:
            sys.exit("fastrt: the zygote ended, and who started the session has left: nobody can start another one")
        if message is None:
            raise ZygoteEndedError
        if "refused" in message:
            for pipe in self._unclaimed[:2]:
                pipe.drain()
            self._unclaimed = self._unclaimed[2:]
            if message["actor"] is None:
                self._stillborn += 1
            else:
                self._actors.refused(message["actor"], f"could not be forked: {message['refused']}")
        elif message.get("actor") is not None:
            pid = message.get("started") or message["worker"]
            self._actors.started(message["actor"], pid, pid in self._members)
        if "started" in message:
            self._read_output(message["started"], self._unclaimed[:2])
            self._unclaimed = self._unclaimed[2:]
        elif "worker" in message:
            out, err = message["fds"]
            self._read_output(
                message["worker"], [LogPipe(out, False, self._on_output), LogPipe(err, True, self._on_output)]
            )
        elif "ended" in message:
            pid = message["ended"]
            if pid in self._members:
                self._statuses[pid] = message["status"]
                self._stillborn = 0
            elif pid in self._unreported:
                self._unreported.remove(pid)
            elif pid in self._actors:
                self._actors.ended(pid, explain(message["status"]))
            else:
                self._stillborn += 1
            for pipe in self._pipes.pop(pid, []):
                if pipe in self._muted:
                    self._muted.remove(pipe)
                elif pipe.fd in self._selector.get_map():
                    self._selector.unregister(pipe)
                pipe.drain()

    def _read_output(self, pid: int, pipes: list[LogPipe]) -> None:
        self._pipes[pid] = pipes
        for pipe in pipes:
            pipe.pid = pid
            self._selector.register(pipe, selectors.EVENT_READ, self._on_log)

    def _runs_tasks(self, client: int) -> bool:
        return any(m.index == client and m.kind == "worker" for m in self._members.values())

    def _is_blocked(self, client: int) -> bool:
        return any(m.index == client and m.pid in self._pool.blocked for m in self._members.values())

    def _staff(self) -> None:
        if self._config.num_workers:
            most = max(self._config.num_workers, self._config.clients_dense // 2)  # the rest is for others who join
            # One is there however much actors have: what asks for nothing must not wait for these to end.
            self._pool.size = max(1, min(self._config.num_workers + self._admission.further_workers(), most))
            want_workers(self._client, self._pool.size)
        if self._stillborn >= _STILLBORN_MAX:
            self._segment.poison("workers cannot start: each one ended before it joined; see their error output")
            return
        for _ in range(self._pool.missing(tasks.queued(self._client) > 0)):
            self._fork()
        self._tend_actors()

    def _fork(self, actor: int | None = None) -> None:
        out, err = self._pool.fork(actor)
        self._unclaimed += [LogPipe(out, False, self._on_output), LogPipe(err, True, self._on_output)]

    def _tend_actors(self) -> None:
        if self._ending or self._pool.counting:  # a dead daemon may have ordered their processes
            return
        self._actors_wanted = True
        while self._actors_wanted or self._refresh_wanted:
            if self._refresh_wanted:
                self._refresh_wanted = False
                self._admission.refresh()
            self._actors_wanted = False
            self._actors.tend()

    def _want_actors(self) -> None:
        self._actors_wanted = True

    def _on_actor_ended(self, actor: int) -> None:
        self._admission.on_actor_ended(actor)
        self._refresh_wanted = True

    def _on_log(self, pipe: LogPipe) -> None:
        if self._drivers_lag():
            # The worker that prints waits, as it would for any slow reader of its output; nothing is lost.
            self._selector.unregister(pipe)
            self._muted.append(pipe)
        elif not pipe.read():
            self._selector.unregister(pipe)

    def _on_output(self, printed: Printed) -> None:
        """Show what a worker has printed to the drivers here, and to those of other nodes if it may be theirs."""
        self._log(printed.text(), printed.is_error, printed.is_update)
        owner = next((m for m in self._members.values() if m.index == (printed.job & 0xFFFF) - 1), None)
        if self._config.log_to_driver and (owner is None or owner.kind != "driver"):
            self._forwarding.forward(printed, self._admission.uplink)

    def _log(self, text: str, is_error: bool = True, is_update: bool = False) -> None:
        self._post(op="log", text=text, error=is_error, update=is_update)

    def _post(self, **message: Any) -> None:
        for link in self._readers():
            link.post(**message)

    def _log_from_elsewhere(self, message: dict[str, Any]) -> None:
        """Show the drivers what a task has printed on another node; what they cannot take now is left out."""
        text = str(message.get("text", ""))
        if self._drivers_lag():
            self._left_out += text.count("\n")
        else:
            flags = {"error": message.get("error") is True, "update": message.get("update") is True}
            for link in self._readers("all"):
                link.post(op="log", text=text, **flags)

    def _tend_output(self) -> None:
        """Pass on unfinished lines, say what was left out, and have the uplink know whether a driver reads."""
        now, uplink = time.monotonic(), self._admission.uplink
        for pipes in self._pipes.values():
            for pipe in pipes:
                if pipe.has_rest and pipe not in self._muted:
                    pipe.pass_on_unfinished(now)
        self._forwarding.tend(uplink)
        if self._left_out and not self._drivers_lag():
            self._log(f"fastrt: {self._left_out} lines from other nodes were left out: this program read too slowly\n")
            self._left_out = 0
        reads = any(member.logs == "all" for member in self._members.values())
        if uplink is not None and self._told_readers != (uplink, reads):
            self._told_readers = uplink, reads
            uplink.post(op="reads_output", on=reads)

    def _readers(self, *which: str) -> list[Link]:
        which = which or ("node", "all")
        return [member.link for member in self._members.values() if member.link is not None and member.logs in which]

    def _drivers_lag(self) -> bool:
        links = self._readers()
        if not links and time.monotonic() < self._comeback_until:
            return True  # whoever read it before will come back in a moment
        return any(link.backlog > _BACKLOG_BYTES for link in links)

    # ---- now and then ----

    def _tend(self) -> None:
        """Keep memory ready ahead of need, and let workers go that were only needed while others waited."""
        unread.forward(self._post)
        for member in self._members.values():
            if member.link is not None:
                member.link.flush()
        if self._muted and not self._drivers_lag():
            for pipe in self._muted:
                self._selector.register(pipe, selectors.EVENT_READ, self._on_log)
            self._muted.clear()
        now = time.monotonic()
        self._tend_output()
        if now - self._refreshed_at > self._tick_s():
            self._refreshed_at = now
            self._admission.refresh()
        if self._advisor is not None:
            self._advisor.look(now)
        if now - self._swept_at > _SWEEP_S:
            self._swept_at = now
            with contextlib.suppress(LockStuck):
                functions.sweep(self._client)
        spill.tick(self._client)
        self._oom_kills.look(time.monotonic())
        used, committed, most = arena.room(self._client)
        self._quiet_looks = self._quiet_looks + 1 if used == self._used else 0
        self._used = used
        if committed < most and committed - used < _AHEAD_BYTES:
            arena.grow(self._client)
        if self._pool.surplus() <= 0:
            self._surplus_since = 0.0
        elif not self._surplus_since:
            self._surplus_since = time.monotonic()
        elif time.monotonic() - self._surplus_since > _SURPLUS_PATIENCE_S:
            self._surplus_since = 0.0
            able = [m for m in self._members.values() if m.kind == "worker" and m.pid not in self._pool.blocked]
            for link in [m.link for m in able[-self._pool.surplus() :] if m.link is not None]:
                link.post(op="stop")  # taken up when it is idle; until then it goes on working


def create_segment(config: Config) -> Segment:
    """Make the arena of a new session."""
    return Segment.create(
        config.object_store_memory,
        clients_max=config.clients_max,
        clients_dense=config.clients_dense,
        objects_max=min(config.objects_max, max(1 << 16, config.object_store_memory // 512)),
        tasks_max=config.tasks_max,
        trace=config.trace,
    )


def _whole(value: object) -> int:
    """A number from a message: 0 when it is none, or out of every range."""
    return value if isinstance(value, int) and 0 <= value < 1 << 64 else 0


def sweep_sessions(runtime_dir: Path, spill_dir: Path) -> None:
    """Remove segments, folders and spilled values of crashed sessions; make the runtime folder, for this user only.

    Raises:
        UnsafeFolderError: the runtime folder belongs to another user, or others may enter or replace it.
    """
    private_folder(runtime_dir, RUNTIME_FOLDER)
    sweep()
    for folder in [*runtime_dir.iterdir(), *(spill_dir.iterdir() if spill_dir.is_dir() else ())]:
        gone = re.fullmatch("[0-9a-f]{32}", folder.name) and not (SHM_DIR / f"fastrt-{folder.name}").exists()
        # A session that ends removes its segment first: as long as its daemon answers, the rest is its own to do.
        if gone and not answers(str(runtime_dir / folder.name / "node.sock")) and _is_private(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _is_private(folder: Path) -> bool:
    try:
        return has_private_folder(folder, "a session's folder")
    except (UnsafeFolderError, OSError):
        return False  # another user's: a spill folder may be shared
