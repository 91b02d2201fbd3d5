"""Actors that run on the peer node: actors created here and placed there, and its actors with handles here.

Each has a record here in state AWAY, and this process takes its calls: it sends them over the stream in the order of
the mailbox, and seals their results when they come. The stream keeps that order, so calls of one caller run in it. The
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

if TYPE_CHECKING:
    from fastrt.cluster.peer_stream import Exchange

_SET = message_set("node")
_Actor, _Plan, _Call, _Whose, _Ask, _Answer = (
    _SET.message(f"fastrt.node.{name}") for name in ("Actor", "Plan", "Call", "Whose", "Ask", "Answer")
)
_LOOK_S = 1.0  # covers a caller that was killed before its wake


@dataclass
class RemoteActor:
    """An actor on the peer.

    Attributes:
        actor: its record here.
        name: of its class.
        target: what names it to the peer.
        sent: numbers of its calls that the peer has.
        fallen: calls that its process there did not end, and how often each had begun.
        gone: what the peer says of the end of that process.
        mailbox: while its calls are taken.
    """

    actor: int
    name: str
    target: Any
    sent: set[int] = field(default_factory=set)
    returned: list[tuple[int, int]] = field(default_factory=list)
    gone: Any = None
    mailbox: Mailbox | None = None


class Mailbox:
    """The mailbox of an actor target process is on the peer, a source of `LoopWaiter`.

    Args:
        client: this process's attachment.
        remote: the actor.
        then: called with the remote and its claimed calls; with none when there may be other news.
    """

    def __init__(self, client: Client, remote: RemoteActor, then: Callable[[RemoteActor, list[int]], None]) -> None:
        self._inbox = Inbox(client, remote.actor, True)
        self._remote, self._then = remote, then

    def look(self) -> None:
        """Take all calls that can run."""
        claimed = [task for task in map(self._inbox.claim, self._inbox.look()) if task != core.NO_TASK]
        self._then(self._remote, claimed)

    def arm(self) -> float:
        """Have the next call wake this process."""
        return 0.0 if self._inbox.arm() else _LOOK_S


class RemoteActors:
    """The calling side of one stream.

    Args:
        exchange: the stream.
        store: this process's attachment.
    """

    def __init__(self, exchange: Exchange, store: Store) -> None:
        self._exchange = exchange
        self._store = store
        self._client = store.client
        self._by_record: dict[int, RemoteActor] = {}  # by record
        self._placed: dict[int, RemoteActor] = {}  # ours, by the number that the peer knows
        self._by_stand_in: dict[int, RemoteActor] = {}  # the peer's, by the objref of the stand-in
        self._asked: dict[int, asyncio.Future[tuple[list[str], ObjectRef | None]]] = {}
        self._numbers = 0

    # ---- ours ----

    def host(self, actor: int) -> None:
        """Have the peer run an actor that this process has taken by `actors.carry`."""
        info = actors.info(self._client, actor)
        try:
            ref = handles.acquire(self._client, *info["object"])
            plan: ActorPlan = self._store.load(ref)
            demand = self._store.load(handles.acquire(self._client, *info["demand"])) if info["demand"] else b""
            function = b"" if plan.cls is None else self._exchange.functions.send(plan.cls.objref, plan.cls.index)
        except FastrtError as exc:  # its last handle went, or what it is made of is lost
            self._drop(actor, f"it could not be sent to node {self._exchange.name}: {exc}")
            return
        self._numbers += 1
        bare = pickle.dumps(replace(plan, cls=None, init=None, demand=None), 5)
        message = _Actor(hosted=self._numbers, function=function, plan=bare, demand=demand, bare=info["bare"])
        if plan.init is not None:
            message.init.CopyFrom(self._exchange.references.name(plan.init))
        if not info["max_restarts"]:  # else handles that come there must find it wherever it runs next
            message.ref.CopyFrom(self._exchange.references.name(ref))
        self._exchange.out.add("actor", message, len(bare) + len(demand) + 128)
        self._placed[self._numbers] = self._follow(actor, plan.name, _Whose(hosted=self._numbers))
        actors.carried(self._client, actor)

    def on_gone(self, message: Any) -> None:
        """The process of an actor of ours has ended over there."""
        remote = self._placed.get(message.hosted)
        if remote is not None:
            remote.gone = message
            self._settle(remote)

    def on_fallen(self, remote: RemoteActor, number: int, task: int, attempts: int) -> None:
        """A call came back without a result, because its actor's process ended."""
        remote.sent.discard(number)
        remote.returned.append((task, attempts))
        self._settle(remote)

    def ended(self, remote: RemoteActor, number: int) -> None:
        """A call has its results, or was cancelled."""
        remote.sent.discard(number)
        if not remote.sent and remote.actor in self._by_record:
            self._settle(remote)
            self._look_for_end(remote)

    def _settle(self, remote: RemoteActor) -> None:
        """Leave everything to the actor's next process, once nothing comes from the last one any more."""
        if remote.gone is None and not remote.returned:
            return
        self._close_mailbox(remote)
        if remote.gone is not None and not remote.sent:
            where = f"{remote.gone.reason} on node {self._exchange.name}"
            if remote.gone.failed:
                actors.end_for_good(self._client, remote.actor, actors.FAILED, where)
            self._lose(remote, where)

    def _lose(self, remote: RemoteActor, how: str) -> None:
        for task, attempts in remote.returned:
            for _ in range(attempts - 1):  # the first is counted here already
                submission.again(self._client, task)
            if core.cancelled(self._client, task):
                self._exchange.end(task, TaskCancelledError("the call was cancelled"))
            elif not calls.put_back(self._client, task, attempts > 0):
                error = ActorDiedError(f"actor {remote.name} died while it ran this call: {how}")
                error.attempts = core.info(self._client, task)["attempts"]
                self._exchange.end(task, error)
        self._forget(remote)
        self._drop(remote.actor, how)

    def _close_mailbox(self, remote: RemoteActor) -> None:
        if remote.mailbox is not None:
            self._exchange.waiter.drop(remote.mailbox)
            remote.mailbox = None

    def _forget(self, remote: RemoteActor) -> None:
        self._close_mailbox(remote)
        self._by_record.pop(remote.actor, None)
        self._placed.pop(remote.target.hosted, None)

    def _drop(self, actor: int, how: str) -> None:
        """Leave it to the daemon what becomes of an actor."""
        actors.drop(self._client, actor, how)  # in the record: the daemon may look before it reads any message
        if self._store.tell is not None:
            self._store.tell(ActorsChanged())

    def _look_for_end(self, remote: RemoteActor) -> None:
        """End an actor of this node on the peer, once no caller is left and all its calls have ended."""
        if remote.target.hosted and actors.is_over(self._client, remote.actor):
            self._exchange.out.add("unhost", remote.target.hosted)
            self._forget(remote)
            self._drop(remote.actor, "its last handle is gone")

    # ---- the peer's ----

    def send_plan(self, ref: ObjectRef) -> None:
        """The peer has been named the object of an actor: tell how to call it."""
        plan: ActorPlan = self._store.load(ref)
        bare = pickle.dumps(replace(plan, cls=None, init=None, demand=None), 5)
        self._exchange.out.add("plan", _Plan(objref=ref.objref, plan=bare), len(bare) + 64)

    def on_plan(self, message: Any) -> None:
        """How to call an actor of the peer, target object was named here."""
        standin = self._exchange.references.waiting(message.objref)
        if standin is None or standin.task is None:
            return  # it is not wanted any more
        plan: ActorPlan = pickle.loads(message.plan)  # the stream has shown the session's token
        parts = serialize(plan)
        writer = self._store.result(standin.task, 0, parts.nbytes, parts.kind, 0)
        if writer is not None:
            actor = actors.stand_in(self._client, standin.ref, self._class(plan.name).objref)
            parts.write(writer)
            writer.seal([])
            self._by_stand_in[standin.ref.objref] = self._follow(actor, plan.name, _Whose(objref=message.objref))
        core.finish(self._client, standin.task)
        standin.task = standin.origin = None

    def _class(self, name: str) -> ObjectRef:
        """Store a placeholder for a class that this node does not have: its name, for messages."""
        digest = hashlib.blake2b(name.encode(), digest_size=16, person=b"class elsewhere").digest()
        found: ObjectRef = functions.add_function(self._client, digest, self._store.put(name), name)
        return found

    def is_used(self, objref: int) -> bool:
        """Whether an object stands for an actor that still has calls."""
        remote = self._by_stand_in.get(objref)
        return remote is not None and (bool(remote.sent) or actors.has_calls(self._client, remote.actor))

    def given_up(self, objref: int) -> None:
        """Drop the actor of an object that is not held here any more."""
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
            self._exchange.out.add("kill", target)  # before calls that were made after it
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

    # ---- names ----

    def ask(self, name: str) -> asyncio.Future[tuple[list[str], ObjectRef | None]]:
        """Ask the peer for the actor of a name, or, with none, for the names that there are."""
        self._numbers += 1
        asked = self._asked[self._numbers] = asyncio.get_running_loop().create_future()
        self._exchange.out.add("ask", _Ask(number=self._numbers, name=name))
        return asked

    def on_ask(self, message: Any) -> None:
        """The peer asks."""
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
        """The peer answers."""
        ref = self._exchange.references.resolve(message.ref) if message.HasField("ref") else None
        asked = self._asked.pop(message.number, None)
        if asked is not None and not asked.done():
            asked.set_result((list(message.name), ref))

    def close(self, take_back: Callable[[int], int | None], lost: str) -> None:
        """The stream has ended.

        Args:
            take_back: gives the task that a number stands for.
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
                actors.end_for_good(self._client, remote.actor, actors.FAILED, f"it lived elsewhere: {lost}")
                for task, _ in remote.returned:
                    self._exchange.end(task, ActorDiedError(f"actor {remote.name} is out of reach: {lost}"))
                remote.returned.clear()
            self._lose(remote, lost)
        self._by_stand_in.clear()
