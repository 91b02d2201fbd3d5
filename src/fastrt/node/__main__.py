"""The daemon's process: `python -m fastrt.node SETTINGS`, started by `fastrt.runtime`.

SETTINGS is JSON: config (settings by name), bootstrap_fd, zygote_fd, session (sys_path, preload), adopt (the segment
of a session whose daemon died, or null), cluster (whether it is a node of one).
"""

from __future__ import annotations

import json
import socket
import sys

from fastrt.config import Config
from fastrt.node.daemon import Daemon
from fastrt.node.pool import Pool

_SPARE_WORKERS = 16


def main() -> None:
    """Run the daemon; tell the starter where it listens, or what went wrong."""
    settings = json.loads(sys.argv[1])
    starter = socket.socket(fileno=settings["bootstrap_fd"])
    zygote = socket.socket(fileno=settings["zygote_fd"])
    try:
        config = Config.load(**settings["config"])
        pool = Pool(zygote, config.num_workers, _SPARE_WORKERS, config.clients_max - 2)  # this process and a driver
        daemon = Daemon(config, pool, settings["session"], settings["adopt"], settings["cluster"])
    except Exception as exc:  # the starter reports it to the user
        starter.send(json.dumps({"error": f"{type(exc).__name__}: {exc}"}).encode())
        sys.exit(1)
    try:
        starter.send(json.dumps({"socket": daemon.socket_path}).encode())
        daemon.run(starter)
    finally:
        daemon.close()


if __name__ == "__main__":
    main()
