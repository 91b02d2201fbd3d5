"""Run the scheduler inside the mindspore 2.7 wheel, for test_mindspore.py; arguments: workers, servers.

It listens on a port of its own choice, which only the kernel knows, and wants somebody on the one it was given.
"""

import ctypes
import os
import socket
import sys
import threading
from pathlib import Path

WORKERS, SERVERS = int(sys.argv[1]), int(sys.argv[2])
_LISTEN = "0A"

given = socket.create_server(("127.0.0.1", 0))
PORT = given.getsockname()[1]
os.environ.update(
    MS_ROLE="MS_SCHED",
    MS_WORKER_NUM=str(WORKERS),
    MS_SERVER_NUM=str(SERVERS),
    MS_SCHED_HOST="127.0.0.1",
    MS_SCHED_PORT=str(PORT),
    GLOG_v="3",
)


def listening() -> set[int]:
    """Ports on which this process listens."""
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            inodes.add(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    lines = Path("/proc/self/net/tcp").read_text().splitlines()[1:]
    parts = [line.split() for line in lines]
    return {int(p[1].rpartition(":")[2], 16) for p in parts if p[3] == _LISTEN and f"socket:[{p[9]}]" in inodes}


def announce() -> None:
    """Print the scheduler's address once it listens."""
    pause = threading.Event()
    while not (found := listening() - {PORT}):
        pause.wait(0.02)
    sys.stdout.write(f"address 127.0.0.1:{found.pop()}\n")
    sys.stdout.flush()


import mindspore  # noqa: E402
from mindspore.parallel._ps_context import ps_context  # noqa: E402

context = ps_context()
context.set_ps_enable(True)
context.set_worker_num(WORKERS)
context.set_server_num(SERVERS)
context.set_scheduler_ip("127.0.0.1")
context.set_scheduler_port(PORT)
library = ctypes.CDLL(str(Path(mindspore.__file__).parent / "lib" / "libmindspore_backend_common.so"))
instance = library._ZN9mindspore2ps9Scheduler11GetInstanceEv
instance.restype = ctypes.c_void_p
run = library._ZN9mindspore2ps9Scheduler3RunEv
run.argtypes = [ctypes.c_void_p]
threading.Thread(target=announce, daemon=True).start()
run(instance())
