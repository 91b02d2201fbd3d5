"""`init_group`: from a name, or a coordinator's address, to a group."""

from __future__ import annotations

from typing import TYPE_CHECKING, overload

from fastrt.collective.shared import SharedGroup
from fastrt.store import client as store_client

if TYPE_CHECKING:
    from fastrt.collective.spanning import SpanningGroup


@overload
def init_group(
    *, name: str = ..., rank: int, world_size: int, address: None = ..., timeout: float = ...
) -> SharedGroup: ...
@overload
def init_group(
    *, name: str = ..., rank: int, world_size: int, address: str, timeout: float = ..., node: str | None = ...
) -> SpanningGroup: ...
def init_group(
    *,
    name: str = "default",
    rank: int,
    world_size: int,
    address: str | None = None,
    timeout: float = 30.0,
    node: str | None = None,
) -> SharedGroup | SpanningGroup:
    """Join a group of processes that work on arrays together; returns when all of them have joined.

    Without an address, the processes find each other by the name alone, on one machine and as one user; no other
    process is needed. In tasks, and in a driver, a name belongs to the session of fastrt; elsewhere, to the user.
    With an address, they may be on any machines that reach each other; those of one machine share memory.

    Args:
        name: what all call the group. When it has been made, the name can be used again.
        rank: this process's number, from 0.
        world_size: how many they are.
        address: `host:port` of a coordinator (`fastrt coordinator`), for ranks on several machines.
        timeout: how long to wait for the others, here and by default in every operation, in seconds.
        node: with an address: which processes share memory with this one, namely those that say the same; by default
            those of the same machine, user and network namespace.
    Returns:
        The group; end it with `destroy`, or use it with `with`.
    Raises:
        ValueError: the rank is out of range.
        CollectiveTimeout: the others did not all come in time; the message names the missing.
        CollectiveMismatch: two have the same rank, or they disagree about the group.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} in a group of {world_size}")
    return join_group(name, rank, world_size, address, timeout, node, name)


def join_group(
    meeting: str, rank: int, world_size: int, address: str | None, timeout: float, node: str | None, name: str
) -> SharedGroup | SpanningGroup:
    """What `init_group` does, for ranks that meet under another name than the group's own.

    Raises:
        ValueError: a node, and no address.
    """
    if address is not None:
        from fastrt.collective.assembly import node_identity  # gRPC: only who needs it pays for the import
        from fastrt.collective.spanning import SpanningGroup

        identity = node_identity() if node is None else node
        return SpanningGroup.join(address, meeting, rank, world_size, timeout, identity, name)
    if node is not None:
        raise ValueError("node= is for groups with an address=")
    store = store_client.current()
    session = "" if store is None else store.client.segment.session
    return SharedGroup.join(f"{session}/{meeting}", rank, world_size, timeout, name)
