"""`ray.init` and the object that it returns."""

from __future__ import annotations

import math
import os
import platform
import sys
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from fastrt.config import Config
from fastrt.errors import AttachError, ConfigError, FastrtError, NotInitializedError, UnsupportedError
from fastrt.exceptions import RaySystemError
from fastrt.ids import NodeID
from fastrt.ray import variables
from fastrt.ray.calls import check_namespace
from fastrt.ray.job_config import JobConfig
from fastrt.ray.logs import LoggingConfig
from fastrt.ray.refusals import refuse
from fastrt.ray.util.addresses import get_node_ip_address
from fastrt.runtime import driver
from fastrt.runtime.nodefile import latest_node, latest_session
from fastrt.runtime.session import Runtime
from fastrt.store import client as store_client
from fastrt.store import engine as engines
from fastrt.store.client import Store

VERSION = "2.60.0"  # of the Ray whose names these are
COMMIT = "fastrt"
_ADDRESS = "RAY_ADDRESS"
_TWICE = (
    "Maybe you called ray.init twice by accident? This error can be suppressed by passing in "
    "'ignore_reinit_error=True' or by calling 'ray.shutdown()' prior to 'ray.init()'."
)
_AUTO_CONNECT = "RAY_ENABLE_AUTO_CONNECT"

# Options of `ray.init` that fastrt has under another name.
_RENAMED = {"object_spilling_directory": "spill_dir", "_memory": "memory"}
# Those of its `_system_config`; all others there change no result here.
_OF_THE_SYSTEM = {"memory_usage_threshold": "memory_threshold", "max_lineage_bytes": "lineage_bytes"}
_BYTES = ("memory", "object_store_memory")
_OF_NODES = "_system_config", "_enable_object_reconstruction", "_node_name"  # Ray refuses them with an address
_COUNTS = ("num_cpus", "num_workers")
# Options without a meaning here: they change no result.
WITHOUT_MEANING = (
    "include_dashboard", "dashboard_host", "dashboard_port", "configure_logging", "logging_level", "logging_format",
    "proxy_server_url", "_metrics_export_port", "_system_config", "_enable_object_reconstruction", "_node_name",
    "_redis_max_memory", "_redis_username", "_redis_password", "_tracing_startup_hook", "_plasma_directory",
    "_driver_object_store_memory", "_node_ip_address", "_skip_env_hook",
)  # fmt: skip
REASONS = {
    "enable_resource_isolation": "fastrt does not limit its workers by cgroups",
    "cgroup_path": "fastrt does not limit its workers by cgroups",
    "system_reserved_cpu": "fastrt does not limit its workers by cgroups",
    "system_reserved_memory": "fastrt does not limit its workers by cgroups",
}


class InitialisedError(FastrtError, RuntimeError):
    """This process uses a session already. Call `ray.shutdown()` first, or give `ignore_reinit_error=True`."""


class NoSessionError(AttachError, ConnectionError):
    """No session can be joined at the address. Start one by `ray.init()`, or a node by `fastrt start`."""


class NotStartedError(NotInitializedError, RaySystemError):
    """There is no session, and RAY_ENABLE_AUTO_CONNECT=0 keeps calls from starting one. Call `ray.init()`."""


@dataclass(frozen=True)
class _Address:
    node_ip_address: str
    raylet_ip_address: str
    node_id: str
    address: str
    gcs_address: str
    object_store_address: str
    raylet_socket_name: str
    session_dir: str
    webui_url: str = ""
    metrics_export_port: int = 0
    dashboard_agent_listen_port: int = 0


class RayContext(Mapping[str, Any]):
    """The session that `init` has started or joined. A `with` statement shuts it down at its end.

    Args:
        runtime: fastrt's object of the session; None inside a task.

    Attributes:
        address_info: addresses of the session, by the names that Ray gives them.
        dashboard_url: empty: `fastrt dashboard` is started by hand.
        python_version, ray_version, ray_commit: texts.
        runtime: as given.
    """

    address_info: dict[str, Any]
    dashboard_url: str
    python_version: str
    ray_version: str
    ray_commit: str

    def __init__(self, runtime: Runtime | None) -> None:
        self.runtime = runtime
        self.dashboard_url = ""
        self.python_version = platform.python_version()
        self.ray_version = VERSION
        self.ray_commit = COMMIT
        self.address_info = asdict(_address())

    def __getitem__(self, key: str) -> Any:
        return self.address_info[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.address_info)

    def __len__(self) -> int:
        return len(self.address_info)

    def __enter__(self) -> RayContext:
        return self

    def __exit__(self, *exc_info: object) -> None:
        driver.shutdown()

    def __repr__(self) -> str:
        return f"RayContext(node_id={self.address_info['node_id']!r}, session_dir={self.address_info['session_dir']!r})"

    def disconnect(self) -> None:
        """Leave the session, as `shutdown`."""
        driver.shutdown()


