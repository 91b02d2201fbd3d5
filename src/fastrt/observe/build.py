"""The build of fastrt that runs: `setup.py` records its facts in `build.json`, which only a wheel holds."""

from __future__ import annotations

import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastrt.foreign_text import read_object

_FILE = Path(__file__).parents[1] / "build.json"


@dataclass(frozen=True)
class Build:
    """The facts of a build.

    Attributes:
        version: of fastrt.
        python: version and implementation of the running Python.
        machine: architecture and C library.
        commit: of the sources, "" if unknown; ends in "+" if files had changed.
        layout: version of the shared memory's layout; processes of a session must agree in it; 0: unknown.
        flags: of the C compiler, those that matter.
        is_recorded: whether the build recorded them; a source tree that was built in place has none.
    """

    version: str
    python: str
    machine: str
    commit: str
    layout: int
    flags: tuple[str, ...]
    is_recorded: bool

    def lines(self) -> list[str]:
        """Describe the build in three lines; the first one holds the version."""
        commit = f" (commit {self.commit[:12]}{'+' * self.commit.endswith('+')})" if self.commit else ""
        if self.is_recorded:
            core = f"core: layout {', '.join([str(self.layout), *self.flags])}"
        else:
            core = f"core: built in place in {_FILE.parent}, without a record of commit and flags"
        return [f"fastrt, version {self.version}{commit}", f"Python {self.python}, {self.machine}", core]


def this_build(version: str, file: Path = _FILE) -> Build:
    """Return the facts of the installed build.

    Args:
        version: of fastrt.
        file: the record that the build made.
    """
    python = f"{platform.python_version()} ({sys.implementation.name})"
    machine = f"{platform.machine()}, {' '.join(part for part in platform.libc_ver() if part) or 'unknown C library'}"
    about: dict[str, Any] = {}
    try:
        about = read_object(file.read_text(), str(file), own=True)
    except (OSError, ValueError):
        return Build(version, python, machine, "", 0, (), False)
    return Build(
        version, python, machine, str(about.get("commit", "")), int(about.get("layout", 0)),
        tuple(map(str, about.get("flags", ()))), True,
    )  # fmt: skip
