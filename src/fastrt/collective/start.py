"""`init_group`: makes a group from a name, or from a coordinator's address and a token."""

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
    *,
    name: str = ...,
    rank: int,
    world_size: int,
    address: str,
    timeout: float = ...,
    node: str | None = ...,
    token: str | None = ...,
    insecure: bool = ...,
) -> SpanningGroup: ...
def init_group(
    *,
    name: str = "default",
    rank: int,
    world_size: int,
    address: str | None = None,
    timeout: float = 30.0,
    node: str | None = None,
    token: str | None = None,
    insecure: bool = False,
) -> SharedGroup | SpanningGroup:
    """Join a group of processes that work on arrays together; returns when all of them have joined.

    Without an address, the processes find each other by the name alone, on one machine and as one user; no other
    process is needed. In tasks, and in a driver, a name belongs to the session of fastrt; elsewhere, to the user.
    With an address, they may be on any machines that reach each other; those of one machine share memory. Any process
    can read and write in a coordinator, so the ranks prove a secret to each other that is not there: the token.

    Args:
        name: what all call the group. When it has been made, the name can be used again.
        rank: this process's number, from 0.
        world_size: how many they are.
        address: `host:port` of a coordinator (`fastrt coordinator`), for ranks on several machines.
        timeout: how long to wait for the others, here and by default in every operation, in seconds.
        node: with an address: which processes share memory with this one, namely those that say the same; by default
            those of the same machine, user and network namespace.
        token: with an address: the secret of the ranks, the same for all: of `new_token()`, or a cluster's. By default
            it is read from the file that FASTRT_TOKEN_FILE names.
        insecure: with an address: do not encrypt connections between machines. They are authenticated all the same.
    Returns:
        The group; end it with `destroy`, or use it with `with`.
    Raises:
        ValueError: the rank is out of range, or an argument needs an address.
        ConfigError: there is an address and no token, or a damaged one.
        CollectiveTimeout: the others did not all come in time; the message names the missing.
        CollectiveMismatch: two have the same rank, or they disagree about the group.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} in a group of {world_size}")
    return join_group(name, rank, world_size, address, timeout, node, name, token, insecure)


def join_group(
    meeting: str,
    rank: int,
    world_size: int,
    address: str | None,
    timeout: float,
    node: str | None,
    name: str,
    token: str | None,
    insecure: bool,
) -> SharedGroup | SpanningGroup:
    """Do what `init_group` does, for ranks that meet under another name than the group's own.

    Raises:
        ValueError: an argument needs an address, and there is none.
        ConfigError: see `init_group`.
    """
    if address is not None:
        from fastrt.collective.access import find_access
        from fastrt.collective.spanning import SpanningGroup
        from fastrt.collective.tcp_rendezvous import node_identity  # gRPC: only who needs it pays for the import

        identity = node_identity() if node is None else node
        access = find_access(name, token, insecure)
        return SpanningGroup.join(address, meeting, rank, world_size, timeout, identity, access, name)
    if node is not None or token is not None or insecure:
        raise ValueError("node=, token= and insecure= are for groups with an address=")
    store = store_client.current()
    session = "" if store is None else store.client.segment.session
    return SharedGroup.join(f"{session}/{meeting}", rank, world_size, timeout, name)
