"""Tables of the parameter server in shared memory, and its optimizers."""
