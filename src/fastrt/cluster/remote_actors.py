"""Actors that run on the peer: actors created here and placed there, and the peer's actors with handles here.

Each has a local record in state AWAY. This process takes its calls, sends them over the stream in the order of the
mailbox, and seals their results when they arrive. The stream keeps that order, so calls of one caller run in it. The
node that created an actor owns it: it decides about the name, the restarts and the calls of a dead process, and treats
a lost node as a dead process.
"""

from __future__ import annotations

import asyncio
import hashlib
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fastrt._core.memory.clients import Client
from fastrt._core.objects import functions, handles
from fastrt._core.tasks import actors, calls, submission
from fastrt._core.tasks import tasks as core
from fastrt._core.tasks.inbox import Inbox
from fastrt.errors import ActorDiedError, FastrtError, TaskCancelledError
from fastrt.net.grpc.descriptors import message_set
from fastrt.store.client import Store
from fastrt.store.messages import ActorsChanged
from fastrt.store.ref import ObjectRef
from fastrt.store.serialize import serialize
from fastrt.tasks.actor_handle import ActorPlan
from fastrt.tasks.actor_records import death_of_call
from fastrt.tasks.resources import NOTHING

if TYPE_CHECKING:
    from fastrt.cluster.peer_stream import Exchange

_SET = message_set("node")
_Actor, _Plan, _Call, _Whose, _Ask, _Answer = (
    _SET.message(f"fastrt.node.{name}") for name in ("Actor", "Plan", "Call", "Whose", "Ask", "Answer")
)
_NOTHING = NOTHING.to_bytes()  # said, so that the peer does not place the actor again
_LOOK_S = 1.0  # between polls: a caller may be killed before it sends its wake


@dataclass
class RemoteActor:
    """An actor that runs on the peer.

    Attributes:
        actor: its local record.
        name: its class's name.
        target: the message that names it to the peer.
        sent: numbers of its calls that the peer has.
        returned: calls that its process on the peer did not finish, and how often each had begun.
        gone: the peer's report that this process has ended; None: it has not.
        mailbox: set while this process takes its calls.
        is_bare: it is a bundle of a placement group, without a process.
        moves: the peer has the order to end it, so that another node runs it.
    """

    actor: int
    name: str
    target: Any
    sent: set[int] = field(default_factory=set)
    returned: list[tuple[int, int]] = field(default_factory=list)
    gone: Any = None
    mailbox: Mailbox | None = None
    is_bare: bool = False
    moves: bool = False


class Mailbox:
    """The mailbox of an actor that runs on the peer; a source of `LoopWaiter`.

    Args:
        client: this process's attachment.
        remote: the actor.
        then: called with the actor and its claimed calls; with no calls when something else may have changed.
    """

    def __init__(self, client: Client, remote: RemoteActor, then: Callable[[RemoteActor, list[int]], None]) -> None:
        self._inbox = Inbox(client, remote.actor, True)
        self._remote, self._then = remote, then

    def look(self) -> None:
        """Claim all calls that can run."""
        claimed = [task for task in map(self._inbox.claim, self._inbox.look()) if task != core.NO_TASK]
        self._then(self._remote, claimed)

    def arm(self) -> float:
        """Have the next call wake this process."""
        return 0.0 if self._inbox.arm() else _LOOK_S


