"""A coordination service whose sockets survive the process that holds its state.

JAX's clients of today end their process as soon as the coordinator's connection closes (measured: jaxlib 0.10.2
aborts 7 ms after it, by a fatal log line in its error polling). So the sockets live in a front that does next to
nothing: it takes calls, remembers which are not answered, passes them to the keeper, and passes the answers back.
When the keeper dies it is started again on the same records, and the front asks it again everything that is not
answered, in the old order. A client sees a slow answer and nothing else. Killing the front itself closes the sockets.

Reads of keys that the keeper has told of are answered here, see `replica`.

Threads: the server's thread takes calls, and exchanges each batch of them for the keeper's answers; the reader thread
takes the answers that time brings, and notices the keeper's end while the server is idle. (One exchange a batch on
the server's own thread, because waking the reader for each answer would cost as much as the call.) `_lock` guards the
links, the replica's changes, `_outgoing` and what is added to `_pending`; it is held during an exchange, and while
calls are replayed to a new keeper, so that none is passed before an older one. The reader answers without it: the
keeper may be waiting for the reader to make room while the server's thread, in an exchange, waits for the keeper.
"""

from __future__ import annotations

import json
import logging
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace

from fastrt.coordination.core import PATHS, Reply
from fastrt.coordination.link import (
    CALL,
    END_BYTES,
    FORGET,
    KEY,
    REPLY,
    SETTINGS,
    STOP,
    Frame,
    Link,
    LinkClosed,
    packed_time,
)
from fastrt.coordination.replica import Replica
from fastrt.coordination.service import CoordinatorOptions, Listener
from fastrt.durable import StateDirectoryError
from fastrt.errors import ConfigError

_log = logging.getLogger(__name__)

_INDEX = {path: index for index, path in enumerate(PATHS)}
# A keeper that dies this many times in a row, getting ready or over the same calls, will not live by another start.
_FAILURES_MAX = 5
_READY_S = 60.0
_STOP_S = 10.0


