"""One bidirectional gRPC stream between two nodes. Each side may forward tasks to the other.

The node that forwards a task still owns it: there the task is RUNNING, claimed by the uplink, and there its results are
sealed when they arrive. So a dead uplink, a dead node and a cut network have the same effect as a dead worker: the task
runs again on any node, up to its `max_retries`. The node that runs the task submits it like a local task. Its arguments
are stand-ins for objects of the owner (`references`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Container
from functools import partial
from typing import Any

from fastrt._core.objects import handles, remote, spill
from fastrt._core.repair import inspect
from fastrt._core.tasks import actors, admission, calls, generators, submission, tally
from fastrt._core.tasks import tasks as core
from fastrt.cluster.borrowing import AnyOf
from fastrt.cluster.generator_handles import Streams
from fastrt.cluster.generators import Flows
from fastrt.cluster.hosted_actors import HostedActor, HostedActors
from fastrt.cluster.idle import Idle
from fastrt.cluster.leaving import PeerLeaves
from fastrt.cluster.ledger import AcceptedTask, Ledger
from fastrt.cluster.membership import refused_report
from fastrt.cluster.node_tables import NodeTables
from fastrt.cluster.outbox import Outgoing
from fastrt.cluster.questions import Questions
from fastrt.cluster.references import LOOKS, PeerError, References
from fastrt.cluster.remote_actors import RemoteActor, RemoteActors
from fastrt.cluster.sent_functions import SentFunctions
from fastrt.cluster.standing import Standing
from fastrt.cluster.value_traffic import ValueTraffic
from fastrt.errors import FastrtError, ObjectStoreFullError, TaskCancelledError, WorkerCrashedError
from fastrt.net.grpc.descriptors import message_set
from fastrt.store.client import Store
from fastrt.store.ref import ObjectRef
from fastrt.store.serialize import PICKLE, serialize
from fastrt.store.waiter import LoopWaiter
from fastrt.tasks.cancel import cancel_in
from fastrt.tasks.options import RETRIES_FOREVER, carried, received, retries_left
from fastrt.tasks.resources import Demand, export

_SET = message_set("node")
_Frame, _Value, _Ref, _Task, _Call, _Release, _Cancel, _Fallen = (
    _SET.message(f"fastrt.node.{name}")
    for name in ("Frame", "Value", "Ref", "Task", "Call", "Release", "Cancel", "Fallen")
)
# If there are more objects of other nodes than one call of `tidy_all` looks at, the next one is so much later while
# they are released, and so many times longer than the call has taken while they are only looked at.
_MORE_S, _MORE_TIMES = 0.02, 20
_HOPS_MAX = 255  # what a task's record can hold


def tidy_all(exchanges: Collection[Exchange], used: Container[int]) -> float:
    """Tidy all streams of a node: none releases what another one needs.

    Args:
        exchanges: the streams.
        used: numbers of other objects to keep.
    Returns:
        Seconds until the next call: infinite if all objects of other nodes were looked at, else soon while they are
        released, and after some time while they are only looked at.
    """
    began = time.monotonic()
    needs = {exchange: exchange.needs() for exchange in exchanges}
    released = sum(one.tidy(AnyOf(used, *(needs[other] for other in needs if other is not one))) for one in needs)
    if not any(exchange.references.has_unlooked for exchange in exchanges):
        return math.inf
    return max(_MORE_S, 0.0 if released else _MORE_TIMES * (time.monotonic() - began))


class Exchange:
    """This node's side of one stream.

    Attributes:
        node: the peer's session, once its hello has arrived; else empty.
        name: the peer's name, for messages.
        workers, queued: its load, as last reported.
        room: how many of this node's tasks it accepts at once, as last reported.
        reported_room: the room for tasks on this node that the last frame to the peer reported.
        is_short: whether the peer's store is short of room, as last reported.
        ledger: the forwarded and the accepted tasks and calls.
        traffic: the values that cross the stream.
        out: the queue of messages to the peer.
        functions: the functions that the two nodes have sent each other.
        questions: what tools of one node ask the other.
        standing: the tasks that wait in a debugger.
        jobs: the jobs of other nodes whose tasks run here.
        idle: whether both sides agree to close the stream.
        leaves: whether the peer leaves the cluster, and what the two nodes have said about it.

    Args:
        store: this process's attachment.
        waiter: waits for references on behalf of the process's event loop.
        tables: the node's tables of values; None: this stream gets its own.
    """

    RESULTS_MAX = 10_000  # of a task or call

    def __init__(
        self,
        store: Store,
        waiter: LoopWaiter,
        tables: NodeTables | None = None,
    ) -> None:
        self.node = ""
        self.name = ""
        self.is_short = False
        self.workers = self.queued = self.room = self.reported_room = 0
        self.ledger = Ledger()
        self.out = Outgoing(_Frame, _Value)
        self.questions = Questions(self.out.add)
        self._store = self.store = store
        self._client = self.client = store.client
        self.waiter = waiter
        self.references = References(store, self._send_object, _Ref)
        self.references.on_again = self._hold_again
        tables = tables or NodeTables(store, waiter)
        self._budget = tables.budget
        self.jobs = tables.jobs
        self.traffic = ValueTraffic(self, tables)
        self.functions = SentFunctions(store, self.references, self.out)
        self.closed = self._peer_leaves = False
        self.standing = Standing(self._client, self.ledger, self.out)
        self.idle = Idle()
        self.leaves = PeerLeaves()
        self.remote_actors = RemoteActors(self, store)
        self.hosted_actors = HostedActors(self, store)
        self.flows = Flows(self, store)
        self.streams = Streams(self)
        self.references.on_stream = self.streams.mirror
        self.has_run = False  # whether a task or call of the peer has run here
        self.on_output: Callable[[Any], None] = lambda message: None  # set by the uplink

    # ---- the side that forwards ----

    def forward(self, task: int) -> None:
        """Forward a task that this process has claimed to the peer.

        Raises:
            FastrtError: the function cannot be read here.
        """
        info = core.info(self._client, task)
        kind, data, refs = core.arguments(self._client, task, True)
        lacks = self.lacks(refs)
        message = _Task(
            function=self.functions.send(*info["function"]),
            kind=kind,
            argument=data,
            ref=[self.references.name(ref) for ref in refs],
            dependencies=info["deps"],
            results=info["returns"],
            priority=info["priority"],
            hops=info["hops"] + 1,
        )
        if info["flags"] & admission.DEMAND:
            message.demand = self._store.load(admission.demand_of(self._client, task, info["id"]))
        number = self.describe(message, task, info)
        self.out.add("task", message, len(data) + 128)
        self.ledger.fetch(number, lacks)

    def describe(self, message: Any, task: int, info: dict[str, Any], remote: RemoteActor | None = None) -> int:
        """Fill in how a task or a call is run, and the number by which the peer knows it.

        Args:
            message: the message to the peer; filled here.
            task: of this process.
            info: the fields of its record.
            remote: the actor whose call it is.
        Returns:
            The number.
        """
        message.retries, message.retry_errors = retries_left(info), bool(info["flags"] & core.RETRY_ERRORS)
        message.job = self.jobs.name(info["job"])
        message.policy = carried(self._store, task, info["job"] if remote is None else 0)
        flow = self.flows.describe(task, message) if info["flags"] & generators.STREAM else None
        message.task = number = self.ledger.forward(task, remote)
        if flow is not None:
            self.flows.register(number, flow)
        return number

    def pass_cancels(self) -> None:
        """End forwarded tasks that were cancelled: on this node at once, and on the peer by a message.

        The task of a stand-in is cancelled by the peer, which owns the object; the stand-in then gets its value.
        """
        for objref, force, alone in self.references.newly_cancelled():
            self.out.add("cancel", _Cancel(objref=objref, force=force, alone=alone))
        for number, sent in self.ledger.open():
            terms = core.cancel_terms(self._client, sent.task)
            if terms is None:
                continue
            self.ledger.take(number)
            self.flows.drop(number)
            self.traffic.drop(sent.task)
            self.out.add("cancel", _Cancel(task=number, force=terms[0], alone=terms[1]))
            self.end(sent.task, TaskCancelledError(f"the task was cancelled while node {self.name} ran it"))
            if sent.remote is not None:
                self.remote_actors.ended(sent.remote, number)

    def _on_ended(self, number: int) -> None:
        ended = self.ledger.end(number)
        if ended is None:
            return
        sent, was_sealed = ended
        if not was_sealed:
            self.flows.drop(number)
            try:
                self.traffic.end(sent.task)
            except RuntimeError as exc:
                raise PeerError(f"node {self.name} ended a task, but not all its results have arrived") from exc
        if sent.remote is not None:
            self.remote_actors.ended(sent.remote, number)

    def _on_fallen(self, message: Any) -> None:
        sent = self.ledger.take(message.task)
        if sent is None:
            return
        self.flows.drop(message.task)
        self.traffic.drop(sent.task)
        if sent.remote is None:
            for _ in range(message.attempts):
                self.traffic.count_run(sent)
            self._queue_again(sent.task, message.attempts)
        else:
            self.remote_actors.on_fallen(sent.remote, message.task, sent.task, message.attempts)

    def _queue_again(self, task: int, attempts: int) -> None:
        """Queue a task that the peer has returned before it began its next attempt; `attempts` have ended there."""
        for _ in range(attempts - 1):  # the first one is counted here
            submission.again(self._client, task)
        if (core.retry if attempts else core.give_back)(self._client, task):
            return
        if core.cancelled(self._client, task):
            self.end(task, TaskCancelledError("the task was cancelled"))
        else:
            self.end(task, WorkerCrashedError(f"a task was given up after attempt {attempts} on node {self.name}"))

    def end(self, task: int, error: FastrtError) -> None:
        """Make an error the result of a task of this process."""
        self._store.put_error(task, error)
        cancelled = isinstance(error, TaskCancelledError)
        core.finish(self._client, task, tally.CANCELLED if cancelled else tally.CRASHED)

    # ---- the side that runs ----

    def _on_task(self, message: Any) -> None:
        refs = [self.references.resolve(one) for one in message.ref]
        if abs(message.priority) > submission.PRIORITY_MAX:
            raise PeerError(f"node {self.name} sends a task of priority {message.priority}")
        known = self.ledger.find_accepted(message.task)
        if message.results > self.RESULTS_MAX or message.dependencies > len(refs) or known:
            raise PeerError(f"node {self.name} sent a task with invalid counts, or a task number in use")
        function = self.functions.received(message.function)
        if function is None:
            raise PeerError(f"node {self.name} sent a task before the function that it runs")
        flags, policy, stream = self.run_options(message)
        options = submission.TaskOptions(
            function,
            message.results,
            min(message.retries, RETRIES_FOREVER),
            flags,
            demand=self.demand(message.demand) if message.demand else None,
            policy=policy,
            priority=message.priority,
            hops=min(message.hops, _HOPS_MAX),
        )
        args = submission.PackedArgs(message.kind, message.argument, refs, message.dependencies)
        with self.jobs.of(message.job):
            results = submission.submit(self._client, options, args, stream)
        self.accept(message, [results] if message.results == 1 else results, stream)
        for ref in refs[: message.dependencies]:
            self.traffic.remote.fetch(ref.objref, is_urgent=False)  # before a worker is free

    def accept(
        self,
        message: Any,
        made: list[ObjectRef],
        stream: ObjectRef | None,
        hosted: HostedActor | None = None,
        is_call: bool = False,
    ) -> None:
        """Send the results of an accepted task or call once the last exists: together, in one frame."""
        number = message.task
        self.has_run = True
        if not made:
            self.out.add("ended", number)  # no result is expected
            return
        self.ledger.accept(number, AcceptedTask(made, len(made), hosted, is_call))
        self._budget.expect(self, number, [one.objref for one in message.ref if not one.yours])
        if stream is not None:
            self.flows.run(message, stream, made[0], partial(self._send_result, number, 0))
            return
        self.waiter.add(made[-1], partial(self._send_results, number, made))

    def demand(self, data: bytes) -> ObjectRef:
        """Store the demand of a task or an actor that the peer has placed here; it must stay on this node.

        Raises:
            PeerError: `data` is no demand.
        """
        try:
            demand = Demand.from_bytes(data)._replace(strategy="", node=self._client.segment.session, soft=False)
        except ValueError as exc:
            raise PeerError(f"node {self.name} sent an invalid demand: {exc}") from None
        return export(self._store, demand)

    def run_options(self, message: Any) -> tuple[int, ObjectRef | None, ObjectRef | None]:
        """Return the flags, the policy and the stream of a task or a call of the peer."""
        policy = received(self._store, message.policy) if message.policy else None
        return core.RETRY_ERRORS if message.retry_errors else 0, policy, self.flows.create(message)

    def forwarded(self) -> list[tuple[bool, str, int, str]]:
        """Return the tasks and calls in progress over this stream, for listings of a cluster.

        Returns:
            For each: whether the peer runs it, the peer's NodeID, its number on the stream, and the id of its first
            result on this node. Those without results are left out.
        """
        rows = [(number, inspect.task(self._client, sent.task)) for number, sent in self.ledger.open()]
        sent = [(True, self.node, number, row["returns"][0]) for number, row in rows if row and row["returns"]]
        ran = [
            (False, self.node, number, accepted.results[0].objref)
            for number, accepted in self.ledger.all_accepted().items()
        ]
        return [(away, node, number, f"{objref:016x}") for away, node, number, objref in sent + ran]

    def lacks(self, refs: list[ObjectRef]) -> int:
        """Return how many bytes of these objects the peer has to fetch."""
        away = [ref for ref in refs if not self.references.has(ref.objref)]
        return sum(spill.size(self._client, ref.index) for ref in away)

    def _send_results(self, number: int, made: list[ObjectRef], _last: ObjectRef) -> None:
        for k, ref in enumerate(made):
            if handles.is_ready(self._client, ref):
                self._send_result(number, k, ref)
            else:
                self.waiter.add(ref, partial(self._send_result, number, k))

    def _send_result(self, number: int, k: int, ref: ObjectRef) -> None:
        accepted = None if self.closed else self.ledger.find_accepted(number)
        if accepted is None:
            return
        if accepted.hosted is not None and self.hosted_actors.send_fallen(accepted.hosted, number, ref):
            self.ledger.give_back(number)
            self._budget.ended(self, number)
            return
        self.traffic.send(ref, partial(self._result_sent, number), task=number, result=k)

    def _result_sent(self, number: int) -> None:
        if self.ledger.result_sent(number):
            self._budget.ended(self, number)
            self.out.add("ended", number)

    def return_waiting(self) -> None:
        """Return the peer's tasks that no worker has begun to the peer, because this node leaves."""
        for number, accepted in self.ledger.returnable():
            what, task, _ = core.cancel(self._client, accepted.results[0], spares_begun=True)
            if what == "ending":
                self._return(number, task)

    def return_task(self, task: int, first: int) -> bool:
        """Return a task that this process has taken, by its first result; False: it is not the peer's."""
        for number, accepted in self.ledger.returnable():
            if accepted.results[0].objref == first:
                self._return(number, task)
                return True
        return False

    def _return(self, number: int, task: int) -> None:
        self.ledger.give_back(number)
        self._budget.ended(self, number)
        self.out.add("fallen", _Fallen(task=number, attempts=core.info(self._client, task)["attempts"]))
        self.end(task, TaskCancelledError("another node runs it"))

    @property
    def is_at_rest(self) -> bool:
        """Return whether neither node works for the other, and all messages to the peer are sent."""
        return self.ledger.is_empty and self.out.is_empty and not self.hosted_actors.has_processes

    def let_go(self) -> bool:
        """Have what this node needs of the peer, which leaves, moved elsewhere; return whether nothing is left."""
        is_free = self.remote_actors.move()
        is_free &= self.traffic.remote.move(self)
        needed = self.traffic.remote.needed()
        waits = any(self.traffic.remote.is_used(one.ref, needed) for _, one in self.references.unfinished())
        return is_free and not waits and not self.ledger.has_sent and self.streams.is_empty

    def _on_cancel(self, message: Any) -> None:
        accepted = self.ledger.find_accepted(message.task)
        ref = self.references.exported_ref(message.objref) if accepted is None else accepted.results[0]
        if ref is not None:  # its value, the error, is sent like any other
            cancel_in(self._store, ref, message.force and not calls.is_call(self._client, ref), not message.alone)

    # ---- objects ----

    def _send_object(self, ref: ObjectRef) -> None:
        if generators.is_stream(self._client, ref):
            self.streams.feed(ref)
            return
        # Its value goes in the frame that first names it. If it comes later, the peer claims it from the next process.
        is_later = not handles.is_ready(self._client, ref) or spill.is_spilled(self._client, ref)
        if actors.is_actor(self._client, ref):
            self.send_when_ready(ref)
        elif is_later:
            self.traffic.hold(ref)
            self.send_when_ready(ref)
        else:
            self.out.follow(partial(self._send_export, ref))

    def _hold_again(self, ref: ObjectRef) -> None:
        if not actors.is_actor(self._client, ref) and not generators.is_stream(self._client, ref):
            self.traffic.hold(ref)

    def send_when_ready(self, ref: ObjectRef) -> None:
        """Send the value of an object that the peer holds once it exists."""
        self.waiter.add(ref, self._send_export)

    def _send_export(self, ref: ObjectRef) -> None:
        if self.closed or self.references.exported_ref(ref.objref) is None:
            return  # the peer may have released it before its value existed: nothing would ever end the offer
        if actors.is_actor(self._client, ref):
            self.remote_actors.send_plan(ref)
        else:
            self.traffic.send(ref, lambda: None, objref=ref.objref)

    # ---- the stream ----

    def first_frame(self, report: Any) -> Any:
        """Return the first frame: the report of this node, and whether it may claim values."""
        answers = self.questions.answer is not None
        return _Frame(hello=report, claims=self.traffic.may_claim, answers=answers)

    def on_frame(self, frame: Any) -> None:
        """Handle a frame of the peer.

        Raises:
            PeerError: the frame is invalid.
        """
        if frame.HasField("hello"):
            why = refused_report(frame.hello)
            if why is not None or self.node not in ("", frame.hello.node):
                raise PeerError(f"its hello names node {frame.hello.node[:40]!r}: {why or 'the first named another'}")
            self.node, self.name, self.workers = frame.hello.node, frame.hello.name, frame.hello.workers
            self.traffic.connect(frame.hello.native, frame.claims)
            self.questions.peer_answers = frame.answers
        self.queued, self.room, self.is_short = frame.queued, frame.room, frame.short
        self._peer_leaves = self._peer_leaves or frame.leaving
        steps: tuple[tuple[Any, Callable[[Any], None]], ...] = (
            (frame.function, self.functions.on_function),
            (frame.actor, self.hosted_actors.on_actor),
            (frame.task, self._on_task),
            (frame.kill, self.hosted_actors.on_kill),
            (frame.call, self.hosted_actors.on_call),
            (frame.ask, self.remote_actors.on_ask),
            (frame.answer, self.remote_actors.on_answer),
            (frame.claim, self.traffic.claims.on_claim),
            (frame.named, self.traffic.claims.on_named),  # before the values that follow
            (frame.value, self.traffic.on_value),
            (frame.unknown, self.traffic.claims.on_unknown),
            (frame.where, self.traffic.on_where),
            (getattr(frame, "from"), self.traffic.on_from),
            (frame.copy, self.traffic.on_copy),
            (frame.plan, self.remote_actors.on_plan),  # after the messages that may name its actor for the first time
            (frame.ended, self._on_ended),
            (frame.fallen, self._on_fallen),
            (frame.gone, self.remote_actors.on_gone),
            (frame.unhost, self.hosted_actors.on_unhost),
            (frame.over, self.streams.on_over),
            (frame.reads, self._on_reads),
            (frame.cancel, self._on_cancel),
            (frame.withdrawn, self.traffic.on_withdrawn),
            (frame.taken, partial(self.traffic.on_answer, again=False)),
            (frame.again, partial(self.traffic.on_answer, again=True)),
            (frame.release, self._on_release),
            (frame.forget, self.functions.on_forget),  # after the messages that name them
            (frame.output, self.on_output),
            (frame.question, self.questions.on_question),
            (frame.page, self.questions.on_page),
            (frame.standing, self.standing.on_standing),
        )
        for messages, handle in steps:
            for message in messages:
                try:
                    handle(message)
                except ObjectStoreFullError as exc:
                    self._reject(message, exc)
        self.leaves.hear(frame.leaves, frame.needless)  # about all that has come before

    def _reject(self, message: Any, error: ObjectStoreFullError) -> None:
        """Answer a message that the store has no room for.

        Raises:
            ObjectStoreFullError: the message is neither a task nor a call.
        """
        if not isinstance(message, (_Task, _Call)):
            raise error
        data = serialize(error).to_bytes()
        for k in range(message.results):
            first = _Value(task=message.task, result=k, kind=PICKLE, error=True, size=len(data))
            self.out.add_value(first, memoryview(data), lambda: None)
        self.out.add("ended", message.task)

    def _on_reads(self, message: Any) -> None:
        (self.flows if message.task else self.streams).on_reads(message)

    def _on_release(self, message: Any) -> None:
        self.references.released(message.objref, message.named)
        if self.references.exported_ref(message.objref) is None:
            self.streams.stop(message.objref)
            self.traffic.released(message.objref)

    def needs(self) -> Container[int]:
        """Return the numbers of the objects of this node that the peer holds, waits for, or names in values to come."""
        return AnyOf(self.references.exported, self.ledger.awaited(), self.traffic.arrivals.named())

    def tidy(self, needed: Container[int], most: int = LOOKS) -> int:
        """Release unused functions, and unused objects of the peer; not those with a stand-in in `needed`.

        Returns:
            How many objects it has released, of the `most` that it has looked at.
        """
        count = 0
        self.functions.tidy()
        needed = AnyOf(needed, self.traffic.arrivals.named(), self.ledger.awaited())
        for objref, standin in self.references.given_up(needed, self.remote_actors.is_used, most):
            self.remote_actors.given_up(standin.ref.objref)
            self.traffic.remote.forget(standin.ref.objref)
            self.streams.given_up(objref)
            if standin.task is not None:
                self.traffic.arrivals.drop(standin.task)
                self.end(standin.task, TaskCancelledError("no reference to this object is left"))
            self.out.add("release", _Release(objref=objref, named=standin.named))
            count += 1
        return count

    def close(self, why: str, is_lost: bool = True, is_leaving: bool = False) -> None:
        """End the stream: forwarded tasks run again, tasks of the peer end, values that only the peer has are lost.

        Args:
            why: the reason.
            is_lost: whether the peer may be lost; False: this node ends the stream.
            is_leaving: this node leaves the cluster, and its last frame says so.
        """
        if self.closed:
            return
        self.closed = True
        self.out.close(is_leaving)
        self.traffic.close(self._peer_leaves)
        what = "was lost" if is_lost else "is disconnected"
        lost = f"node {self.name or '(unnamed)'} {what}: {why}"
        self.questions.close(lost)
        self.remote_actors.close(self._take_back, lost)
        self.hosted_actors.close()
        self.flows.close()
        self.streams.close(lost)
        for _, sent in self.ledger.open():
            if self._has_results(sent.task):
                core.finish(self._client, sent.task)  # only the peer's word that it has ended is missing
            elif core.cancelled(self._client, sent.task):
                self.end(sent.task, TaskCancelledError("the task was cancelled"))
            elif core.retry(self._client, sent.task):
                self.traffic.count_run(sent)
            else:
                attempts = core.info(self._client, sent.task)["attempts"]
                self.end(sent.task, WorkerCrashedError(f"a task was given up after attempt {attempts}: {lost}"))
        self.traffic.lose(lost, self._peer_leaves)
        for accepted in self.ledger.all_accepted().values():
            cancel_in(self._store, accepted.results[0])
        self.ledger.clear()
        self.references.clear()
        self.functions.clear()

    def _has_results(self, task: int) -> bool:
        """Return whether a forwarded task has results, and all of them are sealed: the peer may keep their values."""
        returns = core.info(self._client, task)["returns"]
        return returns > 0 and not any(remote.result_objref(self._client, task, k) for k in range(returns))

    def _take_back(self, number: int) -> int | None:
        """Remove a forwarded task by its number; return its index if it has not ended yet."""
        sent = self.ledger.take_open(number)
        return None if sent is None else sent.task
