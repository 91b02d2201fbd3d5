"""The invariants between two nodes: they hold whenever no message is on its way on the stream between them.

Both nodes then count the same names of the same objects, a task that one has forwarded is known to the other, and a
node that has its turn to fetch a value fetches it. A count that is wrong is found here at once; at the end, the close
of the stream would have hidden it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from fastrt._core.objects import handles, remote
from fastrt._core.repair import inspect
from fastrt._core.tasks import tasks as core
from fastrt.cluster import peer_stream, remote_values, value_traffic
from fastrt.cluster.claims import CLAIM_S

if TYPE_CHECKING:
    from .node import Node
    from .world import World

QUIET_S = 2 * CLAIM_S  # for what nothing uses to be released: nodes keep values for each other for almost so long
LOOK_S = 5.0  # between two looks at whether it is released
AFTER_S = 10.0  # after that


def stream_of(exchange: Any) -> tuple[Any, int]:
    """Return the simulated stream of an exchange and which side of it this is; None: it has none yet."""
    return exchange.writes_to.stream if exchange.writes_to is not None else None, exchange.writes_to_side


def is_quiet(stream: Any, ends: list[Any]) -> bool:
    """Return whether nothing is on its way on a stream, and both ends have handled everything."""
    if stream.is_broken or any(stream.on_way) or any(stream.held) or any(one.closed for one in ends):
        return False
    if any(process.is_blocked for process in stream.processes) or any(one.waits_for_room for one in ends):
        return False  # a frame is being handled
    arrived = any(end is None or end.arrived or end.error is not None for end in stream.ends)
    return not arrived and all(one.out.is_empty and one.node and one.idle.is_open for one in ends)


def pairs(exchanges: list[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield (an exchange, the peer's exchange) for each quiet stream, in both orders."""
    by_stream: dict[Any, dict[int, Any]] = {}
    for exchange in exchanges:
        stream, side = stream_of(exchange)
        if stream is not None:
            by_stream.setdefault(stream, {})[side] = exchange
    for stream, ends in by_stream.items():
        if len(ends) == 2 and is_quiet(stream, [ends[0], ends[1]]):
            yield ends[0], ends[1]
            yield ends[1], ends[0]


def check(exchanges: list[Any], violation: Callable[[str], None]) -> None:
    """Check all streams.

    Args:
        exchanges: the open exchanges of all nodes.
        violation: called with each invariant that does not hold.
    """
    for exchange in exchanges:
        ledger = exchange.ledger
        counts = (
            sum(one.remote is None for one in ledger._out.values()),
            sum(not one.is_call for one in ledger._in.values()),
        )
        if counts != (ledger.forwarded, ledger.accepted):
            violation(f"a ledger counts {ledger.forwarded}, {ledger.accepted} tasks and has {counts}")
    peers = {}
    for one, peer in pairs(exchanges):
        peers[one] = peer
        where = f"{peer.name} > {one.name}"
        exported = {objref: held.named for objref, held in one.references._exports._held.items()}
        imported = {objref: standin.named for objref, standin in peer.references._imports.items()}
        if exported != imported:
            differ = dict(sorted(set(exported.items()) ^ set(imported.items())))
            violation(f"{where}: the nodes count names differently: {exported} {imported}: {differ}")
        unknown = set(one.ledger._out) - set(peer.ledger._in)
        if unknown:
            violation(f"{where}: the tasks {sorted(unknown)} were forwarded, and do not run there")
        values = one.traffic.values
        coming = peer.traffic.arrivals
        lost = [number for number in values._open if number not in coming._offered and -number not in coming._arriving]
        if lost:
            violation(f"{where}: {len(lost)} offers are neither taken nor refused")
        left = set(values._kept) - set(exported)
        if left:
            violation(f"{where}: values of the objects {sorted(left)} are offered, which the node does not hold")
    for exchange in exchanges:
        values = exchange.traffic.remote
        awaited = [ref for accepted in exchange.ledger.all_accepted().values() for ref in accepted.results]
        for ref in awaited if exchange.traffic.may_claim else ():
            if not values.is_used(ref, values.needed()):
                violation(f"object {ref.objref:#x} counts as unused, and the node {exchange.name} waits for it")
    for one, peer in peers.items():
        tables, arriving = one.traffic._tables, peer.traffic.arrivals._arriving
        for objref, spread in tables.spreads._spreads.items():
            for fetch in [fetch for fetch in spread._sending if fetch.stream is one]:
                if fetch in spread._waiting:
                    violation(f"{peer.name}: the receiver {one.name} of object {objref:#x} has two turns")
                if -fetch.number not in arriving:
                    violation(f"{peer.name}: it is the turn of {one.name} to fetch object {objref:#x}, and it does not")


