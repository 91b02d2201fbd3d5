"""Nodes of a cluster as processes of their own, as `fastrt start` runs them."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from fastrt.node.daemon import sweep_sessions
from fastrt.runtime.nodefile import nodes_here

FASTRT = [sys.executable, "-c", "from fastrt.cli.main import main; main()"]
START = [*FASTRT, "start"]
UP_S = 30.0
_GRPC_THREADS = ("event_engine", "grpc_global_tim", "lifeguard")


class RunningNode:
    """One `fastrt start`; `within` is a command that runs it elsewhere."""

    def __init__(self, runtime_dir: Path, *options: str, within: Sequence[str] = ()) -> None:
        env = {**os.environ, "FASTRT_RUNTIME_DIR": str(runtime_dir), "FASTRT_OBJECT_STORE_MEMORY": "256MiB"}
        env["FASTRT_SPILL_DIR"] = str(runtime_dir.parent / "spill")
        self.process = subprocess.Popen(
            [*within, *START, *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        self.output = ""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line
            if line.startswith("use it:"):
                break
        else:
            raise AssertionError(f"the node did not start:\n{self.output}{self.process.communicate()[1]}")
        (self.note,) = [node for node in nodes_here(runtime_dir) if node.pid == self.process.pid]

    @property
    def head(self) -> str:
        return self.note.head

    def processes(self) -> list[psutil.Process]:
        """All processes of the node."""
        first = psutil.Process(self.process.pid)
        return [first, *first.children(recursive=True)]

    def child(self, module: str) -> psutil.Process | None:
        """A process of the node: "fastrt.runtime.uplink", "fastrt.cluster.head"; None while there is none."""
        for process in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):  # or a zombie
                if module in " ".join(process.cmdline()):
                    return process
        return None

    def named(self, name: str) -> list[psutil.Process]:
        """The processes of the node with this name."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended since
                if process.name() == name:
                    found.append(process)
        return found

    def kill_child(self, module: str) -> psutil.Process:
        """Kill a process of the node; which one it was."""
        process = self.child(module)
        assert process is not None
        process.kill()
        return process

    def kill(self) -> None:
        """As a machine that loses its power: everything of the node at once, without a word."""
        everything = self.processes()
        for process in everything:
            with contextlib.suppress(psutil.NoSuchProcess):  # a worker has just ended by itself
                process.suspend()
        for process in everything:
            with contextlib.suppress(psutil.NoSuchProcess):  # workers die with the zygote that was killed before them
                process.kill()
        self.process.communicate()
        psutil.wait_procs(everything, 10)

    def stop(self, number: int = signal.SIGTERM) -> tuple[str, str]:
        """End it as a service manager does, or by SIGINT at once; its output and error output."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        out, err = self.process.communicate(timeout=30)
        return self.output + out, err


def wakes_per_s(processes: Sequence[psutil.Process], seconds: float) -> float:
    """How often threads of some processes wake from a sleep, but for those of gRPC's core."""

    def count() -> int:
        wakes = 0
        for process in processes:
            for status in Path(f"/proc/{process.pid}/task").glob("*/status"):
                with contextlib.suppress(OSError):  # the thread has ended
                    fields = dict(line.split(":\t", 1) for line in status.read_text().splitlines())
                    if not fields["Name"].startswith(_GRPC_THREADS):
                        wakes += int(fields["voluntary_ctxt_switches"])
        return wakes

    before, start = count(), time.monotonic()
    threading.Event().wait(seconds)  # what is measured takes this long
    return (count() - before) / (time.monotonic() - start)


@contextlib.contextmanager
def two_nodes(
    runtime_dir: Path, workers: int, *options: str, of_head: Sequence[str] = ()
) -> Iterator[tuple[RunningNode, RunningNode]]:
    """A head with one worker, "one", and "two" with so many and these options; tests may kill the latter."""
    head = RunningNode(runtime_dir, "--head", "--port", "0", "--num-workers", "1", "--name", "one", *of_head)
    more = ("--num-workers", str(workers), "--name", "two", *options)
    other = RunningNode(runtime_dir, "--address", head.head, *more)
    yield head, other
    if other.process.returncode is None:
        out, err = other.stop()
        assert "Traceback" not in err, err
        assert other.process.returncode == 0, out + err
    out, err = head.stop()
    assert "Traceback" not in err, err
    assert head.process.returncode == 0, out + err
    sweep_sessions(runtime_dir, runtime_dir.parent / "spill")  # of the node that was killed
