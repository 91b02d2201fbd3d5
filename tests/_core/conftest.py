"""Fixtures for the core: a small node to work on, and other processes to work against.

Every test ends with an fsck of a quiet arena in which nothing is left but what the test says it keeps.
"""

import contextlib
import gc
import json
import os
import platform
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fastrt
from fastrt._core.memory import clients
from fastrt._core.memory.clients import Client
from fastrt._core.memory.segment import Segment
from fastrt._core.objects import handles, unread_list
from fastrt._core.repair import recovery
from fastrt._core.repair.fsck import fsck, usage
from fastrt._core.tasks import tasks
from fastrt.errors import ObjectStoreFullError

KIND = 16  # the first kind of value that the core does not read by itself
PAGE = 1 << 14
SLAB_PAGES_KEPT = 6  # each size class keeps one empty page
PEER = Path(__file__).with_name("peer.py")
FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())


class PeerError(AssertionError):
    """What the code told to a peer raised there."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind
        self.text = text


class Peer:
    """Another process. `run` has it execute code and waits for the value; `start` and `finish` are its halves."""

    def __init__(self, segment: Segment | None, kind: int = clients.KIND_WORKER) -> None:
        paths = [str(Path(fastrt.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        self.process = subprocess.Popen(
            [sys.executable, str(PEER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ
        )
        self.pid = self.process.pid
        self.index = -1
        self._read = b""
        self._joining = False
        if segment is not None:
            self.index, gen = clients.admit(segment, self.pid, kind, f"peer {self.pid}")
            self.start(f"client = clients.Client(segment.Segment.attach({segment.name!r}), {self.index}, {gen})")
            self._joining = True  # not waited for before its first use, so that several start at once

    def start(self, code: str) -> None:
        assert self.process.stdin is not None
        if self._joining:
            self._joining = False
            self.finish()
        self.process.stdin.write(json.dumps(code).encode() + b"\n")
        self.process.stdin.flush()

    def finish(self, timeout_s: float = 20.0) -> Any:
        assert self.process.stdout is not None
        fd = self.process.stdout.fileno()
        until = time.monotonic() + timeout_s
        while b"\n" not in self._read:
            ready = select.select([fd], [], [], max(0.0, until - time.monotonic()))[0]
            assert ready, f"peer {self.pid} did not answer within {timeout_s} s"
            data = os.read(fd, 65536)
            assert data, f"peer {self.pid} ended with {self.process.wait()} instead of answering"
            self._read += data
        line, _, self._read = self._read.partition(b"\n")
        reply = json.loads(line)
        if "error" in reply:
            raise PeerError(reply["error"], reply["text"])
        return reply["value"]

    def run(self, code: str) -> Any:
        self.start(code)
        return self.finish()

    def answered(self) -> bool:
        """Whether the code that was started has come to its end."""
        assert self.process.stdout is not None
        return b"\n" in self._read or bool(select.select([self.process.stdout.fileno()], [], [], 0)[0])

    def is_asleep(self) -> bool:
        """Whether its only thread sleeps on a futex (a peer has nothing else to sleep on while it runs code)."""
        try:
            fields = Path(f"/proc/{self.pid}/syscall").read_text().split()
        except PermissionError:
            pytest.skip("/proc/<pid>/syscall is not readable here, so sleep cannot be told from work")
        return fields[0] == str(FUTEX) and not self.answered()

    def is_stopped(self) -> bool:
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    def kill(self) -> None:
        self.process.kill()
        self.close()

    def close(self) -> None:
        """Let it end and collect it."""
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self.process.wait(20)


class Node:
    """A segment with this process attached as its driver, and whoever else the test asks for."""

    KIND = KIND
    PAGE = PAGE

    def __init__(self, store_bytes: int = 16 << 20, **sizes: Any) -> None:
        self.segment = Segment.create(store_bytes, **{"objects_max": 1 << 14, "tasks_max": 1 << 13, **sizes})
        self.client = self.attach(clients.KIND_DRIVER)
        self.client.adopt_job(self.client.job)
        self.peers: list[Peer] = []
        self.others: list[int] = []
        self.keeps = 0  # objects that the test leaves on purpose, such as functions

    def attach(self, kind: int = clients.KIND_TOOL) -> Client:
        """Another client of this process; the first one of all is the node's own."""
        index, gen = clients.admit(self.segment, os.getpid(), kind, "test")
        if kind != clients.KIND_DRIVER:
            self.others.append(index)
        return Client(self.segment, index, gen)

    def peer(self, kind: int = clients.KIND_WORKER) -> Peer:
        peer = Peer(self.segment, kind)
        self.peers.append(peer)
        return peer

    def bury(self, peer: Peer) -> dict[str, list[int]]:
        """Kill a peer and give back what it held."""
        peer.kill()
        self.peers.remove(peer)
        return recovery.recover(self.client, peer.index)

    def end(self, ending: list[int]) -> None:
        """End the tasks that a recovery or a cancellation has handed over, with an error."""
        for task in ending:
            for k in range(tasks.info(self.client, task)["returns"]):
                writer = handles.result(self.client, task, k, 5, KIND, 0, True)
                if writer is not None:
                    writer.copy(0, b"error")
                    writer.seal()
            tasks.finish(self.client, task)

    def put(self, nbytes: int, *refs: handles.Ref) -> handles.Ref:
        """Store a value of the given size that contains `refs`."""
        writer = handles.create(self.client, nbytes, KIND, len(refs))
        writer.copy(0, bytes([nbytes % 251]) * min(nbytes, 64))
        return writer.seal(refs)

    def fill(self, make: Callable[[], Any], match: str = "full") -> list[Any]:
        """Call `make` until there is no more room; what it made."""
        held = []
        while True:
            try:
                held.append(make())
            except ObjectStoreFullError as exc:
                if match not in str(exc):
                    raise
                return held

    def close(self) -> None:
        try:
            for peer in list(self.peers):
                self.end(self.bury(peer)["ending"])
            for index in self.others:
                self.end(recovery.recover(self.client, index)["ending"])
            if usage(self.client)["objects"] != self.keeps:
                gc.collect()  # 30 ms that a test without cycles need not pay
            assert fsck(self.client, quiet=True) == []
            left = usage(self.client)
            assert (left["objects"], left["tasks"]) == (self.keeps, 0)
            assert left["bytes_used"] <= (SLAB_PAGES_KEPT + self.keeps) * PAGE
        finally:
            for peer in self.peers:
                peer.kill()
            self.segment.unlink()


