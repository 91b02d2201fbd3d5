"""The tables that all streams of a node share: values of other nodes, lineage, kept objects, and who sends a value.

An uplink has one `NodeTables`. The `ValueTraffic` of each stream uses it, and enters its stream there.
"""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING, Any

from fastrt._core.tasks import tasks as core
from fastrt.cluster.borrowing import DETACHED, AnyOf
from fastrt.cluster.budget import ArgumentBudget
from fastrt.cluster.claiming import BYTES_MIN as _SHORT_BYTES_MIN
from fastrt.cluster.generator_handles import end_abandoned
from fastrt.cluster.jobs import Jobs
from fastrt.cluster.large_values import BYTES_MIN, Native
from fastrt.cluster.lineage import Lineage, Record
from fastrt.cluster.references import StandIn, from_source
from fastrt.cluster.remote_values import Kept, RemoteValues
from fastrt.cluster.spread import Order, Spreads
from fastrt.store.client import Store
from fastrt.store.ref import ObjectRef
from fastrt.store.waiter import LoopWaiter

if TYPE_CHECKING:
    from fastrt.cluster.peer_stream import Exchange

NEVER_BYTES = 1 << 62  # as `keep_bytes`: nothing stays
_LOOKS = 2000  # stand-ins that one pass of `_break_circles` looks at
_RECORDS_A_PASS = 50  # the arguments of one record may lead to a thousand objects


class NodeTables:
    """The tables that all streams of a node share.

    Attributes:
        native: this node's native stream for large values; None: they are sent in pieces between the tasks.
        keep_bytes: a result of at least this size stays here until the peer reads it.
        remote: the values that other nodes keep for this one.
        lineage: rebuilds objects of lost nodes.
        budget: limits the arguments that are fetched ahead.
        kept: the objects that peers may claim on their next streams.
        spreads: which node sends large values to which.
        streams: the streams to other nodes.
        jobs: the jobs of other nodes whose tasks run here.

    Args:
        store: this process's attachment.
        waiter: waits for references on behalf of the process's event loop.
        native, keep_bytes: as above.
        lineage_bytes: how much the records of lineage may keep.
    """

    def __init__(
        self,
        store: Store,
        waiter: LoopWaiter,
        native: Native | None = None,
        lineage_bytes: int = 0,
        keep_bytes: int = BYTES_MIN,
    ) -> None:
        self.native = native
        self.keep_bytes = max(keep_bytes, _SHORT_BYTES_MIN)
        self._store = store
        self.remote = RemoteValues(store)
        self.lineage = Lineage(store, waiter, lineage_bytes, self.remote)
        self.budget = ArgumentBudget(store.client)
        self.kept = Kept()
        self.spreads = Spreads(_send_order)
        self.streams: set[Exchange] = set()
        self.jobs = Jobs(store.client)
        self._unlooked: list[StandIn] = []  # that this pass of `_break_circles` has not looked at yet
        self.remote.needed = self._needed
        self.kept.find = self._find_kept

    def _find_kept(self, node: str, objref: int) -> ObjectRef | None:
        """Return an object that a node holds over a stream that has not ended here yet."""
        refs = (one.references.exported_ref(objref) for one in self.streams if one.node == node)
        return next((ref for ref in refs if ref is not None), None)

    def adopt(self) -> None:
        """Take over the values of other nodes from an earlier uplink process; end streams without a source."""
        self.remote.adopt()
        end_abandoned(self._store)

    def adopt_stand_ins(self) -> None:
        """Take over stand-ins of an earlier uplink process of this node; they are claimed from their nodes."""
        known = self.remote.promised() | self.lineage.making
        for stream in self.streams:
            known.update(standin.task or 0 for _, standin in stream.references.unfinished())
        left = [one for one in core.promises(self.remote.client) if one[0] not in known]
        origins = self.lineage.origins() if left else {}
        for task, ref, source in left:
            node, number = from_source(source)
            standin = StandIn(ref, task, state=DETACHED, origin=origins.get(ref.objref))
            self.remote.add_detached(node, number, standin, "its stream to this node ended")

    def tidy(self) -> Container[int]:
        """Forget what nothing uses any more; return the numbers of the objects that this process still needs."""
        self._break_circles()
        self.lineage.go_on()
        return AnyOf(self.remote.tidy(), self.lineage.wanted)

    def _break_circles(self) -> None:
        """Take their origins from objects that the arguments of that task contain by now; see `Lineage.needs`.

        When the origin was noted, a result that an argument names had perhaps no value yet.
        """
        if not self._unlooked:
            every = (one for stream in self.streams for one in stream.references.stand_ins())
            self._unlooked = [one for one in every if one.origin is not None]
        left, looked_at = _LOOKS, dict[Record, Container[int]]()
        while self._unlooked and left and len(looked_at) < _RECORDS_A_PASS:
            left -= 1
            standin = self._unlooked.pop()
            if standin.origin is not None:
                record = standin.origin.record
                if record not in looked_at:
                    looked_at[record] = self.lineage.needs(record)
                if standin.ref.objref in looked_at[record]:
                    standin.origin = None

    def is_only(self, stream: Exchange) -> bool:
        """Return whether this node has no other stream to the peer of this one."""
        return all(one is stream or one.node != stream.node for one in self.streams)

    def _needed(self) -> Container[int]:
        """Return the numbers of the objects of this node that other nodes hold or wait for, or rebuilds wait for."""
        return AnyOf(self.lineage.wanted, *(stream.needs() for stream in self.streams))


def _send_order(order: Order) -> None:
    fetch: Any = order.receiver
    fetch.stream.traffic.send_from(fetch.number, order.senders)
