"""The parameter servers of a job: a process beside the program starts them, and ends them after it.

That process joins rank 0's session as a driver, so a cluster's servers are spread over its nodes. The program finds
them by two variables, which `fastrt.ps.connect` reads.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fastrt.errors import FastrtError
from fastrt.folders import replace_private
from fastrt.foreign_text import read_object
from fastrt.net import supervise
from fastrt.runtime.processes import prepare_service, start_service

_TOKEN = "ps_token"  # in the session's folder, which is this user's alone
_END_S = 10.0


@dataclass(frozen=True)
class ServerOptions:
    """The parameter servers of a job.

    Attributes:
        count: of servers; 0: none.
        mode, workers: as `mode` and `num_workers` of `fastrt.ps.start`.
    """

    count: int = 0
    mode: Literal["sync", "async"] = "sync"
    workers: int = 1


class Servers:
    """The parameter servers, for a `with` statement.

    Args:
        options: how many, and how they work.
        socket_path: of the session.
        host: address of this machine for the other nodes; empty: there are none.
        patience_s: how long the start may take.

    Attributes:
        variables: of the program.

    Raises:
        FastrtError: they cannot be started; their error output says why.
    """

    def __init__(self, options: ServerOptions, socket_path: str, host: str, patience_s: float) -> None:
        self.variables: dict[str, str] = {}
        self._process: subprocess.Popen[bytes] | None = None
        if options.count:
            settings = {**vars(options), "socket": socket_path, "host": host}
            self._process = prepare_service("fastrt.launch.servers", "servers")
            address = start_service(self._process, settings, patience_s)
            token = str(Path(socket_path).with_name(_TOKEN))
            self.variables = {"FASTRT_PS_ADDRESS": address, "FASTRT_PS_TOKEN_FILE": token}

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            supervise.reap(self._process, _END_S)


def main(argument: str) -> None:
    """Start the servers, and keep them until standard input ends, or SIGTERM arrives.

    Args:
        argument: JSON: socket (of the session's daemon), host, and the fields of `ServerOptions`.
    """
    from fastrt.ps.start import start
    from fastrt.runtime.driver import init

    settings = read_object(argument, "the settings of parameter servers", own=True)
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(0))
    where = {"host": settings["host"], "scheduling": "spread"} if settings["host"] else {}
    try:
        with (
            init(address=settings["socket"]),
            start(settings["count"], settings["mode"], num_workers=settings["workers"], **where) as cluster,
        ):
            replace_private(Path(settings["socket"]).parent, _TOKEN, f"{cluster.token}\n".encode())
            supervise.announce(cluster.address)
            supervise.wait_for_starter()
    except (FastrtError, OSError) as exc:
        sys.stderr.write(f"fastrt: the parameter servers cannot start: {exc}\n")
        sys.exit(1)
