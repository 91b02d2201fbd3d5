"""The few names below `ray._private` that programs and libraries of others use although they are not public."""

from fastrt.ray._private import services, worker

__all__ = ["services", "worker"]
