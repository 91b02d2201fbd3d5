"""Receives the values that the peer sends.

Small values arrive in pieces between the tasks, and are written as they arrive. A large value is offered first and
fetched once it is admitted. It is admitted when the store has room for it, after others were spilled if necessary, and
when it fits into the budget for arguments of tasks that have not run. Until then its bytes stay on the peer, so a full
store makes the sender wait. An offer is answered by fetching the value over the peer's native stream, or by requesting
its pieces.

Several objects can share one value, which a third node offers under one number. One of them is in transit at a time,
and the others wait behind it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastrt._core.memory import arena
from fastrt._core.objects import handles, remote, spill
from fastrt._core.objects.handles import Writer
from fastrt.cluster.budget import STALL_S, ArgumentBudget
from fastrt.cluster.references import PeerError
from fastrt.errors import ObjectStoreFullError
from fastrt.folders import UnsafeFolderError
from fastrt.store import room
from fastrt.store.client import NO_ROOM
from fastrt.store.messages import Spill
from fastrt.store.ref import ObjectRef
from fastrt.store.serialize import PICKLE, serialize

if TYPE_CHECKING:
    from fastrt.cluster.peer_stream import Exchange
    from fastrt.cluster.remote_values import Source

_SPARE_BYTES = 1 << 20  # required beyond the values of a frame before it is read
_ATTEMPTS_MAX = 4  # to fetch a value from nodes that the peer names; then the peer sends it in pieces
_REFUSALS_MAX = 64  # failed allocations in one pass over the offers


@dataclass
class Arriving:
    """A value in transit to this node.

    Attributes:
        make: allocates memory for it: called with size, kind, number of references, whether it is an error, and
            whether to wait for room; returns None when nothing waits for the value any more.
        kind, error, contains, size: describe it.
        task: the task in this node's table that it belongs to.
        result: which result of the task it is; below 0: it is an item.
        objref: the peer's object whose value it is; 0: it is a result or an item.
        finish: called with it once it is complete.
        holder: the address of the native stream that offers it; empty: the peer's.
        is_kept: its offer needs no answer, because it lasts as long as this node holds the object.
        writer: takes its bytes; None until it is admitted.
        at: how many bytes have arrived, if they arrive in pieces.
        attempts: how often the peer was asked which node shall send it.
        make_file: makes a file for it, for a store without room: called with size, kind and number of references; as
            `make`.
    """

    make: Callable[[int, int, int, bool, bool], Writer | None]
    kind: int
    error: bool
    contains: list[ObjectRef]
    size: int
    task: int
    result: int
    objref: int
    finish: Callable[[ObjectRef], None]
    holder: str = ""
    is_kept: bool = False
    writer: Any = None
    at: int = 0
    attempts: int = 0
    make_file: Callable[[int, int, int], Any] | None = None

    def allocate_in_file(self) -> bool:
        """Make a file for it; return False when nothing waits for it any more.

        Raises:
            OSError, UnsafeFolderError, MemoryError: no file can be made.
        """
        assert self.make_file is not None
        self.writer = self.make_file(self.size, self.kind, len(self.contains))
        return self.writer is not None

    def allocate(self, patient: bool) -> bool:
        """Allocate memory for it; return False when nothing waits for it any more.

        Raises:
            ObjectStoreFullError: there is no room now; if `patient`, no room could be made.
        """
        self.writer = self.make(self.size, self.kind, len(self.contains), self.error, patient)
        return self.writer is not None

    def become_error(self, size: int, kind: int) -> bool:
        """Prepare for an error in place of the value; return False when no error can take its place."""
        self.writer = None
        self.size, self.kind, self.error, self.contains = size, kind, True, []
        return self.allocate(True)

    def seal(self) -> None:
        """Seal the value after its last byte, which makes it visible."""
        writer, self.writer = self.writer, None
        self.finish(writer.seal(self.contains))

    def give_up(self, error: ObjectStoreFullError) -> None:
        """Store an error in its place, because there is no room for it."""
        self.writer = None
        for parts in (serialize(error), NO_ROOM):
            try:
                writer = self.make(parts.nbytes, PICKLE, 0, True, False)
            except ObjectStoreFullError:
                continue
            if writer is not None:
                parts.write(writer)
                self.finish(writer.seal(()))
            return


class Fetching(Arriving):
    """The bytes of a remote value in transit: if they do not come, the value stays remote."""

    def allocate(self, patient: bool) -> bool:
        """Allocate memory for it; return False when the bytes are here already."""
        self.writer = self.make(self.size, self.kind, 0, False, patient)
        return self.writer is not None

    def become_error(self, size: int, kind: int) -> bool:
        """Free the memory: the value must be made again."""
        self.writer.abort()
        return False

    def give_up(self, error: ObjectStoreFullError) -> None:
        """Leave the value remote: the process that wants it waits for room too, and gets the error."""
        self.writer = None


class _InTransit(dict[int, Arriving]):
    """Some of the values in transit, by number.

    Args:
        tasks: counts the values of each task; without the tasks that have none.
    """

    def __init__(self, tasks: Counter[int]) -> None:
        super().__init__()
        self._tasks = tasks

    def __setitem__(self, number: int, arriving: Arriving) -> None:
        before = self.get(number)
        super().__setitem__(number, arriving)
        self._tasks[arriving.task] += 1
        if before is not None:
            self._gone(before)

    def __delitem__(self, number: int) -> None:
        self.pop(number)

    def pop(self, number: int, *default: Any) -> Any:
        """Remove a value, and return it."""
        found = super().pop(number, *default)
        if isinstance(found, Arriving):
            self._gone(found)
        return found

    def clear(self) -> None:
        """Remove all values."""
        for number in list(self):
            del self[number]

    def _gone(self, arriving: Arriving) -> None:
        self._tasks[arriving.task] -= 1
        if not self._tasks[arriving.task]:
            del self._tasks[arriving.task]


class Arrivals:
    """The values in transit to this node over one stream.

    Args:
        exchange: the stream.
        budget: limits the arguments that are fetched ahead.
    """

    def __init__(self, exchange: Exchange, budget: ArgumentBudget) -> None:
        self._exchange = exchange
        self._budget = budget
        self._client = exchange.client
        self._tasks = Counter[int]()  # how many values of each task are in the next two tables
        self._arriving = _InTransit(self._tasks)  # by transfer; below 0: by the peer's offer
        self._offered = _InTransit(self._tasks)  # values that are not admitted yet, in order
        self._behind: dict[int, list[Arriving]] = {}  # by number: values that wait until the one before has ended
        self._oldest = 0  # the first offer that the store has no room for,
        self._wait: room.RoomWait | None = None  # and its wait
        self._asked: int | None = None  # how many spill rounds had ended when this process requested one
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_short(self) -> bool:
        """Return whether a value waits for room."""
        return self._wait is not None

    def begin(self, message: Any, arriving: Arriving) -> None:
        """Begin to receive a value: the message is all of it, its first piece, or its offer.

        Raises:
            PeerError: the message is invalid.
        """
        if message.native:
            if self._exchange.traffic.values is None:
                who = self._exchange.name
                raise PeerError(f"node {who} offers a value over a native stream, and this node has none")
            if self.is_fetching(message.native):
                self._behind.setdefault(message.native, []).append(arriving)
                return
            self._offered[message.native] = arriving
            self.admit()
            return
        try:
            if not arriving.allocate(True):
                return
        except ObjectStoreFullError as exc:
            arriving.give_up(exc)
            return
        self._take_piece(arriving, message)
        if arriving.at < arriving.size:
            self._arriving[message.transfer] = arriving

    def resume(self, message: Any) -> None:
        """Take the first piece of a value that was offered, admitted, and then requested in pieces.

        Raises:
            PeerError: the piece is invalid.
        """
        arriving = self._arriving.pop(-message.native, None)
        if arriving is not None:
            self._continue(message.native)
            failed = message.error and not arriving.error  # the peer could not read the value
            if failed and not arriving.become_error(message.size, message.kind):
                self._exchange.traffic.on_withdrawn(message.native)
                return
            self._take_piece(arriving, message)
            if arriving.at < arriving.size:
                self._arriving[message.transfer] = arriving

    def on_piece(self, message: Any) -> None:
        """Take a further piece of a value.

        Raises:
            PeerError: the piece does not continue the value.
        """
        arriving = self._arriving.get(message.transfer)
        if arriving is None:
            return  # the value is not wanted any more
        self._take_piece(arriving, message)
        if arriving.at == arriving.size:
            del self._arriving[message.transfer]

    def _take_piece(self, arriving: Arriving, message: Any) -> None:
        if message.at != arriving.at or arriving.at + len(message.data) > arriving.size:
            raise PeerError(
                f"node {self._exchange.name} sent {len(message.data)} bytes at offset {message.at} of a value of "
                f"{arriving.size} bytes; {arriving.at} bytes had arrived"
            )
        arriving.writer.copy(arriving.at, message.data)
        arriving.at += len(message.data)
        if arriving.at == arriving.size:
            arriving.seal()

    def fetch(self, source: Source, is_urgent: bool) -> None:
        """Fetch the bytes of a remote value; `is_urgent`: also beyond the budget for arguments."""
        waiting = self._offered.get(source.number)
        if waiting is None and -source.number in self._arriving:
            return
        objref = 0 if is_urgent else source.objref
        if waiting is None:
            self._offered[source.number] = self._fetching(source, objref)
        elif is_urgent:
            waiting.objref = 0
        self.admit()

    def fetch_ahead(self, source: Source) -> bool:
        """Fetch the bytes of a remote value that no process waits for yet; return False if there is no memory for them.

        No other value makes room for it, as for one that waits among the offers.
        """
        number = source.number
        if self._exchange.closed or self.is_fetching(number):
            return True
        fetching = self._fetching(source, 0)
        try:
            is_wanted = fetching.allocate(False)
        except ObjectStoreFullError:
            return False
        self._offered[number] = fetching
        self._admitted(number, fetching, is_wanted)
        return True

    def _fetching(self, source: Source, objref: int) -> Fetching:
        about = handles.describe(self._client, source.ref)

        def make(size: int, kind: int, nrefs: int, error: bool, patient: bool) -> Any:
            return remote.fetch(self._client, source.ref)

        fetching = Fetching(make, about["kind"], False, [], about["bytes"], -1, -1, objref, _ignore)
        fetching.holder, fetching.is_kept = source.holder, True
        fetching.make_file = lambda size, kind, nrefs: self._exchange.store.files.fetch(source.ref)
        return fetching

    def is_fetching(self, number: int) -> bool:
        """Return whether a value comes under this number."""
        return number in self._offered or -number in self._arriving

    def cancel(self, number: int) -> None:
        """Stop fetching a remote value. An argument that comes under the same number goes on: its stand-in waits."""
        if isinstance(self._offered.get(number), Fetching):
            del self._offered[number]
        arriving = self._arriving.get(-number)
        if isinstance(arriving, Fetching):
            del self._arriving[-number]
            if self._exchange.traffic.values is not None:
                self._exchange.traffic.values.cancel(number)
            arriving.writer.abort()
            self._end_turn(number, arriving)
        self._continue(number)

    def _continue(self, number: int) -> None:
        """Go on with the next value of a number, if the one before has ended."""
        if number in self._behind and not self.is_fetching(number):
            behind = self._behind[number]
            self._offered[number] = behind.pop(0)
            if not behind:
                del self._behind[number]
            self.admit_soon()

    async def room_for(self, frame: Any) -> None:
        """Wait until the store has room for the values in a frame; the sender waits meanwhile.

        If no room can be made, it returns all the same.
        """
        wanted = sum(value.size for value in frame.value if not value.at and not value.native)
        if not wanted:
            return
        wanted += _SPARE_BYTES
        store = self._exchange.store
        waiting: room.RoomWait | None = None
        asked: int | None = None
        while not self._exchange.closed and store.tell is not None:
            used, _, most = arena.room(self._client)
            if most - used >= wanted or wanted > most:
                return
            waiting = waiting or room.RoomWait(store, wanted, serves=True)
            if asked is None or spill.rounds(self._client) != asked:
                if asked is None or spill.last_round(self._client)[0]:
                    waiting.stir()
                elif store.files.falls_back or waiting.look():
                    return
                asked = spill.rounds(self._client)
                store.tell(Spill(wanted))
            await asyncio.sleep(waiting.pause_s)

    # ---- offers ----

    def admit_soon(self) -> None:
        """Schedule `admit`: part of the budget for arguments was released."""
        self._exchange.waiter.loop.call_soon(self.admit)

    def admit(self) -> None:
        """Fetch the offered values that can be admitted."""
        if self._exchange.closed:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        budget, stream = self._budget, self._exchange
        arguments = {one.objref for one in self._offered.values() if one.objref}
        first = budget.first(stream, arguments) if arguments else ()
        oldest = refused = 0
        is_late = False
        for number, one in list(self._offered.items()):
            if one.objref and one.objref not in first and not budget.admits(stream, one.objref, one.size):
                is_late = True
                continue
            try:
                is_wanted = one.allocate(False)
            except ObjectStoreFullError as exc:
                if not exc.may_pass or one.size > arena.room(self._client)[2]:
                    if not self._use_file(number, one):
                        self._give_up(number, room.explain(exc, room.story(self._exchange.store, one.size)))
                    continue
                oldest = oldest or number
                refused += 1
                if refused == _REFUSALS_MAX:
                    break
                continue
            self._admitted(number, one, is_wanted)
        self._wait_for_room(oldest)
        if is_late and self._timer is None:
            self._timer = self._exchange.waiter.loop.call_later(STALL_S, self.admit)

    def _admitted(self, number: int, one: Arriving, is_wanted: bool) -> None:
        del self._offered[number]
        if is_wanted:
            self._budget.fetch(self._exchange, one.objref, one.size)
            self._fetch(number, one)
        else:
            self._taken(number, one)
            self._continue(number)

    def _use_file(self, number: int, one: Arriving) -> bool:
        """Admit a value into a file, because the store has no room; return False if no file can be made."""
        if one.error or one.make_file is None or not self._exchange.store.files.falls_back:
            return False
        try:
            is_wanted = one.allocate_in_file()
        except (OSError, UnsafeFolderError, ValueError, MemoryError):
            return False
        self._admitted(number, one, is_wanted)
        return True

    def _fetch(self, number: int, arriving: Arriving) -> None:
        self._arriving[-number] = arriving
        values = self._exchange.traffic.values
        assert values is not None
        if (
            arriving.is_kept
            and arriving.size >= self._exchange.traffic.spread_bytes
            and arriving.attempts < _ATTEMPTS_MAX
        ):
            arriving.attempts += 1
            self._exchange.out.add("where", number)
        elif values.is_reachable or arriving.holder:
            values.take(number, arriving.writer, arriving.kind, [(arriving.holder, number)])
        else:
            self._exchange.out.add("again", number)

    def fetch_from(self, message: Any) -> None:
        """Fetch a value from the nodes that the peer names; the turn that comes too late is given back."""
        arriving, values = self._arriving.get(-message.number), self._exchange.traffic.values
        if arriving is None:
            self._exchange.traffic.has_no_copy(message.number)
        elif values is not None and not values.is_on_its_way(message.number):
            holders = [(holder.address, holder.offered) for holder in message.holder]
            values.take(message.number, arriving.writer, arriving.kind, holders)

    def _wait_for_room(self, number: int) -> None:
        """Wait for room for the oldest offer (0: there is none), and schedule the next attempt."""
        if number == 0:
            self._oldest, self._wait, self._asked = 0, None, None
            return
        store, one = self._exchange.store, self._offered[number]
        if self._wait is None or number != self._oldest:
            if self._wait is None:
                self._exchange.out.stir()  # each frame reports whether this node is short of room
            self._oldest, self._wait, self._asked = number, room.RoomWait(store, one.size, serves=True), None
        if self._asked is not None and spill.rounds(self._client) != self._asked:
            self._asked = None
            if spill.last_round(self._client)[0]:
                self._wait.stir()
            elif not self._use_file(number, one):
                why = self._wait.look()
                if why:
                    error = ObjectStoreFullError(f"no room for a value of node {self._exchange.name}")
                    self._give_up(number, room.explain(error, room.story(store, one.size), why, True))
        if self._asked is None and store.tell is not None:
            self._asked = spill.rounds(self._client)
            store.tell(Spill(one.size))
        self._timer = self._exchange.waiter.loop.call_later(self._wait.pause_s, self.admit)

    def _give_up(self, number: int, error: ObjectStoreFullError) -> None:
        given_up = self._offered.pop(number)
        given_up.give_up(error)
        self._taken(number, given_up)
        self._continue(number)

    def landed(self, number: int, error: BaseException | None) -> None:
        """Seal a value that the native stream has delivered; on an error, request its pieces."""
        arriving = self._arriving.get(-number)
        if arriving is None:
            return
        if error is not None:
            if 0 < arriving.attempts < _ATTEMPTS_MAX:
                self._fetch(number, arriving)
            else:
                self._exchange.out.add("again", number)
            return
        del self._arriving[-number]
        arriving.seal()
        self._taken(number, arriving)
        if arriving.attempts:
            self._exchange.traffic.offer_copy(number)
        self._exchange.traffic.arrived(number)
        self._continue(number)

    def _taken(self, number: int, arriving: Arriving) -> None:
        """Tell the peer that a value has arrived, or is not needed."""
        if not arriving.is_kept:
            self._exchange.out.add("taken", number)

    def _end_turn(self, number: int, arriving: Arriving) -> None:
        """Tell the peer that this node stops fetching a value whose sender the peer has chosen: others wait for it."""
        if arriving.attempts:
            self._exchange.traffic.has_no_copy(number)

    def drop(self, task: int, result: int | None = None) -> None:
        """Stop writing one result of a task, or all of them: the memory may be reused."""

        def is_dropped(one: Arriving) -> bool:
            return one.task == task and result in (None, one.result)

        for number, behind in list(self._behind.items()):
            behind[:] = [one for one in behind if not is_dropped(one)]  # such offers need no answer
            if not behind:
                del self._behind[number]
        if task not in self._tasks:
            return
        for number, one in list(self._offered.items()):
            if is_dropped(one):
                del self._offered[number]
                self._taken(number, one)
                self._continue(number)
        for transfer, one in list(self._arriving.items()):
            if is_dropped(one):
                del self._arriving[transfer]
                if transfer < 0 and self._exchange.traffic.values is not None:
                    self._exchange.traffic.values.cancel(-transfer)
                    self._taken(-transfer, one)
                    self._end_turn(-transfer, one)
                    self._continue(-transfer)

    def named(self) -> set[int]:
        """Return the numbers of the objects that these values contain."""
        behind = (one for some in self._behind.values() for one in some)
        coming = (*self._arriving.values(), *self._offered.values(), *behind)
        return {ref.objref for one in coming for ref in one.contains}

    def clear(self) -> None:
        """Drop all values in transit, because the stream has ended."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for one in self._arriving.values():
            if isinstance(one, Fetching):
                one.writer.abort()  # at once: what becomes of the value depends on whether its bytes are here
        self._arriving.clear()
        self._offered.clear()
        self._behind.clear()
        self._wait = None


def _ignore(ref: object) -> None:
    """Do nothing: the bytes of a remote value are sealed by their memory."""
