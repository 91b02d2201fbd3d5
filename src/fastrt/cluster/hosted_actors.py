"""Actors of the other node of a stream that run here, and the other node's calls of actors here.

A hosted actor is an actor of this node without a name, and is never restarted here: the node that created it decides
about that. It takes its resources on this node, and ends when its node is lost, orders it, or has no more handles.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fastrt._core.tasks import actors, submission
from fastrt._core.tasks import tasks as core
from fastrt.cluster.references import PeerError
from fastrt.errors import ActorDiedError, FastrtError, ObjectStoreFullError
from fastrt.net.grpc.descriptors import message_set
from fastrt.store.client import Store
from fastrt.store.messages import ActorsChanged
from fastrt.store.ref import ObjectRef
from fastrt.store.serialize import serialize
from fastrt.tasks.actor_handle import ActorPlan, dead_actor, kill_in
from fastrt.tasks.options import RETRIES_FOREVER

if TYPE_CHECKING:
    from fastrt.cluster.peer_stream import Exchange

_SET = message_set("node")
_Fallen, _Gone = (_SET.message(f"fastrt.node.{name}") for name in ("Fallen", "Gone"))


@dataclass
class Guest:
    """An actor of the other node that runs here: its object, and its record."""

    ref: ObjectRef
    actor: int


class Guests:
    """The running side of one stream.

    Args:
        exchange: the stream.
        store: this process's attachment.
    """

    def __init__(self, exchange: Exchange, store: Store) -> None:
        self._exchange = exchange
        self._store = store
        self._client = store.client
        self._guests: dict[int, Guest] = {}

    def on_actor(self, message: Any) -> None:
        """Build an actor of the other node's here.

        Raises:
            PeerError: it cannot be one.
        """
        references = self._exchange.references
        init = references.resolve(message.init) if message.HasField("init") else None
        function = self._exchange.functions.received(message.function)
        if (function is None) != message.bare or message.hosted in self._guests:
            raise PeerError(f"node {self._exchange.name} sends an actor without its class, or twice the same")
        plan: ActorPlan = pickle.loads(message.plan)  # the stream has shown the session's token
        try:
            demand = self._exchange.demand(message.demand) if message.demand else None
            session = self._client.segment.session
            plan = replace(plan, session=session, cls=function, init=init, demand=demand)
            ref = self._store.put_serialized(serialize(plan))
            objref = 0 if function is None else function.objref
            actor = actors.create(self._client, ref, objref, "", 0, False, demand, message.bare)
        except ObjectStoreFullError as exc:
            self._exchange.out.add("gone", _Gone(hosted=message.hosted, reason=str(exc)))
            return
        assert actor is not None
        if message.HasField("ref"):
            references.adopt(message.ref, ref)
        self._guests[message.hosted] = Guest(ref, actor)
        self._tell()

    def on_call(self, message: Any) -> None:
        """The other node calls an actor here.

        Raises:
            PeerError: it cannot be a call.
        """
        references = self._exchange.references
        refs = [references.resolve(one) for one in message.ref]
        if message.dependencies > len(refs) or message.results > self._exchange.RESULTS_MAX:
            raise PeerError(f"node {self._exchange.name} sends a call with impossible counts")
        guest = self._guests.get(message.actor.hosted)
        ref = references.exported_ref(message.actor.objref) if guest is None else guest.ref
        if ref is None:
            if not message.actor.hosted:
                raise PeerError(f"node {self._exchange.name} calls an actor that it was never named")
            self._exchange.out.add("fallen", _Fallen(task=message.task))
            return
        flags, policy, stream = self._exchange.special(message)
        retries = min(message.retries, RETRIES_FOREVER)
        options = submission.CallOptions(ref, message.method, message.results, retries, flags, policy=policy)
        args = submission.PackedArgs(message.kind, message.argument, refs, message.dependencies)
        try:
            made = submission.submit(self._client, options, args, stream)
        except submission.CallOfDead as dead:
            task, made = dead.args
            self._store.put_error(task, dead_actor(self._store, ref))
            core.finish(self._client, task)
        self._exchange.borrow(message, [made] if message.results == 1 else made, stream, guest, True)

    def fell(self, guest: Guest, number: int, ref: ObjectRef) -> bool:
        """Whether a result only says that the actor's process has ended; if so, report that to the calling node."""
        if actors.info(self._client, guest.actor)["state"] not in (actors.DOWN, actors.DEAD):
            return False
        try:
            self._store.load(ref)
        except ActorDiedError as exc:
            if type(exc) is not ActorDiedError:
                return False  # its method has met another that is dead
            self._exchange.out.add("fallen", _Fallen(task=number, attempts=exc.attempts))
            return True
        except BaseException:  # any error of a method itself
            return False
        return False

    def on_kill(self, whose: Any) -> None:
        """The other node ends an actor."""
        guest = self._guests.get(whose.hosted)
        ref = self._exchange.references.exported_ref(whose.objref) if guest is None else guest.ref
        if ref is not None:
            actor = actors.index_of(self._client, ref)
            reason = whose.reason or "it was killed by fastrt.kill"
            kill_in(self._store, actor, reason, not whose.restart or guest is not None, not whose.gentle)
            self._tell()

    def on_unhost(self, number: int) -> None:
        """Release a hosted actor that has no more callers on the other node."""
        self._guests.pop(number, None)

    def tend(self) -> None:
        """Tell of those whose processes have ended."""
        for number, guest in list(self._guests.items()):
            info = actors.info(self._client, guest.actor)
            if info["state"] == actors.DEAD:
                del self._guests[number]
                failed = info["ended"] in (actors.FAILED, actors.EXITED)  # it is not to be built again
                self._exchange.out.add("gone", _Gone(hosted=number, reason=info["reason"], failed=failed), 512)

    def close(self) -> None:
        """The other node is lost, and with it those who made these actors: another node may build them again."""
        for guest in self._guests.values():
            try:
                kill_in(
                    self._store, guest.actor, f"node {self._exchange.name}, which had made it, was lost", force=False
                )
            except FastrtError:
                continue
        self._guests.clear()

    def _tell(self) -> None:
        if self._store.tell is not None:
            self._store.tell(ActorsChanged())
