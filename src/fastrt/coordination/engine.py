"""The core of the service without sockets or threads: dialects, state machine and records.

A shell submits the pending calls, then settles: deadlines are checked, the records of all calls are written in one
batch, and only then are the answers returned. Between two settles nothing leaves, so no caller sees an effect that a
crash could undo.

A front whose keeper died before it answered submits the same calls again under the same numbers. Answers to calls that
change state are kept with the records of their batch, so that such a call is not carried out twice.
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

# Batches whose answers are kept. A front has received all but the last few, however many calls are under way.
_KEPT_BATCHES = 1024
_KeptAnswers = message_set("coordination").message("fastrt.coordination.KeptAnswers")

_ALL = [*dialect_xla.methods(), *dialect_tensorflow.methods(), *dialect_runtime.methods()]
METHODS = {method.path: method for method in _ALL}
PATHS = (*METHODS, SNAPSHOT_PATH)
_NO_CALL = 0  # servers count their calls from 1
_LAST_WRITE = ("state", "last_write")
_TIMED = (ev.EnterBarrier, ev.NodeConnect, ev.NodeGetKey, ev.NodeBarrier)
# Events that add a caller's data to the state; rejected while the disk is full.
_GROWING = (ev.InsertKey, ev.IncrementKey, ev.NodeSetKey)
# The most that a call adds to the log beside twice its bytes: the key in a record, and the kept answer.
_CALL_BYTES = 4096
# The most that a write of the front adds to the log beside its value and the bytes of its key.
_WRITE_BYTES = 64
_FULL_RETRY_S = 0.2
# Reads of one key, which a front may answer by itself.
READ_PATHS = frozenset(path for path in METHODS if path.endswith(("/GetKeyValue", "/TryGetKeyValue")))
INSERT_PATHS = frozenset(path for path in METHODS if path.endswith("/InsertKeyValue"))


class Reply(NamedTuple):
    """The answer to a call. `details` are the bytes of `grpc-status-details-bin`."""

    call: int
    code: int
    message: str
    details: bytes
    body: bytes


class Core:
    """One coordination service.

    Args:
        settings: the settings of the state machine. The journal's incarnation replaces theirs, if it has one.
        journal: the store of the records; None keeps nothing.
        front: identifies the front that numbers the calls; None when no front could submit them again.
        owns_log: carry out the writes in the journal's log of writes; False while a living front owns that log.
        clock: seconds that never go back.

    Attributes:
        is_full: the disk was full at the last write: calls that need room are rejected until there is some.

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
        self._front_keys: set[str] = set()  # keys to report to the front
        self._promised_bytes = 0  # for calls of this batch
        self._must_keep = False  # the batch has records that are nowhere else on disk
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
        """Submit a call; a settle returns its answer, now or later.

        Args:
            call: its number.
            path: its method.
            body: its request.
            waited_s: how long ago its caller made it. A front that submits it again counts from the first time, so
                that a barrier's deadline does not move.
        """
        try:
            self._submit(call, path, body, waited_s)
        except Exception:
            # A fault in one call must not end the service: the front would submit that call again and again.
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
            self._front_keys.add(normalized(request.key))
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
        """Carry out a write that a front has answered and kept in its `WriteLog`; repeated numbers are ignored."""
        if number <= self.last_write:
            return
        self.last_write = number
        # A call of the same batch may only be carried out where there is room for both.
        self._promised_bytes += len(key.encode("utf-8", "surrogateescape")) + len(value) + _WRITE_BYTES
        must_keep = self._must_keep
        self._handle(ev.InsertKey(_NO_CALL, key, value, overwrite=True))
        self._must_keep = must_keep  # the front's log has it
        self._records[_LAST_WRITE] = b"%d" % number
        self._front_keys.discard(key)  # the front set it, so it knows it

    def forget(self, call: int) -> None:
        """Drop the call of a caller that disconnected."""
        if self._pending.pop(call, None) is not None:
            self._handle(ev.Forget(call))

    def settle(self) -> list[Reply]:
        """Check deadlines, write the records, and return the answers that may go out now.

        If a full disk has no room even for records of calls that cannot be rejected, the answers wait until there is.

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
        """Write the records of the batch; False when the disk is full and the write must be tried again."""
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
        """Whether a call of this size may be carried out: whether its records will fit."""
        if self._journal is None:
            return True
        self._promised_bytes += nbytes
        has_room = self._retry_at is None and self._journal.has_room(self._promised_bytes)
        if not has_room:
            self._promised_bytes -= nbytes
        if has_room == self.is_full:
            self.is_full = not has_room
            state = "has room again" if has_room else "is full: calls that set keys are rejected"
            _log.warning("the disk under %s %s", self._journal.directory, state)
        return has_room

    def _full_words(self) -> str:
        assert self._journal is not None
        return (
            f"The disk under the coordinator's state directory {self._journal.directory} is full. Keys cannot be set "
            "until there is room; reads and deletions go on."
        )

    def take_keys(self) -> list[tuple[str, bytes | None]]:
        """Keys that were set, removed or read: the front applies them before it passes on the last settle's answers."""
        if not self._front_keys:
            return []
        keys, self._front_keys = self._front_keys, set()
        return [(key, self.state.keys.find(key)) for key in keys]

    def next_deadline(self) -> float | None:
        """The latest time for the next settle, by the clock."""
        deadline = self.state.next_deadline()
        if self._retry_at is None:
            return deadline
        return self._retry_at if deadline is None else min(self._retry_at, deadline)

    def stop(self) -> list[Reply]:
        """Shut down and answer all waiting calls. The effects on barriers are not kept: a restart continues them."""
        replies = self.settle()
        if self._must_keep:  # the disk is full: the changes of these calls will be lost
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
                        self._front_keys.add(effect.key)
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
        """Carry out the writes that a front answered and did not pass on before it died."""
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
            log.drop()
        finally:
            journal.losses += log.losses
            log.close()

    def _incarnation(self, settings: Settings, found: list[tuple[str, str, bytes]]) -> int:
        """The service's incarnation: the kept one, or else a new one, which is written to the journal."""
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
