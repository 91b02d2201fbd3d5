"""The departure of nodes, over the streams of one uplink: carries out `leaving` for this node and its peers.

A node that leaves returns the tasks that it has not begun, and asks its peers until none of them needs it. A node whose
peer leaves fetches the values that the peer keeps for it, and has actors end there that may restart elsewhere.
"""

from __future__ import annotations

from collections.abc import Collection

from fastrt._core.memory.clients import Client
from fastrt._core.objects import remote
from fastrt._core.repair import inspect
from fastrt._core.tasks import admission
from fastrt._core.tasks import tasks as core
from fastrt.cluster.leaving import Leaving
from fastrt.cluster.peer_stream import Exchange
from fastrt.cluster.remote_values import Kept
from fastrt.store.messages import ReturnTask

LOOK_S = 0.02  # between two looks while this node or a peer leaves


class Departure:
    """The departure of this node and of its peers.

    Args:
        client: the uplink's attachment.
        exchanges: the streams to other nodes, as they are at any time.
        kept: what this node keeps for nodes without a stream.
    """

    def __init__(self, client: Client, exchanges: Collection[Exchange], kept: Kept) -> None:
        self._client = client
        self._exchanges = exchanges
        self._kept = kept
        self._leaving = Leaving()

    @property
    def asked(self) -> int:
        """Return the number of this node's last question to its peers; 0: it stays."""
        return self._leaving.asked

    @property
    def is_active(self) -> bool:
        """Return whether `look` must be called often."""
        return bool(self.asked) or any(exchange.leaves.must_answer for exchange in self._exchanges)

    def leave(self) -> None:
        """Begin to leave the cluster."""
        self._leaving.leave()
        self._ask()

    def on_return(self, message: ReturnTask) -> None:
        """Return a task that cannot run here to its node; it has not begun."""
        task = message.record
        if admission.refuse(self._client, task, message.id):
            returns = core.info(self._client, task)["returns"]
            first = remote.result_objref(self._client, task, 0) if returns else 0
            if not any(exchange.return_task(task, first) for exchange in self._exchanges):
                core.finish(self._client, task)  # without results, or its stream has ended

    def look(self) -> bool:
        """Take the next steps; return whether this node has left: no peer needs it."""
        for exchange in self._exchanges:
            if exchange.leaves.must_answer and exchange.let_go():
                exchange.leaves.answer()
                exchange.out.stir()
        return bool(self.asked) and self._leave()

    def _leave(self) -> bool:
        for exchange in self._exchanges:
            exchange.return_waiting()
        streams_rest = all(exchange.is_at_rest for exchange in self._exchanges)
        is_at_rest = streams_rest and self._kept.is_empty and not inspect.unfinished(self._client)
        before = self.asked
        has_left = self._leaving.look(is_at_rest, [exchange.leaves.agreed for exchange in self._exchanges])
        if self.asked != before:
            self._ask()
        return has_left

    def _ask(self) -> None:
        for exchange in self._exchanges:
            exchange.out.stir()  # each frame has the number of the question