class RemoteActors:
    """The actors that run on one peer and are called from this node.

    Args:
        exchange: the stream to the peer.
        store: this process's attachment.
    """

    def __init__(self, exchange: Exchange, store: Store) -> None:
        self._exchange = exchange
        self._store = store
        self._client = store.client
        self._by_record: dict[int, RemoteActor] = {}  # by record
        self._placed: dict[int, RemoteActor] = {}  # owned by this node, by the number that the peer knows
        self._by_stand_in: dict[int, RemoteActor] = {}  # owned by the peer, by the objref of the stand-in
        self._asked: dict[int, asyncio.Future[tuple[list[str], ObjectRef | None]]] = {}
        self._numbers = 0

    # ---- actors of this node ----

    def host(self, actor: int) -> None:
        """Send an actor that this process has claimed by `actors.carry` to the peer, which will host it."""
        info = actors.info(self._client, actor)
        try:
            ref = handles.acquire(self._client, *info["object"])
            plan: ActorPlan = self._store.load(ref)
            demand = self._store.load(handles.acquire(self._client, *info["demand"])) if info["demand"] else _NOTHING
            function = b"" if plan.cls is None else self._exchange.functions.send(plan.cls.objref, plan.cls.index)
        except FastrtError as exc:  # its last handle is gone, or its class or arguments are lost
            self._drop(actor, f"it could not be sent to node {self._exchange.name}: {exc}")
            return
        self._numbers += 1
        bare = self._bare(plan, ref)
        job = self._exchange.jobs.name(plan.job)
        message = _Actor(hosted=self._numbers, function=function, plan=bare, demand=demand, bare=info["bare"], job=job)
        if plan.init is not None:
            message.init.CopyFrom(self._exchange.references.name(plan.init))
        if not info["max_restarts"]:  # otherwise handles on the peer must find it on any node that runs it next
            message.ref.CopyFrom(self._exchange.references.name(ref))
        self._exchange.out.add("actor", message, len(bare) + len(demand) + 128)
        remote = self._placed[self._numbers] = self._follow(actor, plan.name, _Whose(hosted=self._numbers))
        remote.is_bare = info["bare"]
        actors.carried(self._client, actor)

    def move(self) -> bool:
        """Move the actors that may be restarted away from the peer, which leaves.

        The calls that have begun end first. Later ones wait for the next process. Bundles go with the peer.

        Returns:
            Whether no actor is left there.
        """
        left = [remote for remote in self._by_record.values() if not remote.is_bare]
        for remote in left:
            info = actors.info(self._client, remote.actor)
            may_restart = info["max_restarts"] < 0 or info["restarts"] < info["max_restarts"]
            if not remote.target.hosted or remote.moves or info["ended"] or not may_restart:
                continue
            self._close_mailbox(remote)
            if not remote.sent:
                remote.moves = True
                target = _Whose(gentle=True, reason="its node leaves the cluster")
                target.MergeFrom(remote.target)
                self._exchange.out.add("kill", target)
        return not left

    def on_gone(self, message: Any) -> None:
        """Handle the end of the process of an actor that this node owns."""
        remote = self._placed.get(message.hosted)
        if remote is not None:
            remote.gone = message
            self._settle(remote)

    def on_fallen(self, remote: RemoteActor, number: int, task: int, attempts: int) -> None:
        """Handle a call that was returned without a result, because its actor's process ended."""
        remote.sent.discard(number)
        remote.returned.append((task, attempts))
        self._settle(remote)

    def ended(self, remote: RemoteActor, number: int) -> None:
        """Handle the end of a call: it has its results, or was cancelled."""
        remote.sent.discard(number)
        if not remote.sent and remote.actor in self._by_record:
            self._settle(remote)
            self._look_for_end(remote)

    def _settle(self, remote: RemoteActor) -> None:
        """Leave the calls to the actor's next process, once the last one has ended and answered all its calls."""
        if remote.gone is None and not remote.returned:
            return
        self._close_mailbox(remote)
        if remote.gone is not None and not remote.sent:
            where = f"{remote.gone.reason} on node {self._exchange.name}"
            if remote.gone.failed:
                actors.end_for_good(self._client, remote.actor, actors.FAILED, where)
            self._lose(remote, where)

    def _lose(self, remote: RemoteActor, how: str, node_lost: bool = False) -> None:
        for task, attempts in remote.returned:
            for _ in range(attempts - 1):  # the first attempt is already counted here
                submission.again(self._client, task)
            if core.cancelled(self._client, task):
                self._exchange.end(task, TaskCancelledError("the call was cancelled"))
            elif not calls.put_back(self._client, task, attempts > 0):
                words = f"actor {remote.name} died while it ran this call: {how}"
                error = death_of_call(self._store, remote.actor, words)
                error.attempts = core.info(self._client, task)["attempts"]
                self._exchange.end(task, error)
        self._forget(remote)
        self._drop(remote.actor, how, node_lost)

    def _close_mailbox(self, remote: RemoteActor) -> None:
        if remote.mailbox is not None:
            self._exchange.waiter.drop(remote.mailbox)
            remote.mailbox = None

    def _forget(self, remote: RemoteActor) -> None:
        self._close_mailbox(remote)
        self._by_record.pop(remote.actor, None)
        self._placed.pop(remote.target.hosted, None)

    def _drop(self, actor: int, how: str, node_lost: bool = False) -> None:
        """Return an actor to the daemon, which decides whether it is restarted."""
        actors.drop(self._client, actor, how, node_lost)  # in the record: the daemon may read it before any message
        if self._store.tell is not None:
            self._store.tell(ActorsChanged())

    def _look_for_end(self, remote: RemoteActor) -> None:
        """End an actor of this node on the peer, once no handle is left and all its calls have ended."""
        if remote.target.hosted and actors.is_over(self._client, remote.actor):
            self._exchange.out.add("unhost", remote.target.hosted)
            self._forget(remote)
            self._drop(remote.actor, "its last handle is gone")

    # ---- actors of the peer ----

    def send_plan(self, ref: ObjectRef) -> None:
        """Send the description of an actor to the peer, which has received the name of its object."""
        plan: ActorPlan = self._store.load(ref)
        bare = self._bare(plan, ref)
        self._exchange.out.add("plan", _Plan(objref=ref.objref, plan=bare), len(bare) + 64)

    def _bare(self, plan: ActorPlan, ref: ObjectRef) -> bytes:
        """Encode a plan without the references to objects of this node."""
        origin = plan.id_at(self._client.segment.session, ref.objref)
        return pickle.dumps(replace(plan, cls=None, init=None, demand=None, waits=(), origin=origin), 5)

    def on_plan(self, message: Any) -> None:
        """Create the local record of an actor of the peer from its description."""
        standin = self._exchange.references.waiting(message.objref)
        if standin is None or standin.task is None:
            return  # no handle needs it any more
        plan: ActorPlan = pickle.loads(message.plan)  # safe: the peer has proved the session's token
        parts = serialize(plan)
        writer = self._store.result(standin.task, 0, parts.nbytes, parts.kind, 0)
        if writer is not None:
            actor = actors.stand_in(self._client, standin.ref, self._class(plan.name).objref)
            parts.write(writer)
            writer.seal([])
            self._by_stand_in[standin.ref.objref] = self._follow(actor, plan.name, _Whose(objref=message.objref))
        core.finish(self._client, standin.task)
        self._exchange.references.settled(message.objref)

    def _class(self, name: str) -> ObjectRef:
        """Store a placeholder for a class that this node does not have; it holds the name, for messages."""
        digest = hashlib.blake2b(name.encode(), digest_size=16, person=b"class elsewhere").digest()
        found: ObjectRef = functions.add_function(self._client, digest, self._store.put(name), name)
        return found

    def is_used(self, objref: int) -> bool:
        """Return whether an object is the stand-in for an actor that still has calls."""
        remote = self._by_stand_in.get(objref)
        return remote is not None and (bool(remote.sent) or actors.has_calls(self._client, remote.actor))

    def given_up(self, objref: int) -> None:
        """Drop the actor of a stand-in that this node has released."""
        remote = self._by_stand_in.pop(objref, None)
        if remote is not None and remote.actor in self._by_record:
            self._forget(remote)
            self._drop(remote.actor, "its last handle is gone")

    # ---- calls ----

    def _follow(self, actor: int, name: str, target: Any) -> RemoteActor:
        remote = self._by_record[actor] = RemoteActor(actor, name, target)
        remote.mailbox = Mailbox(self._client, remote, self._on_mail)
        self._exchange.waiter.open(remote.mailbox)
        return remote

    def _on_mail(self, remote: RemoteActor, tasks: list[int]) -> None:
        order = actors.take_order(self._client, remote.actor)
        if order in (actors.ORDER_KILL, actors.ORDER_END):
            info = actors.info(self._client, remote.actor)
            target = _Whose(restart=not info["ended"], gentle=order == actors.ORDER_END, reason=info["reason"])
            target.MergeFrom(remote.target)
            self._exchange.out.add("kill", target)  # ahead of the calls that were made after it
        for task in tasks:
            self._send(remote, task)
        if not tasks and not remote.sent:
            self._look_for_end(remote)

    def _send(self, remote: RemoteActor, task: int) -> None:
        info = core.info(self._client, task)
        kind, data, refs = core.arguments(self._client, task, True)
        message = _Call(
            actor=remote.target, method=info["function"][1], kind=kind, argument=data,
            ref=[self._exchange.references.name(ref) for ref in refs], dependencies=info["deps"],
            results=info["returns"],
        )  # fmt: skip
        remote.sent.add(self._exchange.describe(message, task, info, remote))
        self._exchange.out.add("call", message, len(data) + 128)

    @property
    def is_empty(self) -> bool:
        """Return whether no actor of this node or the peer is called over the stream, and no search is open."""
        return not (self._by_record or self._asked)

    # ---- names ----

    def ask(self, name: str) -> asyncio.Future[tuple[list[str], ObjectRef | None]]:
        """Ask the peer for the actor with a name; with an empty name, for all its actor names."""
        self._numbers += 1
        asked = self._asked[self._numbers] = asyncio.get_running_loop().create_future()
        self._exchange.out.add("ask", _Ask(number=self._numbers, name=name))
        return asked

    def on_ask(self, message: Any) -> None:
        """Answer the peer's search for an actor name."""
        answer = _Answer(number=message.number)
        if not message.name:
            answer.name.extend(actors.names(self._client))
        else:
            ref = actors.find(self._client, message.name)
            if ref is not None:
                answer.name.append(message.name)
                answer.ref.CopyFrom(self._exchange.references.name(ref))
        self._exchange.out.add("answer", answer)

    def on_answer(self, message: Any) -> None:
        """Resolve a search with the peer's answer."""
        ref = self._exchange.references.resolve(message.ref) if message.HasField("ref") else None
        asked = self._asked.pop(message.number, None)
        if asked is not None and not asked.done():
            asked.set_result((list(message.name), ref))

    def close(self, take_back: Callable[[int], int | None], lost: str) -> None:
        """End all remote actors and searches, because the stream has ended.

        Args:
            take_back: removes a forwarded call by its number; returns its task, or None if it has ended.
            lost: how the peer was lost.
        """
        for asked in self._asked.values():
            if not asked.done():
                asked.set_result(([], None))
        self._asked.clear()
        for remote in list(self._by_record.values()):
            tasks = [take_back(number) for number in sorted(remote.sent)]
            remote.returned += [(task, 1) for task in tasks if task is not None]
            if not remote.target.hosted:
                actors.end_for_good(self._client, remote.actor, actors.FAILED, f"it ran on another node: {lost}")
                for task, _ in remote.returned:
                    self._exchange.end(task, ActorDiedError(f"actor {remote.name} cannot be reached: {lost}"))
                remote.returned.clear()
            self._lose(remote, lost, node_lost=True)
        self._by_stand_in.clear()
