"""One machine's node daemon: client slots, worker pool, recovery after deaths, log lines."""
