"""Messages that other members have sent to this one, by sender and in order of arrival.

Upstream matches messages by order alone: a receive gets the sender's next message, even a late one that belongs to an
earlier receive which has timed out. Messages of fastrt's members carry a tag that names their operation, so a late
message is recognised and dropped. A message without a tag comes from another implementation; the next receive gets it.
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
    """Names the operation and step that a message belongs to.

    Attributes:
        group: the group's name; "" for a message that the application sent directly.
        operation: number of the operation in its group, from 1.
        step: number of the message within the operation.
        what: the operation in words; must be the same on all members of the group.
    """

    group: str = ""
    operation: int = 0
    step: int = 0
    what: str = ""


MESSAGE = Tag()


class Mailbox:
    """Received bytes by the sender's role and rank. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._came: dict[Source, deque[tuple[Tag | None, bytes]]] = {}
        self._gone: frozenset[Source] = frozenset()
        self._ids: dict[Source, str] = {}
        self._ends: Counter[Source] = Counter()

    def put(self, source: Source, tag: Tag | None, data: bytes) -> None:
        """Add received bytes; `tag` is None if the sender is no fastrt member."""
        with self._changed:
            self._came.setdefault(source, deque()).append((tag, data))
            self._changed.notify_all()

    def set_members(self, ids: dict[Source, str], gone: frozenset[Source]) -> None:
        """Set the members and the lost ones among them; receives that wait for a lost member return."""
        with self._changed:
            ended = {source for source in gone if source not in self._gone}
            ended |= {source for source, one in self._ids.items() if source in ids and ids[source] != one}
            self._ids, self._gone = ids, gone
            self._ends.update(ended)
            self._changed.notify_all()

    def ends(self, sources: Collection[Source]) -> dict[Source, int]:
        """Number of times that each of these members was lost or replaced by another one."""
        with self._changed:
            return {source: self._ends[source] for source in sources}

    def take(self, source: Source, timeout_s: float) -> bytes | None:
        """Take the sender's next message that belongs to no group; None after the timeout."""
        return self._wait(lambda: self._next(source, lambda tag: not tag.group), timeout_s, {})

    def take_step(self, source: Source, wanted: Tag, timeout_s: float, members: Mapping[Source, int]) -> bytes | None:
        """Take the message of one step of an operation.

        Args:
            source: the sender.
            wanted: tag of the step.
            timeout_s: how long to wait.
            members: of the group, as `ends` returned them when the group was made. When one of them is lost or
                replaced, no more messages are expected.
        Returns:
            Its bytes; None after the timeout, or when a member of the group is lost.
        Raises:
            CollectiveTimeout: the sender has given up this operation and is at a later one.
            CollectiveMismatch: the sender runs another operation under this number.
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
                    f"operation {wanted.operation} of group {wanted.group!r}: {_name(source)} runs {first.what}, but "
                    f"this member runs {wanted.what}"
                )
            return self._next(source, lambda tag: tag == wanted)

        return self._wait(look, timeout_s, members)

    def forget(self, group: str) -> None:
        """Drop the messages of a group that were not taken."""
        with self._changed:
            for source, came in self._came.items():
                self._came[source] = deque(one for one in came if one[0] is None or one[0].group != group)

    def _next(self, source: Source, fits: Callable[[Tag], bool]) -> bytes | None:
        """Take out the first message that fits or has no tag."""
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
        """The first of these members that is lost, or was lost or replaced since `ends` was called; None without."""
        return next((one for one, ends in members.items() if one in self._gone or self._ends[one] != ends), None)


def _name(source: Source) -> str:
    return f"{source[0].name.lower()} {source[1]}"
