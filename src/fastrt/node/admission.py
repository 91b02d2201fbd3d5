"""Admits tasks with demands: reads their records in the arena, and carries out what `placing` decides.

It runs on the daemon's thread. A second thread sleeps in the arena until a record changes, and writes to an eventfd
then. All state here is a cache: a daemon that replaces a dead one rebuilds it from the tasks' records.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from fastrt._core.memory import arena
from fastrt._core.memory.clients import KIND_WORKER
from fastrt._core.objects import handles, spill
from fastrt._core.tasks import actors, admission
from fastrt._core.tasks import tasks as core
from fastrt.config import RESOURCE_PARTS
from fastrt.errors import FastrtError, StaleReferenceError
from fastrt.folders import read_private, replace_private
from fastrt.foreign_text import read_object
from fastrt.node.actor_gate import ActorGate
from fastrt.node.amounts import free_of
from fastrt.node.cpu_room import CpuRoom, Workers
from fastrt.node.group_records import GroupRecords
from fastrt.node.group_waits import GroupWaits
from fastrt.node.groups import Groups
from fastrt.node.keys import ActorKey, BundleKey, Key, Order, TaskKey, key_of, pair_of
from fastrt.node.lost_nodes import LostNodes
from fastrt.node.placing import ELSEWHERE, GONE, HERE, ORDERED, WAITING, Placing
from fastrt.node.refusals import Refusals
from fastrt.node.strays import Strays
from fastrt.node.task_moves import TaskMoves
from fastrt.store.client import Store
from fastrt.store.join import Link
from fastrt.store.messages import (
    ActorEnded,
    ActorFound,
    ClusterNodes,
    DemandList,
    FindActor,
    Forward,
    ForwardedRecord,
    Holds,
    ListNodes,
    NodeList,
    NodeRow,
    RequestResources,
    Resources,
    ResourcesRequested,
    ReturnTask,
    SearchActor,
    SearchEnded,
)
from fastrt.tasks.actor_records import kill_in
from fastrt.tasks.labels import is_selector, labels_of
from fastrt.tasks.resources import NOTHING, STORE_MEMORY, Demand, device_amounts, group_of

_NAP_S = 1.0
_REQUESTED = "requested.json"  # in the session's folder
_DEMANDS_MAX = 1000  # different ones, in one answer
_SWEEP_S = 2.0  # between two looks for waiting tasks that were cancelled
_TASKS_A_MESSAGE = 1000
_TASKS_AHEAD = 16  # whose arguments are fetched while they wait for resources
_PLACES = {  # of an actor, by its state
    actors.EMPTY: GONE,
    actors.DEAD: GONE,
    actors.STARTING: HERE,
    actors.LIVE: HERE,
    actors.AWAY: ELSEWHERE,
    actors.WANTED: WAITING,
    actors.DOWN: WAITING,
}


class Admission:
    """The daemon's part in placing tasks.

    Args:
        store: the daemon's own attachment.
        total: parts of the resources of this node by name.
        labels: of this node.
        cluster: whether the node has an uplink, or will have one.
        runs_here: whether a client, given its slot, runs the tasks that it claims; an uplink forwards them instead.
        is_blocked: whether a worker, given its slot, sleeps in a get.
        workers: of the node.
        start_actors: has the daemon examine the actors again soon.
        say: prints a line at the drivers.

    Attributes:
        cpu_room: where tasks of several CPUs and bundles wait for CPUs of tasks without demands.
    """

    def __init__(
        self,
        store: Store,
        total: Mapping[str, int],
        labels: Mapping[str, str],
        cluster: bool,
        runs_here: Callable[[int], bool],
        is_blocked: Callable[[int], bool],
        workers: Workers,
        start_actors: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        self._store = store
        self._client = store.client
        self._start_actors = start_actors
        self._finding: dict[int, Link] = {}  # connections that wait for `SearchEnded`, by ticket
        session = self._client.segment.session
        self.placing = Placing(session, total, cluster, labels_of(session, labels))
        self._moves = TaskMoves(self._client, self.placing, runs_here, is_blocked)
        self.groups = Groups(self.placing)
        self._strays = Strays(self.placing)
        self.groups.is_away = lambda key: self._place_of_actor(key) == ELSEWHERE
        self.cpu_room = CpuRoom(self._client, self.placing, workers)
        self._known: dict[int, Demand] = {}  # by the number of the object that holds it
        self._records = GroupRecords(self._client, self.groups, self._demand_of_actor)
        self._refusals = Refusals(store, self.placing, self.groups, self._records, self._return_task, start_actors, say)
        self._group_waits = GroupWaits(store, self.groups, self._records, self._moves.states, self._refusals.refuse)
        self._ended: set[int] = set()  # actors that ended since the last `refresh`
        self._uplink: Link | None = None
        self._lost = LostNodes()
        self._reported: Any = None
        self._swept_at = 0.0
        self._folder = Path(store.socket_path).parent
        self._requested: list[dict[str, int]] = []
        self._closed = False
        self._is_counting = False
        self.news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._gate = ActorGate(store, self.news)
        self._thread = threading.Thread(target=self._listen, name="fastrt-held", daemon=True)
        self._thread.start()

    def take_over(self, is_counting: bool) -> None:
        """Rebuild the state from the records: an earlier daemon has admitted these tasks and actors.

        Args:
            is_counting: the zygote has not named its processes yet: `on_process` comes for those of actors, then
                `on_all_processes`; until then nothing is placed.
        """
        self._is_counting = is_counting
        self.cpu_room.take_over()
        for index, id_ in admission.take_over(self._client):
            task = TaskKey(index, id_)
            demand = self._demand(task)
            if demand is not None:
                (state, client), *_ = self._moves.states([task])
                is_here = self._moves.place_of(state, client) != ELSEWHERE
                self.placing.found(task, demand, admission.devices_of(self._client, index, id_) if is_here else 0)
        wanted = []
        for actor, gen in actors.demanding(self._client):
            info = actors.info(self._client, actor)
            if info["state"] in (actors.STARTING, actors.LIVE, actors.DOWN, actors.AWAY):
                demand = self._demand_of_actor(info)
                key = key_of(actor, gen, info)
                is_away = info["state"] == actors.AWAY
                is_ours = demand.bundle and not demand.node  # no demand: freed, it ends
                if not is_away:
                    self.placing.found(key, demand, info["devices"])
                elif is_ours:  # `groups` finds out where it is
                    self.placing.wait(key, demand, time.monotonic())
                if is_ours and isinstance(key, BundleKey):
                    self.groups.add(key, demand, None)
            actors.grant(self._client, actor, gen, 0)  # also if its process is on its way: see `actors.enter`
            if info["bare"] and info["state"] == actors.WANTED and not info["ended"]:
                wanted.append((actor, info))
        for actor, info in wanted:  # now: the first request may ask for all groups
            self.may_start(actor, info)
        with contextlib.suppress(FileNotFoundError):
            about = read_object(read_private(self._folder, _REQUESTED), _REQUESTED, {"bundles": list}, own=True)
            self._requested = about["bundles"]

    def on_process(self, actor: int) -> None:
        """Take the process of an actor: its resources are in use, also if an earlier daemon has ordered it."""
        info = actors.info(self._client, actor)
        demand = self._demand_of_actor(info)
        # A process that needs devices and was ordered by an earlier daemon has lost them: it ends.
        if info["state"] in (actors.WANTED, actors.STARTING, actors.LIVE) and not device_amounts(demand.amounts):
            self.placing.found(key_of(actor, info["gen"], info), demand)

    def on_all_processes(self) -> None:
        """Begin to place: all processes are known."""
        self._is_counting = False
        self.refresh()

    def may_start(self, actor: int, info: Mapping[str, Any], again: bool = False) -> bool:
        """Whether an actor may get a process here now; if not, it may get it later, or on another node.

        Args:
            actor: its index.
            info: its record, as `actors.info` returns it.
            again: whether its process has just ended: an order to forward it has been carried out.
        """
        if info["demand"] is None and (not self.placing.can_grow or self.placing.keep(ActorKey(actor, info["gen"]))):
            return True
        demand = self._demand_of_actor(info)
        if info["bare"] and not demand.bundle:
            return False  # freed with the last handle just now: it ends
        key = key_of(actor, info["gen"], info)
        if again and isinstance(key, ActorKey) and self._gate.lacks_lost(key, self.placing, info["node_lost"]):
            return False
        place = self.placing.place_of(key)
        if place == HERE:
            return True
        if place != WAITING and (place != ORDERED or again):
            if isinstance(key, ActorKey) and self._gate.holds(key, self.placing.waiting_actors):
                return False
            now = time.monotonic()
            self.placing.wait(key, demand, now)
            if isinstance(key, BundleKey) and demand.node:
                self._hold_or_refuse(key, demand)
            elif isinstance(key, BundleKey):
                self.groups.add(key, demand, now)
            self.refresh()
        return self.placing.place_of(key) == HERE

    def _hold_or_refuse(self, key: BundleKey, demand: Demand) -> None:
        """Reserve a bundle of another node's group here, or end it, so that the node finds another place."""
        room = self.placing.rooms().get(self.placing.node, {})
        if all(room.get(name, 0) >= parts for name, parts in demand.amounts) and self.placing.fit_here([demand]):
            order = self.placing.put(key, self.placing.node, time.monotonic())
            actors.grant(self._client, *pair_of(key), order.devices)
        else:
            actors.end_for_good(self._client, key.record, actors.KILLED, "there was no room for it")

    def remove_group(self, name: str) -> None:
        """Give back the resources that a placement group has reserved."""
        known = self.groups.keys_of(name)
        for key in self._records.bundles(name) if known is None else known:
            if self._place_of_actor(key) != GONE:
                kill_in(self._store, key.record, "its placement group was removed")
        self.groups.remove(name)
        self._start_actors()

    def end_groups_of_jobs(self, runs: Callable[[int], bool]) -> None:
        """Remove the placement groups of jobs that have ended; `runs` says of a job's number whether it has not."""
        for name in self.groups.of_ended_jobs(runs):
            self.remove_group(name)

    def end_actors_of(self, groups: Container[str]) -> None:
        """End the actors here that use one of these placement groups after one of its bundles is gone."""
        for actor, _ in actors.demanding(self._client):
            info = actors.info(self._client, actor)
            if not info["ended"] and info["state"] != actors.DEAD and group_of(self._demand_of_actor(info)) in groups:
                kill_in(self._store, actor, "its placement group was removed")
        self._start_actors()

    def close(self) -> None:
        """End the thread that waits for changes."""
        self._closed = True
        with contextlib.suppress(FastrtError):  # the session is broken: it has ended
            admission.tell(self._client)
        self._thread.join()
        os.close(self.news)

    def on_news(self, fd: int) -> None:
        """Handle changes of records: the eventfd is readable."""
        os.eventfd_read(fd)
        self.refresh()

    def on_cluster(self, link: Link, message: ClusterNodes) -> None:
        """Take the nodes of the cluster from the uplink; one that has not joined a head yet reports none."""
        self.placing.name = message.name
        self._uplink = link
        if message.is_new_daemon:
            self._reported = None
        if message.nodes or message.is_change:  # else those of the last uplink stay: tasks wait for them
            others = [row for row in message.nodes if row.node != self.placing.node]
            self._lost.note(self.placing.views, others, message.left if message.is_change else None)
            self.placing.see(others, message.left if message.is_change else None)
            self.placing.has_uplink = True
            self._strays.see()
        self.refresh()

    @property
    def uplink(self) -> Link | None:
        """The connection to this node's uplink; None while there is none."""
        return self._uplink

    def on_hang_up(self, link: Link) -> None:
        """Forget a connection that has ended; it may be the uplink's."""
        self._finding = {ticket: one for ticket, one in self._finding.items() if one is not link}
        if link is self._uplink:
            self._uplink = None
            self._reported = None
            self.placing.has_uplink = False
            self.placing.held.clear()
            for ticket in list(self._finding):
                self.on_search_ended(link, SearchEnded(ticket, [], 0, 0))

    def on_find(self, link: Link, message: FindActor) -> None:
        """Have the uplink search other nodes for an actor; answered by `on_search_ended`."""
        if self._uplink is None:
            link.send(ActorFound([], 0, 0))
            return
        ticket = link.fileno()
        self._finding[ticket] = link
        self._uplink.post(SearchActor(ticket, message.name))

    def on_search_ended(self, uplink: Link, message: SearchEnded) -> None:
        """Answer the process that has asked for an actor."""
        link = self._finding.pop(message.ticket, None)
        if link is not None:
            link.send(ActorFound(message.names, message.objref, message.entry))

    def on_holds(self, link: Link, message: Holds) -> None:
        """Take from the uplink which large objects of this node another node has copies of."""
        for objref, nbytes in message.objects:
            self.placing.holds(message.node, objref, nbytes)

    def on_list_nodes(self, link: Link, message: ListNodes) -> None:
        """Answer with this node and the others, for people."""
        placing = self.placing
        free = free_of(self._client, placing.total, *self._state())
        if STORE_MEMORY in free:
            used, _, most = arena.room(self._client)
            # In whole MiB: functions and other small objects of a session lie there, too, and are not values of users.
            free[STORE_MEMORY] = (most - (used >> 20 << 20)) * RESOURCE_PARTS
        here = NodeRow(placing.node, placing.name, placing.total, free, placing.labels)
        link.send(NodeList(here, list(placing.views.values()), self._lost.rows()))

    def demand(self) -> DemandList:
        """Return the demand that waits here. Tasks that were cancelled while they waited are left out."""
        self._swept_at = -_SWEEP_S
        self.refresh()
        rows = self.placing.demand()
        others = sum(row.waiting for row in rows[_DEMANDS_MAX:])
        groups = [row for row in self.groups.rows() if row.state != "CREATED"]
        queued = core.queued(self._client)
        return DemandList(rows[:_DEMANDS_MAX], others, queued, groups[:_DEMANDS_MAX], self._requested)

    def on_request(self, link: Link, message: RequestResources) -> None:
        """Take the resources that the cluster should have, for the programs that read the demand."""
        self._requested = message.bundles
        replace_private(self._folder, _REQUESTED, json.dumps({"bundles": message.bundles}).encode())
        link.send(ResourcesRequested())

    def _state(self) -> tuple[dict[str, int], int]:
        """Free amounts without regard to tasks without demands, and the number of admitted tasks."""
        used = self.placing.used
        return {name: parts - used.get(name, 0) for name, parts in self._total().items()}, self.placing.tasks_here

    def _total(self) -> dict[str, int]:
        """The amounts of this node, without the resources that stand for selectors."""
        return {name: parts for name, parts in self.placing.total.items() if not is_selector(name)}

    def refresh(self) -> None:
        """Read the records of all tasks and actors, and place those that can be placed."""
        if self._is_counting:
            return
        now, placing = time.monotonic(), self.placing
        if self._gate.open(placing):
            self._start_actors()
        self._moves.report(now)
        others = list(placing.placed_actors.values())
        for key, state in zip(others, actors.states(self._client, [pair_of(key) for key in others]), strict=True):
            placing.moved(key, _PLACES[state], now)
        if self._ended:
            ended, self._ended = self._ended, set()
            waiting = [(actor, placing.waiting_actors[actor]) for actor in ended if actor in placing.waiting_actors]
            self._drop_gone([kind(*pair) for pair in waiting for kind in (ActorKey, BundleKey)], now)
        for index, id_ in admission.take_held(self._client):
            task = TaskKey(index, id_)
            demand = self._demand(task)
            if demand is not None and demand.bundle:
                self._group_waits.add(task, demand.bundle, now)
            elif demand is not None:
                named = admission.named(self._client, index, id_) if placing.held else ()
                placing.wait(task, demand, now, named, core.info(self._client, index)["priority"])
        if now - self._swept_at > _SWEEP_S:
            self._swept_at = now
            self._sweep(now)
        if placing.devices.count:
            placing.linger(self._lingering())
        forward: list[Order] = []
        while True:
            orders = self.groups.decide(now) + placing.decide(now)
            if self._carry_out(orders, forward, now) and not self.cpu_room.open(now):
                break
        gone = placing.take_gone_groups()
        if gone:
            self.end_actors_of(gone)
        self._group_waits.answer()
        self._report_to_uplink(forward)

    def _carry_out(self, orders: list[Order], forward: list[Order], now: float) -> bool:
        """Carry out orders; False when more can be decided: a task was cancelled, so that others may have its room."""
        done = True
        for order in orders:
            key = order.key
            if order.what == "ask":
                order = self._strays.decide(order, now) or order
            if order.what == "forward":
                forward.append(order)
            elif order.what == "ask":
                continue
            elif not isinstance(key, TaskKey) and self._place_of_actor(key) == GONE:
                self.placing.moved(key, GONE, now)  # its record may belong to another by now
            elif order.what == "release":
                self._release(key)
            elif order.what == "warn" and self._records.is_removed(group_of(order.demand)):
                self.groups.remove(group_of(order.demand))
                done = False
            elif order.what != "admit":
                self._refusals.carry_out(order)
            elif not isinstance(key, TaskKey):
                actors.grant(self._client, key.record, key.gen, order.devices)
                if isinstance(key, BundleKey):  # before its group is ready: the next daemon finds it reserved
                    actors.hold(self._client, key.record)
                self._start_actors()
            elif self.cpu_room.takes(key, order.demand, order.devices):
                continue
            elif not admission.admit(self._client, key.record, key.id, order.devices):
                self.placing.moved(key, GONE, now)
                done = False
        return done

    def _release(self, key: Key) -> None:
        """Have a bundle give up its resources: it waits again."""
        if self.placing.place_of(key) == HERE:
            self.placing.leave(key)
            actors.drop(self._client, key.record)
            self._start_actors()
        elif actors.info(self._client, key.record)["state"] == actors.AWAY:
            actors.order(self._client, key.record, actors.ORDER_KILL)

    def _lingering(self) -> list[tuple[int, int]]:
        """The devices, and parts of each, of processes that have not ended although their task or actor has."""
        running = self.placing.devices.holders()
        tasks = {key.id for key in running if isinstance(key, TaskKey)}
        others = {key.gen << 32 | key.record for key in running if isinstance(key, ActorKey)}
        return [
            (devices, parts)
            for _, kind, devices, parts, holder in admission.device_holders(self._client)
            if holder not in (tasks if kind == KIND_WORKER else others)
        ]

    @property
    def waits_for_processes(self) -> bool:
        """Whether devices become free when a process ends."""
        return self.placing.devices.is_lingering

    def _sweep(self, now: float) -> None:
        waiting = self.placing.waiting()
        self._drop_gone([key for key in waiting if not isinstance(key, TaskKey)], now)
        tasks = [key for key in waiting if isinstance(key, TaskKey)]
        for task, (state, _) in zip(tasks, self._moves.states(tasks), strict=True):
            if state == admission.GONE:
                self.placing.moved(task, GONE, now)
        self._group_waits.drop_ended()

    def on_actor_ended(self, actor: int) -> None:
        """Note that an actor or a bundle has ended: the next `refresh` forgets it if it waited."""
        self._ended.add(actor)
        self._gate.forget(actor, self.placing)
        if self._uplink is not None:  # its process may run on another node
            self._uplink.post(ActorEnded())

    def _drop_gone(self, waiting: Sequence[ActorKey | BundleKey], now: float) -> None:
        """Forget those of some waiting actors and bundles that have ended."""
        for key in waiting:
            if self._place_of_actor(key) == GONE:
                self.placing.moved(key, GONE, now)

    def _place_of_actor(self, key: ActorKey | BundleKey) -> int:
        return _PLACES[actors.states(self._client, [pair_of(key)])[0]]

    def _demand_of_actor(self, info: Mapping[str, Any]) -> Demand:
        """The demand of an actor."""
        if info["demand"] is None:
            return NOTHING
        objref, index = info["demand"]
        found = self._known.get(objref)
        if found is None:
            try:
                found = Demand.from_bytes(self._store.load(handles.acquire(self._client, objref, index)))
            except StaleReferenceError:  # freed with the last handle: the actor ends
                return NOTHING
            self._known[objref] = found
        return found

    def _demand(self, task: TaskKey) -> Demand | None:
        """The demand of a task; None when the task has ended meanwhile."""
        ref = admission.demand_of(self._client, *pair_of(task))
        if ref is None:
            return None
        found = self._known.get(ref.objref)
        if found is None:
            try:
                found = Demand.from_bytes(self._store.load(ref))
            except (FastrtError, ValueError) as exc:
                self._refusals.refuse(task, FastrtError(f"the task's demand cannot be read: {exc}"))
                return None
            if len(self._known) > 10_000:
                self._known.clear()
            self._known[ref.objref] = found
        return found

    def _return_task(self, task: TaskKey) -> None:
        if self._uplink is not None:  # else the task ends with its uplink
            self._uplink.post(ReturnTask(*pair_of(task)))

    def _report_to_uplink(self, forward: list[Order]) -> None:
        link = self._uplink
        if link is None:
            return
        for k in range(0, len(forward), _TASKS_A_MESSAGE):
            tasks: list[ForwardedRecord] = []
            others: list[ForwardedRecord] = []
            for order in forward[k : k + _TASKS_A_MESSAGE]:
                record = ForwardedRecord(*pair_of(order.key), order.node)
                (tasks if isinstance(order.key, TaskKey) else others).append(record)
            link.post(Forward(tasks, others))
        ahead = [one for one in self.placing.only_here(_TASKS_AHEAD) if spill.wanted_by(self._client, [one])]
        state = self._total(), *self._state(), self.placing.is_looking, ahead
        if state != self._reported:
            self._reported = state
            link.post(Resources(*state))

    def _listen(self) -> None:
        """Wake the daemon whenever a record has changed."""
        seen = 0
        while not self._closed:
            try:
                now = admission.wait_news(self._client, seen, _NAP_S)
            except FastrtError:
                return  # the session is broken: the daemon's own thread meets the same error
            if now != seen:
                seen = now
                os.eventfd_write(self.news, 1)
