"""Objects that the daemon holds for the uplink, so that they outlive its process.

Most are objects of this node that other nodes hold: the uplink names them on behalf of those nodes. Those under this
node's own name are records of `cluster.lineage`. If the uplink is killed, the next one gets the list, and the other
nodes claim what they hold. If the daemon is killed, the uplink sends the list to the next daemon.
"""

from __future__ import annotations

import contextlib
import time

from fastrt._core.memory.clients import Client
from fastrt._core.objects import handles
from fastrt._core.objects.handles import Ref
from fastrt.errors import FastrtError
from fastrt.store.join import Link
from fastrt.store.messages import KeepObject, KeptObject, KeptObjects, ReleaseObject

_PATIENCE_S = 60.0  # without an uplink: longer than the other nodes wait
_ROWS_MAX = 5000  # of one message


class KeptObjectTable:
    """The objects that the daemon holds for other nodes.

    Args:
        client: the daemon's attachment.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._refs: dict[tuple[str, int], Ref] = {}
        self._uplink: Link | None = None
        self._since = 0.0  # without an uplink

    def keep(self, link: Link, message: KeepObject) -> None:
        """Hold an object that another node holds."""
        with contextlib.suppress(FastrtError):  # the uplink has released it, and this is an old message
            self._refs[message.node, message.objref] = handles.acquire(self._client, message.objref, message.entry)

    def release(self, link: Link, message: ReleaseObject) -> None:
        """Drop an object that the other node does not hold any more."""
        self._refs.pop((message.node, message.objref), None)

    def connect(self, link: Link) -> None:
        """Send a new uplink the list of the objects."""
        if link is self._uplink:
            return
        self._uplink = link
        rows = [KeptObject(node, objref, ref.index) for (node, objref), ref in self._refs.items()]
        for at in range(0, len(rows), _ROWS_MAX):
            link.post(KeptObjects(rows[at : at + _ROWS_MAX]))

    def tend(self, uplink: Link | None) -> None:
        """Drop everything when the node has had no uplink for so long that it must have left the cluster."""
        if uplink is not None or not self._refs:
            self._since = 0.0
            return
        now = time.monotonic()
        self._since = self._since or now
        if now - self._since > _PATIENCE_S:
            self._refs.clear()
