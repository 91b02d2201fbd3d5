"""The outputs of graphs, under their path in Ray."""

from fastrt.tasks.dag import MultiOutputNode

__all__ = ["MultiOutputNode"]
