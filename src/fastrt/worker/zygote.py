"""The zygote: a process with one thread that has imported what workers need and forks them in milliseconds.

It never touches gRPC and never joins the arena. Orders come over a SEQPACKET socket (`store.messages`): first
`Configure`, then `Fork` with the write and read ends of the stdout and stderr of the new worker, or of an actor's
process. It reports each start and each end, with the wait status: it is the workers' parent, and only a parent learns
the signal that ended a process. `ListProcesses`, from a daemon that replaced a dead one, makes it name its processes
with the read ends of their output.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import io
import os
import resource
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from fastrt.config import raise_descriptors
from fastrt.devices import Device, hidden
from fastrt.store.messages import (
    CollectGarbage,
    Configure,
    Fork,
    Forked,
    ForkFailed,
    ListProcesses,
    MayWait,
    Process,
    ProcessEnded,
    ProcessesListed,
    Ready,
    Stop,
    WaitAnswer,
    expect,
    read_message,
    write_message,
)
from fastrt.tasks.marks import Source, mark
from fastrt.worker.title import set_title

if TYPE_CHECKING:
    from fastrt.store.join import Lasting
    from fastrt.worker.main import Worker

_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_PTRACER = 1, 15, 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)
_MESSAGE_BYTES_MAX = 1 << 16


def introduce(name: str) -> None:
    """Name this process for `ps` and `top`, and have the kernel kill it when the zygote ends.

    Debuggers and profilers of the same user may read it, also where `kernel.yama.ptrace_scope` is 1 (else only
    parents may read their children).
    """
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(_PR_SET_NAME, name.encode())
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY)  # fails on kernels without Yama, which need no permission


def main(control_fd: int) -> None:
    """Serve orders on the socket `control_fd` until daemon and starter have closed it or died.

    The starter keeps the other end open too, and passes it to the next daemon when one dies. The zygote has no death
    signal for the starter: that fires when the starting *thread* ends.
    """
    control = socket.socket(fileno=control_fd)
    data = control.recv(_MESSAGE_BYTES_MAX)
    if not data:
        return  # the daemon could not start
    session = dict(vars(expect(read_message(data), Configure)))
    sys.path[:] = session["sys_path"]
    gc.disable()
    from fastrt.worker import native_threads  # here: the packages that it imports are on the driver's sys.path

    os.environ.update(hidden([Device(*fields) for fields in session["devices"]]))
    session["threads_follow_cpus"] = native_threads.begin(session["library_threads"])  # before a library is loaded
    for name in session["preload"]:
        try:
            importlib.import_module(name)
        except Exception:  # an ImportError, or a warning that the program's `-W error` makes an error
            continue  # the worker that needs it raises the error
    import hashlib  # noqa: F401  (imported here so that every worker has it)

    from fastrt.worker import actor as worker_actor  # noqa: F401

    gc.freeze()  # these objects stay shared between all workers: no collection ever writes to them
    gc.enable()
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)  # a signal handler wakes the select below by it
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda signum, frame: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the loop below sees that the daemon is gone
        control.send(write_message(Ready(os.getpid())))
    session["descriptors"] = raise_descriptors()  # the workers get the limit that it had
    outputs: dict[int, list[int]] = {}  # read ends of each worker's stdout and stderr
    actors: dict[int, int] = {}  # the actor of a worker's process
    while True:
        readable: list[int] = select.select([control.fileno(), woken], [], [])[0]  # both are among the first few
        try:
            if woken in readable:
                os.read(woken, 4096)
                _reap(control, outputs)
            for pid in actors.keys() - outputs.keys():
                del actors[pid]
            if control.fileno() in readable and not _serve(control, session, outputs, actors, (woken, wake)):
                break
        except (BrokenPipeError, ConnectionResetError):
            break
    control.close()
    for pid in outputs:  # the workers end with this process, but not the processes that their tasks have started
        _kill_group(pid)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _reap(control: socket.socket, outputs: dict[int, list[int]]) -> None:
    """Report ended workers, and end the processes that their tasks have left behind."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None:
            return
        _kill_group(ended.si_pid)  # before it is reaped: no other process can have its number yet
        pid, status = os.waitpid(ended.si_pid, 0)
        for fd in outputs.pop(pid, []):
            os.close(fd)
        control.send(write_message(ProcessEnded(pid, status)))


