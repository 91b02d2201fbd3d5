"""Actors whose constructors have arguments that do not exist yet: they take no resources until these do.

Else an actor could hold the resources that the task needs which makes its argument, and both would wait without end.
The object of an actor names these arguments (`ActorPlan.waits`); all else that it names exists already.

An argument may also be lost, when its node is, and the task that makes it again may need what the actor holds. So an
actor whose process has ended gives its resources back while a lost argument is not made again. The arena says which
node keeps a value; one that is made again has another source, or its bytes are here.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from fastrt._core.objects import handles, remote
from fastrt._core.tasks import actors
from fastrt.errors import FastrtError
from fastrt.node.keys import ActorKey
from fastrt.store.client import Store
from fastrt.store.ref import ObjectRef

if TYPE_CHECKING:
    from fastrt.node.placing import Placing
    from fastrt.store.waiter import Waiter

# A node whose stream has ended may still be a member for so long: both sides of a cut notice it within ten seconds.
_DOUBT_S = 15.0


class ActorGate:
    """The actors of one node that wait for arguments. A new daemon asks for the arguments again.

    Args:
        store: the daemon's attachment.
        news: an eventfd, written when an actor has all its arguments.
    """

    def __init__(self, store: Store, news: int) -> None:
        self._store, self._news = store, news
        self._waiter: Waiter | None = None
        self._lock = threading.Lock()
        self._missing: dict[ActorKey, int] = {}  # how many arguments each lacks; 0: it may start
        self._callbacks: dict[ActorKey, Callable[[object, FastrtError | None], None]] = {}
        self._opened: list[ActorKey] = []
        self._lost: dict[ActorKey, tuple[float, dict[int, str]]] = {}  # since when each waits, and `_kept_elsewhere`

    def holds(self, key: ActorKey, waiting: dict[int, int]) -> bool:
        """Whether an actor lacks arguments. The first call begins to wait for them.

        Args:
            key: the actor.
            waiting: generations of the actors that the daemon leaves alone, by record: it becomes one.
        """
        if key not in self._missing:
            self._begin(key)
        held = self._missing[key] > 0
        if held:
            waiting[key.record] = key.gen
        return held

    def lacks_lost(self, key: ActorKey, placing: Placing, node_lost: bool) -> bool:
        """Whether arguments of an actor whose process has ended are lost; then it gives back its resources.

        Args:
            key: the actor.
            placing: of this node.
            node_lost: whether the process has ended because its node was lost.
        """
        ran_on = placing.node_of(key) if node_lost else ""  # a lost node may still be a member
        kept = self._kept_elsewhere(key)
        lost = {objref: node for objref, node in kept.items() if node == ran_on or node not in placing.views}
        if lost:
            placing.forget(key)
            placing.waiting_actors[key.record] = key.gen
            self._lost[key] = time.monotonic(), lost
        return bool(lost)

    def open(self, placing: Placing) -> bool:
        """Let those wait for resources that have got their last argument; return whether there are any."""
        with self._lock:
            opened, self._opened = self._opened, []
        for key, (since, lost) in list(self._lost.items()):
            kept, doubt = self._kept_elsewhere(key), time.monotonic() - since < _DOUBT_S
            if not any(kept.get(one) == node and (doubt or node not in placing.views) for one, node in lost.items()):
                del self._lost[key]
                opened.append(key)
        waiting = placing.waiting_actors
        for key in opened:
            if waiting.get(key.record) == key.gen:
                del waiting[key.record]
        return bool(opened)

    def forget(self, actor: int, placing: Placing) -> None:
        """Drop an actor that has ended."""
        with self._lock:
            for key in [key for key in self._missing if key.record == actor]:
                if self._missing.pop(key):
                    self._opened.append(key)
                    if self._waiter is not None:  # it would keep the arguments until they are ready
                        self._waiter.remove(self._callbacks[key])
                self._callbacks.pop(key, None)
            for key in [key for key in self._lost if key.record == actor]:
                del self._lost[key]
                self._opened.append(key)
        self.open(placing)

    def _kept_elsewhere(self, key: ActorKey) -> dict[int, str]:
        """Return the arguments of an actor whose bytes are not here, and the node that keeps each."""
        client = self._store.client
        named: list[ObjectRef] = []
        with contextlib.suppress(FastrtError):  # its last handle is gone
            named += handles.contained(client, handles.acquire(client, *actors.info(client, key.record)["object"]))
            for ref in [ref for ref in named if handles.is_ready(client, ref)]:
                named += handles.contained(client, ref)
        missing = {ref.objref for ref in named if remote.is_missing(client, ref)}
        return {objref: node for _, objref, node, _ in remote.sources(client) if objref in missing} if missing else {}

    def _begin(self, key: ActorKey) -> None:
        client = self._store.client
        self._missing[key] = 0
        try:
            named = handles.contained(client, handles.acquire(client, *actors.info(client, key.record)["object"]))
            several = list({ref.objref: ref for ref in named}.values())
            missing = handles.wait_some(client, several, len(several), 0.0, 0.0)[1] if several else []
        except FastrtError:  # its last handle is gone
            return
        if not missing:
            return
        self._missing[key] = len(missing)
        if self._waiter is None:
            from fastrt.store.waiter import Waiter  # here: most daemons need none

            self._waiter = Waiter(self._store)
        self._callbacks[key] = self._one_less(key)
        for ref in missing:
            self._waiter.add(ref, self._callbacks[key])

    def _one_less(self, key: ActorKey) -> Callable[[object, FastrtError | None], None]:
        def ready(ref: object, error: FastrtError | None) -> None:
            with self._lock:
                if self._missing.get(key):
                    self._missing[key] -= 1
                    if not self._missing[key]:
                        self._opened.append(key)
                        os.eventfd_write(self._news, 1)

        return ready
