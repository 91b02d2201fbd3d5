"""Objects, and the list of the heads, that the daemon holds for the uplink, so that they outlive its process.

Most objects are those of this node that other nodes hold: the uplink names them on behalf of those nodes. Those under
this node's own name are records of `cluster.lineage`. If the uplink is killed, the next one gets the list, and the
other nodes claim what they hold. If the daemon is killed, the uplink sends all of it to the next one. If both die, the
heads are in a file, without which the node would have no cluster while the first head is gone.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastrt._core.memory.clients import Client
from fastrt._core.objects import handles
from fastrt._core.objects.handles import Ref
from fastrt._core.tasks import tasks as core
from fastrt.errors import FastrtError
from fastrt.folders import read_private, replace_private
from fastrt.store.join import Link
from fastrt.store.messages import (
    OBJECTS_MAX,
    KeepObjects,
    KeptObject,
    KeptObjects,
    KnownHeads,
    Message,
    ReleaseObjects,
    expect,
    read_message,
    write_message,
)

_PATIENCE_S = 60.0  # without an uplink: longer than the other nodes wait
_HEADS = "heads.json"  # in the session's folder


class StandIns:
    """Tasks of dead uplinks that the next uplink takes over.

    Args:
        client: the daemon's attachment, which must end these tasks.
        end: ends one, when no uplink comes.
    """

    def __init__(self, client: Client, end: Callable[[int], None]) -> None:
        self._client = client
        self._end = end
        self._tasks: list[int] = []
        self.on_more: Callable[[], None] = lambda: None  # called when there are more of them

    def __bool__(self) -> bool:
        return bool(self._tasks)

    def add(self, tasks: list[int]) -> None:
        """Hold the tasks that a dead uplink has left."""
        if tasks:
            self._tasks += tasks
            self.on_more()

    def hand_over(self, slot: int | None) -> bool:
        """Pass all to the uplink with this client slot (None: it has ended); return whether it has got any."""
        before = len(self._tasks)
        if slot is not None:
            self._tasks = [task for task in self._tasks if not core.hand_over(self._client, task, slot)]
        return len(self._tasks) < before

    def give_up(self) -> None:
        """End all with an error."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            self._end(task)


class KeptObjectTable:
    """The objects that the daemon holds for other nodes.

    Args:
        client: the daemon's attachment.
        stand_ins: the tasks that it holds for the next uplink.
        slot_of: returns the client slot of the process at a connection; None: it has ended.
        folder: of the session.
    """

    def __init__(
        self, client: Client, stand_ins: StandIns, slot_of: Callable[[Link], int | None], folder: Path
    ) -> None:
        self._client = client
        self._stand_ins = stand_ins
        self._slot_of = slot_of
        self._refs: dict[tuple[str, int], Ref] = {}
        self._folder = folder
        self._heads: KnownHeads | None = None
        with contextlib.suppress(FileNotFoundError):
            self._heads = expect(read_message(read_private(folder, _HEADS)), KnownHeads)
        self._uplink: Link | None = None
        self._since = 0.0  # without an uplink
        stand_ins.on_more = self._hand_over

    @property
    def handlers(self) -> dict[type[Message], Callable[[Link, Any], None]]:
        """The method for each message of the uplink about these objects and the heads."""
        return {KeepObjects: self.keep, ReleaseObjects: self.release, KnownHeads: self.note_heads}

    def keep(self, link: Link, message: KeepObjects) -> None:
        """Hold objects that another node holds."""
        for objref, entry in message.objects:
            with contextlib.suppress(FastrtError):  # the uplink has released it, and this is an old message
                self._refs[message.node, objref] = handles.acquire(self._client, objref, entry)

    def release(self, link: Link, message: ReleaseObjects) -> None:
        """Drop objects that the other node does not hold any more."""
        for objref in message.objects:
            self._refs.pop((message.node, objref), None)

    def note_heads(self, link: Link, message: KnownHeads) -> None:
        """Hold what the uplink knows of the heads: the first one may be gone when the next uplink starts."""
        self._heads = message
        with contextlib.suppress(OSError):  # the disk is full: the file is read only if the uplink dies, too
            replace_private(self._folder, _HEADS, write_message(message))

    def connect(self, link: Link) -> None:
        """Send a new uplink the heads and the list of the objects, and pass it the stand-ins."""
        if link is self._uplink:
            return
        self._uplink = link
        if self._heads is not None:
            link.post(self._heads)
        self._hand_over()  # first: the records that are in the list say how to make their values again
        rows: dict[str, list[KeptObject]] = {}
        for (node, objref), ref in self._refs.items():
            rows.setdefault(node, []).append(KeptObject(objref, ref.index))
        for node, kept in rows.items():
            for at in range(0, len(kept), OBJECTS_MAX):
                link.post(KeptObjects(node, kept[at : at + OBJECTS_MAX]))

    def _hand_over(self) -> None:
        """Pass the stand-ins to the uplink; any list makes it look for those that it has got."""
        if self._uplink is not None and self._stand_ins.hand_over(self._slot_of(self._uplink)):
            self._uplink.post(KeptObjects("", []))

    def tend(self, uplink: Link | None) -> None:
        """Drop everything when the node has had no uplink for so long that it must have left the cluster."""
        if uplink is not None or not (self._refs or self._stand_ins):
            self._since = 0.0
            return
        now = time.monotonic()
        self._since = self._since or now
        if now - self._since > _PATIENCE_S:
            self._refs.clear()
            self._stand_ins.give_up()
