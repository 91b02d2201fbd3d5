"""The interface of alternative engines, which run a program's tasks and actors, and this process's current one.

fastrt's own engine, the arena and its workers, does not implement it: the public functions look for an engine here only
when this process has no store, so the choice costs the fast paths nothing. While another engine is current there is no
store, and a call that needs one raises UnsupportedError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from fastrt.errors import StaleReferenceError, UnsupportedError

if TYPE_CHECKING:
    from fastrt.store.ref import ObjectRef


class Engine(Protocol):
    """Runs a program in place of fastrt's own engine. The public functions of these names call its methods.

    An engine's references and handles are instances of its own subclasses of `ObjectRef` and `ActorHandle`. The caller
    has already checked arguments of calls against signatures.

    Attributes:
        name: the engine's name for `fastrt.init`.
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
        """Submit a task that calls `function.function`. `settings` are all; `changed` differ from the default."""

    def create(self, actor_class: Any, changed: Mapping[str, Any], args: Any, kwargs: Any) -> Any:
        """Create an actor of `actor_class.cls`, with the settings that differ from the default; return its handle."""

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
        """The fields of `RuntimeContext` for `fastrt.runtime_context()` on this engine."""


_engine: Engine | None = None


def current() -> Engine | None:
    """The alternative engine of this process; None if it uses fastrt's own engine or none."""
    return _engine


def set_engine(engine: Engine | None) -> None:
    """Set the alternative engine of this process; None: it uses fastrt's own engine or none."""
    global _engine
    _engine = engine


def refuse(engine: Engine) -> None:
    """Reject a call that needs fastrt's own engine.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError(
        f"this call needs fastrt's own engine: it has no counterpart on engine {engine.name!r}, which this process "
        "uses; to use it, call fastrt.shutdown() and then fastrt.init() without an engine"
    )


def stale(ref: object) -> StaleReferenceError:
    """The error for a reference or handle that the current engine did not make."""
    return StaleReferenceError(f"{ref!r} belongs to a session that has ended; its value went with it")
