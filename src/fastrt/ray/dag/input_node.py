"""The inputs of graphs, under their path in Ray."""

from fastrt.tasks.dag import DAGInputData, InputAttributeNode, InputNode

__all__ = ["DAGInputData", "InputAttributeNode", "InputNode"]
