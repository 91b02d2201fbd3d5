"""The memory of this machine, or of the cgroup with the tightest limit, which programs ask for before they fill it."""

from __future__ import annotations

from fastrt.config import MemoryLevel, memory_levels

__all__ = ["get_system_memory", "get_used_memory"]


def get_system_memory() -> int:
    """Return the bytes that all processes together can use."""
    return _tightest().limit


def get_used_memory() -> int:
    """Return the bytes that they use; pages of files that the kernel can drop at once do not count."""
    return _tightest().used


def _tightest() -> MemoryLevel:
    return min(memory_levels(), key=lambda level: level.limit)
