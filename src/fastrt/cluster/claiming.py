"""Claims over one stream: each node names again what it held of the other one when their last stream ended.

A node sends the numbers of the objects that it claims. The peer answers each: with a value that it offers, with `named`
for a value that follows, once it exists or because nothing can be offered, or with `unknown`. Both nodes may have
several streams to each other, and the first answer counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fastrt._core.objects import handles
from fastrt.cluster.absent_values import Unclaimed
from fastrt.cluster.references import StandIn
from fastrt.cluster.remote_values import Kept, RemoteValues, Source
from fastrt.net.grpc.descriptors import message_set
from fastrt.store.ref import ObjectRef

if TYPE_CHECKING:
    from fastrt.cluster.peer_stream import Exchange

_SET = message_set("node")
_Value, _Release = (_SET.message(f"fastrt.node.{name}") for name in ("Value", "Release"))
BYTES_MIN = 16 << 10  # smaller values are sent, not offered


class Claiming:
    """The claims of one stream, in both directions.

    Args:
        exchange: the stream.
        remote: the values that other nodes keep for this one.
        kept: the objects that peers may claim.
        offer: completes the message that offers an object's value for as long as the peer holds the object.
        is_only: returns whether this node has no other stream to the peer. The peer may have noticed already that
            another one has ended, and keep for this node what this node will claim once it notices, too.
    """

    def __init__(
        self,
        exchange: Exchange,
        remote: RemoteValues,
        kept: Kept,
        offer: Callable[[Any, ObjectRef], None],
        is_only: Callable[[], bool],
    ) -> None:
        self._exchange = exchange
        self._client = exchange.client
        self._remote = remote
        self._kept = kept
        self._offer = offer
        self._is_only = is_only
        self._open: set[int] = set()  # claims without an answer

    # ---- of this node ----

    def begin(self) -> None:
        """Claim what the peer has for this node, when the stream begins."""
        self._claim(self._remote.claims(self._exchange.node))

    def claim_more(self) -> None:
        """Claim what the peer has for this node since another stream between the two nodes has ended."""
        new = [number for number in self._remote.claims(self._exchange.node) if number not in self._open]
        if new:
            self._claim(new)

    def _claim(self, numbers: list[int]) -> None:
        for number in numbers:
            self._open.add(number)
            self._exchange.out.add("claim", number)
        if self._is_only():
            self._exchange.out.add("claim", 0)  # that was all: the peer need not keep anything else

    def take(self, message: Any) -> bool:
        """Take a value of the peer if it is the answer to a claim; return False if it must be received.

        A value can cross the claim, because its object was named on this stream too. One that has not the form of an
        answer leaves the claim open; one that has it counts as the answer, and the answer is received in its place.
        An object that was named again in the same frame has a stand-in that waits for it: no other value comes.
        """
        objref = message.objref
        if objref not in self._open or not message.native or message.contains or message.error:
            return False
        known, sealed = self._use_answer(objref)
        if sealed:
            self._use_source(message, sealed)
        is_over = self._count_naming(objref, known) or bool(sealed)
        return is_over and self._exchange.references.waiting(objref) is None

    def on_named(self, objref: int) -> None:
        """Use the answer to a claim of an object whose value follows once it exists."""
        known, sealed = self._use_answer(objref)
        self._count_naming(objref, known)
        self._remote.give_up(sealed, f"node {self._exchange.name} does not offer its value any more")

    def on_unknown(self, objref: int) -> None:
        """Give up a claimed value that the peer does not have."""
        self._open.discard(objref)
        why = f"node {self._exchange.name}, which had it, does not know it any more: its uplink was killed"
        self._remote.give_up(self._remote.claimed(self._exchange.node, objref), why)

    def _use_source(self, message: Any, claimed: list[Unclaimed]) -> None:
        """Give local objects the source that they had."""
        references = self._exchange.references
        known = references.find(message.objref)
        origin = next((one.origin for one in claimed if one.origin is not None), None)
        for one in claimed:
            if known is None:
                references.kept(message.objref, one.ref, origin)
                known = references.imported(message.objref)
            known.origin = known.origin or origin
            same_as = None if known.ref is one.ref else known.ref
            source = Source(one.ref, self._exchange, message.objref, message.native, message.holder, same_as)
            self._remote.add(source)
            self._remote.resolved(one.ref.objref)
            if known.origin is None:  # no task can make it again: from now on it must not depend on its node
                source.is_wanted = True
                self._remote.fetch(one.ref.objref)

    def _use_answer(self, objref: int) -> tuple[StandIn | None, list[Unclaimed]]:
        """Use stand-ins that wait for a claimed object again.

        Returns:
            The stand-in that another naming on this stream made before, and the claimed values that are no stand-ins.
        """
        self._open.discard(objref)
        references = self._exchange.references
        known = references.find(objref)
        claimed = self._remote.claimed(self._exchange.node, objref)
        sealed = [one for one in claimed if one.standin is None]
        for one in claimed:
            if one.standin is None:
                continue
            one.standin.origin = one.standin.origin or one.origin
            if sealed or not references.claimed(objref, one.standin):  # another object here stands for it already
                self._remote.share(one, sealed[0].ref if sealed else references.imported(objref).ref)
        return known, sealed

    def _count_naming(self, objref: int, known: StandIn | None) -> bool:
        """Count the naming in the answer to a claim; a stand-in that the answer has made counts it already.

        Returns:
            Whether nothing here uses the object, as when another stream's answer came before: it is released.
        """
        if known is not None:
            known.named += 1  # another naming on this stream came before the answer
        elif self._exchange.references.find(objref) is None:
            self._exchange.out.add("release", _Release(objref=objref, named=1))
            return True
        return False

    # ---- of the peer ----

    def on_claim(self, objref: int) -> None:
        """Name an object again that this node has kept for the peer since their last stream ended."""
        if not objref:
            self._kept.drop(self._exchange.node)
            return
        values = self._exchange.traffic.values
        ref = self._kept.claim(self._exchange.node, objref)
        if ref is None:
            self._exchange.out.add("unknown", objref)
            return
        self._exchange.references.name_again(ref)
        about = handles.describe(self._client, ref)
        is_plain = handles.is_ready(self._client, ref) and not about["error"]
        is_plain &= values is not None and values.is_known  # a peer without a native stream takes no offers
        if not is_plain or about["bytes"] < BYTES_MIN or handles.contained(self._client, ref):
            self._exchange.out.add("named", objref)
            self._exchange.send_when_ready(ref)
            return
        message = _Value(objref=objref, kind=about["kind"], size=about["bytes"])
        self._offer(message, ref)
        self._exchange.out.add("value", message)
