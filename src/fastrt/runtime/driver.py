"""`init` and `shutdown`, and the one runtime that this process uses."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from fastrt.config import Config, read_resources
from fastrt.errors import ConfigError, FastrtError, NotInitializedError
from fastrt.runtime.foreign import RAY, kind_of, start_foreign
from fastrt.runtime.nodefile import find_node
from fastrt.runtime.nodes import nodes_at
from fastrt.runtime.session import Attached, Runtime, start
from fastrt.store import client as store_client
from fastrt.store import engine as engines
from fastrt.store import job_folders, waiter
from fastrt.store.client import Store
from fastrt.tasks import namespaces
from fastrt.tasks.runtime_env import Environment, environment_of, set_current

ADDRESS = "FASTRT_ADDRESS"  # set by `fastrt run` for the program, also by hand
_STORE_BYTES_ANY = 64 << 20  # small, so that a machine without room for a second store can still join its node's
# Options of `ray.init` that have no meaning here and change no result.
_RAY_ONLY = ("include_dashboard", "dashboard_host", "dashboard_port", "configure_logging", "logging_level")

# Settings that a program has of its own when it uses a node that runs already; all others are the node's.
_OF_PROGRAMS = (
    *("runtime_dir", "log_to_driver", "advice", "record_call_sites", "populate_bytes", "spin_us"),
    *("store_patience_s", "start_timeout_s", "cleanup_timeout_s"),
)

_runtime: Runtime | None = None
_lock = threading.RLock()


def init(
    num_workers: int | None = None,
    object_store_memory: int | str | None = None,
    *,
    address: str | None = None,
    num_cpus: int | None = None,
    num_gpus: float | None = None,
    resources: Mapping[str, float] | None = None,
    ignore_reinit_error: bool = False,
    engine: str | None = None,
    local_mode: bool = False,
    runtime_env: Mapping[str, Any] | None = None,
    namespace: str | None = None,
    **settings: Any,
) -> Runtime:
    """Start the embedded runtime: a node daemon, an object store, and workers; or use a node that runs already.

    Args:
        num_workers, num_cpus: two names: worker processes; default: the CPUs that this process may use.
        object_store_memory: size of the store in bytes, or text such as "512MiB"; default: the smallest of 30 %
            of available memory, half of the cgroup's limit, and 80 % of free /dev/shm.
        address: `host:port` of a cluster's head, or "auto": use the node of it that `fastrt start` runs on this
            machine, instead of starting one. Or another program's `Runtime.socket_path`: use its session, as long as
            that program runs. Settings of a node are refused then. Default: FASTRT_ADDRESS (`fastrt run`).
        num_gpus, resources: further resources that tasks may request, with their amounts: {"license": 2}.
        ignore_reinit_error: return the running runtime instead of raising.
        engine: the engine that runs tasks: "fastrt", "local" (as local_mode=True), or "ray": the cluster at `address`.
        local_mode: run everything in this process, in order and at once, for a debugger.
        runtime_env: the default environment of tasks and actors, not of this process: see `docs/environments.md`.
        namespace: the namespace of actor names for this program, its tasks and actors; default: the session's own,
            which all programs without a namespace share.
        **settings: any field of `fastrt.config.Config`; each also has a variable FASTRT_<NAME>.
    Returns:
        The `Runtime`; a `with` statement shuts it down at its end.
    Raises:
        ConfigError: a setting is wrong.
        FastrtError: it is running already, or it cannot start; the message says why.
    """
    global _runtime
    with _lock:
        if is_initialized():
            if ignore_reinit_error and _runtime is not None:
                return _runtime
            if _runtime is None:
                raise FastrtError("this process runs tasks of a session: use that session, without init")
            raise FastrtError("fastrt is initialised already; call fastrt.shutdown() first, or ignore_reinit_error")
        shutdown()  # of a session whose daemon died
        if num_workers is not None and num_cpus is not None and num_workers != num_cpus:
            raise FastrtError(f"num_workers={num_workers} and num_cpus={num_cpus} are two names for one setting")
        num_workers = num_cpus if num_workers is None else num_workers
        about: dict[str, Any] = {"num_workers": num_workers, "object_store_memory": object_store_memory}
        about |= {"resources": resources, "num_gpus": num_gpus}
        which = kind_of(engine, local_mode)
        space = "" if namespace is None else namespaces.checked("namespace", namespace)
        if which is not None:
            settings |= {"runtime_env": runtime_env} if runtime_env is not None else {}
            settings |= {"namespace": space} if space and which == RAY else {}
            _runtime = start_foreign(which, address, about, settings)
            set_current(Environment(namespace=space) if space and which != RAY else None)
        else:
            address = _address(address, about, settings)
            job = _of_job(address, runtime_env)
            settings = {name: value for name, value in settings.items() if name not in _RAY_ONLY}
            _runtime = _start_own(about, settings) if address is None else _attach(address, about, settings)
            set_current(job)
        _runtime.on_exit = shutdown
        store_client.set_store(_runtime._store)
        if _runtime._store is not None:
            _runtime.enter(space)
        return _runtime


def shutdown() -> None:
    """End the session: queued tasks are dropped, running ones killed, the store removed.

    A node of a cluster keeps running; only this program's tasks, actors and references end. Views of values that are
    still in use stay readable. `init` may follow at once. Does nothing when no session runs, or inside a task.
    """
    global _runtime
    with _lock:
        runtime, _runtime = _runtime, None
        if runtime is not None:
            store_client.set_store(None)
            set_current(None)
            job_folders.set_here(())
            runtime.close()


def is_initialized() -> bool:
    """Whether this process uses a running session; always true inside a task."""
    if store_client.current() is None:
        return engines.current() is not None
    return not (_runtime is not None and _runtime._died)


def has_session() -> bool:
    """Whether this process has called `init`, and not ended its session: it is a driver."""
    return _runtime is not None


def _address(address: str | None, about: dict[str, Any], settings: dict[str, Any]) -> str | None:
    """Return the address to use: in a program of `fastrt run`, where none or "auto" is given, that of its node.

    The nodes of such a program run already, so options that describe a node are ignored, with a warning.
    """
    given = os.environ.get(ADDRESS)
    if not given or address not in (None, "auto"):
        return address
    ignored = _of_node(about, settings)
    if ignored:
        sys.stderr.write(
            f"fastrt: {', '.join(ignored)} of fastrt.init have no effect here: {ADDRESS} names a node that runs "
            "already. Give them to `fastrt run`\n"
        )
        about.update(dict.fromkeys(about))
        for name in ignored:
            settings.pop(name, None)
    return given


def _of_job(address: str | None, runtime_env: Any) -> Environment | None:
    """Return the default environment of the job.

    From now on the program's code, also that in an environment, carries its folders to a node that runs already. A node
    that it starts has its `sys.path`.
    """
    elsewhere = isinstance(runtime_env, Mapping) and runtime_env.get("working_dir")
    job_folders.set_here(() if address is None else job_folders.of_program(with_current=not elsewhere))
    return environment_of(runtime_env)


def _of_node(about: dict[str, Any], settings: dict[str, Any]) -> list[str]:
    """Return the names of the given settings that are a node's."""
    given = {**settings, **about}
    known = [*(field.name for field in fields(Config)), "num_gpus"]
    return [name for name in known if name not in _OF_PROGRAMS and given.get(name) is not None]


