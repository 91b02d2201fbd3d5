"""Tasks that wait in a debugger on another node than their owner's, so that the owner's timeouts stand still, too.

The node that runs a task reports it on the stream to its owner when it begins or ends to wait. The owner's uplink
writes it into its node's folder of debuggers, where each timeout that is over looks (`fastrt.store.debugging`). A task
that was forwarded twice is reported by each node to the one before, as far as the program that submitted it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any

from fastrt._core.tasks import tasks as core
from fastrt.cluster.jobs import submitter
from fastrt.cluster.outbox import Outgoing
from fastrt.errors import FastrtError
from fastrt.net.grpc.descriptors import message_set
from fastrt.store import debugging
from fastrt.store.debugging import ELSEWHERE, Stop

if TYPE_CHECKING:
    from fastrt._core.memory.clients import Client
    from fastrt.cluster.ledger import Ledger
    from fastrt.cluster.peer_stream import Exchange
    from fastrt.store.client import Store

_Standing = message_set("node").message("fastrt.node.Standing")
_ALL = 0  # in place of a task's number: all tasks of the receiver


class Standing:
    """The tasks of one stream that wait in a debugger.

    Args:
        client: this process's client.
        ledger: the tasks of the stream.
        out: the queue of messages to the peer.

    Attributes:
        on_change: called when the peer has reported which tasks of this node wait there; set by the uplink.
    """

    def __init__(self, client: Client, ledger: Ledger, out: Outgoing) -> None:
        self._client, self._ledger, self._out = client, ledger, out
        self.on_change: Callable[[], object] = bool
        self._there: frozenset[int] = frozenset()  # tasks of this node, as last reported by the peer
        self._reported: list[int] = []  # tasks of the peer, as last reported to it

    def on_standing(self, message: Any) -> None:
        """Take the tasks of this node that wait on the peer: these, and no others."""
        self._there = frozenset(message.task)
        self.on_change()

    def forwarded(self) -> Iterator[tuple[int, int]]:
        """The job and path of each task of this node that waits on the peer; (job, 0): all tasks of a job count."""
        for number, sent in self._ledger.open() if self._there else ():
            if number in self._there or _ALL in self._there:
                info = core.info(self._client, sent.task)
                yield info["job"], info["path"] if number in self._there else 0

    def accepted(self) -> dict[int, int]:
        """The tasks and calls of the peer that have no value yet: their paths on this node, by number."""
        makers = {n: core.maker_of(self._client, one.results[0]) for n, one in self._ledger.all_accepted().items()}
        return {number: maker[1] for number, maker in makers.items() if maker is not None}

    def report(self, numbers: list[int]) -> None:
        """Report which tasks of the peer wait here, if others do than at the last report."""
        if numbers != self._reported:
            self._reported = numbers
            self._out.add("standing", _Standing(task=numbers), 16 + 8 * len(numbers))


class Standstill:
    """The uplink's part: passes on between the streams and the node's folder of debuggers which tasks wait.

    Args:
        store: the uplink's attachment.
        exchanges: the streams, as they are at any time.
    """

    def __init__(self, store: Store, exchanges: Collection[Exchange]) -> None:
        self._client, self._exchanges = store.client, exchanges
        self._folder = debugging.folder_of(store.socket_path)
        self._record = debugging.Record(self._folder, is_uplinks=True)
        self._is_active = False

    def tidy(self) -> None:
        """Look again if tasks waited at the last look: a process may have been killed."""
        if self._is_active:
            self.look()

    def look(self) -> None:
        """Pass on which tasks wait now: for this node's programs into the folder, for peers on their streams."""
        stops = [
            Stop(os.getpid(), job, ELSEWHERE, exchange.name, 0, "", 0, "", "", time.monotonic(), path=path)
            for exchange in self._exchanges
            for job, path in exchange.standing.forwarded()
        ]
        try:
            self._record.replace(stops)
            waiting = debugging.waiting(self._folder, with_elsewhere=True)
        except (OSError, FastrtError):  # the session ends, or its disk is full
            return
        self._is_active = bool(waiting)
        paths = {stop.path for stop in waiting if submitter(stop.job) == self._client.job}  # of tasks of other nodes
        accepted = {exchange: exchange.standing.accepted() if paths else {} for exchange in self._exchanges}
        # A path that no peer has forwarded is of a task that one of theirs has submitted here, or of an actor.
        is_any = not paths <= {path for some in accepted.values() for path in some.values()}
        for exchange, some in accepted.items():
            named = [number for number, path in sorted(some.items()) if path in paths]
            exchange.standing.report([_ALL] if some and is_any else named)
