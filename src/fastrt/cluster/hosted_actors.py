"""Actors that this node hosts for the peer, and the peer's calls of actors on this node.

A hosted actor has no name here and is never restarted here: its owner, the node that created it, decides about both.
It uses resources of this node. It ends when its owner is lost, orders the end, or has no more handles.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fastrt._core.tasks import actors, submission, tally
from fastrt._core.tasks import tasks as core
from fastrt.cluster.references import PeerError
from fastrt.errors import ActorDiedError, FastrtError, ObjectStoreFullError
from fastrt.net.grpc.descriptors import message_set
from fastrt.store.client import Store
from fastrt.store.messages import ActorsChanged
from fastrt.store.ref import ObjectRef
from fastrt.store.serialize import serialize
from fastrt.tasks.actor_handle import ActorPlan, dead_actor
from fastrt.tasks.actor_records import kill_in
from fastrt.tasks.options import RETRIES_FOREVER

if TYPE_CHECKING:
    from fastrt.cluster.peer_stream import Exchange

_SET = message_set("node")
_Fallen, _Gone = (_SET.message(f"fastrt.node.{name}") for name in ("Fallen", "Gone"))


@dataclass
class HostedActor:
    """An actor of the peer that this node hosts: its object, its record, and whether it is a bundle."""

    ref: ObjectRef
    actor: int
    is_bare: bool = False


class HostedActors:
    """The actors that this node hosts for one peer, and the peer's calls.

    Args:
        exchange: the stream to the peer.
        store: this process's attachment.
    """

    def __init__(self, exchange: Exchange, store: Store) -> None:
        self._exchange = exchange
        self._store = store
        self._client = store.client
        self._actors: dict[int, HostedActor] = {}

    def on_actor(self, message: Any) -> None:
        """Create an actor that the peer has placed on this node.

        Raises:
            PeerError: the message is invalid.
        """
        references = self._exchange.references
        init = references.resolve(message.init) if message.HasField("init") else None
        function = self._exchange.functions.received(message.function)
        if (function is None) != message.bare or message.hosted in self._actors:
            raise PeerError(
                f"node {self._exchange.name} sent an actor without its class, or one that it had already sent"
            )
        plan: ActorPlan = pickle.loads(message.plan)  # safe: the peer has proved the session's token
        try:
            demand = self._exchange.demand(message.demand) if message.demand else None
            session = self._client.segment.session
            job = self._exchange.jobs.number(message.job)
            plan = replace(plan, session=session, job=job, cls=function, init=init, demand=demand)
            ref = self._store.put_serialized(serialize(plan))
            objref = 0 if function is None else function.objref
            actor = actors.create(self._client, ref, objref, "", 0, False, demand, message.bare, held=True)
        except ObjectStoreFullError as exc:
            self._exchange.out.add("gone", _Gone(hosted=message.hosted, reason=str(exc)))
            return
        assert actor is not None
        if message.HasField("ref"):
            references.adopt(message.ref, ref)
        self._actors[message.hosted] = HostedActor(ref, actor, message.bare)
        self._notify_daemon()

    def on_call(self, message: Any) -> None:
        """Submit a call that the peer makes to an actor on this node.

        Raises:
            PeerError: the message is invalid.
        """
        references = self._exchange.references
        refs = [references.resolve(one) for one in message.ref]
        if message.dependencies > len(refs) or message.results > self._exchange.RESULTS_MAX:
            raise PeerError(f"node {self._exchange.name} sent a call with invalid counts")
        hosted = self._actors.get(message.actor.hosted)
        ref = references.exported_ref(message.actor.objref) if hosted is None else hosted.ref
        if ref is None:
            if not message.actor.hosted:
                raise PeerError(f"node {self._exchange.name} called an actor whose handle it was never sent")
            self._exchange.out.add("fallen", _Fallen(task=message.task))
            return
        flags, policy, stream = self._exchange.run_options(message)
        retries = min(message.retries, RETRIES_FOREVER)
        options = submission.CallOptions(ref, message.method, message.results, retries, flags, policy=policy)
        args = submission.PackedArgs(message.kind, message.argument, refs, message.dependencies)
        try:
            with self._exchange.jobs.of(message.job):
                made = submission.submit(self._client, options, args, stream)
        except submission.CallOfDead as dead:
            task, made = dead.args
            self._store.put_error(task, dead_actor(self._store, ref))
            core.finish(self._client, task, tally.CRASHED)
        self._exchange.accept(message, [made] if message.results == 1 else made, stream, hosted, True)

    def send_fallen(self, hosted: HostedActor, number: int, ref: ObjectRef) -> bool:
        """Return a call to the peer if its result is only the error that the actor's process has ended.

        Returns:
            Whether that was so; False: the result is to be sent as usual.
        """
        if actors.info(self._client, hosted.actor)["state"] not in (actors.DOWN, actors.DEAD):
            return False
        try:
            self._store.load(ref)
        except ActorDiedError as exc:
            if type(exc) is not ActorDiedError:
                return False  # the method itself called another actor, which is dead
            self._exchange.out.add("fallen", _Fallen(task=number, attempts=exc.attempts))
            return True
        except BaseException:  # any error of a method itself
            return False
        return False

    def on_kill(self, target: Any) -> None:
        """Kill an actor on the peer's order."""
        hosted = self._actors.get(target.hosted)
        ref = self._exchange.references.exported_ref(target.objref) if hosted is None else hosted.ref
        if ref is not None:
            actor = actors.index_of(self._client, ref)
            reason = target.reason or "it was killed by fastrt.kill"
            kill_in(self._store, actor, reason, not target.restart or hosted is not None, not target.gentle)
            self._notify_daemon()

    def on_unhost(self, number: int) -> None:
        """Release a hosted actor that has no more handles on the peer; the daemon ends it if it has not started."""
        self._actors.pop(number, None)
        self._notify_daemon()

    @property
    def is_empty(self) -> bool:
        """Return whether this node hosts no actor of the peer."""
        return not self._actors

    @property
    def has_processes(self) -> bool:
        """Return whether this node hosts actors of the peer, without bundles of placement groups."""
        return not all(hosted.is_bare for hosted in self._actors.values())

    def report_ended(self) -> None:
        """Report the hosted actors whose processes have ended to the peer."""
        for number, hosted in list(self._actors.items()):
            info = actors.info(self._client, hosted.actor)
            if info["state"] == actors.DEAD:
                del self._actors[number]
                failed = info["ended"] in (actors.FAILED, actors.EXITED)  # it must not be restarted
                self._exchange.out.add("gone", _Gone(hosted=number, reason=info["reason"], failed=failed), 512)

    def close(self) -> None:
        """Kill the hosted actors, because the peer that owns them is lost: another node may create them again."""
        for hosted in self._actors.values():
            try:
                kill_in(self._store, hosted.actor, f"node {self._exchange.name}, which owned it, was lost", force=False)
            except FastrtError:
                continue
        self._actors.clear()

    def _notify_daemon(self) -> None:
        if self._store.tell is not None:
            self._store.tell(ActorsChanged())