def _start_own(about: dict[str, Any], settings: dict[str, Any]) -> Runtime:
    """Start a node for this process alone."""
    num_gpus = about.pop("num_gpus")
    if num_gpus is not None:
        about["resources"] = {**read_resources("resources", about["resources"] or {}), "GPU": num_gpus}
    return start(Config.load(**about, **settings))


def _attach(address: str, about: dict[str, Any], settings: dict[str, Any]) -> Runtime:
    """Use the node of a cluster that runs on this machine."""
    refused = _of_node(about, settings)
    if refused:
        raise ConfigError(
            f"settings of the node, which runs already: {', '.join(refused)}; give them to `fastrt start`"
        )
    config = Config.load(num_workers=1, object_store_memory=_STORE_BYTES_ANY, **settings)
    if os.path.isabs(address):
        workers = nodes_at(address)[0]["Resources"].get("CPU", 0)
        return Attached(config, address, int(workers))
    node = find_node(config.runtime_dir, address)
    return Attached(config, node.socket_path, node.num_workers)


def _start_default() -> Store:
    store = init(ignore_reinit_error=True)._store  # another thread may have started it first, or have ended it again
    if store is None:
        raise NotInitializedError("the runtime was shut down while this call started it; call fastrt.init()")
    return store


def _forget_after_fork() -> None:
    global _lock
    _lock = threading.RLock()
    if _runtime is not None:
        _runtime.forget()


store_client.install(start=_start_default)
waiter.install()
os.register_at_fork(after_in_child=_forget_after_fork)
atexit.register(shutdown)
