"""The few names below `ray._private` that programs and libraries of others use although they are not public."""

from fastrt.ray._private import internal_api, ray_constants, services, utils, worker

__all__ = ["internal_api", "ray_constants", "services", "utils", "worker"]
