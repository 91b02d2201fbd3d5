"""Programs for the tests of `fastrt run`, and a look at the processes that their jobs leave."""

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from fastrt.node.daemon import sweep_sessions

from .machines import Machines

# Prints when the first task on another node had run, and on which nodes tasks run.
APP = """
import json, os, sys, time
import fastrt

@fastrt.remote
def host():
    return os.uname().nodename, os.environ.get("PMI_FD"), os.environ.get("OMPI_COMM_WORLD_RANK")

with fastrt.init():
    nodes = fastrt.nodes()
    others = [node["NodeID"] for node in nodes if not node["IsHere"]]
    found = fastrt.get([host.options(scheduling=node).remote() for node in others])
    seen = time.time()
    print(json.dumps({"names": sorted(node["NodeName"] for node in nodes), "hosts": found, "seen": seen}))
sys.exit(int(sys.argv[1]))
"""
WAIT = """
import threading
import fastrt
with fastrt.init():
    print("up", len(fastrt.nodes()), flush=True)
    threading.Event().wait(120)
"""
# Prints "up"; `hosts` are those on which its tasks have run when all have.
SLOW = """
import fastrt, os, threading
@fastrt.remote(max_retries=3)
def slow(k):
    threading.Event().wait(0.3)
    return os.uname().nodename
with fastrt.init():
    refs = [slow.remote(k) for k in range(40)]
    print('up', flush=True)
    hosts = fastrt.get(refs)
"""


def is_swept(runtime_dir: Path, folder: Path) -> bool:
    """Remove what killed nodes have left, as the next session does; whether no session is left."""
    sweep_sessions(runtime_dir, folder / "spill")
    return not [path for path in runtime_dir.iterdir() if path.is_dir()]


def needs(*names: str) -> None:
    """Skip the test unless these programs are installed."""
    absent = [name for name in names if shutil.which(name) is None]
    if absent:
        pytest.skip(f"not installed: {', '.join(absent)}")


def kill_all(process: psutil.Process) -> None:
    """Kill a process and those that it has started."""
    for one in [*process.children(recursive=True), process]:
        with contextlib.suppress(psutil.Error):
            one.kill()


def rest_of(command: str) -> list[psutil.Process]:
    """Processes of jobs with this program that still run."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if command in process.cmdline():
                found.append(process)
    return found


@contextlib.contextmanager
def captured(machines: Machines, host: str, path: Path) -> Iterator[None]:
    """Write what goes over a host's link into a file."""
    words = ["tcpdump", "-i", "wire", "-s", "0", "-U", "-w", str(path), "tcp"]
    command = ["ip", "netns", "exec", machines.namespace(host), *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as listening:
        try:
            assert listening.stderr is not None
            for line in listening.stderr:
                if "listening on" in line:
                    break
            yield
        finally:
            listening.terminate()
            listening.communicate(timeout=60)
