"""A driver's part in a session: its store, its connection to the daemon, and recovery after the daemon's death.

`Embedded` is a session that the process starts for itself; `Attached` is a session of a cluster's node.
"""

from __future__ import annotations

import contextlib
import os
import shutil  # not where it is used: imported at exit, it would make Python forget that Ctrl-C ended the program
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from fastrt._core.memory import arena
from fastrt._core.memory.segment import Segment
from fastrt.config import Config
from fastrt.errors import AttachError, FastrtError
from fastrt.net.supervise import RestartLimit
from fastrt.runtime import populated
from fastrt.runtime.processes import Processes
from fastrt.store import garbage, join, messages, unread, warnings
from fastrt.store.client import Store
from fastrt.store.join import Link
from fastrt.tasks import call_sites, namespaces

if TYPE_CHECKING:
    import subprocess

    from fastrt.runtime.siblings import Stage
    from fastrt.store.ref import ObjectRef

_SHUTDOWN_S = 10.0
_DEATHS_MAX, _DEATHS_WITHIN_S = 5, 60.0  # a daemon that dies more often is not started again
_BACK_TO_START = "\r\x1b[K"  # and erase the line
_LAST_WORDS_S = 0.1  # for the last lines from other nodes: a result may overtake the output of its task
_COMEBACK_S, _COMEBACK_STEP_S = 10.0, 0.05


class Runtime:
    """A running session. Made by `fastrt.init`. A `with` statement shuts it down at its end.

    Attributes:
        session: 32 hex digits that name the session.
        num_workers: worker processes that can run tasks at the same time.
        object_store_memory: the store's size in bytes.
        socket_path: where other processes join.
        on_exit: called at the end of a `with` statement.
        logs: which output of workers it shows, see `join.join`.
    """

    on_exit: Callable[[], None]
    logs = "node"

    def __init__(self, config: Config, socket_path: str, num_workers: int) -> None:
        self.num_workers = num_workers
        self.socket_path = socket_path
        self._config = config
        self._pid = os.getpid()
        self._namespace = ""
        self._noted: ObjectRef | None = None  # holds the namespace
        self._store: Store | None
        self._store, self._link = self._join(self.logs if config.log_to_driver else "")
        warnings.configure(config.advice)
        unread.start()
        if config.record_call_sites:
            call_sites.start(self._store)
        self.session: str = self._store.client.segment.session
        self.object_store_memory: int = arena.room(self._store.client)[2]
        self._leaving = False
        self._open = ""  # the prefix of the progress bar in the terminal's last line
        self._died = False
        self._restarts = RestartLimit(_DEATHS_MAX, _DEATHS_WITHIN_S)  # of daemons
        segment = self._store.client.segment
        self._listener = threading.Thread(target=self._listen, args=[segment], name="fastrt-logs", daemon=True)
        self._listener.start()
        populated.map_ahead(self._store.client, config.populate_bytes)

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.on_exit()

    def __repr__(self) -> str:
        return f"Runtime(session={self.session[:8]}, num_workers={self.num_workers})"

    def _repr_html_(self) -> str:
        """The session as a table, for notebooks: with the address of its dashboard, or the command that starts one."""
        from fastrt.runtime import dashboards

        return dashboards.as_html(self.session, self.socket_path, self.num_workers, self.object_store_memory)

    def _join(self, logs: str = "") -> tuple[Store, Link]:
        name = os.path.basename(sys.argv[0] or "python")
        client, link = join.join(self.socket_path, "driver", name, logs=logs)
        client.adopt_job(client.job)
        store = Store(client, self._config.spin_us / 1e6, self._rejoin, self._tell, self._config.store_patience_s)
        store.socket_path = self.socket_path
        return store, link

    def _tell(self, message: messages.Message) -> bool:
        return self._link.send(message)

    def _rejoin(self) -> Store:
        """In a forked child: join the session as a new client."""
        store, self._link = self._join()
        store.note = None if self._store is None else self._store.note
        self._store = store
        self.enter(self._namespace)  # the child is a job of its own
        return store

    def enter(self, namespace: str) -> None:
        """Put this program, and children that it forks, into a namespace of actors' names."""
        self._namespace = namespace
        if namespace and self._store is not None:
            self._noted = namespaces.note(self._store, namespace)

    def _listen(self, segment: Segment) -> None:
        """Print the output of workers; when the daemon dies, connect to its replacement."""
        while not self._leaving:
            self._print_output()
            if not self._leaving and not self._replace_daemon(segment):
                # Without a daemon a worker's death goes unnoticed: waits must end, not hang.
                self._died = True
                segment.poison("the node daemon died; call fastrt.init() to start another", closed=True)
                self._remove(segment)
                return

    def _print_output(self) -> None:
        """Print messages of the daemon until it closes the connection."""
        while True:
            try:
                message = self._link.receive()
            except EOFError:
                return
            if isinstance(message, messages.Unread):
                unread.print_one(message)
            elif isinstance(message, messages.CollectGarbage):
                garbage.collect()
            elif isinstance(message, messages.Log):
                stream = sys.stderr if message.is_error else sys.stdout
                try:
                    self._show(stream, message.text, message.is_update)
                except Exception:  # the program has closed or replaced its output; its workers continue
                    continue

    def _show(self, stream: Any, text: str, is_update: bool) -> None:
        """Write lines. On a terminal a progress bar stays open, and the next line of the same task overwrites it."""
        source = text.partition(") ")[0]
        if self._open:
            text = (_BACK_TO_START if source == self._open else "\n") + text
        self._open = source if is_update and stream.isatty() else ""
        stream.write(text.removesuffix("\n") if self._open else text)
        stream.flush()

    def _replace_daemon(self, segment: Segment) -> bool:
        """Connect to the daemon that replaces a dead one; False when there is none."""
        raise NotImplementedError

    def close(self) -> None:
        """Leave the session. A forked child leaves only for itself."""
        store, self._store = self._store, None  # or this object would keep the segment mapped
        self._noted = None
        if store is None:
            return
        self._leaving = True
        is_own = os.getpid() == self._pid
        if is_own:
            with contextlib.suppress(FastrtError):  # the session is broken
                unread.report_all(store.client)
        self._leave(store)
        if is_own:
            unread.end()

    def _leave(self, store: Store) -> None:
        """Close the store, and end the threads and processes of this object."""
        raise NotImplementedError

    def forget(self) -> None:
        """In a forked child: close the parent's descriptors."""

    def _remove(self, segment: Segment) -> None:
        """Remove files of the session that the daemon may have left."""


