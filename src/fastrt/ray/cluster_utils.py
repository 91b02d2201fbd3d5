"""`ray.cluster_utils`: clusters of several nodes on one machine, for the tests of a program."""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from fastrt.config import Config
from fastrt.errors import FastrtError, NotFoundError, UnsupportedError
from fastrt.ids import NodeID
from fastrt.net.supervise import reap
from fastrt.ray import session
from fastrt.ray.refusals import refuse
from fastrt.runtime.driver import is_initialized
from fastrt.runtime.nodefile import NodeFile, nodes_here
from fastrt.runtime.nodes import nodes_at

_START_S = _END_S = 30.0  # for a node to start, and to end in order
# The node's own terminal is the program's, which prints the output of its tasks, their errors and the warnings itself.
_START = "from fastrt.runtime.session import Embedded; Embedded.logs = ''; from fastrt.cli.main import main; main()"
_START_FOR_US = f"from fastrt.net.supervise import end_with_starter; end_with_starter(); {_START}"
_DEFAULTS = {"num_cpus": 1, "num_gpus": 0, "object_store_memory": 150 << 20}
_OPTIONS = {
    "num_cpus": "--num-workers", "num_gpus": "--num-gpus", "resources": "--resources", "labels": "--labels",
    "object_store_memory": "--object-store-memory", "memory": "--memory", "node_name": "--name",
}  # fmt: skip
_WITHOUT_MEANING = (
    "dashboard_port", "enable_object_reconstruction", "env_vars", "object_manager_port", "node_manager_port", "port",
    "redis_port",
)  # fmt: skip


class ClusterNode:
    """A node of a `Cluster`: a process of `fastrt start`, and those that it has started.

    Attributes:
        node_id: as `ray.nodes()` has it.
        unique_id: the same.
        node_name: its name.
        address: where programs join the cluster.
        raylet_socket_name: where programs join this node.
        head: whether the head of the cluster runs there.
    """

    def __init__(self, process: subprocess.Popen[bytes], about: NodeFile) -> None:
        self._process = process
        self.address, self.raylet_socket_name, self.node_name = about.head, about.socket_path, about.name
        self.head = about.is_head
        self.node_id = self.unique_id = NodeID.widened(nodes_at(about.socket_path)[0]["NodeID"]).hex()

    def __repr__(self) -> str:
        return f"ClusterNode({self.node_name!r}, node_id={self.node_id!r})"

    def is_alive(self) -> bool:
        """Whether its process runs."""
        return self._process.poll() is None

    any_processes_alive = remaining_processes_alive = is_alive

    def end(self, graceful: bool) -> None:
        """End the node; `graceful`: its tasks may end before, and its values go to other nodes."""
        if self.is_alive():
            os.killpg(self._process.pid, signal.SIGTERM if graceful else signal.SIGKILL)
        reap(self._process, _END_S)