def settle(world: World, nodes: list[Node]) -> None:
    """Let the nodes release what nothing uses; most have done so long before the end of the time for it.

    Args:
        world: of the run.
        nodes: all of them.
    """
    until = world.now + QUIET_S
    gc.collect()
    while world.now < until and not world.violations and not all(node.is_bare for node in nodes):
        world.run(min(until, world.now + LOOK_S))
        gc.collect()
    world.run(world.now + AFTER_S)


def close_noted(violation: Callable[[str], None]) -> Callable[..., None]:
    """Return a replacement of `Exchange.close`: no forwarded task runs again all results of which are here.

    Args:
        violation: called with each one that does.
    """
    close = peer_stream.Exchange.close

    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        sent = [] if self.closed else [one.task for _, one in self.ledger.open() if one.remote is None]
        complete = {task: core.info(self.client, task)["id"] for task in sent if self._has_results(task)}
        close(self, *args, **kwargs)
        for row in inspect.tasks(self.client) if complete else ():
            if complete.get(row["task"]) == row["id"]:
                violation(f"a task runs again although all its results are here: {row}")

    return noted


def send_noted(violation: Callable[[str], None]) -> Callable[..., None]:
    """Return a replacement of `ValueTraffic.send` that checks that no node offers its peer a value only the peer has.

    Args:
        violation: called with each offer of one.
    """
    send = value_traffic.ValueTraffic.send

    def noted(self: Any, ref: Any, then: Callable[[], None], **where: int) -> None:
        is_theirs = "task" in where and "item" not in where and self._exchange.references.theirs(ref)
        is_missing = is_theirs and remote.is_missing(self._client, ref)
        before = len(self.values._open)
        send(self, ref, then, **where)
        if is_missing and len(self.values._open) > before:
            violation(f"object {ref.objref:#x} is offered to the node that has its only value")

    return noted


def has_value(client: Any, ref: Any) -> bool:
    """Return whether the bytes of an object's value are on this node."""
    is_here = handles.is_ready(client, ref) and not remote.is_missing(client, ref)
    return is_here and not handles.describe(client, ref)["error"]


def give_up_noted(violation: Callable[[str], None]) -> Callable[..., None]:
    """Return a replacement of `RemoteValues.give_up`: no value is made again that is not used, or is here.

    Args:
        violation: called with each value that is made again although nothing but its uplink uses it, or although an
            object with the same source has its bytes here.
    """
    give_up = remote_values.RemoteValues.give_up

    def noted(self: Any, values: list[Any], why: str) -> None:
        refs = {one.standin.task: one.ref for one in values if one.standin is not None}
        sharing = {one.ref.objref: one.same_as for one in values if one.same_as is not None}
        rebuild = self.rebuild

        def checked(made: Any, origin: Any, lost: str) -> None:
            ref = made.ref if isinstance(made, remote_values.Replacement) else refs[made._task]
            if not self.is_used(ref, self.needed()):
                violation(f"object {ref.objref:#x} is made again, and nothing uses it")
            same_as = sharing.get(ref.objref)
            if same_as is not None and has_value(self.client, same_as):
                violation(f"object {ref.objref:#x} is made again, and object {same_as.objref:#x} has its bytes here")
            rebuild(made, origin, lost)

        self.rebuild = checked
        try:
            give_up(self, values, why)
        finally:
            self.rebuild = rebuild

    return noted
