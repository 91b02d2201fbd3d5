"""Actors under the path that Ray gives them: `from ray.actor import exit_actor`."""

from fastrt.errors import FastrtError
from fastrt.tasks.actor_class import ActorClass
from fastrt.tasks.actor_handle import ActorHandle, ActorMethod
from fastrt.tasks.exit_actor import exit_actor
from fastrt.tasks.method import method

__all__ = ["ActorClass", "ActorClassInheritanceException", "ActorHandle", "ActorMethod", "exit_actor", "method"]


class ActorClassInheritanceException(FastrtError, TypeError):
    """Ray raises it for a class that inherits from a remote class; fastrt raises a TypeError."""
