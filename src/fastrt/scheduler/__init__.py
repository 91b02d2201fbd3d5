"""Early Ray's `Scheduler` service over a pure state machine, and the scheduling policy that fastrt's cluster shares."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastrt.scheduler.client import SchedulerClient, SchedulerError
    from fastrt.scheduler.service import Scheduler, SchedulerOptions
    from fastrt.scheduler.state import Settings

__all__ = ["Scheduler", "SchedulerClient", "SchedulerError", "SchedulerOptions", "Settings"]
_MODULES = {
    "Scheduler": "service",
    "SchedulerClient": "client",
    "SchedulerError": "client",
    "SchedulerOptions": "service",
    "Settings": "state",
}


def __getattr__(name: str) -> object:
    """Import a name when it is used: a daemon has the policy without the service and its gRPC."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