class Cluster:
    """A cluster whose nodes run on this machine.

    Args:
        initialize_head: whether to start the first node, which has the head.
        connect: whether to join the cluster by `ray.init`.
        head_node_args: options of `add_node` for the first node.
        shutdown_at_exit: whether the nodes end with this process, also when it is killed.

    Attributes:
        head_node: the first node; None before it is started.
        worker_nodes: the others.

    Source:
        The semantics of `ray.cluster_utils.Cluster`.
    """

    def __init__(
        self,
        initialize_head: bool = False,
        connect: bool = False,
        head_node_args: Mapping[str, Any] | None = None,
        shutdown_at_exit: bool = True,
    ) -> None:
        self.head_node: ClusterNode | None = None
        self.worker_nodes: set[ClusterNode] = set()
        self._started = 0
        if connect and not initialize_head:
            raise RuntimeError("connect=True needs initialize_head=True: there is no node to join")
        if head_node_args and not initialize_head:
            raise ValueError("head_node_args are for the head: give initialize_head=True, too")
        self._ends_with_us = shutdown_at_exit
        if shutdown_at_exit:
            atexit.register(self.shutdown)
        if initialize_head:
            self.add_node(**(head_node_args or {}))
            if connect:
                self.connect()

    @property
    def address(self) -> str:
        """Where programs join the cluster, `host:port`; for `ray.init`.

        Raises:
            NotFoundError: no node has been started.
        """
        if self.head_node is None:
            raise NotFoundError("the cluster has no node: call add_node()")
        return self.head_node.address

    gcs_address = address

    def connect(self, namespace: str | None = None) -> Any:
        """Join the cluster by `ray.init`; return its result."""
        return session.init(self.address, namespace=namespace, ignore_reinit_error=True)

    def add_node(self, wait: bool = True, **node_args: Any) -> ClusterNode:
        """Start a node, the first one with the head of the cluster.

        Args:
            wait: taken for Ray's sake: the node has joined at the return.
            **node_args: num_cpus (default, as Ray's: 1), num_gpus (0), object_store_memory (150 MiB), resources,
                labels, memory, node_name; other options of Ray's nodes that change no result.
        Raises:
            UnsupportedError: another option.
            FastrtError: the node does not start.
        """
        self._started += 1
        given = {option: value for option, value in node_args.items() if value is not None}
        name = given.pop("node_name", None) or f"node-{self._started}"
        where = ["--head", "--port", "0"] if self.head_node is None else ["--address", self.address]
        code = _START_FOR_US if self._ends_with_us else _START
        words = [sys.executable, "-c", code, "start", *where, "--name", name, *_words({**_DEFAULTS, **given})]
        runtime_dir = Config.load(num_workers=1, object_store_memory=1 << 26).runtime_dir
        stdin = subprocess.PIPE if self._ends_with_us else subprocess.DEVNULL
        process = subprocess.Popen(words, stdin=stdin, stdout=subprocess.DEVNULL, start_new_session=True)
        about, end = None, time.monotonic() + _START_S
        while about is None and process.poll() is None and time.monotonic() < end:
            time.sleep(0.02)
            about = next((one for one in nodes_here(runtime_dir) if one.pid == process.pid), None)
        if about is None:
            reap(process, 0.0)
            raise FastrtError(f"node {name} did not start; see its error output")
        node = ClusterNode(process, about)
        if self.head_node is None:
            self.head_node = node
        else:
            self.worker_nodes.add(node)
            self.wait_for_nodes()
        return node

    def remove_node(self, node: ClusterNode, allow_graceful: bool = True) -> None:
        """End a node.

        Args:
            node: which one.
            allow_graceful: whether it may finish its tasks and pass its values on; else it is killed.
        Raises:
            ValueError: the node is not of this cluster.
        """
        if node is not self.head_node and node not in self.worker_nodes:
            raise ValueError(f"{node!r} is no node of this cluster")
        node.end(allow_graceful)
        self.worker_nodes.discard(node)
        if node is self.head_node:
            self.head_node = None

    def list_all_nodes(self) -> list[ClusterNode]:
        """Return the nodes that this cluster has started and not removed, the head's first."""
        return [*([] if self.head_node is None else [self.head_node]), *self.worker_nodes]

    def wait_for_nodes(self, timeout: float = 30) -> None:
        """Wait until the head knows exactly the nodes of `list_all_nodes`.

        Raises:
            TimeoutError: it does not in that many seconds.
        """
        if self.head_node is None:
            return
        end, wanted = time.monotonic() + timeout, {node.node_id for node in self.list_all_nodes()}
        while True:
            there = nodes_at(self.head_node.raylet_socket_name)
            if {NodeID.widened(row["NodeID"]).hex() for row in there} == wanted:
                return
            if time.monotonic() > end:
                names = ", ".join(row["NodeName"] for row in there)
                raise TimeoutError(f"after {timeout} s the head knows {names}; {len(wanted)} nodes were started")
            time.sleep(0.02)

    def remaining_processes_alive(self) -> bool:
        """Whether all nodes that were not removed run."""
        return all(node.is_alive() for node in self.list_all_nodes())

    def shutdown(self) -> None:
        """Leave the cluster if this process uses it, and end its nodes, the head's last."""
        if self.list_all_nodes() and is_initialized():
            session.shutdown()
        for node in [*self.worker_nodes, *self.list_all_nodes()[:1]]:
            node.end(graceful=False)
        self.worker_nodes.clear()
        self.head_node = None
        atexit.unregister(self.shutdown)


def _words(node_args: Mapping[str, Any]) -> list[str]:
    """The options of `fastrt start` for those of a node of Ray."""
    words = []
    for name, value in node_args.items():
        if name.startswith("_") or name in _WITHOUT_MEANING or name in session.WITHOUT_MEANING or value == {}:
            continue
        if name not in _OPTIONS:
            raise UnsupportedError(refuse(f"option {name!r} of a node", "it has no such setting"))
        value = session.amount(name, value)
        if name == "labels":
            value = ",".join(f"{key}={one}" for key, one in value.items())
        words += [_OPTIONS[name], json.dumps(value) if name == "resources" else str(value)]
    return words
