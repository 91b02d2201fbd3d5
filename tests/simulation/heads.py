"""Standby heads in the simulator, and their invariant: while a head can be reached, all nodes see the same members."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from fastrt.cluster import head

from .world import Process

if TYPE_CHECKING:
    from .cluster import Cluster
    from .node import Node

LOOK_S = 1.0
AGREE_S = 15.0  # after the last change of heads, nodes and cuts: a standby takes over 3 s after the head was lost
PORT = 7000


def standby_address(node: Node) -> str:
    """The address of a node's standby head; empty: it has none."""
    is_standby = 1 < node.number <= 1 + node.cluster.family.standbys
    return f"10.0.{node.number}.1:{PORT}" if is_standby else ""


def start_standby(node: Node) -> Process | None:
    """Start the standby head of a node, if it has one."""
    address = standby_address(node)
    if not address:
        return None
    process = Process(node.world, node.host, "standby")
    cluster = node.cluster
    process.start(partial(head._serve, address, node.segment.session, cluster.head_address, cluster.access))
    return process


class Agreeing:
    """Looks again and again whether the nodes agree about the members of the cluster.

    Args:
        cluster: the simulated cluster.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._world = cluster, cluster.world
        self._seen: Any = None
        self._since = 0.0
        self._met: set[str] = set()  # nodes that have been in a cluster with others

    def look(self) -> None:
        """Look, and look again later."""
        cluster, world = self._cluster, self._world
        nodes = [node for node in cluster.nodes if node.alive]
        heads = [cluster.head, *(node.standby for node in nodes)]
        there = [one for one in heads if one is not None and one.alive]
        uplinks = [(node, node.uplink.uplink) for node in nodes if node.uplink.uplink is not None]
        self._met |= {node.segment.session for node, one in uplinks if len(one._head.members.reports) > 1}
        # By their ids: the world keeps processes that have ended, and a new uplink can have the slot of the last one.
        processes = [node.uplink.process for node in nodes if node.uplink.process.alive]
        seen = [id(one) for one in (*nodes, *there, *processes)]
        seen += [way for way, count in world.network.cuts.items() if count]
        if seen != self._seen or not there:
            self._seen, self._since = seen, world.now
        elif world.now - self._since > AGREE_S and not any(world.network.cuts.values()):
            if cluster.head is None or not cluster.head.alive:  # one that has met no node knows no standby of another
                nodes = [node for node in nodes if node.segment.session in self._met]
            wanted = {node.segment.session for node in nodes}
            for node in nodes:
                members = set(node.uplink.uplink._head.members.reports)
                if members != wanted:
                    lacks = [one.host for one in nodes if one.segment.session not in members]
                    world.violation(
                        f"{node.host} does not know {lacks}, {len(members - wanted)} of its members are gone"
                    )
        world.after(LOOK_S, self.look)