class Embedded(Runtime):
    """A session that this process has started for itself, or that of `fastrt start`, which shows all output."""

    def __init__(self, config: Config, processes: Processes, cluster: bool) -> None:
        self._processes = processes
        if not cluster:
            self.logs = "all"
        super().__init__(config, processes.socket_path, config.num_workers)

    def forget(self) -> None:
        """In a forked child: close the parent's descriptors."""
        self._processes.forget()

    def take_beside(self) -> list[subprocess.Popen[bytes]]:
        """Return the processes that were started beside it, which belong to the caller now."""
        taken, self._processes.beside = self._processes.beside, []
        return taken

    def end_for_all(self) -> None:
        """Leave, and end the session also for other drivers that use it."""
        self._leaving = True
        self._link.send(messages.End())
        self.close()

    def _replace_daemon(self, segment: Segment) -> bool:
        """Start a daemon that takes the session over, unless the old one exited in order, or daemons die too often."""
        why = f"it died more than {_DEATHS_MAX} times in {_DEATHS_WITHIN_S:.0f} s, or cannot start"
        while self._was_killed():
            try:
                self._processes.start_daemon(adopt=segment.name)
                self._link.close()
                self._link = join.rejoin(self.socket_path, logs=self.logs if self._config.log_to_driver else "")
                if self._leaving:
                    self._link.send(messages.Bye())  # `close` sent it to the dead daemon
                return True
            except FastrtError as exc:  # it may have been killed again
                why = str(exc)
        if not self._leaving:
            sys.stderr.write(f"fastrt: the node daemon is gone for good: {why}\n")
        return False

    def _was_killed(self) -> bool:
        """Whether a signal has just killed the daemon or the zygote, and not too often."""
        return self._processes.await_end() and self._restarts.allows_another()

    def _leave(self, store: Store) -> None:
        """Leave; the daemon ends the workers and removes the session when no other driver is left."""
        segment = store.client.segment
        store.close()
        if os.getpid() != self._pid:
            return
        self._link.send(messages.Bye())
        self._listener.join(_SHUTDOWN_S + self._config.cleanup_timeout_s)
        self._processes.end()
        self._link.close()
        self._remove(segment)

    def _remove(self, segment: Segment) -> None:
        """Remove the files of the session that the daemon has left."""
        segment.unlink()
        shutil.rmtree(os.path.dirname(self.socket_path), ignore_errors=True)


class Attached(Runtime):
    """A driver in the session of a cluster's node, which goes on without it."""

    logs = "all"

    def _replace_daemon(self, segment: Segment) -> bool:
        until = time.monotonic() + _COMEBACK_S
        while not self._leaving and time.monotonic() < until:
            try:
                link = join.rejoin(self.socket_path, logs=self.logs if self._config.log_to_driver else "")
            except FastrtError:
                time.sleep(_COMEBACK_STEP_S)
                continue
            self._link.close()
            self._link = link
            return True
        return False

    def _leave(self, store: Store) -> None:
        """Leave; the daemon ends this driver's tasks. The session goes on, and this process may join it again."""
        if os.getpid() == self._pid and self._config.log_to_driver and self._has_other_nodes():
            self._listener.join(_LAST_WORDS_S)
        has_joined = not store.client.forked  # false in a child that never called fastrt
        store.close(keep_slot=True)
        if has_joined and not self._died:
            try:
                join.leave(self.socket_path, store.client)
            except AttachError as exc:
                if os.path.exists(self.socket_path):  # else the node has ended
                    sys.stderr.write(f"fastrt: tasks of this program continue until its process ends: {exc}\n")
        if os.getpid() == self._pid:
            self._link.hang_up()
            self._listener.join(_SHUTDOWN_S)
        if has_joined:
            self._link.close()

    def _has_other_nodes(self) -> bool:
        try:
            return bool(join.inquire(self.socket_path, messages.ListNodes(), messages.NodeList).others)
        except FastrtError:
            return False  # the daemon is gone


def start(config: Config, cluster: bool = False, is_head: bool = True, beside: Sequence[Stage] = ()) -> Embedded:
    """Start a session for this process.

    Args:
        config: its settings.
        cluster: whether it is a node of a cluster.
        is_head: whether it is the node with the head, or not in a cluster.
        beside: processes that start with it; see `Processes`.
    Raises:
        FastrtError: it cannot start; the message says why.
    """
    processes = Processes(config, cluster, is_head, beside)
    try:
        processes.start_daemon()
        return Embedded(config, processes, cluster)
    except BaseException:
        processes.end(patience_s=1.0)
        raise
