"""Lists of a session's tasks, actors, objects and workers, under Ray's path but with fastrt's arguments."""

from fastrt.runtime.state_api import list_actors, list_objects, list_tasks, list_workers

__all__ = ["list_actors", "list_objects", "list_tasks", "list_workers"]
