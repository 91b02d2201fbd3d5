"""Actors under the names that Ray gives them: `from fastrt.actor import exit_actor, ActorHandle`."""

from fastrt.tasks.actor import ActorClass
from fastrt.tasks.handle import ActorHandle
from fastrt.tasks.leaving import exit_actor
from fastrt.tasks.method import method

__all__ = ["ActorClass", "ActorHandle", "exit_actor", "method"]
