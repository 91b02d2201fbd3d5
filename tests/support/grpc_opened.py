"""Lets gRPC open its permanent descriptors: a conftest imports this before a test is watched for what it leaves."""

from importlib.util import find_spec

if find_spec("grpc") is not None:  # a light installation does without it
    from fastrt.coordination import Coordinator, CoordinatorOptions, connect
    from fastrt.scheduler import Scheduler, SchedulerClient, SchedulerOptions

    with Coordinator(CoordinatorOptions(num_tasks=1)) as _coordinator, connect(_coordinator.address):
        pass
    with Scheduler(SchedulerOptions()) as _scheduler, SchedulerClient(_scheduler.address) as _client:
        _client.register_store("127.0.0.1:9")
    del _coordinator, _scheduler, _client
