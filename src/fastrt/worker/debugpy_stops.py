"""`FASTRT_DEBUGGER=debugpy`: `breakpoint()` waits for an editor that speaks the Debug Adapter Protocol.

The thread that stops listens on loopback for one client, and goes on when this has said what it wants. From then on
debugpy has the process: it stops all its threads, at any line that the client names. That ends with the task, or when
the client leaves. Until then the program's timeouts stand still, also while the task runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from fastrt._core.memory.clients import Client
from fastrt._core.tasks import tasks as core
from fastrt.store.debugging import LOOK_S, Record, Stop
from fastrt.worker import dap_relay

_RUNNING = (5, 6)  # FRT_TASK_RUNNING and FRT_TASK_BLOCKED of layout.h
_LOOPBACK = "127.0.0.1"
_ATTACH_S = 30.0  # for a client to say what it wants
_OWN_THREADS = {f"fastrt-{name}" for name in ("clock", "calls", "readers", "watch", "debugpy")}
_QUIET = "PYDEVD_DISABLE_FILE_VALIDATION"  # else debugpy prints that it skips frozen modules, those of Python itself


class DebugpyStops:
    """The stops of this process.

    Args:
        client: of this process.
        record: where the stops are written.
        port: where a client may attach; 0: any free one.
        report: prints a line at the driver.
    """

    def __init__(self, client: Client, record: Record, port: int, report: Callable[[str], object]) -> None:
        self._client, self._record, self._port, self._report = client, record, port, report
        self._turn = threading.Lock()  # of the thread that waits for a client
        self._lock = threading.Lock()  # of the stops
        self._stops: dict[tuple[int | None, int], Stop] = {}  # by task and id
        self._waiting: set[tuple[int | None, int]] = set()  # those without a client
        self._is_watching = False
        self._relay: subprocess.Popen[bytes] | None = None

    def stop(self, stop: Stop, task: int | None, frame: FrameType) -> None:
        """Wait for a client, and stop at the next line of a frame.

        Args:
            stop: about this stop, without an address.
            task: the task or call that runs on this thread.
            frame: the user's.
        Raises:
            KeyboardInterrupt: the task was cancelled meanwhile.
        """
        if self._attached(stop, task):
            _pydevd().settrace(
                suspend=True, trace_only_current_thread=True, patch_multiprocessing=False, stop_at_frame=frame,
                notify_stdin=False,
            )  # fmt: skip

    def look_at(self, stop: Stop, task: int | None, exc: BaseException, traced: Any) -> None:
        """Wait for a client, and stop at the frame that raised an exception.

        Args:
            stop, task: as for `stop`.
            exc: the exception.
            traced: the part of its traceback that is the user's.
        Raises:
            KeyboardInterrupt: as for `stop`.
        """
        if self._attached(stop, task):
            _debugpy().trigger_exception_handler((type(exc), exc, traced), as_uncaught=False)

    # ---- the wait for a client ----

    def _attached(self, stop: Stop, task: int | None) -> bool:
        """Wait until a client debugs this process; False: it has left again at once."""
        key = (task, stop.task)
        with contextlib.ExitStack() as ended:
            ended.callback(self._waiting.discard, key)
            self._waiting.add(key)
            listener = None if self._port else ended.enter_context(socket.create_server((_LOOPBACK, 0)))
            port = self._port if listener is None else listener.getsockname()[1]
            stop = dataclasses.replace(stop, address=f"{_LOOPBACK}:{port}")
            self._add(key, stop)
            try:
                while not self._turn.acquire(timeout=LOOK_S):
                    self._check(task)
                ended.callback(self._turn.release)
                if not self._is_attached():
                    if listener is None:
                        listener = ended.enter_context(self._listener(stop, task))
                    self._report(f"{stop.about}: attach a client of debugpy to {stop.address}")
                    while not self._is_attached():
                        self._let_in(listener, task)
            except BaseException:
                with self._lock:
                    self._stops.pop(key, None)
                    self._record.replace(list(self._stops.values()))
                raise
            return bool(_debugpy().is_client_connected())

    def _listener(self, stop: Stop, task: int | None) -> socket.socket:
        """Listen at the port that was named; while it is taken, another task may stand there, whose end is awaited."""
        said = False
        while True:
            self._check(task)
            try:
                return socket.create_server((_LOOPBACK, self._port))
            except OSError as exc:
                if not said:
                    self._report(f"{stop.kind} {stop.name} (pid {stop.pid}) waits for {stop.address}: {exc}")
                said = True
                threading.Event().wait(LOOK_S)

    def _let_in(self, listener: socket.socket, task: int | None) -> None:
        """Wait a moment for a client, and connect it with the debugger."""
        self._check(task)
        if not select.select([listener], [], [], LOOK_S)[0]:
            return
        client, _ = listener.accept()
        with client:
            uid = dap_relay.owner_of(client)
            if uid != os.geteuid():
                self._report(f"pid {os.getpid()} refused a client of debugpy: user {uid} has connected")
            elif not dap_relay.is_protocol(client):
                self._report(f"pid {os.getpid()} refused a client that does not speak the Debug Adapter Protocol")
            else:
                self._connect(client, task)

    def _connect(self, client: socket.socket, task: int | None) -> None:
        debugpy = _debugpy()
        with socket.create_server((_LOOPBACK, 0)) as inner:
            fds = client.fileno(), inner.fileno()
            self._relay = subprocess.Popen(
                [sys.executable, "-I", "-S", dap_relay.__file__, *map(str, fds)], pass_fds=fds, stdin=subprocess.DEVNULL
            )
            _hide_own_threads()
            debugpy.configure(subProcess=False)
            debugpy.connect(inner.getsockname())
        tries = int(_ATTACH_S / LOOK_S)
        while not debugpy.is_client_connected() and self._is_relayed() and tries:
            self._check(task)
            threading.Event().wait(LOOK_S / 4)
            tries -= 1
        if not debugpy.is_client_connected():
            self._leave()

    def _is_relayed(self) -> bool:
        return self._relay is not None and self._relay.poll() is None

    def _is_attached(self) -> bool:
        return self._is_relayed() and bool(_debugpy().is_client_connected())

    def _check(self, task: int | None) -> None:
        if task is not None and core.cancelled(self._client, task):
            raise KeyboardInterrupt

    # ---- the stops ----

    def _add(self, key: tuple[int | None, int], stop: Stop) -> None:
        with self._lock:
            self._stops[key] = stop
            self._record.replace(list(self._stops.values()))
            if not self._is_watching:
                self._is_watching = True
                threading.Thread(target=self._watch, name="fastrt-debugpy", daemon=True).start()

    def _watch(self) -> None:
        """Notice the end of tasks, and of the client, until no stop is left."""
        while True:
            threading.Event().wait(LOOK_S)
            with self._lock:
                self._stops = {
                    key: stop
                    for key, stop in self._stops.items()
                    if key in self._waiting or (self._is_relayed() and self._runs(*key))
                }
                self._record.replace(list(self._stops.values()))
                is_over = not self._stops
            if is_over and self._turn.acquire(blocking=False):
                if not self._stops:
                    self._leave()
                self._turn.release()
                with self._lock:
                    if not self._stops:
                        self._is_watching = False
                        return

    def _runs(self, task: int | None, id: int) -> bool:
        if task is None:
            return True
        info = core.info(self._client, task)
        return info["id"] == id and info["state"] in _RUNNING

    def _leave(self) -> None:
        """Send the client away, and trace no longer."""
        if self._relay is not None:
            _pydevd().stoptrace()  # sends what it still has to say
            for thread in threading.enumerate():  # a thread whose client left while it stood would stop again
                if getattr(thread, "additional_info", None) is not None:
                    thread.additional_info = None  # type: ignore[attr-defined]  # as pydevd does in a forked child
            self._relay.terminate()  # passes that on
            self._relay.wait()
            self._relay = None


@functools.cache
def _debugpy() -> Any:
    before, hook = os.environ.get(_QUIET), sys.breakpointhook
    os.environ[_QUIET] = "1"
    try:
        import debugpy.server  # makes pydevd importable, and reads the variable
    finally:
        sys.breakpointhook = hook  # in place of debugpy's own
        if before is None:
            del os.environ[_QUIET]
        else:
            os.environ[_QUIET] = before
    return debugpy


def _pydevd() -> Any:
    _debugpy()
    import pydevd

    return pydevd


def _hide_own_threads() -> None:
    """Let debugpy leave the threads of fastrt alone."""
    for thread in threading.enumerate():
        if thread.name in _OWN_THREADS:
            thread.pydev_do_not_trace = True  # type: ignore[attr-defined]  # by which debugpy knows its own