def _address() -> _Address:
    store = None if engines.current() is not None else store_client.require()
    socket, node = ("", "") if store is None else (store.socket_path, store.client.segment.session)
    ip = get_node_ip_address()
    node = NodeID.widened(node).hex() if node else ""
    return _Address(ip, ip, node, socket, socket, socket, socket, os.path.dirname(socket))


def shutdown(wait_for_processes: bool = True) -> None:
    """End the session, as `fastrt.shutdown` does.

    Args:
        wait_for_processes: taken for Ray's sake: the processes have always ended at the return.
    """
    driver.shutdown()


def init(
    address: str | None = None,
    *,
    num_cpus: float | None = None,
    num_gpus: float | None = None,
    resources: Mapping[str, float] | None = None,
    labels: Mapping[str, str] | None = None,
    object_store_memory: float | None = None,
    local_mode: bool = False,
    ignore_reinit_error: bool = False,
    logging_config: LoggingConfig | None = None,
    log_to_driver: bool | None = None,
    namespace: str | None = None,
    runtime_env: Mapping[str, Any] | None = None,
    job_config: JobConfig | None = None,
    **more: Any,
) -> RayContext:
    """Join the node that `fastrt start` runs on this machine, or start a session.

    Args:
        address: `host:port`, or the address of another program's context: join that session. None or "auto": join the
            one that the variable FASTRT_ADDRESS or RAY_ADDRESS names, else the node of `fastrt start` on this machine,
            the latest one if there are several; without one, None starts a session, and "auto" joins the latest one
            that another program has started. "local": start one.
        num_cpus, num_gpus, resources, labels, object_store_memory: of the node of a session that is started. With
            num_cpus=0 it runs actors, and tasks with `num_cpus=0`. Parts of a byte are rounded down.
        local_mode: run everything in this process.
        ignore_reinit_error: return the session that this process uses already.
        logging_config: how this process writes its log.
        log_to_driver: whether the output of workers is printed here.
        namespace: of actors' names; default: one of this program's own.
        runtime_env: the default environment of tasks and actors.
        job_config: the namespace, the environment, and more; the arguments above take precedence.
        **more: `_temp_dir`, the folder for that of the sessions; Ray's other options, which change no result here;
            settings of `fastrt.init`.
    Raises:
        UnsupportedError: an option that fastrt has not.
        ConfigError: an option is wrong, or is one of a node while there is a node to join; a ValueError.
        InitialisedError: this process uses a session already.
        NoSessionError: there is no session at the address; a ConnectionError.
    Source:
        The semantics of `ray.init`.
    """
    check_namespace(namespace)
    if driver.is_initialized():
        if ignore_reinit_error:
            return RayContext(driver._runtime)
        raise InitialisedError(_TWICE)
    folder = more.pop("_temp_dir", None)
    if address in (None, "auto") and not local_mode and more.get("engine") is None:
        address = find_session(address, more.get("runtime_dir") or variables.runtime_dir(folder))
    if address is not None and address.startswith("ray://"):
        raise UnsupportedError(refuse(f"client for {address!r}", "a program runs on a node of its cluster"))
    _check_node(address, more)
    settings = _settings(more)
    settings |= {} if log_to_driver is None else {"log_to_driver": log_to_driver}
    settings |= {} if labels is None else {"labels": labels}
    settings |= _of_job(job_config or JobConfig(), namespace, runtime_env, logging_config)
    about = {"CPU": num_cpus, "GPU": num_gpus, "object_store_memory": object_store_memory}
    settings = _of_node({**about, "memory": settings.pop("memory", None)}, resources, address, folder, settings)
    try:
        runtime = driver.init(
            address=None if address == "local" else address,
            ignore_reinit_error=ignore_reinit_error,
            local_mode=local_mode,
            **settings,
        )
    except AttachError as exc:
        raise NoSessionError(str(exc)) from None
    return RayContext(runtime)


