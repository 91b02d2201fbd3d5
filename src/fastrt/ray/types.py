"""Types for annotations: `from ray.types import ObjectRef`."""

from fastrt.store.ref import ObjectRef

__all__ = ["ObjectRef"]
