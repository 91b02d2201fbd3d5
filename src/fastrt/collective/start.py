"""`init_group`: from a name, or a coordinator's address, to a group."""

from __future__ import annotations

from fastrt.collective.shared import SharedGroup
from fastrt.store import client as store_client


def init_group(
    *,
    name: str = "default",
    rank: int,
    world_size: int,
    timeout: float = 30.0,
) -> SharedGroup:
    """Join a group of processes that work on arrays together; returns when all of them have joined.

    The processes find each other by the name alone, on one machine and as one user; no other process is needed. In
    tasks, and in a driver, a name belongs to the session of fastrt; elsewhere, to the user.

    Args:
        name: what all call the group. When it has been made, the name can be used again.
        rank: this process's number, from 0.
        world_size: how many they are.
        timeout: how long to wait for the others, here and by default in every operation, in seconds.
    Returns:
        The group; end it with `destroy`, or use it with `with`.
    Raises:
        ValueError: the rank is out of range.
        CollectiveTimeout: the others did not all come in time; the message names the missing.
        CollectiveMismatch: two have the same rank, or they disagree about the group.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} in a group of {world_size}")
    store = store_client.current()
    session = "" if store is None else store.client.segment.session
    return SharedGroup.join(f"{session}/{name}", rank, world_size, timeout, name)
