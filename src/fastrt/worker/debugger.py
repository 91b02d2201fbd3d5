"""`breakpoint()` in tasks, calls and actors' constructors: the thread waits until `fastrt debug` lets it go on.

With `FASTRT_DEBUGGER=debugpy` it waits for an editor instead, see `debugpy_stops`.

Only the thread that stops waits: another thread of the process goes on, and waits for its turn if it stops, too. pdb is
imported at the first stop. In a child that user code has forked, `breakpoint()` is Python's own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

from fastrt._core.tasks import tasks as core
from fastrt.errors import FastrtError
from fastrt.store import debugging
from fastrt.store.debugging import LOOK_S, Stop
from fastrt.tasks.marks import Source
from fastrt.worker.debug_door import Door

if TYPE_CHECKING:
    from fastrt.store.client import Store
    from fastrt.worker.debugpy_stops import DebugpyStops
    from fastrt.worker.task_pdb import TaskPdb

_PDB = "pdb"
_PYTHONS_OWN = "PYTHONBREAKPOINT"  # the variable that chooses another debugger, see PEP 553


class Debugger:
    """The debugger of a worker or an actor.

    Args:
        store: this process's attachment.
        source_here: the task, call or actor on this thread.
        runs: whether a task's code runs on this thread, perhaps below that of another task.
        may_interrupt: during this context, `fastrt.cancel` and the end of the process interrupt this thread.
        report: prints a line at the driver.

    Attributes:
        wants_errors: whether a task that raises waits in the debugger.
    """

    wants_errors = False

    def __init__(
        self,
        store: Store,
        source_here: Callable[[], Source],
        runs: Callable[[int], bool],
        may_interrupt: Callable[[], contextlib.AbstractContextManager[None]],
        report: Callable[[str], object],
    ) -> None:
        self._store, self._source_here, self._runs = store, source_here, runs
        self._may_interrupt, self._report = may_interrupt, report
        self._pid = os.getpid()
        self._folder = debugging.folder_of(store.socket_path)
        self._record = debugging.Record(self._folder)
        self._lock = threading.RLock()  # of the door and the threads; an interrupt may meet its owner
        self._turn = threading.Lock()  # of the thread that stands still
        self._door: Door | None = None
        self._threads: dict[int, TaskPdb] = {}
        self._standing: TaskPdb | None = None
        self._last: TaskPdb | None = None
        self._interrupted = False
        self._editor: DebugpyStops | None = None

    def install(self, wants_errors: bool, name: str) -> None:
        """Make this the debugger that `breakpoint()` begins, unless PYTHONBREAKPOINT names another one.

        Args:
            wants_errors: whether a task that raises waits in the debugger, too.
            name: "pdb", "debugpy" or "debugpy:PORT".
        """
        self.wants_errors = wants_errors
        if name != _PDB:
            from fastrt.worker.debugpy_stops import DebugpyStops  # here: few sessions need it

            port = int(name.partition(":")[2] or 0)
            self._editor = DebugpyStops(self._store.client, self._record, port, self._report)
        sys.breakpointhook = self._hook

    def take_interrupt(self, frame: FrameType | None) -> bool:
        """Stop the code that runs on the main thread, if the client of the debugger has asked for it.

        The handlers of SIGINT call this.

        Returns:
            Whether that was the reason of the signal.
        Raises:
            KeyboardInterrupt: the code runs for a command of the debugger.
        """
        if not self._interrupted:
            return False
        self._interrupted = False
        one = self._threads.get(threading.get_ident())
        if one is None or one.asking or one.ended or frame is None:
            return True
        if one.stopped:
            raise KeyboardInterrupt
        one.message("The code is interrupted.")
        one.stop(frame)
        return True

    def look_at_error(self, exc: BaseException) -> None:
        """Let a person look at the frame that raised, unless the exception is fastrt's own or ends the process."""
        import bdb

        if not isinstance(exc, Exception) or isinstance(exc, (FastrtError, bdb.BdbQuit)) or self._is_forked:
            return
        with self._may_interrupt(), contextlib.suppress(KeyboardInterrupt):
            if self._editor is None:
                self._begin().look_at(exc)
                return
            from fastrt.worker.task_pdb import last_frame, text_of, user_part

            traced = user_part(exc.__traceback__)
            if traced is not None:
                stop = self._stop_at(last_frame(traced), text_of(exc))
                self._editor.look_at(stop, self._store.task_here(), exc, traced)

    # ---- for TaskPdb ----

    def begin_stop(self, one: TaskPdb, frame: FrameType, error: str) -> None:
        """Wait for this thread's turn, and say where it stopped."""
        while not self._turn.acquire(timeout=LOOK_S):
            one.check()
        self._standing = self._last = one
        door = self._opened()
        door.begin()
        stop = self._stop_at(frame, error)
        self._record.begin(stop)
        if error:
            door.write(f"{error}\n")
        if not door.has_client:
            self._report(f"{stop.about}: fastrt debug {self._pid}")

    def end_stop(self, one: TaskPdb) -> None:
        """Let the next thread stop."""
        if self._standing is one:
            self._standing = None
            with contextlib.suppress(OSError, FastrtError):  # the session has ended
                self._record.end()
            self._turn.release()

    def over(self, one: TaskPdb) -> None:
        """Forget a thread that goes on without a debugger; the last one closes the door."""
        with self._lock:
            self._threads.pop(one.thread, None)
            if self._last is one:
                self._last = None
            if not self._threads and self._door is not None:
                self._door.close("the task goes on without the debugger")
                self._door = None

    def write(self, text: str) -> None:
        """Show text to the client."""
        self._opened().write(text)

    def check(self, task: int | None) -> None:
        """End the wait of a task that was cancelled.

        Raises:
            LeftError: it was.
        """
        from fastrt.worker.task_pdb import LeftError

        if task is not None and core.cancelled(self._store.client, task):
            raise LeftError

    def belongs(self, task: int | None, id: int) -> bool:
        """Whether the task with that id still runs on this thread; True for code outside of tasks."""
        return task is None or (self._runs(task) and core.info(self._store.client, task)["id"] == id)

    def ask(self, one: TaskPdb, prompt: str) -> str:
        """Wait for a line from the client."""
        one.asking = True
        try:
            return self._opened().ask(prompt, one.check)
        finally:
            one.asking = False

    # ---- own ----

    @property
    def _is_forked(self) -> bool:
        return os.getpid() != self._pid

    def _hook(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_forked or os.environ.get(_PYTHONS_OWN):
            return sys.__breakpointhook__(*args, **kwargs)
        frame = sys._getframe(1)
        if self._editor is None:
            self._begin().stop(frame)
        else:
            from fastrt.worker.task_pdb import first_user_frame

            frame = first_user_frame(frame)
            self._editor.stop(self._stop_at(frame, ""), self._store.task_here(), frame)
        return None

    def _stop_at(self, frame: FrameType, error: str) -> Stop:
        """A stop of this thread that begins now."""
        source, code = self._source_here(), frame.f_code
        kind = "actor" if source.actor else "task" if source.task else "thread"
        name = source.name or threading.current_thread().name
        return Stop(
            self._pid, source.job, kind, name, source.task, code.co_filename, frame.f_lineno, code.co_name, error,
            time.monotonic(), path=source.path,
        )  # fmt: skip

    def _begin(self) -> TaskPdb:
        """The debugger of this thread, which is new unless it has stopped in this task before."""
        from fastrt.worker.task_pdb import TaskPdb

        thread = threading.get_ident()
        task = self._store.task_here()
        id = 0 if task is None else core.info(self._store.client, task)["id"]
        found = self._threads.get(thread)
        if found is not None and (found.task, found.id) == (task, id):
            return found
        if found is not None:
            found.end()
        one = TaskPdb(self, thread, task, id)
        with self._lock:
            self._threads[thread] = one
        return one

    def _opened(self) -> Door:
        with self._lock:
            if self._door is None:
                self._door = Door(self._folder / str(self._pid), self._interrupt, self._names)
            return self._door

    def _interrupt(self) -> None:
        """On the door's thread: the client wants running code to stop."""
        one = self._standing or self._last
        if one is None:
            return
        if one.thread == threading.main_thread().ident:
            self._interrupted = True
            signal.pthread_kill(one.thread, signal.SIGINT)
        else:
            self.write("Code outside of the main thread cannot be interrupted; it stops at its next breakpoint.\n")

    def _names(self, text: str, line: str, begin: int, end: int) -> list[str]:
        return self._standing.names(text, line, begin, end) if self._standing is not None else []
