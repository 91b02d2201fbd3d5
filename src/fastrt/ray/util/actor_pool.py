"""`ray.util.actor_pool.ActorPool`."""

from fastrt.util.actor_pool import ActorPool

__all__ = ["ActorPool"]
