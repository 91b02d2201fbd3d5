"""What there is in a session, where Ray has it: `from fastrt.util.state import list_actors`; arguments are fastrt's."""

from fastrt.runtime.state_api import list_actors, list_objects, list_tasks, list_workers

__all__ = ["list_actors", "list_objects", "list_tasks", "list_workers"]
