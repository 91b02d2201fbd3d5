"""Variables of Ray that change the node that `ray.init` starts, and the list of dead actors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from fastrt.config import RUNTIME_BYTES_MAX
from fastrt.foreign_text import read_object

FOLDER = "RAY_TMPDIR"
_OVERRIDE = "RAY_OVERRIDE_RESOURCES"
_FOLDING = "RAY_DEDUP_LOGS"
_DEAD_ACTORS = "RAY_maximum_gcs_destroyed_actor_cached_count"
_OWN_FOLDER = "FASTRT_RUNTIME_DIR"


def runtime_dir(temporary: str | None) -> str | None:
    """Return the sessions' folder below a folder of temporary files, which may be other users', too; None: the default.

    Args:
        temporary: the folder; None: none is given. A folder in fastrt's own variable takes precedence, and one whose
            path is too long for the sockets has no effect.
    """
    if not temporary or _OWN_FOLDER in os.environ:
        return None
    folder = os.path.join(os.path.abspath(temporary), f"fastrt-{os.getuid()}")
    return folder if len(os.fsencode(folder)) <= RUNTIME_BYTES_MAX else None


def of_output() -> dict[str, bool]:
    """Return the setting for which RAY_DEDUP_LOGS=0 stands: each line of the workers is printed."""
    return {"log_fold": False} if os.environ.get(_FOLDING) == "0" else {}


def dead_actors_kept() -> int | None:
    """Return how many dead actors are listed; None: all that are known."""
    text = os.environ.get(_DEAD_ACTORS, "")
    return int(text) if text.isdecimal() else None


def override(about: dict[str, Any], resources: Mapping[str, float] | None) -> Mapping[str, float] | None:
    """Replace resources of a node by those that the variable RAY_OVERRIDE_RESOURCES gives.

    Args:
        about: the resources with an option of their own, by name; changed here.
        resources: the others.
    Returns:
        The others.
    Raises:
        ForeignTextError: the variable is no dict in JSON; a ValueError.
    """
    text = os.environ.get(_OVERRIDE)
    if not text:
        return resources
    given = dict(read_object(text, f"the variable {_OVERRIDE}"))
    for name in about:
        value = given.pop(name, None)
        about[name] = about[name] if value is None else value
    return {**(resources or {}), **given}
