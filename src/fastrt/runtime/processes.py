"""The two processes of an embedded session: the node daemon and the zygote, forked from one interpreter.

The starter keeps the daemon's end of the zygote's socket open and hands it to each daemon: while one is dead the
zygote and its workers continue, and the zygote's reports wait in the socket. A zygote that dies takes its workers
along, and the daemon ends when it notices: both are started again, and the tasks are retried.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastrt.config import Config
from fastrt.errors import FastrtError, NodeDiedError
from fastrt.foreign_text import read_object
from fastrt.net.supervise import interpreter_flags, passed_settings, reap, spawn

if TYPE_CHECKING:  # imported where it is used: the processes started here import this module, but start none
    import subprocess
    from collections.abc import Iterator, Sequence

    from fastrt.runtime.siblings import Stage

_ZYGOTE, _DAEMON = "fastrt.worker.zygote", "fastrt.node.__main__"
# Modules that both import, imported once.
_SHARED = (
    *("fastrt.store.client", "fastrt.store.join", "fastrt.store.failures", "fastrt.store.unread"),
    *("fastrt.store.generator", "fastrt.tasks.actor_records", "fastrt.tasks.cancel", "fastrt.tasks.marks"),
    *("fastrt.tasks.resources", "fastrt.node.populator", "hashlib"),
)
# Modules of fastrt that tasks use by its public names: imported once by the zygote instead of in each worker (8 ms).
_PUBLIC = (
    *("fastrt.actor", "fastrt.exceptions", "fastrt.runtime.driver", "fastrt.runtime.nodes"),
    *("fastrt.store.as_completed", "fastrt.store.drafts", "fastrt.tasks.cancel", "fastrt.tasks.context"),
    *("fastrt.tasks.decorator", "fastrt.tasks.placement_group"),
)
# Modules that the zygote imports for all workers when the driver uses them: importing NumPy takes 80 ms.
_PRELOAD = ("numpy",)
_END_S = 10.0

SERVICE_CALL = "settings = sys.stdin.buffer.readline(); settings and main(settings.decode())"
_SILENT = b'{"error": "it ended without a word; see its error output"}'


class Processes:
    """The zygote and the daemon of a session.

    Args:
        config: the session's settings.
        cluster: whether it is a node of a cluster.
        is_head: whether it is the node with the head, or not in a cluster.
        beside: processes that start with the first daemon. Their standard input ends when they are not used.

    Attributes:
        beside: these processes. Who takes one removes it, and ends it.
    """

    def __init__(
        self, config: Config, cluster: bool = False, is_head: bool = True, beside: Sequence[Stage] = ()
    ) -> None:
        _occupy_standard_descriptors()
        self._stages_beside = list(beside)
        self.beside: list[subprocess.Popen[bytes]] = []
        self._cluster, self._is_head = cluster, is_head
        self.socket_path = ""
        self.daemon: subprocess.Popen[bytes] | None = None
        self.zygote: subprocess.Popen[bytes] | None = None
        self._zygote_is_new = True  # until a daemon has sent it `Configure`
        self._config = config
        self._control: socket.socket | None = None  # to the zygote
        self._bootstrap: socket.socket | None = None  # its end shows the daemon that the starter is gone

    def await_end(self) -> bool:
        """Wait for the daemon's end; whether another can replace it: a signal has killed it, or the zygote."""
        assert self.daemon is not None
        assert self.zygote is not None
        status = self.daemon.wait()
        return status < 0 or (self.zygote.poll() or 0) < 0

    def start_daemon(self, adopt: str | None = None) -> None:
        """Start a daemon and wait until it listens at `socket_path`.

        Args:
            adopt: the segment of the session when it takes a dead daemon's place.
        Raises:
            FastrtError: it cannot start; the message says why.
            NodeDiedError: it did not answer in time.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if self._bootstrap is not None:
            self._bootstrap.close()
        self._bootstrap = ours
        with theirs:
            if self.zygote is None or self.zygote.poll() is not None:
                self._start_all(theirs, adopt)
            else:
                with self._settings(theirs, adopt) as (settings, fds):
                    self.daemon = spawn(_DAEMON, "main()", str(settings), name="daemon", pass_fds=fds)
        assert self.daemon is not None
        ours.settimeout(self._config.start_timeout_s)
        try:
            answer = read_object(ours.recv(1 << 16) or _SILENT, "the answer of the daemon", own=True)
        except TimeoutError:
            self.daemon.kill()
            raise NodeDiedError(f"the node daemon did not start in {self._config.start_timeout_s} s") from None
        if "error" in answer:
            raise FastrtError(f"the runtime cannot start: {answer['error']}")
        self.socket_path = answer["socket"]
        self._zygote_is_new = False

    def _start_all(self, bootstrap: socket.socket, adopt: str | None) -> None:
        """Start a zygote and a daemon, and the first time the processes beside them."""
        from fastrt.runtime import siblings

        if self._control is not None:
            self._control.close()
        self._control, zygote_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._zygote_is_new = True
        fd, flags = zygote_end.fileno(), tuple(interpreter_flags())
        zygote = siblings.Sibling("zygote", _ZYGOTE, "main(int(sys.argv[1]))", (str(fd),), (fd,), flags)
        with zygote_end, self._settings(bootstrap, adopt) as (settings, fds):
            daemon = siblings.Sibling("daemon", _DAEMON, "main()", (str(settings),), tuple(fds))
            stages = [siblings.Stage(_SHARED, (daemon, zygote)), *self._stages_beside]
            self._stages_beside = []
            try:
                self.daemon, self.zygote, *self.beside = siblings.start(stages, self._config.start_timeout_s)
            except BaseException:
                self.forget()  # those that were forked end
                raise

    def end(self, patience_s: float = _END_S) -> None:
        """Wait for the processes, which have the order to end; kill those that do not end in time."""
        self.forget()
        for process in self.beside:
            if process.stdin is not None:
                process.stdin.close()
        for process in filter(None, (self.daemon, self.zygote, *self.beside)):
            reap(process, patience_s)

    def forget(self) -> None:
        """Close this process's ends; a forked child does it too, or it would keep the zygote waiting for a daemon."""
        for end in filter(None, (self._control, self._bootstrap)):
            end.close()

    @contextlib.contextmanager
    def _settings(self, bootstrap: socket.socket, adopt: str | None) -> Iterator[tuple[int, list[int]]]:
        """The argument of a daemon that starts in this context, and the descriptors that it inherits."""
        assert self._control is not None
        fds = [bootstrap.fileno(), self._control.fileno()]
        config = dataclasses.asdict(self._config)
        settings = {
            "config": {name: str(value) if isinstance(value, Path) else value for name, value in config.items()},
            "bootstrap_fd": fds[0],
            "zygote_fd": fds[1],
            "zygote_is_new": self._zygote_is_new,
            "adopt": adopt,
            "cluster": self._cluster,
            "is_head": self._is_head,
            "session": {
                "sys_path": [p for p in sys.path if isinstance(p, str)],  # Python ignores other values
                "preload": [*_PUBLIC, *(name for name in _PRELOAD if name in sys.modules)],
            },
        }
        with passed_settings(settings) as argument:
            yield argument, [*fds, argument]