@pytest.fixture
def make_node(drop_arguments: None) -> Iterator[Callable[..., Node]]:
    """Make nodes of other sizes; see Node and Segment.create."""
    made: list[Node] = []

    def make(*args: Any, **kwargs: Any) -> Node:
        made.append(Node(*args, **kwargs))
        return made[-1]

    yield make
    with contextlib.ExitStack() as stack:
        while made:
            stack.callback(made.pop().close)


@pytest.fixture(autouse=True)
def nothing_reports_unread_errors() -> Iterator[None]:
    """Drop the errors that a test frees unread: an earlier session of this process would print them, or a later one."""
    unread_list.on_unread(None)
    yield
    unread_list.take()


@pytest.fixture
def frequent_turns() -> Iterator[None]:
    """Have threads that take turns do so as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def node(make_node: Callable[..., Node]) -> Node:
    return make_node()


@pytest.fixture(scope="module")
def module_node() -> Iterator[Node]:
    """One node for all examples of a property; the test must leave nothing in it."""
    node = Node()
    node.segment.unlink()  # nobody else attaches; so no test sees its name
    yield node
    node.close()


@pytest.fixture
def client(node: Node) -> Client:
    return node.client


@pytest.fixture
def function(node: Node) -> handles.Ref:
    """What tasks of a test run: an object like any other, as far as the core knows."""
    node.keeps += 1  # pytest holds it until after the node's end
    return handles.put_scalar(node.client, b"function")


@pytest.fixture
def lone_peers() -> Iterator[Callable[[], Peer]]:
    """Processes without an attachment."""
    made: list[Peer] = []

    def make() -> Peer:
        made.append(Peer(None))
        return made[-1]

    yield make
    for peer in made:
        peer.kill()


@pytest.fixture
def alarm() -> Iterator[Callable[..., None]]:
    """Call something in this process's signal handler after some seconds, in which `during` is called if there is one.

    A handler that raises may do so before `during` is reached, on a busy machine.
    """
    old = signal.getsignal(signal.SIGALRM)
    calls: list[Callable[[], object]] = []

    def ring(signum: int, frame: object) -> None:
        calls.pop()()

    def arm(seconds: float, call: Callable[[], object], during: Callable[[], object] = lambda: None) -> None:
        calls.append(call)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        during()

    signal.signal(signal.SIGALRM, ring)
    yield arm
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, old)


@pytest.fixture
def in_thread() -> Iterator[Callable[[Callable[[], object]], threading.Thread]]:
    """Run something beside the test; joined at its end."""
    threads: list[threading.Thread] = []

    def run(call: Callable[[], object]) -> threading.Thread:
        thread = threading.Thread(target=call)
        threads.append(thread)
        thread.start()
        return thread

    yield run
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
