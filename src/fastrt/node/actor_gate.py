"""Actors whose constructors have arguments that do not exist yet: they take no resources until these do.

Else an actor could hold the resources that the task needs which makes its argument, and both would wait without end.
The object of an actor names these arguments (`ActorPlan.waits`); all else that it names exists already.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from fastrt._core.objects import handles
from fastrt._core.tasks import actors
from fastrt.errors import FastrtError
from fastrt.node.keys import ActorKey
from fastrt.store.client import Store

if TYPE_CHECKING:
    from fastrt.store.waiter import Waiter


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
        self._opened: list[ActorKey] = []

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

    def open(self, waiting: dict[int, int]) -> None:
        """Take those that have got their last argument out of `waiting`."""
        with self._lock:
            opened, self._opened = self._opened, []
        for key in opened:
            if waiting.get(key.record) == key.gen:
                del waiting[key.record]

    def forget(self, actor: int, waiting: dict[int, int]) -> None:
        """Drop an actor that has ended; `waiting` as for `holds`."""
        with self._lock:
            for key in [key for key in self._missing if key.record == actor]:
                if self._missing.pop(key):
                    self._opened.append(key)
        self.open(waiting)

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
        for ref in missing:
            self._waiter.add(ref, self._one_less(key))

    def _one_less(self, key: ActorKey) -> Callable[[object, FastrtError | None], None]:
        def ready(ref: object, error: FastrtError | None) -> None:
            with self._lock:
                if self._missing.get(key):
                    self._missing[key] -= 1
                    if not self._missing[key]:
                        self._opened.append(key)
                        os.eventfd_write(self._news, 1)

        return ready
