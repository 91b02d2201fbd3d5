"""`worker_process_setup_hook` of a `runtime_env`: a function that a worker calls before its first task there.

The function travels with the environment, pickled where the environment is given, or as a name that the worker
imports.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastrt.errors import ConfigError, RuntimeEnvError, SerializationError
from fastrt.store.serialize import deserialize, serialize_code

_BYTES_MAX = 1 << 20


@dataclass(frozen=True)
class SetupHook:
    """A hook as it travels.

    Attributes:
        name: of the function; for one without `data` the name to import it by, "package.module.function".
        kind: how `data` is written.
        data: the pickled function; empty: it is imported.
    """

    name: str
    kind: int = 0
    data: bytes = b""

    def load(self) -> Callable[[], object]:
        """Return the function."""
        if self.data:
            return deserialize(self.kind, self.data, [])[1]  # type: ignore[no-any-return]
        module, _, name = self.name.rpartition(".")
        return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]

    def run(self) -> None:
        """Call the function.

        Raises:
            RuntimeEnvError: it cannot be loaded, or raised an exception.
        """
        try:
            self.load()()
        except (Exception, SystemExit) as exc:
            raise RuntimeEnvError(
                f"the worker_process_setup_hook {self.name} of the runtime_env failed: {type(exc).__name__}: {exc}; "
                "its tasks and actors cannot run"
            ) from exc


def hook_of(given: Any) -> SetupHook:
    """Check a hook, and pickle it.

    Args:
        given: a function without arguments, or its name: "package.module.function".
    Raises:
        TypeError: neither of the two.
        ConfigError: a name without a module, or a function that is too large or names references.
        RuntimeEnvError: it cannot be pickled.
    """
    if isinstance(given, SetupHook):
        return given
    if isinstance(given, str):
        parts_of_name = given.split(".")
        if len(parts_of_name) < 2 or not all(part.isidentifier() for part in parts_of_name):
            raise ConfigError(
                f"runtime_env's worker_process_setup_hook is {given!r}; it must be like 'package.module.function'"
            )
        return SetupHook(given)
    if not callable(given):
        raise TypeError(
            f"runtime_env's worker_process_setup_hook is {given!r}; it must be a function or the name of one"
        )
    name = str(getattr(given, "__qualname__", type(given).__qualname__))
    try:
        parts, _ = serialize_code(name, given)
    except SerializationError as exc:
        raise RuntimeEnvError(f"runtime_env's worker_process_setup_hook {name} cannot be sent: {exc}") from exc
    data = parts.to_bytes()
    if parts.refs or len(data) > _BYTES_MAX:
        why = "names references" if parts.refs else f"has {len(data)} bytes with what it names"
        raise ConfigError(f"runtime_env's worker_process_setup_hook {name} {why}; at most {_BYTES_MAX} bytes are sent")
    return SetupHook(name, parts.kind, data)
