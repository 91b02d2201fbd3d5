"""Distributes the parts of a table to servers.

A table is divided into parts once, when it is created. Servers join and leave, and whole parts move between them. A
change moves as few parts as possible while the servers' numbers of parts differ by one at most: with n servers, 1/n of
all parts.
"""

from __future__ import annotations

from collections.abc import Sequence

PART_ELEMENTS_MIN = 1 << 16  # 256 KiB: smaller parts cost more in calls than they gain
PARTS_MAX = 64
PAGE_ELEMENTS = 1024


def divide(elements: int, wanted: int | None) -> list[int]:
    """Choose the boundaries of a dense table's parts.

    Args:
        elements: number of float32 values.
        wanted: number of parts; None chooses it by size.
    Returns:
        Ascending element indexes, one more than there are parts; all but the last one are multiples of a page.
    """
    count = min(PARTS_MAX, elements // PART_ELEMENTS_MIN) if wanted is None else min(wanted, PARTS_MAX)
    pages = -(-elements // PAGE_ELEMENTS)
    count = max(1, min(count, pages))
    return [k * pages // count * PAGE_ELEMENTS for k in range(count)] + [elements]


def assign(parts: int, servers: Sequence[int], first: int = 0) -> list[int]:
    """Choose the first owners of parts. Neighbours stay together; a table of one part goes to server number `first`."""
    order = sorted(servers)
    if parts < len(order):
        return [order[(first + k) % len(order)] for k in range(parts)]
    return [order[k * len(order) // parts] for k in range(parts)]


def rebalance(owners: Sequence[int], servers: Sequence[int]) -> list[int]:
    """Choose owners for a changed set of servers, with as few moves as possible.

    Args:
        owners: the present server of each part.
        servers: the future servers.
    Returns:
        The future server of each part.
    """
    there = sorted(servers)
    least, more = divmod(len(owners), len(there))
    held: dict[int, list[int]] = {server: [] for server in there}
    unassigned = []
    for part, owner in enumerate(owners):
        held[owner].append(part) if owner in held else unassigned.append(part)
    # If the parts cannot be divided evenly, the servers that have the most parts now keep one more.
    ranked = sorted(there, key=lambda server: (-len(held[server]), server))
    wanted = {server: least + (k < more) for k, server in enumerate(ranked)}
    for server in there:
        while len(held[server]) > wanted[server]:
            unassigned.append(held[server].pop())
    unassigned.sort()
    result = list(owners)
    for server in there:
        while len(held[server]) < wanted[server]:
            part = unassigned.pop(0)
            held[server].append(part)
            result[part] = server
    return result
