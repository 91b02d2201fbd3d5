"""The daemon's process: `python -m fastrt.node SETTINGS`, started by `fastrt.runtime`.

SETTINGS is JSON: config (settings by name), zygote_argv, bootstrap_fd, session (sys_path, preload).
"""

from __future__ import annotations

import json
import socket
import sys

from fastrt.node.pool import Pool

_SPARE_WORKERS = 16


def main() -> None:
    """Start the zygote, then the daemon; tell the starter where it listens, or what went wrong."""
    settings = json.loads(sys.argv[1])
    config = settings["config"]
    # The zygote starts while this process goes on importing.
    pool = Pool(settings["zygote_argv"], config["num_workers"], _SPARE_WORKERS)
    starter = socket.socket(fileno=settings["bootstrap_fd"])
    try:
        from fastrt.config import Config
        from fastrt.node.daemon import Daemon

        daemon = Daemon(Config.load(**config), pool, settings["session"])
    except Exception as exc:  # the starter reports it to the user
        starter.send(json.dumps({"error": f"{type(exc).__name__}: {exc}"}).encode())
        pool.kill()
        sys.exit(1)
    try:
        starter.send(json.dumps({"socket": daemon.socket_path}).encode())
        daemon.run(starter)
    finally:
        daemon.close()


if __name__ == "__main__":
    main()
