"""`ray.util.pdb` and `ray.util.rpdb`: breakpoints in tasks, which wait for `fastrt debug`."""

from __future__ import annotations

import sys


def set_trace(breakpoint_uuid: bytes | None = None) -> None:
    """Wait in the debugger at the caller's line, as `breakpoint()` does.

    Args:
        breakpoint_uuid: ignored; Ray's own use of it is internal.
    Source:
        The semantics of `ray.util.pdb.set_trace`.
    """
    sys.breakpointhook()