def _check_node(address: str | None, more: Mapping[str, Any]) -> None:
    """Refuse settings of a node where there is one to join, as Ray does."""
    of_node = [name for name in _OF_NODES if more.get(name)]
    if of_node and address not in (None, "local"):
        raise ConfigError(f"settings of the node, which runs already: {', '.join(of_node)}; leave them out")


def _of_node(
    about: dict[str, Any],
    resources: Mapping[str, float] | None,
    address: str | None,
    folder: str | None,
    settings: dict[str, Any],
) -> dict[str, Any]:
    """Return the settings with those of the node, of which Ray's variables change some if it is started here."""
    if address in (None, "local") and not os.environ.get(driver.ADDRESS):
        resources = variables.override(about, resources)
        folder = variables.runtime_dir(folder or os.environ.get(variables.FOLDER))
        settings = {**variables.of_output(), **({} if folder is None else {"runtime_dir": folder}), **settings}
    settings |= {} if about["memory"] is None else {"memory": amount("memory", about["memory"])}
    return {
        "num_workers": amount("num_cpus", about["CPU"]),
        "num_gpus": about["GPU"],
        "object_store_memory": amount("object_store_memory", about["object_store_memory"]),
        "resources": resources,
        **settings,
    }


def _of_job(
    config: JobConfig,
    namespace: str | None,
    runtime_env: Mapping[str, Any] | None,
    logging_config: LoggingConfig | None,
) -> dict[str, Any]:
    """Configure the log of this process; return the settings of the program, its own arguments first."""
    if not isinstance(config, JobConfig):
        raise TypeError(f"job_config is {config!r}; it must be a ray.job_config.JobConfig")
    log = logging_config or config.py_logging_config
    if log is not None:
        log.apply()
    space = config.ray_namespace if namespace is None else namespace
    check_namespace(space)
    space = str(uuid.uuid4()) if space is None else space
    return {"namespace": space, "runtime_env": config.environment(runtime_env)}


def find_session(address: str | None, runtime_dir: Any = None) -> str | None:
    """Return the address of the session to join where the program names none; None: there is none.

    Source:
        `get_ray_address_from_environment` in Ray's `_private/services.py`.
    """
    if os.environ.get(driver.ADDRESS):
        return address  # the driver reads it
    given = os.environ.get(_ADDRESS) or address
    if given not in (None, "auto"):
        return given
    config = Config.load(num_workers=1, object_store_memory=1 << 26, runtime_dir=runtime_dir)
    node, others = latest_node(config.runtime_dir)
    if node is not None and others:
        sys.stderr.write(
            f"fastrt: nodes of several clusters run here; ray.init joins the latest one, {node.head}. "
            f"{_ADDRESS} chooses another one\n"
        )
    if node is None:
        return (latest_session(config.runtime_dir) if given == "auto" else None) or given
    return node.head


def amount(name: str, value: Any) -> Any:
    """Return an amount of a node as fastrt takes it; other values as they are.

    Args:
        name: of the option: bytes are rounded down, as Ray does, and a whole number of CPUs may be a float.
        value: as given.
    """
    if not isinstance(value, float) or not math.isfinite(value):
        return value
    return int(value) if name in _BYTES or (name in _COUNTS and value.is_integer()) else value


def _settings(more: Mapping[str, Any]) -> dict[str, Any]:
    known = {field.name for field in fields(Config)} | {"engine"}
    of_the_system = more.get("_system_config") or {}
    found = {mine: of_the_system[name] for name, mine in _OF_THE_SYSTEM.items() if name in of_the_system}
    for name, value in more.items():
        name = _RENAMED.get(name, name)
        value = amount(name, value)
        if name in known:
            found[name] = value
        elif name in WITHOUT_MEANING or value is None or value is False:
            continue
        else:
            raise UnsupportedError(refuse(f"option {name!r} of init", REASONS.get(name, "it has no such setting")))
    return found


def _start_default() -> Store:
    """Start or join a session at the first call of a program that has not called `init`: as `init()` does.

    Raises:
        NotStartedError: the variable RAY_ENABLE_AUTO_CONNECT is 0.
    """
    if os.environ.get(_AUTO_CONNECT) == "0":
        raise NotStartedError("Ray has not been started yet. You can start Ray with 'ray.init()'.")
    init(ignore_reinit_error=True)
    store = store_client.current()
    if store is None:
        raise NotInitializedError("the session was ended while this call started it; call ray.init()")
    return store


store_client.install(start=_start_default)
