"""A start of gRPC, which opens now what it keeps open for good."""

from fastrt.scheduler import Scheduler, SchedulerClient, SchedulerOptions

with Scheduler(SchedulerOptions()) as _scheduler, SchedulerClient(_scheduler.address) as _client:
    _client.register_store("127.0.0.1:9")
del _scheduler, _client
