"""The segment, its clients and allocator, and the queues and waits that need nothing else."""
