"""Hostile processes, the doors and folders that they attack, and a scene of services behind those."""
