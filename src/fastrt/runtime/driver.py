"""init and shutdown: the one runtime that this process uses."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import threading
import time
from typing import Any

from fastrt._core.segment import Segment
from fastrt.config import Config
from fastrt.errors import FastrtError, NotInitializedError
from fastrt.runtime.processes import Processes
from fastrt.store import attach
from fastrt.store import client as store_client
from fastrt.store.attach import Link
from fastrt.store.client import Store

_SHUTDOWN_S = 10.0
_DEATHS_MAX, _DEATHS_WITHIN_S = 5, 60.0  # a daemon that dies more often is not started again


class Runtime:
    """A running session, as `init` returns it. Usable in a `with` statement, which shuts it down at its end.

    Attributes:
        session: 32 hex digits that name the session.
        num_workers: worker processes that can run at once.
        object_store_memory: the store's size in bytes.
        socket_path: where other processes join.
    """

    def __init__(self, config: Config, processes: Processes) -> None:
        self.num_workers = config.num_workers
        self.object_store_memory = config.object_store_memory
        self.socket_path = processes.socket_path
        self._config = config
        self._processes = processes
        self._pid = os.getpid()
        self._store: Store | None
        self._store, self._link = self._join(logs=True)
        self.session: str = self._store.client.segment.session
        self._leaving = False
        self._died = False
        self._deaths: list[float] = []  # of daemons, by the clock
        segment = self._store.client.segment
        self._listener = threading.Thread(target=self._listen, args=[segment], name="fastrt-logs", daemon=True)
        self._listener.start()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *exc_info: object) -> None:
        shutdown()

    def __repr__(self) -> str:
        return f"Runtime(session={self.session[:8]}, num_workers={self.num_workers})"

    def _join(self, logs: bool = False) -> tuple[Store, Link]:
        name = os.path.basename(sys.argv[0] or "python")
        client, link = attach.join(self.socket_path, "driver", name, logs=logs)
        client.adopt_job(client.job)
        return Store(client, self._config.spin_us / 1e6, self._rejoin, self._tell), link

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
        """Start a daemon that takes the session over. Not if it ended by itself, or if it is killed too often."""
        why = "it was killed too often, or ended by itself"
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
        """Whether the daemon has just died by a signal, and not so often that another would fare no better."""
        assert self._processes.daemon is not None
        status = self._processes.daemon.wait()
        now = time.monotonic()
        self._deaths = [at for at in self._deaths if now - at < _DEATHS_WITHIN_S] + [now]
        return status < 0 and len(self._deaths) <= _DEATHS_MAX

    def _remove(self, segment: Segment) -> None:
        """Remove what the session has outside of processes; the daemon does, if it can."""
        segment.unlink()
        shutil.rmtree(os.path.dirname(self.socket_path), ignore_errors=True)

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
        self._listener.join(_SHUTDOWN_S)
        self._processes.end()
        self._link.close()
        self._remove(segment)


_runtime: Runtime | None = None
_lock = threading.RLock()


def init(
    num_workers: int | None = None,
    object_store_memory: int | str | None = None,
    *,
    num_cpus: int | None = None,
    ignore_reinit_error: bool = False,
    **settings: Any,
) -> Runtime:
    """Start the embedded runtime: a node daemon, an object store, and workers.

    Args:
        num_workers: worker processes; default: the CPUs that this process may use.
        object_store_memory: size of the store in bytes, or text such as "512MiB"; default: the smallest of 30 %
            of available memory, half of the cgroup's limit, and 80 % of free /dev/shm.
        num_cpus: another name for num_workers.
        ignore_reinit_error: return the running runtime instead of raising.
        **settings: any field of `fastrt.config.Config`; each also has a variable FASTRT_<NAME>.
    Returns:
        The `Runtime`; a `with` statement shuts it down at its end.
    Raises:
        ConfigError: a setting is wrong.
        FastrtError: it is running already, or it cannot start; the message says why.
    """
    global _runtime
    with _lock:
        if is_initialized():
            if ignore_reinit_error and _runtime is not None:
                return _runtime
            if _runtime is None:
                raise FastrtError("this process runs tasks of a session: use that, without init")
            raise FastrtError("fastrt is initialised already; call fastrt.shutdown() first, or ignore_reinit_error")
        shutdown()  # of one whose daemon died
        if num_workers is not None and num_cpus is not None and num_workers != num_cpus:
            raise FastrtError(f"num_workers={num_workers} and num_cpus={num_cpus} are two names for one setting")
        config = Config.load(
            num_workers=num_cpus if num_workers is None else num_workers,
            object_store_memory=object_store_memory,
            **settings,
        )
        _runtime = _start(config)
        store_client.set_store(_runtime._store)
        return _runtime


def shutdown() -> None:
    """End the session: queued tasks are dropped, running ones killed, the store removed.

    Views of values that are still in use stay readable. Does nothing when no session runs, or inside a task.
    """
    global _runtime
    with _lock:
        runtime, _runtime = _runtime, None
        if runtime is not None:
            store_client.set_store(None)
            runtime.close()


def is_initialized() -> bool:
    """Whether a session runs that this process uses; always true inside a task."""
    return store_client.current() is not None and not (_runtime is not None and _runtime._died)


def _start(config: Config) -> Runtime:
    processes = Processes(config)
    try:
        processes.start_daemon()
        return Runtime(config, processes)
    except BaseException:
        processes.end(patience_s=1.0)
        raise


def _start_default() -> Store:
    store = init(ignore_reinit_error=True)._store  # another thread may have been quicker, also to end it again
    if store is None:
        raise NotInitializedError("the runtime was shut down while this call started it; call fastrt.init()")
    return store


def _forget_after_fork() -> None:
    global _lock
    _lock = threading.RLock()
    if _runtime is not None:
        _runtime._processes.forget()


store_client.install(start=_start_default)
os.register_at_fork(after_in_child=_forget_after_fork)
atexit.register(shutdown)
