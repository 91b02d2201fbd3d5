"""`ray.job_config.JobConfig`: settings of a program, for `ray.init(job_config=...)`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fastrt.errors import UnsupportedError
from fastrt.ray.logs import LoggingConfig
from fastrt.ray.refusals import OTHER_LANGUAGE, refuse
from fastrt.ray.runtime_env import without_unknown
from fastrt.tasks.runtime_env import OPTION, Environment, environment_of

__all__ = ["JobConfig"]

_LIFETIMES = ("detached", "non_detached")


class JobConfig:
    """Settings of a program. Arguments of `init` take precedence.

    Args:
        jvm_options: refused: fastrt has no Java workers.
        code_search_path: folders in which workers look for modules; those that do not exist are left out.
        runtime_env: the default environment of tasks and actors.
        metadata: texts by name, for the program itself.
        ray_namespace: of actors' names.
        default_actor_lifetime: of actors without `lifetime=`: "detached" or "non_detached".
        _client_job, _disable_job_level_lineage_reconstruction: taken for Ray's sake; they change nothing.
        _py_driver_sys_path: as `code_search_path`.

    Attributes:
        jvm_options, code_search_path, runtime_env, metadata, ray_namespace, default_actor_lifetime: as given.
        py_logging_config: how the program writes its log.

    Raises:
        UnsupportedError: there are options of Java.
        TypeError: `code_search_path` is no list.
        ValueError: another lifetime.
    """

    def __init__(
        self,
        jvm_options: Sequence[str] | None = None,
        code_search_path: Sequence[str] | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        _client_job: bool = False,
        metadata: Mapping[str, str] | None = None,
        ray_namespace: str | None = None,
        default_actor_lifetime: str = "non_detached",
        _disable_job_level_lineage_reconstruction: bool = False,
        _py_driver_sys_path: Sequence[str] | None = None,
    ) -> None:
        if jvm_options:
            raise UnsupportedError(refuse("jvm_options of a job", OTHER_LANGUAGE))
        if not isinstance(code_search_path, (list, tuple, type(None))):
            raise TypeError(f"The type of code search path is incorrect: {type(code_search_path)}")
        self.jvm_options: list[str] = []
        self.code_search_path = list(code_search_path or ())
        self._py_driver_sys_path = list(_py_driver_sys_path or ())
        self.metadata = dict(metadata or {})
        self.ray_namespace = ray_namespace
        self.py_logging_config: LoggingConfig | None = None
        self.set_runtime_env(runtime_env)
        self.set_default_actor_lifetime(default_actor_lifetime)

    def set_metadata(self, key: str, value: str) -> None:
        """Add a text to the metadata, or replace it."""
        self.metadata[key] = value

    def set_runtime_env(self, runtime_env: Mapping[str, Any] | None, validate: bool = False) -> None:
        """Replace the environment.

        Args:
            runtime_env: the environment.
            validate: whether to check it now, and not by `init`.
        """
        self.runtime_env = without_unknown({OPTION: dict(runtime_env or {})})[OPTION]
        if validate:
            environment_of(self.runtime_env)

    def set_ray_namespace(self, ray_namespace: str) -> None:
        """Replace the namespace."""
        self.ray_namespace = ray_namespace

    def set_default_actor_lifetime(self, default_actor_lifetime: str) -> None:
        """Replace the lifetime of actors that are made without one.

        Raises:
            ValueError: it is neither "detached" nor "non_detached".
        """
        if default_actor_lifetime not in _LIFETIMES:
            raise ValueError("Default actor lifetime must be one of `detached`, `non_detached`")
        self.default_actor_lifetime = default_actor_lifetime

    def set_py_logging_config(self, logging_config: LoggingConfig | None = None) -> None:
        """Replace how the program writes its log."""
        self.py_logging_config = logging_config

    def environment(self, runtime_env: Mapping[str, Any] | None) -> Environment | dict[str, Any] | None:
        """Return the default environment of the program's tasks and actors, for `fastrt.init`.

        Args:
            runtime_env: given to `init` by itself; it takes the place of the one here.
        """
        given = without_unknown({OPTION: dict(runtime_env)})[OPTION] if runtime_env else self.runtime_env
        folders = [path for path in [*self.code_search_path, *self._py_driver_sys_path] if os.path.isdir(path)]
        detached = self.default_actor_lifetime == _LIFETIMES[0]
        if not folders and not detached:
            return given or None  # as it is: another engine reads it by itself
        found = environment_of(given) or Environment()
        if folders:
            paths = dict.fromkeys([*(found.import_paths or ()), *map(os.path.abspath, folders)])
            found = replace(found, import_paths=tuple(paths))
        return replace(found, actor_lifetime=_LIFETIMES[0]) if detached else found

    @classmethod
    def from_json(cls, job_config_json: Mapping[str, Any]) -> JobConfig:
        """Make one of a dict with its arguments."""
        names = ("jvm_options", "code_search_path", "runtime_env", "metadata", "ray_namespace")
        about: dict[str, Any] = {name: job_config_json.get(name) for name in names}
        return cls(**about, _py_driver_sys_path=job_config_json.get("py_driver_sys_path"))