class Front(Listener):
    """A durable coordination service: a front in this process, and a keeper in a process of its own.

    Args:
        options: see `CoordinatorOptions`; `state_dir` must be given.
        on_failure: called, on the reader thread, when the keeper cannot be kept alive.

    Raises:
        ConfigError: an option makes no sense.
        InsecureBindError: the address is open to strangers.
    """

    def __init__(self, options: CoordinatorOptions, on_failure: Callable[[], None] = lambda: None) -> None:
        super().__init__(options)
        if options.state_dir is None:
            raise ConfigError("A front keeps its state in a directory: give state_dir, or use Coordinator.")
        told = {
            "settings": asdict(options.settings()),
            "state_dir": str(options.state_dir),
            "power": options.power,
            "front": random.SystemRandom().getrandbits(63),
        }
        self._told = json.dumps(told).encode()
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._pending: dict[int, bytes] = {}
        self._outgoing: list[bytes] = []
        self._calls: Link | None = None
        self._later: Link | None = None
        self._replica: Replica | None = None
        self._keeper: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._stopping = False

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
            StateDirectoryError: the keeper cannot use the state directory; its log says why.
            OSError: the address cannot be bound.
        """
        if not self._spawn():
            raise StateDirectoryError(
                f"The keeper cannot work on the state directory {self.options.state_dir}; the line above says why."
            )
        try:
            self.listen()
        except OSError:
            self._end_keeper()
            raise
        self._reader = threading.Thread(target=self._read, name="fastrt-front-reader", daemon=True)
        self._reader.start()
        _log.info("coordination service for %d tasks on %s", self.options.num_tasks, self.address)

    def stop(self) -> None:
        """Tell everybody who waits that the service shuts down, and end both processes."""
        self._standard.set_serving(False)
        self._server.stop()
        self._end_keeper()

    def take(self, call: int, method: str, body: bytes) -> None:
        """See `Listener`."""
        replica = self._replica
        known = replica.read(call, method, body) if replica is not None else None
        if known is not None:
            self.answer(known)
            return
        packed = Frame(CALL, call, path=_INDEX[method], details=packed_time(), body=body).pack()
        with self._lock:
            self._pending[call] = packed
            self._outgoing.append(packed)

    def on_cancel(self, call: int) -> None:
        """See `Handler`."""
        with self._lock:
            self._pending.pop(call, None)
            self._outgoing.append(Frame(FORGET, call).pack())

    def on_idle(self) -> float | None:
        """See `Handler`."""
        if self._outgoing:
            with self._lock:
                self._exchange()
        return None

    def on_stop(self) -> None:
        """See `Handler`: the keeper answers what is open before it ends."""
        with self._lock:
            self._stopping = True
            self._outgoing.append(Frame(STOP).pack())
            self._exchange()
        self._end_keeper()

    def _exchange(self) -> None:
        """Pass on what has gathered, and send out the answers that are there at once. `_lock` is held."""
        for _ in range(_FAILURES_MAX):
            if self._calls is None:
                return  # the keeper is gone for good
            data, self._outgoing = b"".join(self._outgoing), []
            try:
                self._calls.write(data + END_BYTES)
                batch = self._calls.read_batch()
            except LinkClosed:
                if self._stopping:
                    return
                self._replace()
                continue
            self._take_in(batch or ())
            return
        self._give_up()

    def _take_in(self, frames: Iterable[Frame]) -> None:
        """Pass on answers; what they say of keys comes first. `_lock` is held."""
        for frame in frames:
            if frame.kind == REPLY:
                self._answer(frame)
            elif frame.kind == KEY and self._replica is not None:
                key = frame.message.decode("utf-8", "surrogateescape")
                self._replica.apply(key, frame.body if frame.code else None)

    def _answer(self, frame: Frame) -> None:
        self._pending.pop(frame.call, None)
        self.answer(Reply(frame.call, frame.code, frame.message.decode(), frame.details, frame.body))

    def _read(self) -> None:
        """The reader thread: answers that time brings, and a new keeper for one that died while nobody called."""
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
                    # The server's thread may have noticed first, and replaced it.
                    if not self._stopping and self._later is later:
                        self._replace()
                        self._exchange()
                continue
            for frame in frames:
                self._answer(frame)

    def _replace(self) -> None:
        """Start a new keeper, to be asked again what is not answered. `_lock` is held."""
        self._close_links()
        _log.warning("the keeper has ended (%s); starting another", self._wait_for_end())
        for attempt in range(_FAILURES_MAX):
            if self._spawn():
                # A copy, because the reader may answer a call of the old keeper meanwhile; asked again, it is answered
                # again, to nobody.
                pending = self._pending.copy()
                self._outgoing = [pending[call] for call in sorted(pending)]
                return
            if self._stopping:
                return
            time.sleep(0.1 * 2**attempt)  # the disk may be full for a moment
        self._give_up()

    def _give_up(self) -> None:
        """No keeper lives long enough to answer: the service ends. `_lock` is held."""
        self._close_links()
        _log.critical("the keeper cannot be kept alive; giving up")
        self._on_failure()

    def _spawn(self) -> bool:
        """Start a keeper and wait until it is ready; False when it ended instead."""
        (calls, their_calls), (later, their_later) = socket.socketpair(), socket.socketpair()
        with their_calls, their_later:
            descriptors = [their_calls.fileno(), their_later.fileno()]
            argv = [sys.executable, "-m", "fastrt.coordination.keeper", *map(str, descriptors)]
            self._keeper = subprocess.Popen(argv, pass_fds=descriptors, stdin=subprocess.DEVNULL)
        self._calls, self._later = Link(calls), Link(later)
        try:
            self._calls.write(Frame(SETTINGS, body=self._told).pack() + END_BYTES)
            ready = self._calls.read_batch(_READY_S)
            if ready:
                settings = replace(self.options.settings(), incarnation=ready[0].call)
                self._replica = Replica(settings)
                return True
        except LinkClosed:
            pass
        self._close_links()
        self._wait_for_end()
        return False

    def _close_links(self) -> None:
        for link in (self._calls, self._later):
            if link is not None:
                link.close()
        self._calls = self._later = None
        self._replica = None

    def _wait_for_end(self) -> str:
        assert self._keeper is not None
        try:
            code = self._keeper.wait(timeout=_STOP_S)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            code = self._keeper.wait()
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def _end_keeper(self) -> None:
        with self._lock:
            self._stopping = True
            later = self._later
            if later is not None:
                later.socket.shutdown(socket.SHUT_RDWR)  # wakes the reader thread
            self._close_links()
            if self._keeper is not None:
                self._wait_for_end()
