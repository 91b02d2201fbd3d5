"""Which server has which part of a table.

A table is divided into parts once, when it is made; servers come and go, and parts move between them whole. A change
moves as few as there can be while no server has more than one part more than another: with n servers, 1/n of them.
"""

from __future__ import annotations

from collections.abc import Sequence

PART_ELEMENTS_MIN = 1 << 16  # 256 KiB: smaller ones cost more calls than they save
PARTS_MAX = 64
PAGE_ELEMENTS = 1024


def divide(elements: int, wanted: int | None) -> list[int]:
    """Where the parts of a dense table begin, and where the last one ends.

    Args:
        elements: how many float32 there are.
        wanted: how many parts; None chooses by size.
    Returns:
        Ascending element indexes, one more than there are parts; all but the last are multiples of a page.
    """
    count = min(PARTS_MAX, elements // PART_ELEMENTS_MIN) if wanted is None else min(wanted, PARTS_MAX)
    pages = -(-elements // PAGE_ELEMENTS)
    count = max(1, min(count, pages))
    return [k * pages // count * PAGE_ELEMENTS for k in range(count)] + [elements]


def assign(parts: int, servers: Sequence[int], first: int = 0) -> list[int]:
    """The first owners of parts: neighbours stay together; a table of one part goes to the server `first` names."""
    order = sorted(servers)
    if parts < len(order):
        return [order[(first + k) % len(order)] for k in range(parts)]
    return [order[k * len(order) // parts] for k in range(parts)]


def rebalance(owners: Sequence[int], servers: Sequence[int]) -> list[int]:
    """New owners for other servers, with as few moves as possible.

    Args:
        owners: the server of each part now.
        servers: those that there are to be.
    Returns:
        The server of each part.
    """
    there = sorted(servers)
    least, more = divmod(len(owners), len(there))
    held: dict[int, list[int]] = {server: [] for server in there}
    homeless = []
    for part, owner in enumerate(owners):
        held[owner].append(part) if owner in held else homeless.append(part)
    # Those that have the most keep the parts that are left over.
    ranked = sorted(there, key=lambda server: (-len(held[server]), server))
    wanted = {server: least + (k < more) for k, server in enumerate(ranked)}
    for server in there:
        while len(held[server]) > wanted[server]:
            homeless.append(held[server].pop())
    homeless.sort()
    result = list(owners)
    for server in there:
        while len(held[server]) < wanted[server]:
            part = homeless.pop(0)
            held[server].append(part)
            result[part] = server
    return result
