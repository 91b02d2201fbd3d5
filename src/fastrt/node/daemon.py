"""The node daemon: creates the segment, admits clients, keeps the worker pool and recovers from deaths.

One thread, one selector. It is on no hot path: tasks and objects never pass through it, and they go on while it is
dead. All state that it needs lies in the arena and in the zygote, so another daemon can take its place. When the last
driver has left, it ends every worker and removes the session.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from fastrt._core.memory import arena
from fastrt._core.memory.clients import KIND_DAEMON, KIND_DRIVER, Client, admit, table
from fastrt._core.memory.segment import Segment
from fastrt._core.objects import functions, remote, spill
from fastrt.config import Config, spare_memory
from fastrt.errors import LockStuck
from fastrt.node.actors import Actors
from fastrt.node.admission import Admission
from fastrt.node.advisor import Advisor
from fastrt.node.amounts import resources_of
from fastrt.node.cpu_room import Workers
from fastrt.node.deaths import Deaths
from fastrt.node.janitor import Janitor, explain
from fastrt.node.kept import KeptObjectTable
from fastrt.node.leftovers import sweep_sessions
from fastrt.node.members import FORKED, Member, Members
from fastrt.node.memory_monitor import MemoryMonitor
from fastrt.node.output import Output
from fastrt.node.populator import Populator
from fastrt.node.served_link import ServedLink
from fastrt.node.session_end import SessionEnd
from fastrt.node.spiller import Spiller
from fastrt.node.staffing import Staffing
from fastrt.node.worker_pool import Pool, worker_settings
from fastrt.store import unread
from fastrt.store.client import Store
from fastrt.store.join import Link, listen
from fastrt.store.messages import (
    ActorsChanged,
    Blocked,
    Bye,
    ClusterNodes,
    End,
    Fetch,
    FindActor,
    Forked,
    ForkFailed,
    GroupList,
    GroupRemoved,
    Holds,
    Join,
    JoinAgain,
    Leave,
    Left,
    ListDemand,
    ListGroups,
    ListNodes,
    MayWait,
    Message,
    MessageError,
    Process,
    ProcessEnded,
    ProcessesListed,
    Ready,
    Reconnect,
    Refused,
    RemoteOutput,
    RemoveGroup,
    RequestResources,
    Restore,
    SearchEnded,
    Spill,
    Unblocked,
    Unread,
    WaitAnswer,
)
from fastrt.store.session_folder import Beat, make_session_folder

_TICK_S = 0.5  # how often the daemon checks whether the arena should grow and workers should leave
_QUIET_TICKS = 4  # after so many without an event, a tick takes longer
_QUIET_TICK_S = 1.0
_OPENING_S = 0.02  # while a placement group waits for tasks that run where it is reserved
_HURRY_S = 0.005  # while a death waits for the zygote's report
_AHEAD_BYTES = 64 << 20  # free memory kept ready from the start, so that no put waits for the kernel
_SWEEP_S = 1.0  # how often unused functions are dropped
_LAST_WORDS_S = 1.0  # for a process that reads output to take the rest of it


class ZygoteEndedError(Exception):
    """The zygote was killed, and its workers with it; the session can continue with another one."""


class Daemon:
    """A node's daemon.

    Args:
        config: the session's settings.
        pool: the worker pool; its zygote is starting at the same time.
        session: settings of the workers that the starter chose: sys_path, preload.
        adopt: the segment of a session whose daemon died; None for a new session.
        cluster: whether the session is a node of a cluster.
        is_head: whether it is the node with the head, or not in a cluster.
    """

    def __init__(
        self,
        config: Config,
        pool: Pool,
        session: dict[str, Any],
        adopt: str | None = None,
        cluster: bool = False,
        is_head: bool = True,
    ) -> None:
        self._config = config
        self._pool = pool
        if adopt is None:
            sweep_sessions(config.runtime_dir, config.spill_dir)
        self._segment = create_segment(config) if adopt is None else Segment.attach(adopt)
        self._dir = make_session_folder(config.runtime_dir / self._segment.session, "the session's folder")
        spill_folder = config.spill_dir / self._segment.session
        self._beat = Beat([self._dir, spill_folder])
        self.socket_path = str(self._dir / "node.sock")
        index, gen = admit(self._segment, os.getpid(), KIND_DAEMON, "daemon", 4)  # an old daemon may still have one
        self._client = Client(self._segment, index, gen)
        self._spiller = Spiller(self._client, spill_folder, self._dir, config.spill_fallback, config.spill_url)
        self._ahead = min(_AHEAD_BYTES, config.populate_bytes)
        self._populator = make_populator(self._client, config)
        self._janitor = Janitor(self._store())
        self._selector = selectors.DefaultSelector()
        self._members = Members(self._segment, self._selector, config.log_to_driver)
        self._output = Output(
            self._selector, self._members, config, lambda: self._admission.uplink, self._segment.session, self._about
        )
        self._monitor = MemoryMonitor(self._client, config.memory_threshold, pool.actors, self._output.log)
        self._admission = Admission(
            self._store(),
            resources_of(config, is_head),
            config.labels,
            cluster,
            self._runs_tasks,
            self._is_blocked,
            Workers.of(config, self._able),
            self._want_actors,
            self._output.log,
        )
        self._advisor = Advisor(self._client, pool, self._output.log) if config.advice else None
        self._actors = Actors(
            self._store(),
            self._fork,
            self._admission.may_start,
            self._admission.on_process,
            self._on_actor_ended,
            self._admission.placing.waiting_actors,
            self._output.log,
        )
        self._deaths = Deaths(self._members, self._actors, self._janitor, self._monitor)
        self._staffing = Staffing(self._client, pool, self._admission.cpu_room, self._able, self._fork)
        self._actors_wanted = False
        self._refresh_wanted = False
        self._refreshed_at = 0.0
        self._swept_at = 0.0
        self._quiet_ticks = 0
        self._used = 0
        self._starter_left = False
        self._ended = False
        self.ends_session = False
        self._kept = KeptObjectTable(self._client, self._janitor.stand_ins, self._members.slot_of, self._dir)
        self._handlers = self._handler_table()
        self._report_handlers = self._report_handler_table()
        self._listen()
        if pool.zygote_is_new:
            pool.configure(worker_settings(config, session, self.socket_path))
        if adopt is not None:
            self._take_over()

    def _listen(self) -> None:
        """Take part in the events of processes, of the zygote, of the populator and of records."""
        Path(self.socket_path).unlink(missing_ok=True)  # left by a dead daemon
        self._listener = listen(self.socket_path)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._pool.control, selectors.EVENT_READ, self._on_zygote)
        self._selector.register(self._populator, selectors.EVENT_READ, self._on_populated)
        self._selector.register(self._admission.news, selectors.EVENT_READ, self._admission.on_news)

    def _store(self) -> Store:
        store = Store(self._client, 0.0)
        store.socket_path = self.socket_path
        return store

    def _about(self) -> dict[str, str]:
        """Describe the session, for those who read its log files later."""
        drivers = [row["name"] for row in table(self._segment) if row["kind"] == KIND_DRIVER]
        return {"node": self._admission.placing.name or socket.gethostname(), "program": drivers[0] if drivers else ""}

    def _handler_table(self) -> dict[type[Message], Callable[[Link, Any], None]]:
        """The method for each message that a process of the session may send."""
        admission, members = self._admission, self._members
        return {
            Join: self._on_join,
            JoinAgain: members.join_again,
            Reconnect: members.reconnect,
            Leave: self._on_leave,
            Bye: self._on_bye,
            End: self._on_end,
            Blocked: self._on_blocked,
            Unblocked: self._on_unblocked,
            MayWait: self._on_may_wait,
            Spill: self._on_spill,
            Restore: self._on_restore,
            Unread: lambda link, message: self._output.post(message),
            ActorsChanged: lambda link, message: self._tend_actors(),
            ListNodes: admission.on_list_nodes,
            ListDemand: self._on_list_demand,
            RequestResources: admission.on_request,
            ListGroups: self._on_list_groups,
            RemoveGroup: self._on_remove_group,
            FindActor: admission.on_find,
            SearchEnded: admission.on_search_ended,
            ClusterNodes: self._on_cluster,
            Holds: admission.on_holds,
            **self._kept.handlers,
            **self._janitor.ended.handlers,
            RemoteOutput: self._output.on_remote_output,
        }

    def _on_cluster(self, link: Link, message: ClusterNodes) -> None:
        self._kept.connect(link)  # first: the uplink serves other nodes once it knows the resources
        self._admission.on_cluster(link, message)

    def _on_spill(self, link: Link, message: Spill) -> None:
        self._spiller.make_room(message.nbytes)
        self._spiller.look_ahead()
        self._members.collect_garbage()

    def _on_restore(self, link: Link, message: Restore) -> None:
        """Have the bytes of a value brought back: from another node if that one keeps them, else from their file."""
        if not remote.is_remote(self._client, message.entry, message.objref):
            self._spiller.restore(message.entry, message.objref)
        elif self._admission.uplink is not None:
            self._admission.uplink.post(Fetch(message.entry, message.objref))

    def _report_handler_table(self) -> dict[type[Message], Callable[[Any, list[int]], None]]:
        """The method for each report of the zygote; `Pool.receive` has brought its counts up to date."""
        return {
            Ready: lambda report, fds: None,
            ProcessesListed: lambda report, fds: self._admission.on_all_processes(),
            Forked: self._on_forked,
            ForkFailed: self._on_fork_failed,
            Process: self._on_process,
            ProcessEnded: self._on_process_ended,
        }

    def _take_over(self) -> None:
        """Learn the session's processes from the client table and the zygote, and recover from the old daemon first."""
        self._segment.take_over()
        self._output.await_readers()
        if not self._pool.zygote_is_new:
            self._pool.count()
        for row in table(self._segment):
            pid, index = row["pid"], row["client"]
            if index == self._client.index:
                continue
            if row["kind"] == KIND_DAEMON:
                self._janitor.bury(index, pid, explain(None))
                continue
            self._members.take_over(row, self._pool.zygote_is_new)
            if row["blocked"] and not self._pool.zygote_is_new:
                self._pool.blocked.add(pid)
        self._janitor.end_round()
        self._admission.take_over(self._pool.counting)

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
        """Handle the events of the next moment, and recover from deaths."""
        for key, _ in self._selector.select(patience_s):
            self._quiet_ticks = 0
            if self._selector.get_map().get(key.fd) is key:  # an earlier event may have closed it
                key.data(key.fileobj)
        self._bury_dead()

    def _end_processes(self) -> None:
        self.ends_session = True
        self._janitor.ends_session = True
        end = SessionEnd(self._client, self._pool, self._members, self._config.cleanup_timeout_s)
        with contextlib.suppress(ZygoteEndedError, KeyboardInterrupt):
            while end.wait_on():
                self._serve(_HURRY_S)
                self._tend()

    def leave(self) -> None:
        """End the workers, and forward their last output. The session stays, for another daemon."""
        self._pool.kill()
        unread.forward(self._output.post)
        self._output.drain()
        for member in self._members:
            if member.link is not None:
                member.link.flush(_LAST_WORDS_S if member.logs else 0.0)
                member.link.close()

    def close(self) -> None:
        """End the workers and remove the session."""
        self.leave()
        self._admission.close()
        self._populator.close()
        arena.discard(self._client, [m.index for m in self._members if m.kind not in FORKED and not m.gone_at])
        self._spiller.close()
        if self._ended:  # drivers may still use the session
            self._segment.poison("its node was stopped; start one, and call fastrt.init() again", closed=True)
        self._segment.unlink()
        shutil.rmtree(self._dir, ignore_errors=True)

    def _finished(self) -> bool:
        return self._ended or ((self._starter_left or self._members.had_driver) and not self._members.has_drivers())

    def _on_starter(self, starter: socket.socket) -> None:
        self._selector.unregister(starter)  # readable only when the starter has closed it
        self._starter_left = True

    def _patience_s(self) -> float:
        if any(member.gone_at for member in self._members):
            return _HURRY_S
        return min(self._tick_s(), self._actors.patience_s(), self._populator.patience_s(), self._monitor.patience_s())

    def _on_populated(self, populator: Populator) -> None:
        """Commit the populated memory: under a lock, so not in the threads of low priority that populated it."""
        while populator.has_step(arena.room(self._client)[1]) and arena.grow(self._client):
            pass

    def _tick_s(self) -> float:
        if self._admission.cpu_room.is_waiting:
            return _OPENING_S
        tick_s = _TICK_S if self._quiet_ticks < _QUIET_TICKS else _QUIET_TICK_S
        return min(tick_s, self._admission.cpu_room.patience_s())

    # ---- joining and leaving ----

    def _accept(self, listener: socket.socket) -> None:
        link = ServedLink(listener.accept()[0], self._selector)
        _, uid = link.peer()
        if uid != os.geteuid():
            link.send(Refused(f"this session belongs to uid {os.geteuid()}, not to {uid}"))
            link.close()
            return
        self._selector.register(link, selectors.EVENT_READ, self._on_message)

    def _on_message(self, link: Link) -> None:
        try:
            message = link.receive(0)
            while message is not None:
                self._handle(link, message)
                message = link.receive(0) if link.waiting() else None
        except EOFError as error:
            if isinstance(error, MessageError):
                link.post(Refused(str(error)))
            self._admission.on_hang_up(link)
            self._selector.unregister(link)
            link.close()

    def _handle(self, link: Link, message: Message) -> None:
        handler = self._handlers.get(type(message))
        if handler is None:
            raise MessageError(f"the daemon does not take message {message.operation!r}")
        handler(link, message)

    def _on_join(self, link: Link, message: Join) -> None:
        if self._members.join(link, message):
            self._actors.joined(link.peer()[0])

    def _on_leave(self, link: Link, message: Leave) -> None:
        """End a driver's tasks. Its process keeps its slot, for views that it still reads and to join again."""
        member = self._members.leaver(link.peer()[0])
        if member is not None:
            if member.logs:
                self._output.pass_on_rest()
            try:
                self._janitor.end_job(member.index, member.pid)
            except LockStuck as exc:
                link.send(Refused(str(exc)))
                return
            member.left, member.logs, member.link = True, "", None
            self._admission.end_groups_of_jobs(self._members.has_job)
        link.send(Left())

    def _on_bye(self, link: Link, message: Bye) -> None:
        member = self._members.get(link.peer()[0])
        if member is not None:
            member.left = True

    def _on_end(self, link: Link, message: End) -> None:
        self._ended = True

    def _on_blocked(self, link: Link, message: Blocked) -> None:
        self._pool.blocked.add(link.peer()[0])
        self._admission.refresh()

    def _on_unblocked(self, link: Link, message: Unblocked) -> None:
        self._pool.blocked.discard(link.peer()[0])
        self._admission.refresh()

    def _on_may_wait(self, link: Link, message: MayWait) -> None:
        link.send(WaitAnswer(self._pool.may_grow()))

    def _on_list_demand(self, link: Link, message: ListDemand) -> None:
        self._tend_actors()
        link.send(self._admission.demand())

    def _on_list_groups(self, link: Link, message: ListGroups) -> None:
        self._tend_actors()
        link.send(GroupList(self._admission.groups.rows()))

    def _on_remove_group(self, link: Link, message: RemoveGroup) -> None:
        self._admission.remove_group(message.group)
        self._tend_actors()
        self._admission.refresh()
        link.send(GroupRemoved())

    def _bury_dead(self) -> None:
        unread.forward(self._output.post)
        if self._deaths.bury() and self._admission.waits_for_processes:
            self._admission.refresh()

    # ---- workers ----

    def _on_zygote(self, control: socket.socket) -> None:
        received = self._pool.receive()
        if received is None and self._starter_left:
            sys.exit("fastrt: the zygote ended, and the starter of the session, which could replace it, has left")
        if received is None:
            raise ZygoteEndedError
        report, fds = received
        self._report_handlers[type(report)](report, fds)

    def _on_forked(self, report: Forked, fds: list[int]) -> None:
        if report.actor is not None:
            self._actors.started(report.actor, report.pid, report.pid in self._members)
        self._output.claim(report.pid)

    def _on_fork_failed(self, report: ForkFailed, fds: list[int]) -> None:
        self._output.give_up()
        if report.actor is None:
            self._staffing.stillborn += 1
        else:
            self._actors.refused(report.actor, f"could not be forked: {report.error}")

    def _on_process(self, report: Process, fds: list[int]) -> None:
        if report.actor is not None:
            self._actors.started(report.actor, report.pid, report.pid in self._members)
        out, err = fds
        self._output.adopt(report.pid, out, err)

    def _on_process_ended(self, report: ProcessEnded, fds: list[int]) -> None:
        if report.pid in self._members:
            self._staffing.stillborn = 0
        if not self._deaths.reported(report.pid, report.status):
            self._staffing.stillborn += 1
        self._output.end(report.pid)

    def _runs_tasks(self, client: int) -> bool:
        return any(m.index == client and m.kind == "worker" for m in self._members)

    def _is_blocked(self, client: int) -> bool:
        return any(m.index == client and m.pid in self._pool.blocked for m in self._members)

    def _able(self) -> list[Member]:
        return [m for m in self._members if m.kind == "worker" and m.pid not in self._pool.blocked and not m.gone_at]

    def _staff(self) -> None:
        if self._staffing.start_missing():
            self._tend_actors()

    def _fork(self, actor: int | None = None) -> None:
        self._output.add(*self._pool.fork(actor))

    def _tend_actors(self) -> None:
        if self.ends_session or self._pool.counting:  # an earlier daemon may have ordered their processes
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

    def _tend(self) -> None:
        """Keep memory ready ahead of need, and stop workers that were needed only while others slept."""
        unread.forward(self._output.post)
        self._output.tend()
        now = time.monotonic()
        if now - self._refreshed_at > self._tick_s():
            self._refreshed_at = now
            self._admission.refresh()
        if self._advisor is not None:
            self._advisor.look(now)
        self._beat.tend(now)
        if now - self._swept_at > _SWEEP_S:
            self._swept_at = now
            with contextlib.suppress(LockStuck):
                functions.sweep(self._client)
                self._janitor.orphans.end_unused()
            self._admission.end_groups_of_jobs(self._members.has_job)
        self._kept.tend(self._admission.uplink)
        spill.tick(self._client)
        self._spiller.look_ahead()
        self._deaths.look()
        self._monitor.look()
        used, committed, most = arena.room(self._client)
        self._quiet_ticks = self._quiet_ticks + 1 if used == self._used else 0
        self._used = used
        if committed < most and committed - used < self._ahead:
            arena.grow(self._client)
        self._populator.tend(used, committed, most)
        self._staffing.stop_surplus()


def make_populator(client: Client, config: Config) -> Populator:
    """Return the populator of a node, which leaves half of what the memory monitor allows."""
    spare = partial(spare_memory, share=config.memory_threshold / 2 or 0.5)
    return Populator(client, config.populate_bytes, config.huge_pages, config.numa, spare)


def create_segment(config: Config) -> Segment:
    """Create the arena of a new session."""
    return Segment.create(
        config.object_store_memory,
        clients_max=config.clients_max,
        clients_dense=config.clients_dense,
        objects_max=min(config.objects_max, max(1 << 16, config.object_store_memory // 512)),
        tasks_max=config.tasks_max,
        trace=config.trace,
    )
