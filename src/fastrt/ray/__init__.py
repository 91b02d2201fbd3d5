"""The names of Ray's core, mapped to fastrt's: `import fastrt.ray as ray`, or `python -m fastrt.ray program.py`.

Functions and classes are fastrt's own, so calls cost the same. Names of Ray that fastrt has not raise an
`UnsupportedError` that names them. `docs/ray_names.md` lists all.
"""

from __future__ import annotations

import importlib
from typing import Any

from fastrt.ids import (
    ActorClassID,
    ActorID,
    FunctionID,
    JobID,
    NodeID,
    PlacementGroupID,
    TaskID,
    UniqueID,
    WorkerID,
)
from fastrt.ray import actor, exceptions, refusals, runtime_context, util
from fastrt.ray.calls import get_actor, remote, wait
from fastrt.ray.cluster import available_resources, cluster_resources, nodes
from fastrt.ray.logs import LoggingConfig
from fastrt.ray.runtime_context import get_runtime_context
from fastrt.ray.session import COMMIT as __commit__
from fastrt.ray.session import VERSION as __version__
from fastrt.ray.session import init, shutdown
from fastrt.runtime.driver import is_initialized
from fastrt.store.client import get, put
from fastrt.store.generator import ObjectRefGenerator
from fastrt.store.ref import ObjectRef
from fastrt.tasks.actor_handle import kill
from fastrt.tasks.cancel import cancel
from fastrt.tasks.context import get_gpu_ids
from fastrt.tasks.method import method

ObjectID = ObjectRef
DynamicObjectRefGenerator = list  # the value of num_returns="dynamic" is a list of references here
SCRIPT_MODE, WORKER_MODE, LOCAL_MODE = 0, 1, 2

__all__ = [
    "ActorClassID",
    "ActorID",
    "DynamicObjectRefGenerator",
    "FunctionID",
    "JobID",
    "LOCAL_MODE",
    "LoggingConfig",
    "NodeID",
    "ObjectID",
    "ObjectRef",
    "ObjectRefGenerator",
    "PlacementGroupID",
    "SCRIPT_MODE",
    "TaskID",
    "UniqueID",
    "WORKER_MODE",
    "WorkerID",
    "__commit__",
    "__version__",
    "actor",
    "available_resources",
    "cancel",
    "cluster_resources",
    "exceptions",
    "get",
    "get_actor",
    "get_gpu_ids",
    "get_runtime_context",
    "init",
    "is_initialized",
    "kill",
    "method",
    "nodes",
    "put",
    "remote",
    "runtime_context",
    "shutdown",
    "timeline",
    "util",
    "wait",
]

_MODULES = (
    "_private",
    "_raylet",
    "autoscaler",
    "cloudpickle",
    "dag",
    "data",
    "experimental",
    "job_config",
    "remote_function",
    "runtime_env",
    "types",
)


def timeline(filename: str | None = None) -> Any:
    """Return the session's timeline as `fastrt.timeline` does, or write it to a file.

    Args:
        filename: of the file; None: the events are returned.
    """
    from fastrt.observe.timeline import timeline as events

    found = events(filename)
    return found if filename is None else None


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise refusals.missing(__name__, name)
