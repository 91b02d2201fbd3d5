"""The few names below `ray._raylet` that libraries of others use, to ask whether a value is a reference."""

from __future__ import annotations

from fastrt.ray import ObjectRef, ObjectRefGenerator

__all__ = ["ObjectRef", "ObjectRefGenerator"]
