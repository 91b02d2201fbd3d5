"""The pool of workers: how many there should be, and the zygote that makes them."""

from __future__ import annotations

import os
import signal
import socket

from fastrt._core.memory.segment import start_time
from fastrt.store.messages import (
    Configure,
    Fork,
    Forked,
    ForkFailed,
    ListProcesses,
    Message,
    Process,
    ProcessEnded,
    ProcessesListed,
    Ready,
    read_message,
    write_message,
)

_MESSAGE_BYTES_MAX = 1 << 16


class Pool:
    """Keeps `size` workers able to run: one more for each that sleeps inside a task, up to `spare` more.

    Args:
        control: this end of the zygote's SEQPACKET socket.
        size: workers that should be able to run tasks.
        spare: how many more there may be because others wait; beyond it, waiting workers help themselves.
        most: how many there can be at all.
        zygote_is_new: whether no daemon has told it yet which session its workers join.
    """

    def __init__(self, control: socket.socket, size: int, spare: int, most: int, zygote_is_new: bool = True) -> None:
        self.control = control
        self.most = most
        self.zygote_is_new = zygote_is_new
        self.size = size
        self.spare = spare
        self.pids: set[int] = set()
        self.blocked: set[int] = set()
        self.actors: dict[int, int] = {}  # by pid: whose process it is; they are no workers of the pool
        self.starting = 0
        self._zygote = 0  # its pid, once it has said so
        self.counting = False  # after a take-over: until the zygote has named its workers

    def configure(self, session: Configure) -> None:
        """Send the zygote the session that its workers join."""
        self.control.send(write_message(session))

    def count(self) -> None:
        """Ask the zygote for its processes: the daemon that ordered them has died."""
        self.counting = True
        self.control.send(write_message(ListProcesses()))

    def missing(self, tasks_wait: bool) -> int:
        """How many workers should be started now.

        Args:
            tasks_wait: whether tasks are queued. When every worker sleeps they may be what the sleepers need, so
                one more is started then, whatever `spare` says.
        """
        if self.counting or not self.size:
            return 0
        there = len(self.pids) + self.starting
        able = there - len(self.blocked)
        if tasks_wait and able <= 0 and there < self.most:
            return max(1, min(self.size, self.size + self.spare - there))
        return max(0, min(self.size - able, self.size + self.spare - there, self.most - there))

    def may_grow(self) -> bool:
        """Whether a worker that is about to sleep will be replaced."""
        return len(self.pids) + self.starting < min(self.size + self.spare, self.most)

    def surplus(self) -> int:
        """How many workers are there beyond what is needed now."""
        return len(self.pids) - len(self.blocked) - self.size

    def fork(self, actor: int | None = None) -> tuple[int, int]:
        """Order one worker, or the process of an actor; the read ends of its stdout and stderr."""
        out_read, out_write = os.pipe2(os.O_CLOEXEC)
        err_read, err_write = os.pipe2(os.O_CLOEXEC)
        try:
            # The zygote keeps the read ends too: while a dead daemon is replaced, no output is lost.
            socket.send_fds(self.control, [write_message(Fork(actor))], [out_write, err_write, out_read, err_read])
        finally:
            os.close(out_write)
            os.close(err_write)
        self.starting += actor is None
        return out_read, err_read

    def receive(self) -> tuple[Message, list[int]] | None:
        """Return the zygote's next report with its descriptors; None when the zygote is gone.

        Raises:
            MessageError: it is malformed.
        """
        try:
            data, fds, _, _ = socket.recv_fds(self.control, _MESSAGE_BYTES_MAX, 2)
        except ConnectionResetError:  # killed before it had read its orders
            return None
        if not data:
            return None
        report = read_message(data)
        match report:
            case Ready(pid):
                self._zygote = pid
            case ProcessesListed(pid):
                self._zygote, self.counting = pid, False
            case Forked(pid, int(actor)) | Process(pid, int(actor)):
                self.actors[pid] = actor
            case Forked(pid):
                self.starting = max(0, self.starting - 1)
                self.pids.add(pid)
            case Process(pid):
                self.pids.add(pid)
            case ForkFailed(_, None):
                self.starting -= 1
            case ProcessEnded(pid, _):
                self.pids.discard(pid)
                self.blocked.discard(pid)
                self.actors.pop(pid, None)
        return report, list(fds)

    def kill(self) -> None:
        """End every worker with all that its tasks have started, and the zygote.

        A zygote that has not said its pid yet ends when it finds its socket closed.
        """
        for pid in [*self.pids, *self.actors, *filter(None, [self._zygote])]:
            kill_group(pid)
        self.pids.clear()
        self.control.close()


def kill_group(pid: int) -> None:
    """End a process, and what it has started that is still in its group."""
    for send in (os.killpg, os.kill):
        try:
            send(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


def pidfd_of(pid: int, started: int) -> int:
    """A descriptor of the process that had this pid at that start time; -1 when it has ended."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return -1
    if start_time(pid) == started:
        return pidfd
    os.close(pidfd)
    return -1
