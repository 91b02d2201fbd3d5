"""Forwards tasks that the daemon has not placed: those that would wait too long here, to nodes that have room for them.

A node with workers forwards the tasks that are too many for these. A node without workers claims as many tasks as other
nodes have room for, as an idle worker does. If no node has room, the uplink connects to further ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping

from fastrt._core.tasks import admission, tally
from fastrt._core.tasks import tasks as core
from fastrt.cluster.load import Claims
from fastrt.cluster.peer import Helpers, Peer, to_call
from fastrt.cluster.peer_stream import Exchange
from fastrt.errors import FastrtError, TaskCancelledError
from fastrt.store.client import Store
from fastrt.store.waiter import LoopWaiter

_TASKS_A_WORKER = 2  # beyond them, further nodes may begin the tasks earlier
_CALLS_S = 0.05  # before this node looks for further nodes to connect to, while none has room for its tasks
_LOOKING_S = 2.0  # so long after that it is sent the load of the others more often
_HOPS_MAX = 4  # the most times a task is forwarded; without a limit a cancellation might never catch up with it
_KEPT_A_LOOK = 64


class Forwarding:
    """Forwards tasks of this node to its peers.

    Args:
        store: the uplink's attachment.
        waiter: the uplink's; it watches the queue for a node without workers.
        has_workers: whether this node has workers.
        peers: the other nodes by id, as they are at any time.
        exchanges: the streams to other nodes, as they are at any time.
        connect: begins to connect to a peer.
        on_look: called when `is_looking` has become true.
    """

    def __init__(
        self,
        store: Store,
        waiter: LoopWaiter,
        has_workers: bool,
        peers: Mapping[str, Peer],
        exchanges: Collection[Exchange],
        connect: Callable[[Peer], None],
        on_look: Callable[[], None],
    ) -> None:
        self._store = store
        self._client = store.client
        self._waiter = waiter
        self._has_workers = has_workers
        self._peers = peers
        self._exchanges = exchanges
        self._connect = connect
        self._on_look = on_look
        self._called_at = -_LOOKING_S  # when it last needed further nodes for its tasks
        self._claims = Claims(self._client, self._forward_all)

    def begin(self) -> None:
        """Begin to claim tasks as they come, if this node has no workers."""
        if not self._has_workers:
            self._waiter.open(self._claims)

    @property
    def is_looking(self) -> bool:
        """Return whether this node needed further nodes a moment ago."""
        return time.monotonic() < self._called_at + _LOOKING_S

    def forward(self, peer: Peer, task: int) -> None:
        """Forward a claimed task to a peer that has a stream, or end the task if it was cancelled meanwhile."""
        assert peer.exchange is not None
        if core.cancelled(self._client, task):
            self._end_cancelled(task)
            return
        try:
            peer.exchange.forward(task)
        except FastrtError as exc:  # its function or arguments cannot be read: the error becomes its result
            self._store.put_error(task, exc)
            core.finish(self._client, task, tally.FAILED)

    def forward_excess(self, most: int) -> None:
        """Claim up to `most` tasks and forward them."""
        helpers = self._helpers(most)
        kept = 0
        while helpers.has_room() and most > 0 and kept < _KEPT_A_LOOK:
            task = core.next_task(self._client, 0.0, 0.0)
            if task < 0:
                return
            most -= 1
            # A task with demands was admitted on this node and stays. So does one that was forwarded _HOPS_MAX times.
            if admission.is_demanding(self._client, task) or core.info(self._client, task)["hops"] >= _HOPS_MAX:
                kept += 1
                self._give_back(task)
                continue
            self.forward(helpers.choose(task), task)

    def update_room(self) -> None:
        """Update how many tasks a node without workers may claim: as many as other nodes have room for."""
        if self._has_workers:
            return
        before = self._claims.room
        self._claims.room = self._helpers(core.queued(self._client)).room
        if self._claims.room > before == 0:
            self._waiter.stir()

    def _forward_all(self, tasks: list[int]) -> None:
        helpers = self._helpers(len(tasks))
        stay = {task for task in tasks if admission.is_demanding(self._client, task)}  # a worker starts for them
        for task in tasks:
            if task in stay or not helpers.has_room():  # if the node that had room is gone, another one gets the task
                self._give_back(task)
            else:
                self.forward(helpers.choose(task), task)
        if stay:
            self._claims.stop()  # until the next look, a worker gets them first
        else:
            self.update_room()

    def _helpers(self, wanted: int) -> Helpers:
        """Return the peers that have room for tasks.

        Connect to further nodes if `wanted` tasks are more than that room, or than two for each worker with those that
        the peers have.
        """
        named = [self._peers.get(exchange.node) for exchange in self._exchanges if exchange.workers]
        helpers = Helpers(self._client, {id(peer): peer for peer in named if peer is not None}.values())
        if wanted:
            workers = sum(exchange.workers for exchange in self._exchanges)
            forwarded = sum(exchange.ledger.forwarded for exchange in self._exchanges)
            if helpers.room < wanted or forwarded + wanted > _TASKS_A_WORKER * workers:
                self._call_helpers()
        return helpers

    def _call_helpers(self) -> None:
        """Begin to connect to a few more nodes with workers: those that have no queue, and most CPUs free."""
        now = time.monotonic()
        if now >= self._called_at + _CALLS_S:
            self._called_at = now
            self._on_look()
            for peer in to_call(self._client.segment.session, self._peers.values()):
                self._connect(peer)

    def _give_back(self, task: int) -> None:
        """Put a claimed task back into the queue."""
        if not core.give_back(self._client, task):
            self._end_cancelled(task)

    def _end_cancelled(self, task: int) -> None:
        self._store.put_error(task, TaskCancelledError("the task was cancelled before it started"))
        core.finish(self._client, task, tally.CANCELLED)
