"""Names of Ray that fastrt has not, with the reasons, and the errors that say so."""

from __future__ import annotations

from fastrt.errors import UnsupportedError

LIBRARY = "it is one of Ray's libraries, and fastrt has Ray's core only"
OTHER_LANGUAGE = "fastrt's workers run Python only"
_RAY_CLIENT = "fastrt has no client outside of its cluster; a program runs on a node of it"
_PRIVATE = "it is not public in Ray"
_DEPRECATED = "it is deprecated in Ray"
_DEBUGGER = "breakpoint() in a task waits for `fastrt debug`"
_CLUSTER = "fastrt's own commands start and stop clusters (`fastrt start`)"

# By module: names and their reasons.
REFUSED: dict[str, dict[str, str]] = {
    "ray": {
        **dict.fromkeys(("air", "llm", "rllib", "serve", "train", "tune", "workflow"), LIBRARY),
        **dict.fromkeys(
            ("Language", "cpp_function", "cross_language", "java_actor_class", "java_function"), OTHER_LANGUAGE
        ),
        **dict.fromkeys(("ClientBuilder", "client", "client_builder"), _RAY_CLIENT),
        **dict.fromkeys(("_config", "_common", "core", "internal", "widgets"), _PRIVATE),
        **dict.fromkeys(("dashboard", "job_submission", "scripts"), _CLUSTER),
    },
    "ray.util": {
        **dict.fromkeys(("connect", "disconnect", "client", "client_connect"), _RAY_CLIENT),
        **dict.fromkeys(("ray_debugpy", "debugpy"), _DEBUGGER),
        **dict.fromkeys(("iter", "actor_group", "sgd"), _DEPRECATED),
        **dict.fromkeys(("horovod", "lightgbm", "spark", "xgboost", "tracing"), "fastrt has no such integration"),
        "dask": "`import fastrt.dask` runs Dask's graphs on fastrt, by a scheduler of its own",
        "tpu": "fastrt does not assign TPUs",
        "collective": "`fastrt.collective` has groups of its own",
    },
    "ray.util.state": {
        "StateApiClient": "the functions of ray.util.state ask the node itself, no server",
        "get_job": "fastrt has no job server",
        "list_cluster_events": "fastrt keeps no list of events; `fastrt timeline` records them",
        "list_runtime_envs": "fastrt keeps no list of environments",
    },
    "ray.experimental": dict.fromkeys(
        ("channel", "compiled_dag_ref", "dynamic_resources", "internal_kv", "rdt", "set_resource", "shuffle"),
        "it is an experiment of Ray",
    ),
}

_CORE = "it is an internal of Ray's C++ core"
_COROUTINE = "the generator's items come from a task, which takes no values back"
# By class: members and their reasons.
REFUSED |= {
    "ObjectRef": {
        "from_random": "a reference names an object that there is",
        **dict.fromkeys(("call_site", "owner_address", "redis_shard_hash", "tensor_transport"), _CORE),
    },
    "ObjectRefGenerator": dict.fromkeys(("aclose", "asend", "athrow", "send", "throw"), _COROUTINE),
    "id": {"redis_shard_hash": _CORE},
    "ActorID": {"job_id": _CORE, "of": _CORE},
    "TaskID": dict.fromkeys(
        (
            "actor_id", "for_actor_creation_task", "for_actor_task", "for_driver_task", "for_fake_task",
            "for_normal_task", "job_id",
        ),
        _CORE,
    ),
    "PlacementGroupID": {"of": _CORE},
    "PlacementGroup": {"empty": "groups are made by placement_group only"},
}  # fmt: skip


class RefusedName(UnsupportedError, AttributeError):
    """Ray has the name and fastrt has not. An AttributeError as well, so `hasattr` answers False."""


class RefusedModule(UnsupportedError, ImportError):
    """Ray has the module and fastrt has not. An ImportError as well, so programs can do without the module."""


def reason_of(module: str, name: str) -> str | None:
    """Return why fastrt has not that name of Ray's module; None: it is none of those."""
    return REFUSED.get(module, {}).get(name)


def words_of(module: str, name: str) -> str:
    """Return the message for a name that is refused."""
    return refuse(f"{module}.{name}", reason_of(module, name) or _PRIVATE)


def refuse(what: str, reason: str) -> str:
    """Return the message for something of Ray that fastrt has not."""
    return (
        f"fastrt has no {what}: {reason}. The program can run on Ray: by `python`, or by "
        'fastrt.init(engine="ray") where it uses fastrt\'s names'
    )


def missing(module: str, name: str) -> AttributeError:
    """Return the error for an attribute that a module of `fastrt.ray` has not.

    Args:
        module: its name, as `__name__`.
        name: the attribute.
    """
    of_ray = module.removeprefix("fastrt.")
    if reason_of(of_ray, name) is not None:
        return RefusedName(words_of(of_ray, name))
    return AttributeError(f"module {of_ray!r} has no attribute {name!r}")
