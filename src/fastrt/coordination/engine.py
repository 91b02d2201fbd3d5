"""Requests in, answers out: dialects, state machine and records put together, without sockets or threads.

A shell submits the calls that have come, then settles: time passes, the records of all of them go to disk in one
batch, and only then the answers come out. Between two settles nothing leaves, so no caller ever sees what a crash
could take back.

A front that lost this process in mid-answer submits the same calls again under the same numbers. Answers to calls
that change something are kept with the records of their batch, so that such a call is not carried out twice.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from fastrt.coordination import dialect_runtime, dialect_tensorflow, dialect_xla
from fastrt.coordination import events as ev
from fastrt.coordination.dialects import Method, RefusedAnswer, parse_request
from fastrt.coordination.events import Persist
from fastrt.coordination.keyvalues import normalized
from fastrt.coordination.snapshot import SNAPSHOT_PATH, snapshot
from fastrt.coordination.state import CoordinationState, Settings
from fastrt.coordination.status import Code, Failure, failure, to_json
from fastrt.durable import DamagedStateError, DiskFullError, Journal, StateDirectoryError, WriteLog
from fastrt.foreign_text import STATE_BYTES_MAX, read_object
from fastrt.net.grpc.descriptors import message_set

_log = logging.getLogger(__name__)

# Batches whose answers are kept. A front has all but the last few, whatever it has in flight.
_KEPT_BATCHES = 1024
_KeptAnswers = message_set("coordination").message("fastrt.coordination.KeptAnswers")

_ALL = [*dialect_xla.methods(), *dialect_tensorflow.methods(), *dialect_runtime.methods()]
METHODS = {method.path: method for method in _ALL}
PATHS = (*METHODS, SNAPSHOT_PATH)
_NO_CALL = 0  # servers count their calls from 1
_LAST_WRITE = ("state", "last_write")
_TIMED = (ev.EnterBarrier, ev.NodeConnect, ev.NodeGetKey, ev.NodeBarrier)
# Events that make the state larger by what a caller sends; refused while the disk is full.
_GROWING = (ev.InsertKey, ev.IncrementKey, ev.NodeSetKey)
# What a call may add to the log beside its own bytes, twice: the key in a record and the answer that is kept.
_CALL_BYTES = 4096
_FULL_RETRY_S = 0.2
# Reads of one key, which a front may answer by itself.
READ_PATHS = frozenset(path for path in METHODS if path.endswith(("/GetKeyValue", "/TryGetKeyValue")))
INSERT_PATHS = frozenset(path for path in METHODS if path.endswith("/InsertKeyValue"))


class Reply(NamedTuple):
    """What a caller is to be told. `details` are the bytes of `grpc-status-details-bin`."""

    call: int
    code: int
    message: str
    details: bytes
    body: bytes


class Core:
    """One coordination service.

    Args:
        settings: of the state machine. The incarnation is replaced by the journal's, if it has one.
        journal: where records go; None keeps nothing.
        front: identifies the front whose call numbers these are; None when there is none that could ask again.
        owns_log: take in what is in the journal's log of writes; False while a living front has it.
        clock: seconds that never go back.

    Attributes:
        is_full: the disk is full, as far as is known: calls that need room are refused until there is some.

    Raises:
        StateDirectoryError: the journal was written for other jobs or numbers of tasks.
    """

    def __init__(
        self,
        settings: Settings,
        journal: Journal | None = None,
        front: int | None = None,
        owns_log: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._journal = journal
        self._front = front
        self._clock = clock
        self._started = clock()
        self._records: dict[tuple[str, str], bytes | None] = {}
        self._replies: list[Reply] = []
        self._pending: dict[int, tuple[Method, Any]] = {}
        self._kept: dict[int, Reply] = {}
        self._to_keep: list[Reply] = []
        self._batch = 0
        self._told_keys: set[str] = set()
        self._promised_bytes = 0  # for calls of this batch
        self._must_keep = False  # records that are nowhere else on disk
        self._retry_at: float | None = None
        self.is_full = False
        found = list(journal.records()) if journal is not None else []
        settings.incarnation = self._incarnation(settings, found)
        self.state = CoordinationState(settings)
        self.state.restore(found, clock())
        self._load_kept(found)
        self.last_write = next((int(value) for kind, key, value in found if (kind, key) == _LAST_WRITE), 0)
        if journal is not None and owns_log:
            self._take_writes(journal)

    @property
    def is_durable(self) -> bool:
        """Whether records are kept, so that settling costs a write."""
        return self._journal is not None

    def submit(self, call: int, path: str, body: bytes, waited_s: float = 0.0) -> None:
        """A call has come; its answer, now or later, is among those of a settle.

        Args:
            call: its number.
            path: its method.
            body: its request.
            waited_s: how long ago its caller made it. A front that asks again counts from the first time, so that a
                barrier's deadline is what it was.
        """
        try:
            self._submit(call, path, body, waited_s)
        except Exception:
            # A fault of ours in one call must not end the service, and least of all be asked again and again.
            _log.exception("the service failed on %s", path)
            self._pending.pop(call, None)
            message = f"The service failed on {path}; its log says why. The call may have had effect."
            self._replies.append(Reply(call, int(Code.INTERNAL), message, b"", b""))

    def _submit(self, call: int, path: str, body: bytes, waited_s: float) -> None:
        kept = self._kept.pop(call, None) if self._kept else None
        if kept is not None:
            self._replies.append(kept)
            return
        method = METHODS.get(path)
        if method is None:
            self._submit_snapshot(call, body)
            return
        request, event = parse_request(method, body, call, self.state)
        self._pending[call] = (method, request)
        if self._front is not None and path in READ_PATHS and not isinstance(event, Failure):
            self._told_keys.add(normalized(request.key))
        if isinstance(event, Failure):
            self._answer(call, event)
            return
        if isinstance(event, _GROWING) and not self._has_room(2 * len(body) + _CALL_BYTES):
            self._answer(call, failure(Code.RESOURCE_EXHAUSTED, self._full_words(), marked=False))
            return
        if isinstance(event, _TIMED):
            event.timeout_s -= waited_s
        elif isinstance(event, (ev.Register, ev.Shutdown)):
            event.waited_s = waited_s
        self._handle(event)

    def write(self, number: int, key: str, value: bytes) -> None:
        """A front has set a key and kept that in its `WriteLog`; it is carried out once, whoever says it how often."""
        if number <= self.last_write:
            return
        self.last_write = number
        must_keep = self._must_keep
        self._handle(ev.InsertKey(_NO_CALL, key, value, overwrite=True))
        self._must_keep = must_keep  # the front's log has it
        self._records[_LAST_WRITE] = b"%d" % number
        self._told_keys.discard(key)  # by whom it was set, it is known

    def forget(self, call: int) -> None:
        """A caller went away."""
        if self._pending.pop(call, None) is not None:
            self._handle(ev.Forget(call))

    def settle(self) -> list[Reply]:
        """Let time pass, write what changed, and return the answers that may now go out.

        On a full disk that has no room even for records which cannot be refused, the answers wait until there is some.

        Raises:
            StateDirectoryError: the disk is failing; no answer may go out.
        """
        now = self._clock()
        deadline = self.state.next_deadline()
        if deadline is not None and now >= deadline:
            self._handle(ev.Tick())
        if self._records and self._journal is not None:
            if self._front is not None and self._to_keep:
                self._keep_answers()
                self._to_keep = []
            if not self._written(self._journal, now):
                return [] if self._must_keep else self._taken_replies()
        self._records = {}
        self._to_keep = []
        self._must_keep = False
        self._promised_bytes = 0
        return self._taken_replies()

    def _written(self, journal: Journal, now: float) -> bool:
        """Write the records of the batch; False when the disk is full, to be tried again."""
        if self._retry_at is not None and now < self._retry_at:
            return False
        try:
            journal.write(self._records)
        except DiskFullError as error:
            if self._retry_at is None:
                _log.critical("answers wait until there is room: %s", error)
            self._retry_at = now + _FULL_RETRY_S
            self.is_full = True
            return False
        if self._retry_at is not None:
            _log.warning("there is room in %s again; the answers that waited go out", journal.directory)
            self._retry_at = None
        return True

    def _taken_replies(self) -> list[Reply]:
        replies, self._replies = self._replies, []
        return replies

    def _has_room(self, nbytes: int) -> bool:
        """Whether a call of this size may be carried out; its records will fit then."""
        if self._journal is None:
            return True
        self._promised_bytes += nbytes
        has_room = self._retry_at is None and self._journal.has_room(self._promised_bytes)
        if not has_room:
            self._promised_bytes -= nbytes
        if has_room == self.is_full:
            self.is_full = not has_room
            state = "has room again" if has_room else "is full: calls that set keys are refused"
            _log.warning("the disk under %s %s", self._journal.directory, state)
        return has_room

    def _full_words(self) -> str:
        assert self._journal is not None
        return (
            f"The disk under the coordinator's state directory {self._journal.directory} is full. Keys cannot be set "
            "until there is room; reads and deletions go on."
        )

    def take_keys(self) -> list[tuple[str, bytes | None]]:
        """What a front is to know before it passes on the answers of the last settle: keys set, removed or read."""
        if not self._told_keys:
            return []
        keys, self._told_keys = self._told_keys, set()
        return [(key, self.state.keys.find(key)) for key in keys]

    def next_deadline(self) -> float | None:
        """When to settle again at the latest, by the clock."""
        deadline = self.state.next_deadline()
        if self._retry_at is None:
            return deadline
        return self._retry_at if deadline is None else min(self._retry_at, deadline)

    def stop(self) -> list[Reply]:
        """Shut down: everybody who waits is told. What that does to barriers is not kept: they may go on later."""
        replies = self.settle()
        if self._must_keep:  # the disk is full: what these calls changed will not be there again
            code, words = int(Code.RESOURCE_EXHAUSTED), self._full_words()
            replies += [Reply(reply.call, code, words, b"", b"") for reply in self._taken_replies()]
        self._handle(ev.Stop())
        self._records = {}
        self._must_keep, self._retry_at = False, None
        self._to_keep = []
        replies += self.settle()
        if self._journal is not None:
            self._journal.close()
        return replies

    def _handle(self, event: ev.Event) -> None:
        for effect in self.state.handle(event, self._clock()):
            if isinstance(effect, Persist):
                if self._journal is not None:
                    self._records[effect.kind, effect.key] = effect.value
                    self._must_keep = True
                    if self._front is not None and effect.kind == "key":
                        self._told_keys.add(effect.key)
            else:
                self._answer(effect.call, effect.value)

    def _answer(self, call: int, value: Any) -> None:
        waiting = self._pending.pop(call, None)
        if waiting is None:
            return
        method, request = waiting
        reply = _built(call, method, value, request, self.state)
        self._replies.append(reply)
        if method.mutates and self._front is not None:
            self._to_keep.append(reply)

    def _submit_snapshot(self, call: int, body: bytes) -> None:
        uptime_s = self._clock() - self._started
        code, message, answer = snapshot(self.state, body, uptime_s, self._clock(), self._journal is not None)
        self._replies.append(Reply(call, code, message, b"", answer))

    def _keep_answers(self) -> None:
        kept = _KeptAnswers(front=self._front)
        for reply in self._to_keep:
            kept.answers.add(
                call=reply.call, code=reply.code, message=reply.message, details=reply.details, body=reply.body
            )
        self._batch += 1
        self._records["answers", str(self._batch % _KEPT_BATCHES)] = kept.SerializeToString()

    def _load_kept(self, found: list[tuple[str, str, bytes]]) -> None:
        if self._front is None:
            return
        for kind, _, value in found:
            if kind == "answers":
                kept = _KeptAnswers.FromString(value)
                if kept.front == self._front:
                    for a in kept.answers:
                        self._kept[a.call] = Reply(a.call, a.code, a.message, a.details, a.body)

    def _take_writes(self, journal: Journal) -> None:
        """Carry out what a front, which is dead now, has set and not passed on."""
        if not WriteLog.exists(journal.directory):
            if self.last_write:
                words = (
                    f"The log of writes (writes.mark and its log) is missing in {journal.directory}; writes behind "
                    f"number {self.last_write} may be lost"
                )
                if not journal.accept_loss:
                    raise DamagedStateError(f"{words}. Put the files back, or go on by --accept-loss.")
                journal.losses.append(words)
                _log.warning("going on after a loss: %s", words)
            return
        log = WriteLog(journal.directory, journal.accept_loss)
        try:
            for number, key, value in log.after(self.last_write):
                self.write(number, key, value)
            self.settle()
            log.drop(self.last_write)
        finally:
            journal.losses += log.losses
            log.close()

    def _incarnation(self, settings: Settings, found: list[tuple[str, str, bytes]]) -> int:
        """The service's incarnation: the kept one, else a new one, which is kept."""
        roles = dict(settings.roles)
        for kind, key, value in found:
            if (kind, key) == ("state", "service"):
                saved = read_object(value, "the record of the service", own=True, bytes_max=STATE_BYTES_MAX)
                if saved["roles"] != roles:
                    assert self._journal is not None
                    raise StateDirectoryError(
                        f"The state directory {self._journal.directory} was made for tasks {saved['roles']}, and now "
                        f"{roles} are asked for. Use the same numbers, or another state directory."
                    )
                return int(saved["incarnation"])
        incarnation = random.SystemRandom().getrandbits(63) | 1
        if self._journal is not None:
            saved = {"roles": roles, "incarnation": incarnation}
            self._journal.write({("state", "service"): to_json(saved)})
        return incarnation


def _built(call: int, method: Method, value: Any, request: Any, state: CoordinationState) -> Reply:
    if isinstance(value, Failure):
        message, details = method.dialect.render(value)
        return Reply(call, int(value.code), message, details, b"")
    try:
        return Reply(call, 0, "", b"", method.build(value, request, state))
    except RefusedAnswer as refused:
        return _built(call, method, refused.problem, request, state)
    except Exception:
        _log.exception("cannot build the answer of %s", method.path)
        message = f"{method.path} was carried out, but its answer cannot be written; the service's log says why."
        return Reply(call, int(Code.INTERNAL), message, b"", b"")
