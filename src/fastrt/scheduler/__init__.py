"""The cluster's scheduler: early Ray's `Scheduler` service, complete, over a pure state machine."""

from fastrt.scheduler.client import SchedulerClient, SchedulerError
from fastrt.scheduler.service import Scheduler, SchedulerOptions
from fastrt.scheduler.state import Settings

__all__ = ["Scheduler", "SchedulerClient", "SchedulerError", "SchedulerOptions", "Settings"]