def _serve(
    control: socket.socket,
    session: dict[str, Any],
    outputs: dict[int, list[int]],
    actors: dict[int, int],
    own: tuple[int, int],
) -> bool:
    """Carry out one order; False if daemon and starter have closed the socket."""
    data, fds, _, _ = socket.recv_fds(control, _MESSAGE_BYTES_MAX, 4)
    if not data:
        return False
    order = read_message(data)
    if isinstance(order, ListProcesses):
        for worker, ends in outputs.items():
            socket.send_fds(control, [write_message(Process(worker, actors.get(worker)))], ends)
        control.send(write_message(ProcessesListed(os.getpid())))
        return True
    actor = expect(order, Fork).actor
    try:
        pid = os.fork()
    except OSError as exc:  # the limit on processes is reached
        for fd in fds:
            os.close(fd)
        control.send(write_message(ForkFailed(str(exc), actor)))
        return True
    if pid == 0:
        code = 1
        try:
            for fd in [*own, *fds[2:], *(fd for ends in outputs.values() for fd in ends)]:
                os.close(fd)
            control.close()
            code = _become_worker(session, fds[0], fds[1], actor)
        except BaseException:  # the last frame of a process: any exception must be visible
            traceback.print_exc()
        finally:
            _flush()
            os._exit(code)
    for fd in fds[:2]:
        os.close(fd)
    outputs[pid] = fds[2:]
    if actor is not None:
        actors[pid] = actor
    control.send(write_message(Forked(pid, actor)))
    return True


class Output(io.BufferedWriter):
    """stdout or stderr of a worker: whole lines go at once.

    Attributes:
        pending: whether part of a line is left.
        source: returns the task or actor on this thread; a mark in the output shows where it changes.
    """

    pending = False
    source: Callable[[], Source] | None = None
    _marked = Source()

    def write(self, data: Any) -> int:
        """Append bytes, after a mark if another task wrote the last ones."""
        self.pending = True
        if self.source is not None:
            try:
                source = self.source()
            except Exception:  # in a forked child, or after the end of the session
                source = self._marked
            if source != self._marked:
                self._marked = source
                super().write(mark(source))
        return super().write(data)

    def flush(self) -> None:
        """Write the buffered bytes."""
        self.pending = False
        super().flush()

    def as_text(self) -> io.TextIOWrapper:
        """Make the text stream for `sys`, which has no buffer itself."""
        return io.TextIOWrapper(self, "utf-8", "backslashreplace", line_buffering=True, write_through=True)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue


def _open_outputs(out_fd: int, err_fd: int) -> tuple[Output, Output]:
    """Make these descriptors the process's stdout and stderr; a crash writes its Python stack to the latter."""
    for fd, standard in ((out_fd, 1), (err_fd, 2)):
        os.dup2(fd, standard)
        os.close(fd)
    out, err = Output(io.FileIO(1, "w", closefd=False)), Output(io.FileIO(2, "w", closefd=False))
    sys.stdout, sys.stderr = out.as_text(), err.as_text()
    faulthandler.enable(2)  # before the store's handler, which passes a fault on to this one
    return out, err


def _reseed() -> None:
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()  # else every worker draws the same numbers; `random` reseeds itself


def _go_before_others() -> None:
    """Have the kernel end this process before the daemon and the driver when the machine has no memory left.

    Its tasks run again, while a lost driver loses the program. Source: `oom_score_adj` of proc(5); Ray does so, too.
    """
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:  # /proc may be read-only
        score.write("1000")


