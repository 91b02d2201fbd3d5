"""The one place where an engine is chosen: what runs a program's tasks and actors.

fastrt's own engine, the arena and its workers, is none of these: its public functions look here only when this
process has no store, so choosing among engines costs it nothing. While another engine is current there is no store,
and whatever asks for one is told that it has no counterpart there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from fastrt.errors import StaleReferenceError, UnsupportedError

if TYPE_CHECKING:
    from fastrt.store.ref import ObjectRef


class Engine(Protocol):
    """What runs a program when fastrt's own engine does not. The public functions of these names come here.

    References are instances of subclasses of `ObjectRef`, and handles of `ActorHandle`, of the engine's own. Arguments
    of calls have been compared with signatures before.

    Attributes:
        name: as `fastrt.init` takes it.
    """

    name: str

    def put(self, value: object) -> ObjectRef:
        """`fastrt.put`."""

    def get(self, refs: ObjectRef | Sequence[ObjectRef], timeout: float | None) -> Any:
        """`fastrt.get`."""

    def wait(self, refs: list[Any], num_returns: int, timeout: float | None) -> tuple[list[Any], list[Any]]:
        """`fastrt.wait`."""

    def submit(
        self, function: Any, settings: Mapping[str, Any], changed: Mapping[str, Any], args: Any, kwargs: Any
    ) -> Any:
        """A task that calls `function.function`, with all settings, and with those that differ from the default."""

    def create(self, actor_class: Any, changed: Mapping[str, Any], args: Any, kwargs: Any) -> Any:
        """An actor of `actor_class.cls`, with the settings that differ from the default; its handle."""

    def get_actor(self, name: str, namespace: str | None) -> Any:
        """`fastrt.get_actor`."""

    def list_named_actors(self, all_namespaces: bool) -> list[Any]:
        """`fastrt.list_named_actors`."""

    def kill(self, actor: Any, no_restart: bool) -> None:
        """`fastrt.kill`."""

    def exit_actor(self) -> NoReturn:
        """`fastrt.exit_actor`."""

    def cancel(self, ref: ObjectRef, **options: Any) -> None:
        """`fastrt.cancel`."""

    def nodes(self) -> list[dict[str, Any]]:
        """`fastrt.nodes`."""

    def facts(self) -> dict[str, Any]:
        """What `fastrt.runtime_context()` tells of here, as the fields of `RuntimeContext`."""


_engine: Engine | None = None


def current() -> Engine | None:
    """The engine of this process where it is not fastrt's own, or None."""
    return _engine


def set_engine(engine: Engine | None) -> None:
    """Make `engine` the one of this process; None: there is none, or fastrt's own."""
    global _engine
    _engine = engine


def refuse(engine: Engine) -> None:
    """Say that something needs fastrt's own engine.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError(
        f"this call needs fastrt's own engine: it has no counterpart where tasks run on engine {engine.name!r}; call "
        "fastrt.shutdown() and fastrt.init() without an engine to use it"
    )


def stale(ref: object) -> StaleReferenceError:
    """The error for a reference or handle that the current engine did not make."""
    return StaleReferenceError(f"{ref!r} belongs to a session that has ended; its value went with it")
