"""A coordination service whose sockets survive the process that holds its state.

JAX's clients end their process as soon as the coordinator's connection closes (measured: jaxlib 0.10.2 aborts 7 ms
later, by a fatal log line in its error polling). So the sockets belong to a front that does very little: it accepts
calls, records which are not answered, passes them to the keeper, and passes the answers back. When the keeper dies, the
front starts another one on the same records and submits all unanswered calls again, in their order. A client sees only
a slow answer. Killing the front itself closes the sockets.

The front answers reads of keys that the keeper has reported, and sets keys itself while it knows all keys; see
`replica`. It answers such a write once the write is in the front's log, and passes it on later. A new keeper reports
how much of the log it has carried out, and receives the rest. Writes are passed on in order. The front sets no key
itself while a call waits to be passed on: the keeper would carry out that call first, and its answer might show a state
from before the write.

Threads: the server's thread accepts calls, and exchanges each batch of them for the keeper's answers. The reader thread
receives the answers that deadlines cause, and notices the keeper's end while the server is idle. (The server's thread
makes the exchange itself, because waking the reader for each answer would cost as much as the call.) `_lock` guards the
links, changes of the replica, the log, `_outgoing` and additions to `_pending`. It is held during an exchange and while
calls are replayed to a new keeper, so that none overtakes an older one. The reader answers without it: the keeper may
wait for the reader to make room while the server's thread, in an exchange, waits for the keeper.
"""

from __future__ import annotations

import json
import logging
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from typing import IO

from fastrt.coordination.engine import PATHS, Reply
from fastrt.coordination.link import (
    ASIDE,
    CALL,
    END_BYTES,
    FAILED,
    FORGET,
    FULL,
    KEY,
    LONG_VALUE,
    READY,
    REPLY,
    SETTINGS,
    STOP,
    WITH_VALUE,
    WRITE,
    Frame,
    Link,
    LinkClosed,
    packed_time,
)
from fastrt.coordination.replica import Replica
from fastrt.coordination.service import CoordinatorOptions, Listener
from fastrt.durable import DamagedStateError, StateDirectoryError, WriteLog
from fastrt.errors import ConfigError
from fastrt.net import supervise

_log = logging.getLogger(__name__)

_INDEX = {path: index for index, path in enumerate(PATHS)}
# After this many deaths in a row, at the start or on the same calls, another start would not help.
_FAILURES_MAX = 5
_KEEPER = "fastrt.coordination.keeper"
_READY_S = 60.0
# Writes carried out here before an exchange confirms that the keeper has them, and the log is truncated.
_LOG_WRITES_MAX = 1000
# Writes without a waiting reader are passed on together, so that the keeper does not wake and commit for each: one
# client's sets, on two cores, reach 0.86 to 0.98 of jaxlib's rate when it wakes every 10 ms, 0.99 to 1.05 at 50.
_PASS_ON_S = 0.05
_WAITING_READS = frozenset(path for path in PATHS if path.endswith(("/GetKeyValue", "/KeyValueGet")))
_ASIDE_BYTES = Frame(ASIDE).pack()
_STOP_S = 10.0
_WORDS_MAX = 500


