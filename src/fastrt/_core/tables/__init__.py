"""The parameter server's tables in shared memory, and its optimizers."""
