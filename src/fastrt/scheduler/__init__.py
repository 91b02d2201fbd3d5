"""Early Ray's `Scheduler` service over a pure state machine, and the scheduling policy that fastrt's cluster shares."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastrt.lazy import attach

if TYPE_CHECKING:
    from fastrt.scheduler.client import SchedulerClient, SchedulerError
    from fastrt.scheduler.service import Scheduler, SchedulerOptions
    from fastrt.scheduler.state import Settings

__all__ = ["Scheduler", "SchedulerClient", "SchedulerError", "SchedulerOptions", "Settings"]
# A daemon has the policy without the service and its gRPC.
_HOMES = {
    "fastrt.scheduler.client": "SchedulerClient SchedulerError",
    "fastrt.scheduler.service": "Scheduler SchedulerOptions",
    "fastrt.scheduler.state": "Settings",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = attach(__name__, _HOMES)
