"""Sessions of engines other than fastrt's own, which `init` returns."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from fastrt.config import Config, read_resources
from fastrt.errors import ConfigError
from fastrt.runtime.session import Runtime
from fastrt.store import engine as engines

LOCAL, RAY = "local", "ray"


class Foreign(Runtime):
    """A session of another engine. It has no store: `object_store_memory` is 0, `socket_path` empty.

    Args:
        engine: the engine.
        num_workers: its CPUs.
        session: its name.
        end: ends it.
    """

    def __init__(self, engine: engines.Engine, num_workers: int, session: str, end: Callable[[], None]) -> None:
        self.session = session
        self.num_workers = num_workers
        self.object_store_memory = 0
        self.socket_path = ""
        self.engine = engine
        self._store = None
        self._died = False
        self._end_engine = end

    def __repr__(self) -> str:
        return f"Runtime(engine={self.engine.name!r}, num_workers={self.num_workers})"

    def close(self) -> None:
        """End the session."""
        if engines.current() is self.engine:
            engines.set_engine(None)
            self._end_engine()


def start_foreign(which: str, address: str | None, about: dict[str, Any], settings: dict[str, Any]) -> Foreign:
    """Start a session of an engine.

    Args:
        which: the engine, as `kind_of` returns it.
        address: of a cluster.
        about: num_workers, num_gpus, resources and object_store_memory; None where they were not given.
        settings: all others.
    Raises:
        ConfigError: a setting is wrong, or the engine is not installed.
    """
    given = {name: value for name, value in about.items() if value is not None}
    session = _start_ray(address, given, settings) if which == RAY else _start_local(address, given, settings)
    engines.set_engine(session.engine)
    return session


def _start_local(address: str | None, given: dict[str, Any], settings: dict[str, Any]) -> Foreign:
    """Start a session in this process alone. Settings of a store or of processes are checked, and have no effect."""
    from fastrt.engines.local import LocalEngine, refuse_environment

    refuse_environment(settings)
    if address is not None:
        raise ConfigError(f"address={address!r}: local mode has no address, because everything runs in this process")
    resources = read_resources("resources", given.pop("resources", {}))
    if "num_gpus" in given:
        resources["GPU"] = given.pop("num_gpus")
    known = {field.name for field in fields(Config)}
    config = Config.load(**given, **{name: value for name, value in settings.items() if name in known})
    engine = LocalEngine(config.num_workers, resources)
    return Foreign(engine, config.num_workers, "local", engine.close)


def _start_ray(address: str | None, given: dict[str, Any], settings: dict[str, Any]) -> Foreign:
    """Start a session on a running Ray cluster, or, with an address of None, on a new one."""
    try:
        ray_engine = importlib.import_module("fastrt.engines.ray")
    except ImportError as exc:
        raise ConfigError(f"engine='ray' needs Ray in this environment: pip install 'fastrt[ray]' ({exc})") from exc
    if address is not None and given:
        raise ConfigError(f"{', '.join(given)}: the cluster at {address} has its own settings; leave these out")
    if "num_workers" in given:
        given["num_cpus"] = given.pop("num_workers")
    engine = ray_engine.connect(address, {**given, **settings})
    return Foreign(engine, engine.num_cpus, engine.session, engine.close)


def kind_of(engine: str | None, local_mode: bool) -> str | None:
    """The engine that the arguments of `init` select; None: fastrt's own.

    Raises:
        ConfigError: no engine has that name, or the arguments select two.
    """
    if engine not in (None, "fastrt", LOCAL, RAY):
        raise ConfigError(f"engine is {engine!r}; there are 'fastrt' (the default), 'local' and 'ray'")
    if local_mode and engine not in (None, LOCAL):
        raise ConfigError(f"local_mode=True is an engine by itself; leave out engine={engine!r}")
    return LOCAL if local_mode else None if engine == "fastrt" else engine
