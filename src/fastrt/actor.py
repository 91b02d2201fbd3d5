"""Actors under the names that Ray gives them: `from fastrt.actor import exit_actor, ActorHandle`."""

from fastrt.runtime import driver as _driver  # noqa: F401  (it starts a session where there is none)
from fastrt.tasks.actor_class import ActorClass
from fastrt.tasks.actor_handle import ActorHandle
from fastrt.tasks.exit_actor import exit_actor
from fastrt.tasks.method import Actor, method

__all__ = ["Actor", "ActorClass", "ActorHandle", "exit_actor", "method"]