def _occupy_standard_descriptors() -> None:
    """Keep sockets from getting the number of a closed standard stream: output would go to them."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one


def prepare_service(module: str, name: str, **env: str) -> subprocess.Popen[bytes]:
    """Start a service process, which imports its module and waits for `start_service`.

    It ends when its standard input does, which is a pipe of this process.

    Args:
        module: of this package.
        name: shown by `ps` and `top` after `fastrt-`.
        **env: variables beside this process's own.
    """
    import subprocess

    pipe = subprocess.PIPE
    environment = {**os.environ, **quiet(), **env}
    return spawn(module, SERVICE_CALL, name=name, stdin=pipe, stdout=pipe, env=environment)


def quiet() -> dict[str, str]:
    """Variables for a process that serves by gRPC, which writes two lines to stderr for each failed handshake.

    A stranger could fill a disk with them.
    """
    return {"GRPC_VERBOSITY": os.environ.get("GRPC_VERBOSITY", "NONE")}


def start_service(process: subprocess.Popen[bytes], settings: dict[str, Any], patience_s: float) -> str:
    """Have a prepared process run `main(SETTINGS)`, and wait until it has written a line of JSON with its address.

    Args:
        process: of `prepare_service`.
        settings: the argument, as JSON.
        patience_s: how long it may take.
    Returns:
        The address.
    Raises:
        FastrtError: it ended, or did not answer in time; its own error output says why.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended
        process.stdin.write(json.dumps(settings).encode() + b"\n")
        process.stdin.flush()
    line = process.stdout.readline() if select.select([process.stdout], [], [], patience_s)[0] else b""
    if not line:
        reap(process, 0)
        raise FastrtError(f"process {process.pid} did not start to serve; its error output says why")
    return str(read_object(line, "the answer of a service", {"address": str}, own=True)["address"])
