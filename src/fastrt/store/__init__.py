"""Values in shared memory: references, serialization, put, get and wait, and this process's attachment."""
