"""The daemon's process, started by `fastrt.runtime`. Its argument is the descriptor of its settings.

These are config (settings by name), bootstrap_fd, zygote_fd, zygote_is_new (no daemon has used it), session
(sys_path, preload), adopt (the segment of a session whose daemon died, or null), cluster (whether it is a node of one),
is_head (whether it is the node with the head, or not in a cluster).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import traceback
from typing import Any

from fastrt.config import Config, raise_descriptors
from fastrt.net.supervise import fail, take_settings
from fastrt.node.daemon import Daemon, ZygoteEndedError
from fastrt.node.worker_pool import Pool

_SPARE_WORKERS = 16


def main() -> None:
    """Run the daemon; report to the starter where it listens, or why it cannot start."""
    settings = take_settings(int(sys.argv[1]), "the settings of the daemon")
    raise_descriptors()  # it needs some for each process that it watches
    with (
        socket.socket(fileno=settings["bootstrap_fd"]) as starter,
        socket.socket(fileno=settings["zygote_fd"]) as zygote,
    ):
        _run(settings, starter, zygote)


def _run(settings: dict[str, Any], starter: socket.socket, zygote: socket.socket) -> None:
    try:
        config = Config.load(**settings["config"])
        most = config.clients_dense - 2  # the daemon and a driver need slots, too
        pool = Pool(zygote, config.num_workers, _SPARE_WORKERS, most, settings["zygote_is_new"])
        daemon = Daemon(config, pool, settings["session"], settings["adopt"], settings["cluster"], settings["is_head"])
    except Exception as exc:  # the starter reports it to the user
        starter.send(json.dumps({"error": f"{type(exc).__name__}: {exc}"}).encode())
        sys.exit(1)
    threading.excepthook = lambda failed: _give_place(daemon, starter, failed.exc_value)
    try:
        starter.send(json.dumps({"socket": daemon.socket_path}).encode())
        daemon.run(starter)
    except ZygoteEndedError:
        sys.stderr.write("fastrt: the process that forks the workers was killed; it and its workers restart\n")
        daemon.leave()
        os.kill(os.getpid(), signal.SIGKILL)  # the starter replaces a daemon that was killed, and a dead zygote too
    except Exception as exc:
        _give_place(daemon, starter, exc)
    finally:
        daemon.close()


def _give_place(daemon: Daemon, starter: socket.socket, error: BaseException | None) -> None:
    """Report an error that ended a thread, and have the starter replace this daemon, unless the session ends anyway.

    The records of the session are in the arena. So another daemon can take it over, at any moment, as after a kill.
    """
    if not daemon.ends_session and _is_there(starter):
        fail("node daemon", error)
    traceback.print_exception(error)


def _is_there(starter: socket.socket) -> bool:
    """Whether the starter lives: it says nothing, and its end of the socket closes with it."""
    try:
        return starter.recv(1, socket.MSG_DONTWAIT) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


if __name__ == "__main__":
    main()