def _become_independent(title: str, descriptors: int) -> None:
    """Undo settings in the child that only the zygote needs.

    Args:
        title: the short name for `ps` and `top`, "fastrt-worker"; the command line is like it: "fastrt::worker".
        descriptors: the soft limit that the session's workers have.
    """
    introduce(title)
    _go_before_others()
    set_title(title.replace("-", "::"))
    os.setpgid(0, 0)  # so that the daemon can end the worker together with the processes that its tasks have started
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != descriptors:
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, hard))
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    gc.enable()
    _reseed()


def _set_up(session: dict[str, Any], worker: Worker) -> None:
    """Prepare this process for the user's code."""
    worker.debugger.install(session["post_mortem"], session["debugger"])
    if session["logging"]:
        from fastrt.worker import user_logging  # here: few sessions need it

        user_logging.apply(session["logging"], worker.source_here)


def _stop_ordered(daemon: Lasting) -> bool:
    """Read what the daemon has sent to this process, which is idle; return whether that orders it to stop."""
    try:
        while (message := daemon.receive(0)) is not None:
            if isinstance(message, Stop):
                return True
            if isinstance(message, CollectGarbage):
                from fastrt.store import garbage

                garbage.collect()
    except (EOFError, OSError):  # a task can have closed any descriptor
        return True
    return False


def _become_worker(session: dict[str, Any], out_fd: int, err_fd: int, actor: int | None) -> int:
    """In the forked child: join the session and run tasks, or an actor; return the exit code."""
    from fastrt.store import client, join, namespaces, unread, warnings
    from fastrt.worker.actor import ActorWorker
    from fastrt.worker.ending import WORKER_LIMIT_S, Ending
    from fastrt.worker.main import Worker
    from fastrt.worker.native_threads import NativeThreads

    _become_independent("fastrt-worker" if actor is None else "fastrt-actor", session["descriptors"])
    out, err = _open_outputs(out_fd, err_fd)
    core_client, link = join.join(session["socket"], "worker" if actor is None else "actor", f"worker-{os.getpid()}")
    daemon = join.Lasting(session["socket"], link)

    def rejoin() -> client.Store:
        # The connection stays open as long as the core's attachment: the daemon watches the process, not the socket.
        tool, own = join.join(session["socket"], "child", f"child of worker {os.getppid()}")
        forked = client.Store(
            tool, session["spin_s"], rejoin, join.Lasting(session["socket"], own).send, session["patience_s"]
        )
        forked.socket_path, forked.note = session["socket"], store.note
        return forked

    store = client.Store(core_client, session["spin_s"], rejoin, daemon.send, session["patience_s"])
    store.socket_path, store.devices = session["socket"], [Device(*fields) for fields in session["devices"]]
    client.set_store(store)
    namespaces.share()
    unread.start()
    warnings.configure(session["advice"])
    if session["call_sites"]:
        from fastrt.tasks import call_sites

        call_sites.start(store)

    def may_wait() -> bool:
        daemon.send(MayWait())
        while True:
            try:
                answer = daemon.receive(5.0)
            except (EOFError, OSError):
                return True
            if answer is None:
                return True
            if isinstance(answer, WaitAnswer):  # an order to leave that comes now will come again
                return answer.may_wait

    stop_ordered = partial(_stop_ordered, daemon)
    threads = NativeThreads(store, session["threads_follow_cpus"])
    limit_s = session["cleanup_timeout_s"]
    ending = Ending(limit_s if actor is not None else min(WORKER_LIMIT_S, limit_s))
    worker: Worker
    if actor is None:
        worker = Worker(store, daemon.send, stop_ordered, may_wait, ending, threads, [out, err])
    else:
        worker = ActorWorker(store, actor, stop_ordered, ending, threads, [out, err])
    _set_up(session, worker)
    try:
        worker.run()
    finally:
        worker.clean_up()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the process ends now, and its handler needs the session
        core_client.close()
    _flush()
    ending.leave()
    return ending.code


if __name__ == "__main__":
    main(int(sys.argv[1]))
