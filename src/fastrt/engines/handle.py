"""Handles of actors that another engine runs: they look like fastrt's own, and check calls in the same way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

from fastrt.store import engine as engines
from fastrt.tasks import options as tasks_options
from fastrt.tasks.actor_handle import ActorHandle, own_method
from fastrt.tasks.method import MethodPlan
from fastrt.tasks.options import METHODS


class CallingEngine(engines.Engine, Protocol):
    """An engine whose actors are called through these handles."""

    def call(self, handle: Any, which: MethodPlan, settings: dict[str, Any], args: Any, kwargs: Any) -> Any:
        """Call a method; `settings` are its num_returns and the arguments of `.options`."""


class EngineMethod:
    """A method of an actor, as an attribute of its handle: call `.remote(...)`."""

    __slots__ = ("_handle", "_plan", "_settings")

    def __init__(self, handle: EngineHandle, plan: MethodPlan, settings: dict[str, Any]) -> None:
        self._handle = handle
        self._plan = plan
        self._settings = settings

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        name = f"{self._handle._class_name}.{self._plan.name}"
        raise TypeError(f"Actor methods cannot be called directly: {name} is one, call .{self._plan.name}.remote(...)")

    def __repr__(self) -> str:
        return f"ActorMethod({self._handle._class_name}.{self._plan.name})"

    def options(self, **options: Any) -> EngineMethod:
        """Return the same method with other settings; see `ActorMethod.options`.

        Raises:
            TypeError, ValueError: a setting is unknown or wrong.
        """
        given = {name: value for name, value in options.items() if value is not None}
        if "max_task_retries" in given:
            tasks_options.task_retries_of(given["max_task_retries"])
        single = {name: value for name, value in given.items() if name != "max_task_retries"}
        tasks_options.read(METHODS, {"num_returns": self._settings["num_returns"], **single})
        return EngineMethod(self._handle, self._plan, {**self._settings, **given})

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method; see `ActorMethod.remote`.

        Raises:
            TypeError: the arguments do not fit the method's signature.
            StaleReferenceError: the handle belongs to a session that has ended.
        """
        engine = self._handle._engine
        if engine is not engines.current():
            raise engines.stale(self._handle)
        self._plan.check(args, kwargs)
        return engine.call(self._handle, self._plan, self._settings, args, kwargs)


class EngineHandle(ActorHandle):
    """A handle of an actor that another engine runs.

    Args:
        engine: the engine.
        actor: the engine's object for the actor; it can be hashed and compared.
        class_name: of the actor.
        methods: the methods that can be called.
    """

    def __init__(self, engine: CallingEngine, actor: Any, class_name: str, methods: Sequence[MethodPlan]) -> None:
        self._engine = engine
        self._actor = actor
        self._class_name = class_name
        self._methods = tuple(methods)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            found = [which for which in self.__dict__.get("_methods", ()) if which.name == name]
        else:
            found = [which for which in self._methods if which.name == name]
        if found:
            return EngineMethod(self, found[0], {"num_returns": found[0].settings.count})
        if name.startswith("__"):
            return own_method(self, name)
        there = ", ".join(which.name for which in self._methods if not which.name.startswith("_")) or "none"
        raise AttributeError(f"actor class {self._class_name} has no method {name!r}; it has {there}")

    @property
    def _actor_plan(self) -> NoReturn:  # type: ignore[override]  # only fastrt's own engine reads it
        raise engines.stale(self)

    def __repr__(self) -> str:
        return f"ActorHandle({self._class_name})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EngineHandle) and bool(self._actor == other._actor)

    def __hash__(self) -> int:
        return hash(self._actor)
