"""The versions that processes of a cluster must agree in, and the table that a process with other ones gets.

Functions and values travel pickled by reference to modules, by cloudpickle's format and by the bytecode of one minor
version of Python: with another one they fail in unpickling, with an obscure error, or run and give another result.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from functools import cache

MUST_AGREE = ("python", "fastrt", "cloudpickle")
_UNKNOWN = "unknown"
_NAMES = {"python": "Python", "fastrt": "fastrt", "cloudpickle": "cloudpickle", "numpy": "NumPy"}
_TEXT = re.compile(r"[!-~]{1,64}")


@cache
def own_versions() -> Mapping[str, str]:
    """Return this process's versions by name: python (its minor version), fastrt, cloudpickle; numpy if installed."""
    numpy = _version_of("numpy")
    return {**required_versions(), **({"numpy": numpy} if numpy else {})}


@cache
def required_versions() -> Mapping[str, str]:
    """Return those of this process's versions that must agree; in a process of a session without a look at files."""
    return {
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "fastrt": str(getattr(sys.modules.get("fastrt"), "__version__", _UNKNOWN)),
        "cloudpickle": _version_of("cloudpickle") or _UNKNOWN,
    }


def are_versions(found: Mapping[str, str]) -> bool:
    """Whether these can be versions that another process reports: known names, and short printable texts."""
    return set(found) <= set(_NAMES) and all(_TEXT.fullmatch(version) for version in found.values())


def disagreement(theirs: Mapping[str, str], who: str, ours: Mapping[str, str] | None = None, here: str = "here") -> str:
    """Return a table of both sides' versions if they cannot work together; else an empty text.

    Args:
        theirs: versions of the other process; one that it does not report counts as another version.
        who: names the other process.
        ours: of this process; None: `required_versions`.
        here: names this process.
    """
    ours = required_versions() if ours is None else ours
    if all(theirs.get(name, _UNKNOWN) == ours.get(name, _UNKNOWN) for name in MUST_AGREE):
        return ""
    rows = [("", here, who)]
    rows += [(_NAMES[name], ours.get(name, "-"), theirs.get(name, _UNKNOWN)) for name in MUST_AGREE]
    widths = [max(len(row[k]) for row in rows) for k in range(3)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    marks = [" ", *("!" if row[1] != row[2] else " " for row in rows[1:])]
    table = "\n".join(f"  {mark} {line}" for mark, line in zip(marks, lines, strict=True))
    return f"its versions differ; install the same ones on all machines:\n{table}"


def numpy_warning(theirs: Mapping[str, str], who: str) -> str:
    """Return a warning if the other process has another NumPy: arrays travel, but their pickles may not; else ""."""
    ours = own_versions().get("numpy", "")
    other = theirs.get("numpy", "")
    if not ours or not other or ours == other:
        return ""
    return f"{who} has NumPy {other}, and this process {ours}: arrays inside other values may not be readable there"


def _version_of(package: str) -> str:
    """Return a package's version, without importing the package; empty: it is not installed."""
    loaded = getattr(sys.modules.get(package), "__version__", None)
    if loaded is not None:
        return str(loaded)
    from importlib import metadata  # 15 ms: processes of a session have loaded the packages already

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
