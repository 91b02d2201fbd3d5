"""Early Ray's `Scheduler` service over a pure state machine, and the scheduling policy that fastrt's cluster shares."""

from fastrt.scheduler.client import SchedulerClient, SchedulerError
from fastrt.scheduler.service import Scheduler, SchedulerOptions
from fastrt.scheduler.state import Settings

__all__ = ["Scheduler", "SchedulerClient", "SchedulerError", "SchedulerOptions", "Settings"]
