"""The resources of a node: all of them, and the free ones."""

from __future__ import annotations

from collections.abc import Mapping

from fastrt._core.memory.clients import KIND_WORKER, Client, table
from fastrt.config import RESOURCE_PARTS, Config
from fastrt.net.address import own_address
from fastrt.tasks.resources import CPU, HEAD, MEMORY, NODE, STORE_MEMORY, parts_of

_ACCELERATORS = {"neuron_cores": "accelerator_type:aws-neuron-core"}  # there is one type of these


def resources_of(config: Config, is_head: bool) -> dict[str, int]:
    """Return the parts of a node's resources by name, with those that each node has under names of Ray.

    Args:
        config: the node's settings.
        is_head: whether it is the node with the head, or not in a cluster.
    """
    amounts: dict[str, float] = {CPU: config.num_workers, MEMORY: config.memory}
    amounts |= {STORE_MEMORY: config.object_store_memory, NODE + own_address(): 1}
    amounts |= {accelerator: 1 for resource, accelerator in _ACCELERATORS.items() if config.resources.get(resource)}
    return dict(parts_of({**amounts, **({HEAD: 1} if is_head else {}), **config.resources}))


def free_of(client: Client, total: Mapping[str, int], free: Mapping[str, int], admitted: int) -> dict[str, int]:
    """Free amounts of a node, less the CPUs that tasks without demands take.

    Args:
        client: an attachment to its session.
        total: all amounts of the node.
        free: amounts that are not used by tasks with demands.
        admitted: the number of admitted tasks with demands.
    """
    rows = [row for row in table(client.segment) if row["kind"] == KIND_WORKER]
    busy = sum(row["task"] is not None and not row["blocked"] for row in rows)
    left = dict(free)
    if CPU in left:
        left[CPU] = min(left[CPU], total[CPU]) - max(0, busy - admitted) * RESOURCE_PARTS
    return {name: max(0, parts) for name, parts in left.items()}
