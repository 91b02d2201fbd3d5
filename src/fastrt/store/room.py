"""Waiting for room in the store: the retries, the warnings meanwhile, and the cases in which the wait fails.

A value that finds no room goes to a file (`Store.with_room`). It waits only if there can be no file, because the disk
is full too, or `spill_fallback` is off.

A value that does not fit now may fit later: another process drops a view, a value that is being written is sealed and
can be spilled, a task ends. So a process that needs room asks the daemon to spill, and tries again after a sleep.
A wait ends in an error in three cases:

- The waiting process itself uses all the memory in use, and it sleeps. No other process could free any.
- Every driver, worker and actor of the node sleeps in a get or wait, or waits for room too, and no memory was allocated
  or freed for the store's `patience_s`: a deadlock. One process fails, and the limits of the others begin again: they
  can use what it frees. The limits differ a little, so that these looks do not all come at once.
- No memory was allocated or freed for `LIMIT_S`.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from fastrt._core.memory import arena
from fastrt._core.objects import spill
from fastrt._core.repair import fsck
from fastrt.config import SHM_DIR, size_text
from fastrt.errors import ObjectStoreFullError
from fastrt.folders import UnsafeFolderError, free_bytes
from fastrt.store import garbage, warnings
from fastrt.store.messages import Spill

if TYPE_CHECKING:
    from fastrt.store.client import Store

_T = TypeVar("_T")
SPILL_PATIENCE_S = 60.0  # for one round: a disk that is slower than that counts as full
LIMIT_S = 600.0
_STAGGER_S = 0.25  # between the limits of two clients
_STAGGERED = 16
_SERVES = 6  # factor for the patience of a process that serves other nodes, where work continues
_ALONE_LOOKS = 3  # more than one: at the first, a round of spilling may have begun before the last change
_THREADS_S = 2.0  # time for another thread of this process to free memory that only this process uses
_WARN_S = 5.0  # until the first warning; twice as long until each further one
_PAUSE_S = 0.1  # the longest sleep between two attempts
_AWAKE_LOOKS = 3  # a client that sleeps is awake for a moment twenty times a second


def with_room(store: Store, wanted: int, make: Callable[[], _T], make_file: Callable[[], _T] | None) -> _T:
    """Call `make`, which has failed; if the store is full, wait for room or use a file. See `Store.with_room`.

    Raises:
        ObjectStoreFullError: the store stays full, and the disk too, or no file may be used.
    """
    seen = spill.rounds(store.client)
    try:
        return make()
    except ObjectStoreFullError as exc:
        if exc.explained:
            raise
        if exc.may_pass and garbage.collect():
            with contextlib.suppress(ObjectStoreFullError):
                return make()
        trouble = ""
        if not exc.may_pass and make_file is not None:
            made, trouble = _try_file(store, make_file)
            if not trouble:
                return made  # type: ignore[return-value]  # without trouble it was made
        if store.tell is None or not exc.may_pass or wanted > arena.room(store.client)[2]:
            raise explain(exc, story(store, wanted), trouble) from None
    return _wait(store, wanted, make, seen, make_file)


def _wait(store: Store, wanted: int, make: Callable[[], _T], seen: int, make_file: Callable[[], _T] | None) -> _T:
    waiting = RoomWait(store, wanted, store.serves)
    about, why, trouble = Story("", "", ""), "", ""
    while True:
        freed = _spilled(store, wanted, seen)
        seen = spill.rounds(store.client)
        try:
            return make()
        except ObjectStoreFullError as exc:
            if exc.explained:
                raise
            if not freed and make_file is not None:
                made, trouble = _try_file(store, make_file)
                if not trouble:
                    return made  # type: ignore[return-value]  # without trouble it was made
            if why and not freed:
                raise explain(exc, about, "; ".join(filter(None, (why, trouble))), waiting.may_pass) from None
        if store.check_wait is not None:
            store.check_wait()
        if freed:
            waiting.stir()
            why = ""
            continue
        why = waiting.look()
        about = story(store, wanted)  # from before the last attempt: room may come between it and the message
        if not why:
            waiting.nap()


def _spilled(store: Store, wanted: int, seen: int) -> bool:
    """Ask the daemon for room; return whether a round of spilling that ended after `seen` freed anything."""
    if not store.asks(Spill(wanted)) or not spill.wait_round(store.client, seen, SPILL_PATIENCE_S):
        return False
    return spill.last_round(store.client)[0] > 0


def _try_file(store: Store, make_file: Callable[[], _T]) -> tuple[_T | None, str]:
    """Call `make_file`; return its result, and why there is no file, or ""."""
    if not store.files.falls_back:
        return None, "fallback memory is off"
    try:
        return make_file(), ""
    except (OSError, UnsafeFolderError, ValueError, MemoryError) as exc:
        return None, f"no file could take it: {exc}"


class RoomWait:
    """One wait for room.

    Args:
        store: of the process that waits.
        wanted: bytes.
        serves: the process holds memory for other nodes, which may release it at any time.
    """

    def __init__(self, store: Store, wanted: int, serves: bool = False) -> None:
        self._store = store
        self._wanted = wanted
        self._serves = serves
        self._began = self._changed = self._stirred = self._shared = time.monotonic()
        self._patience_s = store.patience_s * (_SERVES if serves else 1) + _STAGGER_S * (
            store.client.index % _STAGGERED
        )
        self._mark = -1, -1
        self._alone = 0  # looks in a row that found that no other process could free enough
        self.may_pass = False  # whether the wait was given up only because others wait, too
        self._awake: dict[int, int] = {}  # at how many looks in a row
        self._warn_s = _WARN_S

    @property
    def waited_s(self) -> float:
        """How long the wait has lasted."""
        return time.monotonic() - self._began

    @property
    def pause_s(self) -> float:
        """How long to sleep before the next attempt."""
        return min(_PAUSE_S, 0.001 + self.waited_s / 8)

    def stir(self) -> None:
        """Restart the limits after a round of spilling has freed memory."""
        self._changed, self._alone = time.monotonic(), 0

    def nap(self) -> None:
        """Sleep until the next attempt."""
        spill.nap(self._store.client, self.pause_s)

    def look(self) -> str:
        """Check the store after a failed attempt; return the reason to give up, or "" to wait on."""
        client, now = self._store.client, time.monotonic()
        others, awake, mark, failed = spill.outlook(client)
        used, committed, _ = arena.room(client)
        if (mark, failed) != self._mark:
            self._mark, self._changed = (mark, failed), now
        awake.discard(client.index)
        self._awake = {index: self._awake.get(index, 0) + 1 for index in awake}
        if any(looks >= _AWAKE_LOOKS for looks in self._awake.values()):
            self._stirred = now
        # If no other process frees anything, pieces of free memory do not join.
        could = committed - used + others if others else max((run for _, run in spill.free_runs(client)), default=0)
        if self._serves or could >= self._wanted:
            self._shared, self._alone = now, 0
        else:
            self._alone += 1
            if self._alone >= _ALONE_LOOKS and (not _has_threads() or now - self._shared > _THREADS_S):
                return "this process itself uses the rest, and waits"
        self.may_pass = True
        if now - max(self._changed, self._stirred) > self._patience_s and spill.fail_first(client, failed):
            return f"after {self.waited_s:.0f} s, in which all processes of this node waited and none freed memory"
        if now - self._changed > LIMIT_S:
            return f"after {self.waited_s:.0f} s; no memory was freed in the last {LIMIT_S:.0f} s"
        self._warn()
        return ""

    def _warn(self) -> None:
        if self.waited_s < self._warn_s:
            return
        self._warn_s *= 2
        sys.stderr.write(
            f"fastrt: the object store is full, and a value has waited for room for {self.waited_s:.0f} s: "
            f"{story(self._store, self._wanted)}\n"
        )


class Story(NamedTuple):
    """The facts about a full store.

    Attributes:
        room: the wanted and the free bytes.
        users: the processes that use the rest, and why nothing was spilled; may be empty.
        advice: how to get more room.
    """

    room: str
    users: str
    advice: str

    def __str__(self) -> str:
        return self.room + self.users


def story(store: Store, wanted: int) -> Story:
    """Describe a full store."""
    client = store.client
    usage = fsck.usage(client)
    free, size = usage["bytes_max"] - usage["bytes_used"], size_text(usage["bytes_max"])
    advice = "raise object_store_memory"
    _, committed, most = arena.room(client)
    shm_free = free_bytes(SHM_DIR)
    if shm_free < most - committed:
        free = min(free, committed + shm_free - usage["bytes_used"])
        size += f", of which {SHM_DIR} has room for {size_text(committed + shm_free)}"
        advice = f"remove files in {SHM_DIR}, or give it more room (docker run --shm-size=...)"
    holders = sorted(fsck.holders(client), key=lambda row: -row["bytes"])[:3]
    held = ", ".join(f"pid {row['pid']} ({size_text(row['bytes'])})" for row in holders if row["bytes"])
    trouble = spill.last_round(client)[1]
    return Story(
        f"{size_text(wanted) if wanted else 'a little room'} wanted, {size_text(free)} free of {size}"
        + (" in pieces that are too small" if wanted and free >= wanted else ""),
        (f"; held by {held}" if held else "") + (f"; spilling failed: {trouble}" if trouble else ""),
        advice,
    )


def explain(exc: ObjectStoreFullError, about: Story, why: str = "", may_pass: bool = False) -> ObjectStoreFullError:
    """Make the error for users from an error of the core.

    Args:
        exc: the error of the core.
        about: the `story`, from before the attempt that failed.
        why: the reason, from `RoomWait.look`.
        may_pass: the attribute of the error.
    """
    text = f"{about.room} ({exc}{': ' + why if why else ''}){about.users}"
    error = type(exc)(f"{text}. Drop references and views, or {about.advice}.")
    error.explained, error.may_pass = True, may_pass
    return error


def warn_of_file(store: Store, wanted: int) -> None:
    """Warn once for each process that its values go to files."""
    found = story(store, wanted)
    warnings.give(
        "fallback memory",
        f"a value found no room in the object store and is in a file in {spill.directory(store.client)}: "
        f"{found}. Drop references and views, or {found.advice}",
    )


def _has_threads() -> bool:
    """Whether the program runs threads beside the current one."""
    here = threading.current_thread()
    return any(thread is not here and not thread.name.startswith("fastrt") for thread in threading.enumerate())
