"""Collective groups of ranks over shared memory, and the vector loops of their operations."""
