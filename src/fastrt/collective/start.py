"""`init_group`: joins a group by a name, or by a coordinator's address and a token."""

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
@overload
def init_group(
    *,
    name: str = ...,
    rank: int,
    world_size: int,
    address: str | None,
    timeout: float = ...,
    node: str | None = ...,
    token: str | None = ...,
    insecure: bool = ...,
) -> SharedGroup | SpanningGroup: ...
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

    Without an address, the processes find each other by the name alone, on one machine and as one user, without another
    process. In tasks, and in a driver, a name belongs to the fastrt session; elsewhere, to the user. With an address
    the processes may be on any machines that can reach each other; those of one machine share memory. Any process can
    read and write a coordinator's keys, so the ranks prove a secret to each other that the coordinator does not have:
    the token.

    Args:
        name: the common name of the group. It can be used again once the group has been made.
        rank: this process's number, from 0.
        world_size: number of ranks.
        address: `host:port` of a coordinator (`fastrt coordinator`), for ranks on several machines.
        timeout: how long to wait for the other ranks, here and by default in every operation, in seconds.
        node: with an address: processes with the same value share memory; default: those of the same machine, user and
            network namespace.
        token: with an address: the secret of the ranks, the same for all, from `new_token()` or a cluster. Default: it
            is read from the file that FASTRT_TOKEN_FILE names.
        insecure: with an address: do not encrypt connections between machines. They are still authenticated.
    Returns:
        The group; end it with `destroy`, or use it with `with`.
    Raises:
        ValueError: the rank is out of range, or an argument needs an address.
        ConfigError: there is an address and no token, or the token is damaged.
        CollectiveTimeout: not all ranks came in time; the message names the missing ones.
        CollectiveMismatch: two processes have the same rank, or the ranks disagree about the group.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"there is no rank {rank} in a group of {world_size}")
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
    """Join a group like `init_group`, but meet under another name than the group's.

    Raises:
        ValueError: an argument needs an address.
        ConfigError: see `init_group`.
    """
    if address is not None:
        from fastrt.collective.access import find_access
        from fastrt.collective.spanning import SpanningGroup
        from fastrt.collective.tcp_rendezvous import node_identity  # imports gRPC, which other groups do not need

        identity = node_identity() if node is None else node
        access = find_access(name, token, insecure)
        return SpanningGroup.join(address, meeting, rank, world_size, timeout, identity, access, name)
    if node is not None or token is not None or insecure:
        raise ValueError("node=, token= and insecure= need an address=")
    store = store_client.current()
    session = "" if store is None else store.client.segment.session
    return SharedGroup.join(f"{session}/{meeting}", rank, world_size, timeout, name)
