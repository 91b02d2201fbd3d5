"""A process's part in a session: its store, its connection to the daemon, and what the daemon's death comes to.

`Embedded` is the session that a process starts for itself; `Attached` one that a node of a cluster runs.
"""

from __future__ import annotations

import os
import shutil  # not where it is used: imported at exit, it would make Python forget that Ctrl-C ended the program
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from fastrt._core import arena
from fastrt._core.segment import Segment
from fastrt.config import Config
from fastrt.errors import FastrtError
from fastrt.runtime.processes import Processes
from fastrt.store import advice, attach
from fastrt.store.attach import Link
from fastrt.store.client import Store
from fastrt.tasks import sites

_SHUTDOWN_S = 10.0
_DEATHS_MAX, _DEATHS_WITHIN_S = 5, 60.0  # a daemon that dies more often is not started again
_COMEBACK_S, _COMEBACK_STEP_S = 10.0, 0.05


class Runtime:
    """A running session, as `init` returns it. Usable in a `with` statement, which shuts it down at its end.

    Attributes:
        session: 32 hex digits that name the session.
        num_workers: worker processes that can run at once.
        object_store_memory: the store's size in bytes.
        socket_path: where other processes join.
        on_exit: what ends it at the end of a `with` statement.
    """

    on_exit: Callable[[], None]

    def __init__(self, config: Config, socket_path: str, num_workers: int) -> None:
        self.num_workers = num_workers
        self.socket_path = socket_path
        self._config = config
        self._pid = os.getpid()
        self._store: Store | None
        self._store, self._link = self._join(logs=True)
        advice.configure(config.advice)
        if config.record_call_sites:
            sites.start(self._store)
        self.session: str = self._store.client.segment.session
        self.object_store_memory: int = arena.room(self._store.client)[2]
        self._leaving = False
        self._died = False
        self._deaths: list[float] = []  # of daemons, by the clock
        segment = self._store.client.segment
        self._listener = threading.Thread(target=self._listen, args=[segment], name="fastrt-logs", daemon=True)
        self._listener.start()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.on_exit()

    def __repr__(self) -> str:
        return f"Runtime(session={self.session[:8]}, num_workers={self.num_workers})"

    def _join(self, logs: bool = False) -> tuple[Store, Link]:
        name = os.path.basename(sys.argv[0] or "python")
        client, link = attach.join(self.socket_path, "driver", name, logs=logs)
        client.adopt_job(client.job)
        store = Store(client, self._config.spin_us / 1e6, self._rejoin, self._tell)
        store.socket_path = self.socket_path
        return store, link

    def _tell(self, **message: Any) -> bool:
        return self._link.send(**message)

    def _rejoin(self) -> Store:
        """In a forked child: join the session as a client of its own."""
        store, self._link = self._join()
        self._store = store
        return store

    def _listen(self, segment: Segment) -> None:
        """Print what workers print; when the daemon dies, start another in its place."""
        while not self._leaving:
            self._print_output()
            if not self._leaving and not self._replace_daemon(segment):
                # Without a daemon nobody would notice a worker's death: waits must end, not hang.
                self._died = True
                segment.poison("the node daemon died; call fastrt.init() to start another", closed=True)
                self._remove(segment)
                return

    def _print_output(self) -> None:
        """Until the daemon closes the connection."""
        while True:
            try:
                message = self._link.receive()
            except EOFError:
                return
            if message is not None and message.get("op") == "log":
                stream = sys.stderr if message["error"] else sys.stdout
                try:
                    stream.write(message["text"])
                    stream.flush()
                except Exception:  # the program closed its output, or put something strange there; its workers go on
                    continue

    def _replace_daemon(self, segment: Segment) -> bool:
        """After the daemon's death: connect to the one that takes its place; False when there is none."""
        raise NotImplementedError

    def close(self) -> None:
        """Leave; the daemon ends the workers and removes the session when no other driver is left."""
        store, self._store = self._store, None  # or this object would keep the segment mapped
        if store is None:
            return
        self._leaving = True
        segment = store.client.segment
        store.close()
        if os.getpid() != self._pid:
            return  # a forked child leaves only for itself
        self._link.send(op="bye")
        self._end(segment)

    def _end(self, segment: Segment) -> None:
        """The daemon has been told: leave no thread and no process of this object's."""
        raise NotImplementedError

    def forget(self) -> None:
        """In a forked child: let go of what belongs to the parent."""

    def _remove(self, segment: Segment) -> None:
        """Remove what the session has outside of processes, where the daemon may not have."""


class Embedded(Runtime):
    """A session of this process's own."""

    def __init__(self, config: Config, processes: Processes) -> None:
        self._processes = processes
        super().__init__(config, processes.socket_path, config.num_workers)

    def forget(self) -> None:
        """In a forked child: let go of what belongs to the parent."""
        self._processes.forget()

    def end_for_all(self) -> None:
        """Leave, and end the session also for other drivers that use it."""
        self._leaving = True
        self._link.send(op="end")
        self.close()

    def _replace_daemon(self, segment: Segment) -> bool:
        """Start a daemon that takes the session over. Not if it ended by itself, or if it is killed too often."""
        why = f"it was killed more than {_DEATHS_MAX} times in {_DEATHS_WITHIN_S:.0f} s, or ended by itself"
        while self._was_killed():
            try:
                self._processes.start_daemon(adopt=segment.name)
                self._link.close()
                self._link = attach.rejoin(self.socket_path, logs=True)
                if self._leaving:
                    self._link.send(op="bye")  # `close` said it to the dead one
                return True
            except FastrtError as exc:  # perhaps because it was killed again
                why = str(exc)
        if not self._leaving:
            sys.stderr.write(f"fastrt: the node daemon is gone for good: {why}\n")
        return False

    def _was_killed(self) -> bool:
        """Whether a signal has just ended daemon or zygote, and not so often that others would fare no better."""
        by_signal = self._processes.await_end()
        now = time.monotonic()
        self._deaths = [at for at in self._deaths if now - at < _DEATHS_WITHIN_S] + [now]
        return by_signal and len(self._deaths) <= _DEATHS_MAX

    def _end(self, segment: Segment) -> None:
        self._listener.join(_SHUTDOWN_S + self._config.cleanup_timeout_s)
        self._processes.end()
        self._link.close()
        self._remove(segment)

    def _remove(self, segment: Segment) -> None:
        """Remove what the session has outside of processes; the daemon does, if it can."""
        segment.unlink()
        shutil.rmtree(os.path.dirname(self.socket_path), ignore_errors=True)


class Attached(Runtime):
    """A driver's part in the session of a node: it leaves alone what it has not started."""

    def _replace_daemon(self, segment: Segment) -> bool:
        until = time.monotonic() + _COMEBACK_S
        while not self._leaving and time.monotonic() < until:
            try:
                link = attach.rejoin(self.socket_path, logs=True)
            except FastrtError:
                time.sleep(_COMEBACK_STEP_S)
                continue
            self._link.close()
            self._link = link
            return True
        return False

    def _end(self, segment: Segment) -> None:
        self._link.hang_up()
        self._listener.join(_SHUTDOWN_S)
        self._link.close()


def start(config: Config, cluster: bool = False) -> Embedded:
    """Start a session of this process's own.

    Args:
        config: its settings.
        cluster: whether it is a node of a cluster.
    Raises:
        FastrtError: it cannot start; the message says why.
    """
    processes = Processes(config, cluster)
    try:
        processes.start_daemon()
        return Embedded(config, processes)
    except BaseException:
        processes.end(patience_s=1.0)
        raise
