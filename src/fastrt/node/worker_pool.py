"""The pool of workers: how many the node needs, and the zygote that forks them."""

from __future__ import annotations

import os
import signal
import socket
from typing import Any

from fastrt._core.memory.segment import start_time
from fastrt.config import Config
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
    """Counts workers: `size` should be able to run, so each that sleeps inside a task needs one more, up to `spare`.

    Args:
        control: this end of the zygote's SEQPACKET socket.
        size: workers that should be able to run tasks.
        spare: how many more workers may run because others sleep; beyond it, sleeping workers run tasks themselves.
        most: the greatest number of workers.
        zygote_is_new: whether the zygote still needs `Configure`: no daemon has used it.
    """

    def __init__(self, control: socket.socket, size: int, spare: int, most: int, zygote_is_new: bool = True) -> None:
        self.control = control
        self.most = most
        self.zygote_is_new = zygote_is_new
        self.size = size
        self.spare = spare
        self.pids: set[int] = set()
        self.blocked: set[int] = set()
        self.actors: dict[int, int] = {}  # processes of actors, by pid: the actor's index; they do not count as workers
        self.starting = 0
        self._zygote = 0  # its pid, once it has reported it
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
            tasks_wait: whether tasks are queued. When every worker sleeps, the sleepers may need these tasks, so one
                more worker is started then, even beyond `spare`.
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
        """How many more workers there are than are needed now."""
        return len(self.pids) - len(self.blocked) - self.size

    def fork(self, actor: int | None = None) -> tuple[int, int]:
        """Order a worker, or the process of an actor; returns the read ends of its stdout and stderr."""
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
        """End every worker with the processes that its tasks have started, and the zygote.

        A zygote that has not reported its pid yet ends when it finds its socket closed.
        """
        for pid in [*self.pids, *self.actors, *filter(None, [self._zygote])]:
            kill_group(pid)
        self.pids.clear()
        self.control.close()


def worker_settings(config: Config, session: dict[str, Any], socket_path: str) -> Configure:
    """Return the settings that the zygote and its workers get.

    Args:
        config: the session's settings.
        session: settings that the starter chose: sys_path, preload.
        socket_path: where they join.
    """
    return Configure(
        session["sys_path"],
        session["preload"],
        socket_path,
        config.spin_us / 1e6,
        config.advice,
        config.store_patience_s,
        config.record_call_sites,
        config.library_threads,
        config.cleanup_timeout_s,
        config.logging,
        config.post_mortem,
        config.debugger,
        [[one.resource, one.variable, one.name] for one in config.devices],
    )


def kill_group(pid: int) -> None:
    """End a process and its process group."""
    for send in (os.killpg, os.kill):
        try:
            send(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


def pidfd_of(pid: int, started: int) -> int:
    """A pidfd of the process that had this pid at that start time; -1 when it has ended."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return -1
    if start_time(pid) == started:
        return pidfd
    os.close(pidfd)
    return -1
