"""Chooses a node for each bundle of a placement group: a pure function of the free resources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fastrt.tasks.resources import CPU, Amounts


def assign(
    bundles: Sequence[Amounts], rooms: Mapping[str, Mapping[str, int]], strategy: str, taken: Sequence[str] = ()
) -> list[str] | None:
    """Choose a node for each bundle.

    Args:
        bundles: the amounts that each takes.
        rooms: the free amounts on each node.
        strategy: PACK: on as few nodes as will do; SPREAD: on as many; STRICT_PACK: on one; STRICT_SPREAD: on as many
            as there are bundles.
        taken: the nodes of the group's other bundles.
    Returns:
        A node for each bundle; None when there is no room for all.
    Source:
        The strategies of `ray.util.placement_group`.
    """
    left = {node: dict(room) for node, room in rooms.items()}
    chosen = [""] * len(bundles)
    used = list(taken)
    for k in sorted(range(len(bundles)), key=lambda k: _ease(bundles[k])):
        able = [node for node, room in left.items() if _fits(bundles[k], room)]
        if strategy == "STRICT_PACK" and used:
            able = [node for node in able if node == used[0]]
        elif strategy == "STRICT_PACK":
            able = [node for node in able if _all_fit(bundles, left[node])]
        elif strategy == "STRICT_SPREAD":
            able = [node for node in able if node not in used]
        if not able:
            return None
        spread = strategy in ("SPREAD", "STRICT_SPREAD")
        chosen[k] = min(
            able, key=lambda node: (used.count(node) if spread else node not in used, -left[node].get(CPU, 0))
        )
        used.append(chosen[k])
        _take(bundles[k], left[chosen[k]])
    return chosen


def _ease(bundle: Amounts) -> tuple[bool, int]:
    """Sort key: bundles that are hard to place come first: those that need more than CPUs, then large ones."""
    return all(name == CPU for name, _ in bundle), -sum(parts for _, parts in bundle)


def _fits(bundle: Amounts, room: Mapping[str, int]) -> bool:
    return all(room.get(name, 0) >= parts for name, parts in bundle)


def _take(bundle: Amounts, room: dict[str, int]) -> None:
    for name, parts in bundle:
        room[name] -= parts


def _all_fit(bundles: Sequence[Amounts], room: Mapping[str, int]) -> bool:
    left = dict(room)
    for bundle in bundles:
        if not _fits(bundle, left):
            return False
        _take(bundle, left)
    return True
