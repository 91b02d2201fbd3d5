"""The values that cross one stream, in both directions.

Small values go in pieces between the tasks. Large ones are offered (`large_values`); a large result, and a large object
that is no argument, stays with its node until it is read (`remote_values`).
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from fastrt._core.objects import handles, remote, spill
from fastrt._core.objects.scalar import CORE_KINDS_END
from fastrt._core.tasks import tasks as core
from fastrt.cluster.absent_values import Unclaimed
from fastrt.cluster.claiming import BYTES_MIN as _SHORT_BYTES_MIN
from fastrt.cluster.claiming import Claiming
from fastrt.cluster.inbox import Arrivals, Arriving
from fastrt.cluster.large_values import BYTES_MIN, Values
from fastrt.cluster.lineage import Origin, OwnResults
from fastrt.cluster.node_tables import NEVER_BYTES, NodeTables
from fastrt.cluster.references import PeerError
from fastrt.cluster.remote_values import Source
from fastrt.cluster.restoring import Restoring
from fastrt.cluster.spread import BYTES_MIN as SPREAD_BYTES_MIN
from fastrt.cluster.spread import SENDERS_MAX, Fetch, Sender
from fastrt.errors import FastrtError, ObjectStoreFullError
from fastrt.net.address import is_address
from fastrt.net.grpc.descriptors import message_set
from fastrt.store.messages import Restore
from fastrt.store.ref import ObjectRef
from fastrt.store.serialize import PICKLE, serialize

if TYPE_CHECKING:
    from fastrt.cluster.ledger import ForwardedTask
    from fastrt.cluster.peer_stream import Exchange

_SET = message_set("node")
_Value = _SET.message("fastrt.node.Value")
_Release = _SET.message("fastrt.node.Release")
_Senders = _SET.message("fastrt.node.Senders")
_Copy = _SET.message("fastrt.node.Copy")
_BACKLOG_BYTES = 4 << 20
_AGAIN_S = 0.5  # until the next attempt to read a value whose file this process cannot read now


class ValueTraffic:
    """The values of one stream.

    Args:
        exchange: the stream.
        tables: the node's.

    Attributes:
        arrivals: values in transit to this node.
        values: large values over the native stream; None: there is none.
        remote: the node's remote values.
        claims: the claims of both nodes after the end of an earlier stream.
        may_claim: whether this node leaves values with the peer, and claims them after the end of a stream.
        spread_bytes: from this size on the peer is asked which node shall send a value.
    """

    def __init__(self, exchange: Exchange, tables: NodeTables) -> None:
        self._exchange = exchange
        self._store = exchange.store
        self._client = exchange.client
        self._tables = tables
        self.remote = tables.remote
        self.may_claim = tables.keep_bytes < NEVER_BYTES
        # Only a node that keeps copies offers them to others.
        self.spread_bytes = max(SPREAD_BYTES_MIN, tables.keep_bytes)
        self.arrivals = Arrivals(exchange, tables.budget)
        tables.budget.join(exchange, self.arrivals.admit_soon)
        tables.streams.add(exchange)
        self.values = None if tables.native is None else Values(tables.native, self.arrivals.landed)
        self._restoring = Restoring(self._store, exchange.waiter.loop)
        self.claims = Claiming(
            exchange, tables.remote, tables.kept, self._offer_kept, partial(tables.is_only, exchange)
        )
        self._own: dict[int, OwnResults] = {}  # by forwarded task

    def connect(self, native: str, may_claim: bool) -> None:
        """Begin with the peer's hello: claim what it keeps for this node.

        Args:
            native: the address of the peer's native stream.
            may_claim: whether the peer may claim what this node keeps.
        """
        if self.values is not None:
            self.values.connect(native, may_claim)
            self._exchange.references.node = self._exchange.node if self.may_claim else ""
        self.claims.begin()

    def hold(self, ref: ObjectRef) -> None:
        """Keep an object that the peer holds beyond this process, until the peer releases it."""
        if self.values is not None and self.values.may_claim:
            self.values.on_keep(ref)

    def released(self, objref: int) -> None:
        """Withdraw the offers of an object that the peer does not hold any more."""
        for number in () if self.values is None else self.values.release(objref):
            self._tables.spreads.remove(Fetch(self._exchange, number))

    def close(self, peer_leaves: bool) -> None:
        """End all transfers; keep for a while what the peer may claim, unless it leaves the cluster."""
        self._tables.streams.discard(self._exchange)
        self._tables.spreads.leave(self._exchange)
        self._tables.budget.leave(self._exchange)
        self._restoring.close()
        if self.values is not None:
            if peer_leaves or not self.values.may_claim:
                for objref in self._exchange.references.exported:
                    self.values.release(objref)
            else:
                self._tables.kept.keep(self._exchange.node, self._exchange.references.claimable())
            self.values.close()
        self.arrivals.clear()
        for own in self._own.values():
            own.drop()
        self._own.clear()

    def lose(self, lost: str, peer_leaves: bool) -> None:
        """Handle the values whose bytes the peer has, after the end of the stream.

        Args:
            lost: how the peer was lost.
            peer_leaves: it has left the cluster, and does not come back.
        """
        self.remote.detach(self._exchange, lost)
        if peer_leaves:
            self.remote.lose(self._exchange.node, lost)

    # ---- to the peer ----

    def send(self, ref: ObjectRef, then: Callable[[], None], **where: int) -> None:
        """Send a value; `then` is called once it needs nothing on this node any more.

        `where` holds the message fields that say which result, item or object it is.
        """
        nbytes = spill.size(self._client, ref.index)
        # Smaller values are offered while the peer is short of room, or the queue is long.
        least = _SHORT_BYTES_MIN if self._exchange.is_short or self._exchange.out.nbytes > _BACKLOG_BYTES else BYTES_MIN
        is_result = "task" in where and "item" not in where
        if is_result:
            least = min(least, self._tables.keep_bytes)
        if self.values is None or not self.values.is_known or (nbytes < least and not self._is_elsewhere(ref)):
            self._send_pieces(ref, then, where)
            return
        theirs = self._exchange.references.theirs(ref) if is_result else 0
        if theirs and remote.is_missing(self._client, ref):
            self._exchange.out.add("value", _Value(yours=theirs, **where))
            then()
            return
        about = handles.describe(self._client, ref)
        contains = [self._exchange.references.name(one) for one in handles.contained(self._client, ref)]
        message = _Value(kind=about["kind"], error=about["error"], size=nbytes, contains=contains, **where)
        is_kept = self.values.may_claim and (nbytes >= self._tables.keep_bytes or self._is_elsewhere(ref))
        if "objref" in where and "item" not in where:
            self._offer_kept(message, ref)
        elif is_result and is_kept and not about["error"] and not contains and self._exchange.references.keep(ref):
            message.keep = ref.objref
            self._offer_kept(message, ref)
        else:
            message.native = self.values.offer(ref, then, where)
            self._exchange.out.add("value", message)
            return
        self._exchange.out.add("value", message)
        then()

    def _is_elsewhere(self, ref: ObjectRef) -> bool:
        return remote.is_missing(self._client, ref) and self.remote.find(ref.objref) is not None

    def _offer_kept(self, message: Any, ref: ObjectRef) -> None:
        """Say in a message where an object's value is, for as long as the peer holds the object."""
        assert self.values is not None
        source = self.remote.find(ref.objref)
        if source is not None and source.address and remote.is_missing(self._client, ref):
            message.native, message.holder = self.values.keep(ref, source.number), source.address
        else:
            message.native = self.values.keep(ref)

    def _send_pieces(self, ref: ObjectRef, then: Callable[[], None], where: dict[str, int]) -> None:
        if self._exchange.closed:
            return
        if self._store.tell is not None and self._restoring.is_away(ref):
            self._restoring.add(ref, partial(self._send_now, then, where))
        else:
            self._send_now(then, where, ref, None)

    def _send_now(
        self, then: Callable[[], None], where: dict[str, int], ref: ObjectRef, error: FastrtError | None
    ) -> None:
        if self._exchange.closed:
            return
        try:
            if error is not None:
                raise error
            kind, is_error, data = self._store.read(ref, at_once=True)
        except OSError:  # too many files are open, or it is in object storage: the daemon restores it
            self._store.asks(Restore(ref.index, ref.objref))
            self._exchange.waiter.loop.call_later(_AGAIN_S, self._send_now, then, where, ref, None)
            return
        except FastrtError as exc:  # the peer gets the error as the value
            kind, is_error, data = PICKLE, True, serialize(exc).to_bytes()
        if kind < CORE_KINDS_END:  # the core's scalars are sent pickled, as kind 0
            data = pickle.dumps(data, 5)
            first = _Value(error=is_error, size=len(data), **where)
        else:
            contains = [self._exchange.references.name(one) for one in handles.contained(self._client, ref)]
            first = _Value(kind=kind, error=is_error, size=len(data), contains=contains, **where)
        self._exchange.out.add_value(first, memoryview(data).cast("B"), then)

    # ---- from the peer ----

    def on_value(self, message: Any) -> None:
        """Handle a value, a piece of one, or the offer of one.

        Raises:
            PeerError: the message is invalid.
        """
        if message.at:
            self.arrivals.on_piece(message)
            return
        contains = [self._exchange.references.resolve(one) for one in message.contains]
        if message.native and message.data:
            self.arrivals.resume(message)
            return
        if message.item:
            if not (self._exchange.flows if message.task else self._exchange.streams).on_item(message, contains):
                self._refuse(message)
            return
        if message.objref and self.claims.take(message):
            return
        task = self._sink(message)
        if task is None:
            self._refuse(message)
            return
        if message.yours:
            self._use_own(message, task)
            return
        self._check_holder(message.holder)
        if message.native and self.values is not None and not contains and not message.error:
            if message.keep:
                self._seal_kept(message, task)
                return
            is_argument = self._tables.budget.names(self._exchange, message.objref)
            if message.objref and not is_argument and message.size >= self._tables.keep_bytes:
                self._seal_remote(message, task)
                return
        self._remember(message, contains)
        if message.task:
            self._exchange.flows.end(message.task)
        if message.kind == 0 and not message.error and len(message.data) == message.size:
            value = pickle.loads(message.data)  # safe: the peer has proved the session's token
            with contextlib.suppress(ObjectStoreFullError):  # `receive` below waits for room
                if core.info(self._client, task)["returns"] == 1 and core.finish_scalar(self._client, task, value):
                    self._sealed(message)
                    return
        self.arrivals.drop(task, message.result)
        self.receive(message, contains, task, None)

    def _use_own(self, message: Any, task: int) -> None:
        """Seal a result with the value of another object of this node, which the peer has received as this result."""
        ref = self._exchange.references.exported_ref(message.yours)
        if ref is None:
            raise PeerError(f"node {self._exchange.name} names object {message.yours:#x}, which it does not hold")
        own = self._own.setdefault(task, OwnResults())
        own.left += 1
        made = self._tables.lineage.result(task, message.result, own.sealed)
        own.made.append(made)
        if not self.remote.follow(made, ref):
            made.copy_of(ref)

    def end(self, task: int) -> None:
        """End a forwarded task that the peer has ended, or let it end with the last result that waits.

        Raises:
            RuntimeError: results are missing.
        """
        own = self._own.pop(task, None)
        if own is not None and own.left:
            results = range(core.info(self._client, task)["returns"])
            if own.left == sum(remote.result_objref(self._client, task, k) != 0 for k in results):
                own.then = partial(core.finish, self._client)
                return
        core.finish(self._client, task)

    def drop(self, task: int) -> None:
        """Drop the results of a forwarded task, which runs again or is ended by this node."""
        self.arrivals.drop(task)
        own = self._own.pop(task, None)
        if own is not None:
            own.drop()

    def _seal_kept(self, message: Any, task: int) -> None:
        """Seal a result whose value the peer keeps."""
        sent = self._exchange.ledger.find(message.task)
        assert sent is not None
        origin = None
        if sent.remote is None:
            sent.record = sent.record or self._tables.lineage.remember(task)
            origin = Origin(sent.record, message.result)
        self.arrivals.drop(task, message.result)
        about = (message.size, message.kind, self._exchange.node, message.keep)
        ref = remote.seal_result(self._client, task, message.result, *about)
        if ref is None:
            self._refuse(message)
        elif self._exchange.references.kept(message.keep, ref, origin):
            self.remote.add(Source(ref, self._exchange, message.keep, message.native, message.holder))
        else:
            raise PeerError(f"node {self._exchange.name} keeps object {message.keep:#x} for two results")

    def _seal_remote(self, message: Any, task: int) -> None:
        """Seal a stand-in whose value stays with the peer until it is read."""
        about = (message.size, message.kind, self._exchange.node, message.objref)
        ref = remote.seal_result(self._client, task, 0, *about)
        core.finish(self._client, task)
        if ref is not None:
            self.remote.add(Source(ref, self._exchange, message.objref, message.native, message.holder))
        self._exchange.references.settled(message.objref)

    def on_where(self, number: int) -> None:
        """Choose the node that sends a value to the peer."""
        objref = None if self.values is None else self.values.kept_object(number)
        if objref is None:
            self._exchange.out.add("withdrawn", number)
            return
        self._tables.spreads.ask(objref, Fetch(self._exchange, number))

    def on_copy(self, message: Any) -> None:
        """Record that the peer has a copy, and offers it to others."""
        self._tables.spreads.received(Fetch(self._exchange, message.number), message.offered)

    def send_from(self, number: int, senders: tuple[Sender, ...]) -> None:
        """Name to the peer the nodes that send it the value that it wants."""
        objref = None if self.values is None else self.values.kept_object(number)
        ref = None if objref is None else self._exchange.references.exported_ref(objref)
        if objref is None or ref is None:
            return
        message = _Senders(number=number)
        for sender in senders:
            copy: Any = sender.peer  # a fetch that has ended
            if copy is not None and copy.stream.traffic.values is not None:
                message.holder.add(address=copy.stream.traffic.values.address, offered=sender.number)
        if not message.holder:
            source = self.remote.find(objref)
            is_elsewhere = source is not None and remote.is_missing(self._client, ref)
            address, offered = (source.address, source.number) if source and is_elsewhere else ("", number)
            message.holder.add(address=address, offered=offered)
        self._exchange.out.add("from", message)

    def on_from(self, message: Any) -> None:
        """Fetch a value from the nodes that the peer has chosen.

        Raises:
            PeerError: the message is invalid.
        """
        for holder in message.holder:
            self._check_holder(holder.address)
        offered = {holder.offered for holder in message.holder}
        if not 0 < len(offered) == len(message.holder) <= SENDERS_MAX:
            raise PeerError(f"node {self._exchange.name} names {len(message.holder)} nodes for {len(offered)} offers")
        self.arrivals.fetch_from(message)

    def _check_holder(self, holder: str) -> None:
        if holder and not is_address(holder):
            name = self._exchange.name
            raise PeerError(f"node {name} says that a value is at {holder[:80]!r}, which is not HOST:PORT")

    def arrived(self, number: int) -> None:
        """Make a fetched copy that is to stay an ordinary value."""
        for source in self.remote.find_offer(self._exchange, number):
            if source.is_wanted and remote.detach(self._client, source.ref):
                self.remote.forget(source.ref.objref)

    def offer_copy(self, number: int) -> None:
        """Offer the value that this node has just fetched under a number of the peer to other nodes.

        The peer also learns of a value that this node cannot offer, such as one with references: others wait for it.
        """
        here = [
            one
            for one in self.remote.find_offer(self._exchange, number)
            if not remote.is_missing(self._client, one.ref)
        ]
        offered = 0
        if here and self.values is not None:
            source = here[0]
            offered = source.offered = source.offered or self.values.offer_copy(source.ref)
        self._exchange.out.add("copy", _Copy(number=number, offered=offered))

    def has_no_copy(self, number: int) -> None:
        """Tell the peer that this node does not fetch a value any more, and has no copy to offer."""
        self._exchange.out.add("copy", _Copy(number=number, offered=0))

    def receive(
        self, message: Any, contains: list[ObjectRef], task: int, finish: Callable[[ObjectRef], None] | None
    ) -> None:
        """Begin to receive a value: the message is all of it, its first piece, or its offer.

        Args:
            message: describes it.
            contains: the references in it.
            task: the task of this process whose result or item it is.
            finish: called with the value once it is complete; None: it is a result.
        Raises:
            PeerError: the message is invalid.
        """
        make: Callable[..., Any] = partial(self._store.create, in_file=True)
        make_file: Callable[..., Any] = self._store.files.create
        place, then = -1, finish
        if then is None:
            make, place = partial(self._store.result, task, message.result), message.result
            make_file = partial(self._store.files.result, task, message.result)
            then = partial(self._arrived, message, task)
        kind, objref = message.kind or PICKLE, 0 if message.item else message.objref
        about = (make, kind, message.error, contains, message.size, task, place, objref)
        is_kept = bool(message.objref) and not message.item
        self.arrivals.begin(message, Arriving(*about, then, message.holder, is_kept, make_file=make_file))

    def _refuse(self, message: Any) -> None:
        """Answer the offer of a value that nothing on this node waits for."""
        if message.keep:
            self._exchange.out.add("release", _Release(objref=message.keep, named=1))
        elif message.native:
            self._exchange.out.add("taken", message.native)

    def on_answer(self, number: int, again: bool) -> None:
        """Handle the answer to an offer: the peer has taken the value, or requests it in pieces."""
        if again:  # the value comes in pieces: its receiver offers no copy
            self._tables.spreads.received(Fetch(self._exchange, number), 0)
        offer = self.values.answered(number) if self.values is not None else None
        if offer is not None and again:
            self._send_pieces(offer.ref, offer.then, {**offer.where, "native": number})
        elif offer is not None:
            offer.then()
        elif again:
            self._exchange.out.add("withdrawn", number)

    def on_withdrawn(self, number: int) -> None:
        """Give up a value that the peer does not offer any more; it was released, or this node would not ask."""
        sources = self.remote.find_offer(self._exchange, number)
        lost = [Unclaimed(source.ref, source.origin, source.same_as) for source in sources]
        for source in sources:
            self.remote.forget(source.ref.objref)
        self.remote.give_up(lost, f"node {self._exchange.name} does not have it any more")

    def _remember(self, message: Any, contains: list[ObjectRef]) -> None:
        """Record which results name objects of the peer whose values are missing here."""
        find = self._exchange.references.find_missing
        missing = [(k, one) for k, one in enumerate(map(find, contains)) if one is not None]
        if not missing:
            return
        if message.objref:
            origin = self._exchange.references.imported(message.objref).origin
        else:
            sent = self._exchange.ledger.find(message.task)
            if sent is None or sent.remote is not None:
                return  # objects that an actor created cannot be rebuilt
            sent.record = sent.record or self._tables.lineage.remember(sent.task)
            origin = Origin(sent.record, message.result)
        if origin is not None:
            self._tables.lineage.names_new(origin, missing)

    def count_run(self, sent: ForwardedTask) -> None:
        """Count that a forwarded task begins again, if it can be made to run for its values, too."""
        if sent.record is not None:
            self._tables.lineage.count_run(sent.record)

    def _sink(self, message: Any) -> int | None:
        """Return the task of this node whose result a value is; None when the value is not wanted any more."""
        if message.objref:
            standin = self._exchange.references.waiting(message.objref)
            return None if standin is None else standin.task
        sent = self._exchange.ledger.find(message.task)
        return None if sent is None or sent.done else sent.task

    def _arrived(self, message: Any, task: int, ref: ObjectRef | None) -> None:
        if message.objref:
            core.finish(self._client, task)
            standin = self._exchange.references.imported(message.objref)
            is_kept = message.native and not message.contains and not message.error
            is_kept = is_kept and message.size >= self._tables.keep_bytes
            if is_kept and remote.mark(self._client, standin.ref, self._exchange.node, message.objref):
                self.remote.add(Source(standin.ref, self._exchange, message.objref, message.native, message.holder))
            self._sealed(message)

    def _sealed(self, message: Any) -> None:
        """Record that a value is sealed and its task has ended."""
        if message.objref:
            self._exchange.references.settled(message.objref)
        else:
            self._exchange.ledger.seal(message.task)
