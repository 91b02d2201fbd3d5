"""`fastrt.exit_actor()`: an actor ends itself. And the methods by which a handle ends it, or asks whether it lives."""

from __future__ import annotations

from typing import Any, NoReturn, Protocol

from fastrt.errors import ActorDiedError
from fastrt.store import client as store_client
from fastrt.store import engine as engines

LEFT = "it left by fastrt.exit_actor (INTENDED_USER_EXIT)"  # which Ray calls it; programs look for the word


class ActorLeaves(SystemExit):
    """Raised in an actor's code to end the actor. Threads and event loops treat it as any SystemExit.

    Args:
        error: the result of the call.
    """

    def __init__(self, error: ActorDiedError) -> None:
        super().__init__(error)
        self.error = error


class Callable(Protocol):
    """A method of an actor."""

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""

    def options(self, **options: Any) -> Callable:
        """Return the same method with other settings."""


class OwnMethod:
    """A method that every actor has: a function that the actor's process calls with the instance.

    Args:
        call: the method that does so.
        function: which one.
    """

    __slots__ = ("_call", "_function")

    def __init__(self, call: Callable, function: Any) -> None:
        self._call = call
        self._function = function

    def options(self, **options: Any) -> OwnMethod:
        """Return the same method with other settings, as `ActorMethod.options` does."""
        return OwnMethod(self._call.options(**options), self._function)

    def remote(self) -> Any:
        """Call the function in the actor's process; returns as `ActorMethod.remote`."""
        return self._call.remote(self._function)


def exit_actor() -> NoReturn:
    """End the actor in whose process this is called, for good: it is not started again.

    The call's results are `ActorDiedError`, as are those of calls that have not ended. The actor's cleanup code runs.
    This may also be called in its constructor, in threads that it has started and in tasks of its event loops; it ends
    then after the call that it runs alone, or at once if it runs several.

    Raises:
        TypeError: this is not an actor's process.
        ActorLeaves: always, in an actor; a SystemExit.
    Source:
        The semantics of `ray.actor.exit_actor`.
    """
    other = engines.current()
    if other is not None:
        other.exit_actor()
    store = store_client.current()
    if store is None or store.actor_here is None:
        raise TypeError("exit_actor ends the actor that calls it, and this is no actor; use fastrt.kill(handle)")
    if store.on_exit is not None:
        store.on_exit(LEFT)
    raise ActorLeaves(ActorDiedError(f"the actor is dead: {LEFT}"))


def is_ready(instance: object) -> bool:
    """Return True: `handle.__ray_ready__` calls this in an actor that is built and takes calls."""
    return True


def leave(instance: object) -> NoReturn:
    """End the actor, for `handle.__ray_terminate__`.

    Raises:
        ActorLeaves: always.
    """
    exit_actor()


OWN = {"__ray_ready__": is_ready, "__ray_terminate__": leave}
