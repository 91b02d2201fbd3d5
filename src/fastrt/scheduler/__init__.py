"""What spans nodes: early Ray's `Scheduler` service over a pure state machine; the membership of fastrt's own nodes."""

from fastrt.scheduler.client import SchedulerClient, SchedulerError
from fastrt.scheduler.service import Scheduler, SchedulerOptions
from fastrt.scheduler.state import Settings

__all__ = ["Scheduler", "SchedulerClient", "SchedulerError", "SchedulerOptions", "Settings"]
