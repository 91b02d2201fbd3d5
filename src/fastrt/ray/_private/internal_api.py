"""`free`, which some programs call although it is not public."""

from __future__ import annotations

from typing import Any

__all__ = ["free"]


def free(object_refs: Any, local_only: bool = False) -> None:
    """Do nothing: an object is freed with its last reference, which may belong to another process."""
