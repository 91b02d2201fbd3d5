"""The lines that tasks print, between the daemons of two nodes: sent to where their drivers are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fastrt.cluster.jobs import Jobs, node_of
from fastrt.cluster.peer import Peer
from fastrt.net.grpc.descriptors import message_set
from fastrt.store import join, messages

_Output = message_set("node").message("fastrt.node.Output")
_QUEUED_BYTES_MAX = 1 << 20  # queued for one node
_TEXT_MAX = 170_000  # bytes of one message to the daemon, which is at most 1 MiB of JSON


class OutputOfTasks:
    """Sends the output of tasks to other nodes, and passes that of theirs to this node's drivers.

    Args:
        name: of this node.
        peers: the other nodes, as they are at any time.
        connect: begins to connect to one.
        daemon: the connection to this node's daemon.
        jobs: the jobs of other nodes whose tasks run here.
    """

    def __init__(
        self,
        name: str,
        peers: Mapping[str, Peer],
        connect: Callable[[Peer], None],
        daemon: join.Lasting,
        jobs: Jobs,
    ) -> None:
        self._name, self._peers, self._connect, self._daemon, self._jobs = name, peers, connect, daemon, jobs

    def on_output(self, message: messages.TaskOutput) -> None:
        """Send a task's output to the node of its driver, or to all nodes if its job is unknown.

        A node gets it if it has sent tasks or calls here, or has drivers that read output.
        """
        job = self._jobs.name(message.job)
        node = node_of(job)
        here = self._jobs.here(job)
        if here:  # its task has been on another node
            text = "".join(f"({message.source}) {line}\n" for line in message.lines)
            self._daemon.send(messages.RemoteOutput(here, text, message.is_error, message.is_update))
            return
        prefix = f"({message.source}, node={self._name}) "
        text = "".join(f"{prefix}{line}\n" for line in message.lines)
        output = _Output(text=text, error=message.is_error, update=message.is_update, job=job)
        for peer in [self._peers[node]] if node in self._peers else () if node else self._peers.values():
            if (peer.report is not None and peer.report.reads_output) or (peer.exchange and peer.exchange.has_run):
                peer.output.append(output)
                self.send(peer)

    def send(self, peer: Peer) -> None:
        """Send the output that waits for a peer."""
        if peer.exchange is None:
            self._connect(peer)
            return
        while peer.output and peer.is_open and peer.exchange.out.nbytes < _QUEUED_BYTES_MAX:
            output = peer.output.popleft()
            peer.exchange.out.add("output", output, len(output.text))

    def pass_to_drivers(self, message: Any) -> None:
        """Pass the output of a task on another node to the daemon.

        Raises:
            PeerError: the message names no job.
        """
        job = self._jobs.here(message.job)
        if job is None:
            return
        text = message.text.encode()[:_TEXT_MAX].decode("utf-8", "ignore")
        self._daemon.send(messages.RemoteOutput(job, text, message.error, message.update))
