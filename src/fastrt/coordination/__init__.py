"""A coordination service that JAX and TensorFlow processes connect to unmodified, and fastrt's own agent for it.

`connect` (blocking) and `connect_async` join a job; `open_keys` and `open_keys_async` use its keys from outside.
`Coordinator` serves one inside this process, `Front` one whose state outlives its process. `fastrt coordinator` runs
either from a shell.
"""

from fastrt.coordination.agent import AsyncAgent, TaskView, connect_async
from fastrt.coordination.client import Agent, Keys, connect, open_keys
from fastrt.coordination.errors import (
    CoordinationError,
    CoordinationTimeoutError,
    CoordinatorLostError,
    KeyExistsError,
    KeyMissingError,
)
from fastrt.coordination.front import Front
from fastrt.coordination.keys import AsyncKeys, open_keys_async
from fastrt.coordination.service import Coordinator, CoordinatorOptions

__all__ = [
    "Agent",
    "AsyncAgent",
    "AsyncKeys",
    "CoordinationError",
    "CoordinationTimeoutError",
    "Coordinator",
    "CoordinatorLostError",
    "CoordinatorOptions",
    "Front",
    "KeyExistsError",
    "KeyMissingError",
    "Keys",
    "TaskView",
    "connect",
    "connect_async",
    "open_keys",
    "open_keys_async",
]
