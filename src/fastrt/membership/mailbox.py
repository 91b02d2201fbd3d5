"""What members have sent to this one, by sender, in the order in which it came.

Upstream matches by that order alone: the next message of a sender is what the next receive gets, also when it is a
late one that an earlier receive has given up. fastrt's members say with each message what it belongs to, so a late one
is recognised and thrown away. What says nothing comes from another implementation, and belongs to whoever asks next.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from fastrt.errors import CollectiveMismatch, CollectiveTimeout
from fastrt.membership.events import Role

Source = tuple[Role, int]


class Tag(NamedTuple):
    """What a message belongs to.

    Attributes:
        group: the group's name; "" for a message of the user's own.
        operation: the operation's number in its group, from 1.
        step: which message of the operation.
        what: the operation in words; all members of the group must mean the same.
    """

    group: str = ""
    operation: int = 0
    step: int = 0
    what: str = ""


MESSAGE = Tag()


class Mailbox:
    """Bytes by sender's role and rank. Any thread may put and take."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._came: dict[Source, deque[tuple[Tag | None, bytes]]] = {}
        self._gone: frozenset[Source] = frozenset()
        self._ids: dict[Source, str] = {}
        self._ends: Counter[Source] = Counter()

    def put(self, source: Source, tag: Tag | None, data: bytes) -> None:
        """Bytes have come; without a tag they are of no member of fastrt's."""
        with self._changed:
            self._came.setdefault(source, deque()).append((tag, data))
            self._changed.notify_all()

    def set_members(self, ids: dict[Source, str], gone: frozenset[Source]) -> None:
        """Who is there, and who of them is lost: nobody waits for those."""
        with self._changed:
            ended = {source for source in gone if source not in self._gone}
            ended |= {source for source, one in self._ids.items() if source in ids and ids[source] != one}
            self._ids, self._gone = ids, gone
            self._ends.update(ended)
            self._changed.notify_all()

    def ends(self, sources: Collection[Source]) -> dict[Source, int]:
        """How often each of some members was lost, or had its place taken by another one."""
        with self._changed:
            return {source: self._ends[source] for source in sources}

    def take(self, source: Source, timeout_s: float) -> bytes | None:
        """The next message of the sender's user; None when none has come in time."""
        return self._wait(lambda: self._next(source, lambda tag: not tag.group), timeout_s, {})

    def take_step(self, source: Source, wanted: Tag, timeout_s: float, members: Mapping[Source, int]) -> bytes | None:
        """The message of one step of an operation.

        Args:
            source: who sends it.
            wanted: what it belongs to.
            timeout_s: how long to wait.
            members: of the group, as `ends` gave them when it was made; when one of them is lost, or another one is in
                its place, nothing more will come.
        Returns:
            Its bytes; None when they have not come in time, or a member is lost.
        Raises:
            CollectiveTimeout: the sender has given the operation up, and is at a later one.
            CollectiveMismatch: it does something else in the operation.
        """

        def belongs(tag: Tag) -> bool:
            return tag.group == wanted.group and tag.operation >= wanted.operation

        def look() -> bytes | None:
            came = self._came.get(source, deque())
            late = [one for one in came if one[0] is not None and one[0].group == wanted.group and not belongs(one[0])]
            for one in late:
                came.remove(one)
            first = next((tag for tag, _ in came if tag is not None and belongs(tag)), None)
            if first is not None and first.operation > wanted.operation:
                raise CollectiveTimeout(f"operation {wanted.operation} was given up by {_name(source)}")
            if first is not None and first.what != wanted.what:
                raise CollectiveMismatch(
                    f"operation {wanted.operation} of group {wanted.group!r}: {_name(source)} does {first.what}, and "
                    f"here it is {wanted.what}"
                )
            return self._next(source, lambda tag: tag == wanted)

        return self._wait(look, timeout_s, members)

    def forget(self, group: str) -> None:
        """Throw away what is left of a group."""
        with self._changed:
            for source, came in self._came.items():
                self._came[source] = deque(one for one in came if one[0] is None or one[0].group != group)

    def _next(self, source: Source, fits: Callable[[Tag], bool]) -> bytes | None:
        """Take out the first message that fits, or that nobody has tagged."""
        came = self._came.get(source, deque())
        for at, (tag, data) in enumerate(came):
            if tag is None or fits(tag):
                del came[at]
                return data
        return None

    def _wait(self, look: Callable[[], bytes | None], timeout_s: float, members: Mapping[Source, int]) -> bytes | None:
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                found = look()
                if found is not None or self.lost(members) is not None:
                    return found
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._changed.wait(left)

    def lost(self, members: Mapping[Source, int]) -> Source | None:
        """One of some members that is lost, or was since then (see `ends`), if any is."""
        return next((one for one, ends in members.items() if one in self._gone or self._ends[one] != ends), None)


def _name(source: Source) -> str:
    return f"{source[0].name.lower()} {source[1]}"
