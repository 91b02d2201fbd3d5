"""The scheduler's reference counts for the objects of a cluster."""
