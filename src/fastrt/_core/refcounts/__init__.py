"""The scheduler's reference counts of the objects in a cluster."""
