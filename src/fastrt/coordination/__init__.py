"""A coordination service that JAX and TensorFlow processes connect to unmodified, and fastrt's own agent for it.

`connect` (blocking) and `connect_async` join a job; `Coordinator` serves one inside this process, `Front` one whose
state outlives its process. `fastrt coordinator` runs either from a shell.
"""

from fastrt.coordination.agent import AsyncAgent, TaskView, connect_async
from fastrt.coordination.client import Agent, connect
from fastrt.coordination.errors import (
    CoordinationError,
    CoordinationTimeoutError,
    CoordinatorLostError,
    KeyExistsError,
    KeyMissingError,
)
from fastrt.coordination.front import Front
from fastrt.coordination.service import Coordinator, CoordinatorOptions

__all__ = [
    "Agent",
    "AsyncAgent",
    "CoordinationError",
    "CoordinationTimeoutError",
    "Coordinator",
    "CoordinatorLostError",
    "CoordinatorOptions",
    "Front",
    "KeyExistsError",
    "KeyMissingError",
    "TaskView",
    "connect",
    "connect_async",
]
