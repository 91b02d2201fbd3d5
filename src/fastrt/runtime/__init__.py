"""Starts and ends sessions: the only package that wires processes together."""
