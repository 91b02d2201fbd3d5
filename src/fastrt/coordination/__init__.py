"""A coordination service that JAX and TensorFlow processes connect to unmodified, and fastrt's own agent for it."""