class Front(Listener):
    """A durable coordination service: a front in this process, and a keeper in another one.

    Args:
        options: the service's options; `state_dir` must be given.
        on_failure: called, on the reader thread, when the keeper cannot be kept alive.

    Attributes:
        failure: how the last keeper ended, "" while none has.

    Raises:
        ConfigError: an option is invalid.
        InsecureBindError: the address is reachable by other machines without protection.
    """

    def __init__(self, options: CoordinatorOptions, on_failure: Callable[[], None] = lambda: None) -> None:
        super().__init__(options)
        if options.state_dir is None:
            raise ConfigError("A front keeps its state in a directory: give state_dir, or use Coordinator.")
        self._keeper_settings = {
            "settings": asdict(options.settings()),
            "state_dir": str(options.state_dir),
            "power": options.power,
            "front": random.SystemRandom().getrandbits(63),
        }
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._pending: dict[int, bytes] = {}
        self._outgoing: list[bytes] = []
        self._has_queued_call = False
        self._waiting_reads: set[int] = set()
        self._pass_on_at: float | None = None
        self._log: WriteLog | None = None
        self._last_write = 0
        self._last_cut = 0
        self._calls: Link | None = None
        self._later: Link | None = None
        self._replica: Replica | None = None
        self._keeper: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._stopping = False
        self._keeper_full = False
        self._keeper_words: deque[str] = deque(maxlen=1)  # the last line of its standard error
        self._keeper_reader: threading.Thread | None = None
        self._keeper_error: Frame | None = None
        self._accept_loss = options.accept_loss
        self.failure = ""

    def __enter__(self) -> Front:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def keeper_pid(self) -> int | None:
        """The process id of the current keeper."""
        return None if self._keeper is None else self._keeper.pid

    def start(self) -> None:
        """Start the keeper, then listen and serve until `stop`.

        Raises:
            DamagedStateError: files of the state directory are damaged; see `CoordinatorOptions.accept_loss`.
            StateDirectoryError: the keeper cannot use the state directory, or was killed; the message says which.
            OSError: the address cannot be bound.
        """
        if not self._spawn():
            if self._keeper_error is not None:
                kind = DamagedStateError if self._keeper_error.code else StateDirectoryError
                raise kind(self._keeper_error.message.decode())
            raise StateDirectoryError(
                f"The process that keeps the state in {self.options.state_dir} did not start: {self.failure}."
            )
        self._accept_loss = False  # accept only damage found at the start
        try:
            self.listen()
        except OSError:
            self._end_keeper()
            raise
        self._reader = threading.Thread(target=self._read, name="fastrt-front-reader", daemon=True)
        self._reader.start()
        _log.info("coordination service for %d tasks on %s", self.options.num_tasks, self.address)

    def stop(self) -> None:
        """Answer all waiting calls that the service shuts down, and end both processes."""
        self._standard.set_serving(False)
        self._server.stop()
        self._end_keeper()

    def take(self, call: int, method: str, body: bytes) -> None:
        """Answer a call from the replica, or queue it for the keeper."""
        replica = self._replica
        known = replica.read(call, method, body) if replica is not None else None
        if known is not None:
            self.answer(known)
            return
        with self._lock:
            done = self._insert(call, method, body)
            if done is None:
                packed = Frame(CALL, call, path=_INDEX[method], details=packed_time(), body=body).pack()
                self._pending[call] = packed
                self._outgoing.append(packed)
                self._has_queued_call = True
                if method in _WAITING_READS:
                    self._waiting_reads.add(call)
        if done is not None:
            self.answer(done)

    def _insert(self, call: int, method: str, body: bytes) -> Reply | None:
        """Set a key here, if possible; returns the answer, else None. `_lock` is held."""
        if self._replica is None or self._log is None or self._has_queued_call or self._keeper_full:
            return None
        found = self._replica.insert(call, method, body)
        if found is None:
            return None
        key, value, reply = found
        try:
            self._log.append(self._last_write + 1, key, value)
        except StateDirectoryError:
            return None  # the keeper will have the same error, and report it
        self._last_write += 1
        if self._pass_on_at is None:
            self._pass_on_at = time.monotonic() + _PASS_ON_S
        self._replica.apply(key, value)
        self._queue_write(self._last_write, key, value)
        return reply

    def _queue_write(self, number: int, key: str, value: bytes) -> None:
        name = key.encode("utf-8", "surrogateescape")
        self._outgoing.append(Frame(WRITE, number, message=name, body=value).pack())

    def on_cancel(self, call: int) -> None:
        """Drop a cancelled call, here and at the keeper."""
        with self._lock:
            self._pending.pop(call, None)
            self._waiting_reads.discard(call)
            self._outgoing.append(Frame(FORGET, call).pack())

    def on_idle(self) -> float | None:
        """Exchange the batch with the keeper, or pass writes on; returns the next deadline."""
        if not self._outgoing:
            return None
        with self._lock:
            if self._has_queued_call or self._last_write - self._last_cut >= _LOG_WRITES_MAX:
                self._exchange()
            elif self._waiting_reads or self._pass_on_at is None or time.monotonic() >= self._pass_on_at:
                self._pass_on()
            return self._pass_on_at

    def on_stop(self) -> None:
        """Stop the keeper, which answers all waiting calls before it ends."""
        with self._lock:
            self._stopping = True
            self._outgoing.append(Frame(STOP).pack())
            self._exchange()
        self._end_keeper()

    def _pass_on(self) -> None:
        """Send the keeper the frames that need no answer. `_lock` is held."""
        if self._calls is None:
            return
        data, self._outgoing, self._pass_on_at = b"".join(self._outgoing), [], None
        try:
            self._calls.write(_ASIDE_BYTES + data + END_BYTES)
        except LinkClosed:
            self._replace()
            self._exchange()

    def _exchange(self) -> None:
        """Send the queued frames to the keeper, and pass on the answers of that batch. `_lock` is held."""
        for _ in range(_FAILURES_MAX):
            if self._calls is None:
                return  # the keeper was given up
            data = b"".join(self._outgoing)
            self._outgoing, self._has_queued_call, self._pass_on_at = [], False, None
            try:
                self._calls.write(data + END_BYTES)
                batch = self._calls.read_batch()
                if batch and batch[-1].kind == FAILED:
                    raise LinkClosed
            except LinkClosed:
                if self._stopping:
                    return
                self._replace()
                continue
            self._take_in(batch or ())
            self._cut_log()
            return
        self._give_up()

    def _cut_log(self) -> None:
        """Truncate the log of writes after an exchange: the keeper has all earlier writes. `_lock` is held.

        Not while the keeper's disk is full: it may have them in memory only.
        """
        if self._log is None or self._keeper_full or self._last_write - self._last_cut < _LOG_WRITES_MAX:
            return
        try:
            self._log.drop()
        except StateDirectoryError as error:
            _log.warning("the log of writes cannot be truncated: %s", error)
        self._last_cut = self._last_write

    def _take_in(self, frames: Iterable[Frame]) -> None:
        """Apply a batch of frames in order: keys to the replica, answers to the callers. `_lock` is held."""
        for frame in frames:
            if frame.kind == REPLY:
                self._answer(frame)
            elif frame.kind == FULL:
                self._keeper_full = bool(frame.code)
            elif frame.kind == KEY and self._replica is not None:
                key = frame.message.decode("utf-8", "surrogateescape")
                if frame.code == LONG_VALUE:
                    self._replica.omit(key)
                else:
                    self._replica.apply(key, frame.body if frame.code == WITH_VALUE else None)

    def _answer(self, frame: Frame) -> None:
        self._pending.pop(frame.call, None)
        self._waiting_reads.discard(frame.call)
        self.answer(Reply(frame.call, frame.code, frame.message.decode(), frame.details, frame.body))

    def _read(self) -> None:
        """Run the reader thread: pass on answers that deadlines cause, and replace a keeper that died while idle."""
        while True:
            later = self._later
            if later is None:
                with self._lock:  # held while the keeper is replaced
                    later = self._later
                if later is None:
                    return
            try:
                frames = later.read()
            except LinkClosed:
                with self._lock:
                    # The server's thread may have noticed this first, and replaced the keeper.
                    if not self._stopping and self._later is later:
                        self._replace()
                        self._exchange()
                continue
            for frame in frames:
                self._answer(frame)

    def _replace(self) -> None:
        """Start a new keeper, and queue all unanswered calls for it. `_lock` is held."""
        self._close_links()
        _log.warning("the keeper has ended (%s); starting another", self._wait_for_end())
        self._keeper_full = False
        for attempt in range(_FAILURES_MAX):
            if self._spawn():
                # A copy, because the reader may pass on an old keeper's answer meanwhile: submitted again, that call
                # has no waiting caller. Writes come first: none was made after a call that changes keys was passed on.
                pending = self._pending.copy()
                self._outgoing += [pending[call] for call in sorted(pending)]
                self._has_queued_call = bool(pending)
                return
            if self._stopping:
                return
            time.sleep(0.1 * 2**attempt)  # the disk may be full for a moment
        self._give_up()

    def _give_up(self) -> None:
        """End the service: no keeper lives long enough to answer. `_lock` is held."""
        self._close_links()
        _log.critical("the keeper cannot be kept alive (%s); giving up", self.failure)
        self._on_failure()

    def _spawn(self) -> bool:
        """Start a keeper and wait until it is ready; False when it ended instead."""
        (calls, their_calls), (later, their_later) = socket.socketpair(), socket.socketpair()
        with their_calls, their_later:
            descriptors = [their_calls.fileno(), their_later.fileno()]
            self._keeper = supervise.spawn(
                _KEEPER,
                "sys.exit(main())",
                *map(str, descriptors),
                name="keeper",
                pass_fds=descriptors,
                stderr=subprocess.PIPE,
                new_session=False,
            )
        self._keeper_error = None
        self._keeper_words = deque(maxlen=1)
        self._keeper_reader = threading.Thread(
            target=_pass_on_lines, args=(self._keeper.stderr, self._keeper_words), name="fastrt-keeper-log", daemon=True
        )
        self._keeper_reader.start()
        self._calls, self._later = Link(calls), Link(later)
        try:
            settings = {**self._keeper_settings, "owns_log": self._log is None, "accept_loss": self._accept_loss}
            self._calls.write(Frame(SETTINGS, body=json.dumps(settings).encode()).pack() + END_BYTES)
            frames = self._calls.read_batch(_READY_S)
            if frames and frames[-1].kind == READY:
                self._begin(frames)
                return True
            if frames and frames[-1].kind == FAILED:
                self._keeper_error = frames[-1]
        except LinkClosed:
            pass
        self._close_links()
        self._wait_for_end()
        return False

    def _begin(self, frames: list[Frame]) -> None:
        """Take up a keeper that is ready and has reported its keys. `_lock` is held, or no call was accepted yet."""
        ready = frames[-1]
        self._replica = Replica(replace(self.options.settings(), incarnation=ready.call))
        self._replica.complete = bool(ready.code)
        self._take_in(frames)
        known = self._last_cut = int(ready.details)
        self._outgoing, self._has_queued_call, self._pass_on_at = [], False, None
        if self._log is not None:
            for number, key, value in self._log.after(known):
                self._replica.apply(key, value)
                self._queue_write(number, key, value)
        elif not self.options.power:
            assert self.options.state_dir is not None
            self._log = WriteLog(self.options.state_dir)
        self._last_write = max(self._last_write, known)

    def _close_links(self) -> None:
        for link in (self._calls, self._later):
            if link is not None:
                link.close()
        self._calls = self._later = None
        self._replica = None

    def _wait_for_end(self) -> str:
        """Wait until the keeper has ended; returns how, and sets `failure` to it."""
        assert self._keeper is not None
        assert self._keeper_reader is not None
        in_time = supervise.reap(self._keeper, _STOP_S)
        code = self._keeper.returncode
        words = f"signal {-code}, {signal.strsignal(-code)}" if code < 0 else f"exit code {code}"
        if not in_time:
            words = f"it did not end within {_STOP_S:g} s and was killed"
        self._keeper_reader.join()
        if self._keeper_words:
            words += f"; its last line: {self._keeper_words[0]}"
        self.failure = words
        return words

    def _end_keeper(self) -> None:
        with self._lock:
            self._stopping = True
            later = self._later
            if later is not None:
                later.socket.shutdown(socket.SHUT_RDWR)  # wakes the reader thread
            self._close_links()
            if self._keeper is not None:
                self._wait_for_end()
            if self._log is not None:
                self._log.close()
                self._log = None


def _pass_on_lines(source: IO[bytes], newest: deque[str]) -> None:
    """Copy a process's standard error to this one's, and keep its last line."""
    with source:
        for line in source:
            sys.stderr.buffer.write(line) if hasattr(sys.stderr, "buffer") else sys.stderr.write(line.decode())
            sys.stderr.flush()
            words = line.decode("utf-8", "replace").strip()
            if words:
                newest.append(words[:_WORDS_MAX])
