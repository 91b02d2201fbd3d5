"""`ray.runtime_context`: the context of the code that asks for it, with all members of Ray's."""

from __future__ import annotations

import json
import os
import warnings
from typing import Any

from fastrt._core.objects import handles
from fastrt._core.repair import inspect
from fastrt._core.tasks import actors
from fastrt._core.tasks import tasks as core
from fastrt.errors import FastrtError, NotInitializedError
from fastrt.ids import ActorID, JobID, NodeID, PlacementGroupID, TaskID, WorkerID
from fastrt.ray.cluster import nodes
from fastrt.ray.util.annotations import RayDeprecationWarning
from fastrt.runtime import driver
from fastrt.store import client as store_client
from fastrt.store import engine as engines
from fastrt.tasks import context, runtime_env
from fastrt.tasks.actor_handle import ActorHandle
from fastrt.tasks.functions import inner_name
from fastrt.tasks.placement_group import get_current_placement_group

__all__ = ["RuntimeContext", "get_runtime_context"]

_ONLY_IN_WORKERS = "This method is only available when the process is a worker."
_WITHOUT_DEVICES = ("FURIOSA", "MBLT", "RBLN", "TTNPU")  # resources of accelerators that fastrt does not assign


class RuntimeContext:
    """The session, process, task and actor of the code that runs. Made by `get_runtime_context`."""

    @property
    def _now(self) -> context.RuntimeContext:
        return context.runtime_context()

    def get(self) -> dict[str, Any]:
        """Return ids of the job and the node, the namespace, and those of the task and the actor where there are."""
        job, node = JobID(self.get_job_id()), NodeID(self.get_node_id())
        found: dict[str, Any] = {"job_id": job, "node_id": node, "namespace": self.namespace}
        task, actor = self.get_task_id(), self.get_actor_id()
        if task is not None:
            found["task_id"] = TaskID(task)
        if actor is not None:
            found["actor_id"] = ActorID(actor)
        return found

    @property
    def job_id(self) -> JobID:
        """The id of the driver that the code runs for."""
        _warn("get_job_id")
        return JobID(self.get_job_id())

    @property
    def node_id(self) -> NodeID:
        """The id of the node."""
        _warn("get_node_id")
        return NodeID(self.get_node_id())

    @property
    def task_id(self) -> TaskID:
        """The id of the task or call that runs here.

        Raises:
            OnlyInWorkersError: this is a driver.
        """
        _warn("get_task_id")
        _check_worker(self._now)
        found = self.get_task_id()
        return TaskID.nil() if found is None else TaskID(found)

    @property
    def actor_id(self) -> ActorID | None:
        """The id of the actor in whose process the code runs; None in a task.

        Raises:
            OnlyInWorkersError: this is a driver.
        """
        _warn("get_actor_id")
        _check_worker(self._now)
        found = self.get_actor_id()
        return None if found is None else ActorID(found)

    @property
    def namespace(self) -> str:
        """The namespace of actors' names."""
        return self._now.namespace

    @property
    def was_current_actor_reconstructed(self) -> bool:
        """Whether the actor's instance is not its first.

        Raises:
            OnlyInWorkersError: this is no actor's process.
        """
        now = self._now
        _check_worker(now)
        if now.actor_id is None:
            raise OnlyInWorkersError("This method shouldn't be called inside Ray tasks.")
        return now.was_current_actor_reconstructed

    @property
    def current_actor(self) -> ActorHandle:
        """A handle of the actor in whose process the code runs.

        Raises:
            RuntimeError: it is no actor's process.
        """
        store = store_client.require()
        if store.actor_here is None:
            raise RuntimeError("This method is only available in an actor.")
        ref = handles.acquire(store.client, *actors.info(store.client, store.actor_here)["object"])
        return ActorHandle(ref)

    @property
    def current_placement_group_id(self) -> PlacementGroupID:
        """The id of the placement group of the task or actor; nil where there is none."""
        _warn("get_placement_group_id")
        found = self.get_placement_group_id()
        return PlacementGroupID.nil() if found is None else PlacementGroupID(found)

    @property
    def should_capture_child_tasks_in_placement_group(self) -> bool:
        """Whether tasks that are submitted here run in the placement group, too."""
        return runtime_env.captured() is not None

    @property
    def runtime_env(self) -> dict[str, Any]:
        """The environment of this process, as it was given."""
        here = runtime_env.current()
        if here is None:
            return {}
        given = {name: getattr(here, name) for name in ("env_vars", "working_dir", "py_modules", "import_paths")}
        return {name: dict(v) if name == "env_vars" else v for name, v in given.items() if v is not None}

    @property
    def gcs_address(self) -> str:
        """The address of the session: the socket of this node's daemon."""
        return store_client.require().socket_path

    def get_job_id(self) -> str:
        """Return the hex digits of `job_id`.

        Raises:
            NotInitializedError: there is no session.
        """
        _check_session("Job ID")
        if engines.current() is not None:
            return JobID.from_int(1).hex()  # the process has one job
        return JobID.of_job(int(self._now.job_id, 16)).hex()

    def get_node_id(self) -> str:
        """Return the hex digits of `node_id`.

        Raises:
            NotInitializedError: there is no session.
        """
        _check_session("Node ID")
        return NodeID.widened(self._now.node_id).hex()

    def get_worker_id(self) -> str:
        """Return the id of this process.

        Raises:
            NotInitializedError: there is no session.
        """
        _check_session("Worker ID")
        return WorkerID.widened(self._now.worker_id).hex()

    def get_task_id(self) -> str | None:
        """Return the id of the task or call that runs here; None in a driver. Its result has the same `task_id()`."""
        now = self._now
        if now.task_id is None:
            return None
        if engines.current() is not None:
            return TaskID.widened(now.task_id).hex()
        store = store_client.require()
        task = store.task_here()
        assert task is not None
        number = core.info(store.client, task)["id"]
        results = next((row["returns"] for row in inspect.tasks(store.client) if row["id"] == number), ())
        return TaskID.widened(f"{results[0]:016x}" if results else now.task_id).hex()

    def get_task_name(self) -> str | None:
        """Return the name of the task that runs here; None in a driver."""
        found = self._now.task_name
        return None if found is None else inner_name(found)

    def get_task_function_name(self) -> str | None:
        """Return the name, with its module, of the function of the task that runs here; None in a driver."""
        if engines.current() is not None:
            return self.get_task_name()
        store = store_client.require()
        task = store.task_here()
        return None if task is None else store.function_name(task)

    def get_actor_id(self) -> str | None:
        """Return the id of the actor in whose process the code runs; None elsewhere."""
        found = self._now.actor_id
        return None if found is None else ActorID.widened(found).hex()

    def get_actor_name(self) -> str | None:
        """Return the name of that actor; "" if it has none, None outside of actors."""
        now = self._now
        return None if now.actor_id is None else now.actor_name or ""

    def get_placement_group_id(self) -> str | None:
        """Return the id of the placement group of the task or actor; None where there is none."""
        group = get_current_placement_group()
        return None if group is None else group.id

    def get_assigned_resources(self) -> dict[str, float]:
        """Return the resources of the task or the actor.

        Raises:
            OnlyInWorkersError: this is a driver.
        """
        now = self._now
        _check_worker(now)
        return now.assigned_resources

    def get_runtime_env_string(self) -> str:
        """Return `runtime_env` as JSON."""
        return json.dumps(self.runtime_env)

    def get_session_name(self) -> str:
        """Return the name of the session's folder."""
        return os.path.basename(os.path.dirname(self.gcs_address))

    def get_temp_dir(self) -> str:
        """Return the folder that has the session's folder."""
        return os.path.dirname(os.path.dirname(self.gcs_address))

    def get_dashboard_url(self) -> str:
        """Return "": Ray's dashboard is not part of fastrt, and `fastrt dashboard` prints the address of fastrt's."""
        return ""

    def get_accelerator_ids(self) -> dict[str, list[str]]:
        """Return the devices of the task or actor by their resource, such as GPU."""
        return {**{name: [] for name in _WITHOUT_DEVICES}, **self._now.accelerator_ids}

    def get_resource_ids(self) -> dict[str, list[str]]:
        """Return as `get_accelerator_ids`, which replaced it."""
        _warn("get_accelerator_ids")
        return self.get_accelerator_ids()

    def get_node_labels(self) -> dict[str, str]:
        """Return the labels of this node."""
        return dict(nodes()[0]["Labels"])

    def is_canceled(self) -> bool:
        """Whether the task that runs here was cancelled.

        Raises:
            RuntimeError: this is a driver, or an actor with coroutine methods.
        """
        import asyncio  # here: programs without an event loop need not load it

        store = store_client.require()
        task = store.task_here()
        if task is None:
            raise RuntimeError(f"{_ONLY_IN_WORKERS} Current mode: 0")
        if store.actor_here is not None and asyncio._get_running_loop() is not None:
            raise RuntimeError("This method is not supported in an async actor.")
        return bool(core.cancelled(store.client, task))


class OnlyInWorkersError(FastrtError, AssertionError):
    """A driver has asked for what only the code of a task or an actor has. Call it there, or the `get_` method."""


def _check_worker(now: context.RuntimeContext) -> None:
    if now.task_id is None and now.actor_id is None and driver.has_session():
        raise OnlyInWorkersError(f"{_ONLY_IN_WORKERS} Current mode: 0")


def _check_session(what: str) -> None:
    if not driver.is_initialized():
        raise NotInitializedError(f"{what} is not available because Ray has not been initialized.")


def _warn(name: str) -> None:
    warnings.warn(f"Use {name}() instead", RayDeprecationWarning, stacklevel=3)


def get_runtime_context() -> RuntimeContext:
    """Return the context of this process; its members answer for the code that reads them.

    A program without a session gets one, as by `ray.init()`.

    Source:
        The semantics of `ray.get_runtime_context`.
    """
    if engines.current() is None:
        store_client.require()
    return RuntimeContext()
