"""The cluster's scheduler: early Ray's `Scheduler` service, complete, over a pure state machine."""
