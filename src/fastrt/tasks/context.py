"""`fastrt.runtime_context()`: the session, process, task and actor that code runs in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fastrt import devices
from fastrt._core.objects import handles
from fastrt._core.tasks import actors, admission
from fastrt._core.tasks import tasks as core
from fastrt.store import client as store_client
from fastrt.store import engine as engines
from fastrt.store.client import Store
from fastrt.store.ref import ObjectRef
from fastrt.tasks import namespaces
from fastrt.tasks.resources import GPU, ONE_CPU, Demand, by_name


@dataclass(frozen=True)
class RuntimeContext:
    """The session, process, task and actor of the code that asked for it. Made by `runtime_context`.

    Its methods are those of Ray's context.

    Attributes:
        job_id: of the driver that the task runs for.
        node_id: as `fastrt.nodes()` has it.
        worker_id: of this process in its session.
        task_id: of the task or call that runs here; None in a driver.
        task_name: its name; None in a driver.
        actor_id: of the actor in whose process the code runs; None elsewhere.
        actor_name: the name that it was given; None where it was not.
        restarts: how often the actor's instance was built again.
        attempt: runs of the task before this one.
        assigned_resources: the resources of the task while it runs, or of the actor while it lives, by the names of
            the request, also where they come from a placement group.
        namespace: of names of actors; empty: the session's default.
        accelerator_ids: the devices of the task or actor by their resource, such as {"GPU": ["0"]}, by the names that
            they have in CUDA_VISIBLE_DEVICES and the like.
    """

    job_id: str
    node_id: str
    worker_id: str
    task_id: str | None
    task_name: str | None
    actor_id: str | None
    actor_name: str | None
    restarts: int = 0
    attempt: int = 0
    assigned_resources: dict[str, float] = field(default_factory=dict)
    namespace: str = ""
    accelerator_ids: dict[str, list[str]] = field(default_factory=dict)

    def get_job_id(self) -> str:
        """Return `job_id`."""
        return self.job_id

    def get_node_id(self) -> str:
        """Return `node_id`."""
        return self.node_id

    def get_worker_id(self) -> str:
        """Return `worker_id`."""
        return self.worker_id

    def get_task_id(self) -> str | None:
        """Return `task_id`."""
        return self.task_id

    def get_task_name(self) -> str | None:
        """Return `task_name`."""
        return self.task_name

    def get_actor_id(self) -> str | None:
        """Return `actor_id`."""
        return self.actor_id

    def get_actor_name(self) -> str | None:
        """Return `actor_name`."""
        return self.actor_name

    def get_assigned_resources(self) -> dict[str, float]:
        """Return `assigned_resources`."""
        return self.assigned_resources

    def get_accelerator_ids(self) -> dict[str, list[str]]:
        """Return `accelerator_ids`."""
        return self.accelerator_ids

    @property
    def was_current_actor_reconstructed(self) -> bool:
        """Whether the actor's instance is not its first."""
        return self.restarts > 0


def runtime_context() -> RuntimeContext:
    """Return the session, process, task and actor that this code runs in.

    Returns:
        The context as it is now; it does not change when the task ends.
    Source:
        The semantics of `ray.get_runtime_context`.
    """
    other = engines.current()
    return RuntimeContext(**other.facts() if other is not None else _facts(store_client.require()))


get_runtime_context = runtime_context  # as Ray spells it


def get_gpu_ids() -> list[int | str]:
    """Return the GPUs of the task or actor that calls this.

    Returns:
        Their names in CUDA_VISIBLE_DEVICES or the like; indexes are numbers. Nothing in a driver.
    Source:
        The semantics of `ray.get_gpu_ids`.
    """
    names = runtime_context().accelerator_ids.get(GPU, [])
    return [int(name) if name.isdigit() else name for name in names]


def _facts(store: Store) -> dict[str, Any]:
    client = store.client
    task, actor = store.task_here(), store.actor_here
    facts: dict[str, Any] = {
        "job_id": f"{client.working_job or client.job:016x}",  # a thread of a task is in the task's job
        "node_id": client.segment.session,  # a node has one session, and its name in the cluster
        "worker_id": f"{client.segment.session}{client.index:04x}{client.gen:08x}",
        "task_id": None,
        "task_name": None,
        "actor_id": None,
        "actor_name": None,
        "namespace": namespaces.here(),
    }
    if actor is not None:
        about = actors.info(client, actor)
        facts |= {"actor_id": store.actor_id, "actor_name": namespaces.split(about["name"])[1] or None}
        facts["restarts"] = about["restarts"]
        if store.actor_job:  # until a call says better
            facts["job_id"] = f"{store.actor_job:016x}"
        facts["accelerator_ids"] = _named(store, about["devices"])
        if about["demand"] is not None:
            facts["assigned_resources"] = _demanded(store, handles.acquire(client, *about["demand"]))
    if task is not None:
        info = core.info(client, task)
        facts |= {"task_id": f"{info['path']:016x}", "attempt": info["attempts"] - 1, "job_id": f"{info['job']:016x}"}
        facts["task_name"] = store.task_name(task)
        if actor is None:
            ref = admission.demand_of(client, task, info["id"])
            facts["assigned_resources"] = by_name(ONE_CPU) if ref is None else _demanded(store, ref)
            facts["accelerator_ids"] = _named(store, admission.devices_of(client, task, info["id"]))
    facts.setdefault("accelerator_ids", _named(store, 0))
    return facts


def _named(store: Store, bits: int) -> dict[str, list[str]]:
    chosen = devices.of_bits(store.devices, bits)
    return {kind: [one.name for one in chosen if one.resource == kind] for kind in devices.RESOURCES}


def _demanded(store: Store, ref: ObjectRef) -> dict[str, float]:
    return by_name(Demand.from_bytes(store.get(ref)).amounts)
