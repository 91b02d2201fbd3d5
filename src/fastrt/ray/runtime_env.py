"""`ray.runtime_env.RuntimeEnv`: an environment of tasks and actors, as a dict that is checked."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from fastrt.errors import UnsupportedError
from fastrt.ray.refusals import refuse
from fastrt.tasks.runtime_env import FIELDS, OPTION, check_config, environment_of

__all__ = ["RuntimeEnv", "RuntimeEnvConfig"]

# Fields of Ray that would have an effect.
_OF_RAY = (
    "conda", "container", "image_uri", "java_jars", "nsight", "_nsight", "py_executable", "rocprof_sys", "_rocprof_sys",
)  # fmt: skip


def without_unknown(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options whose `runtime_env` has only fields that fastrt or Ray knows: Ray ignores other fields.

    A field that is left out gives a warning.
    """
    given = options.get(OPTION)
    if not isinstance(given, Mapping) or all(map(is_known, given)):
        return dict(options)
    unknown = [key for key in given if not is_known(key)]
    words = ", ".join(map(repr, unknown))
    warnings.warn(f"unknown fields of runtime_env have no effect: {words}", stacklevel=4)
    return {**options, OPTION: {key: value for key, value in given.items() if key not in unknown}}


def is_known(key: Any) -> bool:
    """Whether fastrt or Ray has that field of a `runtime_env`."""
    return key in FIELDS or key in _OF_RAY


class RuntimeEnvConfig(dict[str, Any]):
    """Settings of the making of an environment; they change nothing here.

    Args:
        setup_timeout_seconds: seconds that the making may take; -1: any number.
        eager_install: whether it begins when the job starts.
    Raises:
        TypeError: a value has another type.
        ValueError: the seconds are neither above 0 nor -1.
    """

    def __init__(self, setup_timeout_seconds: int = 600, eager_install: bool = True, **more: Any) -> None:
        super().__init__(setup_timeout_seconds=setup_timeout_seconds, eager_install=eager_install, **more)
        check_config(self)


class RuntimeEnv(dict[str, Any]):
    """A `runtime_env`: a dict of the fields that were given.

    Args:
        env_vars, working_dir, py_modules, excludes, pip, uv, worker_process_setup_hook: as for the dict; see
            `docs/environments.md`.
        config: a `RuntimeEnvConfig`.
        **more: fields that only Ray has are refused; others are kept in the dict and have no effect.
    Raises:
        UnsupportedError: a field that fastrt has not.
        TypeError, ConfigError: a value is wrong.
    """

    def __init__(
        self,
        *,
        env_vars: dict[str, str] | None = None,
        working_dir: str | None = None,
        py_modules: list[Any] | None = None,
        excludes: list[str] | None = None,
        pip: Any = None,
        uv: Any = None,
        worker_process_setup_hook: Any = None,
        config: Any = None,
        _validate: bool = True,
        **more: Any,
    ) -> None:
        given = {
            "env_vars": env_vars,
            "working_dir": working_dir,
            "py_modules": py_modules,
            "excludes": excludes,
            "pip": pip,
            "uv": uv,
            "worker_process_setup_hook": worker_process_setup_hook,
        }
        found = {name: value for name, value in given.items() if value is not None}
        for name, value in more.items():
            if value is not None and is_known(name):
                raise UnsupportedError(
                    refuse(
                        f"field {name!r} of runtime_env",
                        "only pip and uv install packages, nothing is wrapped",
                    )
                )
        if _validate:
            environment_of({**found, "config": config})
        super().__init__({**found, **{name: value for name, value in more.items() if not is_known(name)}})

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a plain dict."""
        return dict(self)

    def has_working_dir(self) -> bool:
        """Whether a working folder was given."""
        return "working_dir" in self
