"""The public names of Ray's core, as JSON by sections. Run by a Python that has Ray; it starts nothing."""

import importlib
import inspect
import json
import sys


def public(thing):
    return sorted(name for name in dir(thing) if not name.startswith("_"))


def defined_in(module, kinds=(type,)):
    """Classes and functions that a module defines itself."""
    here = importlib.import_module(module)
    return sorted(
        name
        for name, thing in vars(here).items()
        if not name.startswith("_") and isinstance(thing, kinds) and thing.__module__ == module
    )


def names():
    import ray
    import ray.util
    from ray._common import ray_option_utils
    from ray.runtime_context import RuntimeContext
    from ray.util import actor_pool, multiprocessing, queue, state

    functions = (type, type(public))
    groups = importlib.import_module("ray.util.placement_group")
    found = {
        "ray": sorted({name for name in ray.__all__ if not name.startswith("__")}),
        "ray.util": sorted(ray.util.__all__),
        "ray.exceptions": [
            name for name in defined_in("ray.exceptions") if issubclass(getattr(ray.exceptions, name), BaseException)
        ],
        "ray.actor": ["ActorClass", "ActorHandle", "ActorMethod", "exit_actor", "method"],
        "ray.runtime_env": sorted(ray.runtime_env.__all__),
        "ray.util.state": sorted(state.__all__),
        "ray.util.placement_group": [
            name
            for name in defined_in("ray.util.placement_group", functions)
            if name not in ("check_placement_group_index", "validate_placement_group")
        ],
        "ray.util.scheduling_strategies": defined_in("ray.util.scheduling_strategies"),
        "ray.util.queue": ["Empty", "Full", "Queue"],
        "ray.util.multiprocessing": sorted(multiprocessing.__all__),
        "ray.util.metrics": defined_in("ray.util.metrics"),
        "RuntimeContext": public(RuntimeContext),
        "RayContext": ["address_info", "dashboard_url", "disconnect", "python_version", "ray_commit", "ray_version"],
        "PlacementGroup": public(groups.PlacementGroup),
        "Queue": public(queue.Queue),
        "Pool": public(multiprocessing.Pool),
        "ActorPool": public(actor_pool.ActorPool),
        "ActorClass": public(ray.actor.ActorClass),
        "ActorMethod": public(ray.actor.ActorMethod),
        "RemoteFunction": sorted({*public(ray.remote_function.RemoteFunction), "remote"}),
        "LoggingConfig": public(ray.LoggingConfig),
        "ObjectRef": public(ray.ObjectRef),
        "ObjectRefGenerator": public(ray.ObjectRefGenerator),
    }
    for name in ("ActorID", "JobID", "NodeID", "PlacementGroupID", "TaskID", "UniqueID", "WorkerID"):
        found[name] = public(getattr(ray, name))
    found["options of tasks"] = sorted(ray_option_utils.task_options)
    found["options of actors"] = sorted(ray_option_utils.actor_options)
    found["arguments of init"] = sorted(inspect.signature(ray.init).parameters.keys() - {"kwargs"})
    return found


def parameters():
    """The public parameters of each function and of each method of the classes that programs call, by name."""
    import ray
    import ray.util
    from ray.util import actor_pool, metrics, multiprocessing, queue, state

    groups = importlib.import_module("ray.util.placement_group")
    functions = [("ray", ray, ray.__all__), ("ray.util", ray.util, ray.util.__all__)]
    functions += [("ray.util.state", state, state.__all__)]
    found = {
        f"{module}.{name}": vars(here)[name]  # getattr would import the libraries
        for module, here, names in functions
        for name in names
        if inspect.isfunction(vars(here).get(name))
    }
    classes = {
        "ray.util.queue.Queue": queue.Queue,
        "ray.util.multiprocessing.Pool": multiprocessing.Pool,
        "ray.util.actor_pool.ActorPool": actor_pool.ActorPool,
        "ray.util.metrics.Counter": metrics.Counter,
        "ray.util.metrics.Gauge": metrics.Gauge,
        "ray.util.metrics.Histogram": metrics.Histogram,
        "ray.util.placement_group.PlacementGroup": groups.PlacementGroup,
        "ray.LoggingConfig": ray.LoggingConfig,
        "ray.ObjectRefGenerator": ray.ObjectRefGenerator,
    }
    for where, cls in classes.items():
        for name in public(cls):
            if inspect.isfunction(inspect.unwrap(getattr(cls, name))):
                found[f"{where}.{name}"] = getattr(cls, name)
    return {where: [name for name in inspect.signature(f).parameters if name[0] != "_"] for where, f in found.items()}


def tree():
    """Each exception of Ray with all its bases in Ray and in Python."""
    import ray.exceptions

    return {
        name: [base.__name__ for base in getattr(ray.exceptions, name).__mro__[1:] if base is not object]
        for name in names()["ray.exceptions"]
    }


if __name__ == "__main__":
    import ray

    sys.stdout.write(
        json.dumps({"version": ray.__version__, "names": names(), "tree": tree(), "parameters": parameters()})
    )
