"""Ends tasks, actors and bundles that cannot be placed, or says at the drivers why they wait.

`placing` and `groups` decide which ones. Here are the words, and the errors that become their results. A task or an
actor of another node may go back to that node, which chooses another place.
"""

from __future__ import annotations

from collections.abc import Callable

from fastrt._core.objects.functions import function_name
from fastrt._core.tasks import actors, admission, tally
from fastrt._core.tasks import tasks as core
from fastrt.errors import FastrtError, InfeasibleTaskError
from fastrt.node.group_records import GroupRecords
from fastrt.node.groups import Groups
from fastrt.node.keys import Key, Order, TaskKey
from fastrt.node.placing import Placing
from fastrt.store import failures
from fastrt.store.client import Store
from fastrt.tasks.actor_records import DEMANDS
from fastrt.tasks.resources import Demand, group_of


class Refusals:
    """The refusals of one node.

    Args:
        store: the daemon's attachment.
        placing: knows the resources of all nodes.
        groups: knows why groups were not placed.
        records: say whether a group was removed.
        return_task: called with a task of another node that must choose another place for it.
        start_actors: has the daemon examine the actors again soon.
        say: prints a line at the drivers.
    """

    def __init__(
        self,
        store: Store,
        placing: Placing,
        groups: Groups,
        records: GroupRecords,
        return_task: Callable[[TaskKey], None],
        start_actors: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        self._store = store
        self._client = store.client
        self._placing = placing
        self._groups = groups
        self._records = records
        self._return_task = return_task
        self._start_actors = start_actors
        self._say = say

    def carry_out(self, order: Order) -> None:
        """Carry out an order "refuse", "return" or "warn"."""
        if order.demand.bundle:
            self._cannot_reserve(order)
            return
        group = group_of(order.demand)
        if group and order.what != "refuse" and not self._records.is_removed(group):
            if order.what == "return":  # else it has not become known yet, or has its bundles in a moment
                self._return(order.key)
            return
        key, shortage = order.key, self._shortage(order.demand)
        what, records = ("task", core) if isinstance(key, TaskKey) else ("actor", actors)
        function = records.info(self._client, key.record)["function"]
        name = function_name(self._client, function[0] if records is core else function)
        if order.what == "warn":
            self._say(f"fastrt: {what} {name!r} demands {shortage}; it waits until a node joins that has\n")
        elif isinstance(key, TaskKey):
            self.refuse(key, InfeasibleTaskError(f"task {name!r} demands {shortage}"), name)
        else:
            how = actors.KILLED if self._groups.why_gone(group) == "" else actors.FAILED
            actors.end_for_good(self._client, key.record, how, f"{DEMANDS} {shortage}")
            self._start_actors()

    def refuse(self, task: TaskKey, error: FastrtError, name: str = "") -> None:
        """End a task that has not begun.

        Args:
            task: its key.
            error: its result.
            name: of its function, for the list of failures; empty: it is not listed.
        """
        if admission.refuse(self._client, task.record, task.id):
            if name:
                failures.keep(self._store, task.record, name, error, pid=0)  # no process has run it
            self._store.put_error(task.record, error)
            core.finish(self._client, task.record, tally.FAILED)

    def _return(self, key: Key) -> None:
        """Have the node that placed a task or an actor here choose another place."""
        if isinstance(key, TaskKey):
            self._return_task(key)
            return
        why = "its placement group has no bundle there any more"
        actors.end_for_good(self._client, key.record, actors.KILLED, why)
        self._start_actors()

    def _shortage(self, demand: Demand) -> str:
        group = group_of(demand)
        if not group:
            return self._placing.shortage(demand)
        why = self._groups.why_gone(group)
        if why is None and not self._records.is_removed(group):
            return f"resources of placement group {group}, which no node has"
        return f"resources of placement group {group}, which {f'has {why}' if why else 'was removed'}"

    def _cannot_reserve(self, order: Order) -> None:
        name = order.demand.bundle_group
        shortage = self._groups.why_gone(name) or self._groups.shortage(name)
        if order.what == "warn":
            self._say(f"fastrt: placement group {name} has {shortage}; it waits until nodes join that have it\n")
        else:
            actors.end_for_good(self._client, order.key.record, actors.FAILED, shortage[:400])
            self._start_actors()
