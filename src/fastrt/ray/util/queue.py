"""`ray.util.queue`: queues between processes."""

from fastrt.util.queue import Empty, Full, Queue

__all__ = ["Empty", "Full", "Queue"]
