"""Failpoints for tests of crash safety: kill or stop a process at a chosen instruction of the core.

Works with a test build only (`FASTRT_FAILPOINTS=1 pip install ...`); release builds contain no failpoints. The
processes under test are started with the environment that `Failpoints.environment` returns: every compiled
module then registers its points, named by their source line ("objects.pyx:95 store"), in one shared table.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path
from types import TracebackType

_FIELDS = struct.Struct("<IIIIiIII")  # used, action, slot, side, pid, countdown, jitter, lock: failpoint.h
_HEADER_BYTES = 64
_SLOT = struct.Struct("<56sII")
_SLOTS = 2048
_ACTIONS = {"kill": 1, "stop": 2}
_BYTES = _HEADER_BYTES + _SLOTS * _SLOT.size
SIDES = ("before", "after")


class Failpoints:
    """The table of points that a set of processes shares, in a file that the caller names.

    Args:
        path: the file to create; hits are cheapest on a memory file system.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        with open(self.path, "wb") as file:
            file.truncate(_BYTES)
        self._map = _mapped(self.path)
        self._is_creator = True

    @classmethod
    def attach(cls, path: str | os.PathLike[str]) -> Failpoints:
        """Use a table that another process has created: arm points and read counters."""
        self = cls.__new__(cls)
        self.path = Path(path)
        self._map = _mapped(self.path)
        self._is_creator = False
        return self

    def __enter__(self) -> Failpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the file; its creator also removes it."""
        self._map.close()
        if self._is_creator:
            self.path.unlink(missing_ok=True)

    def environment(self) -> dict[str, str]:
        """Return the environment for processes that are to register their points in this table."""
        return {**os.environ, "FASTRT_FAILPOINTS_FILE": str(self.path)}

    def points(self) -> dict[str, tuple[int, int]]:
        """List all points that any process has loaded: name -> hits (before, after)."""
        found = {}
        for k in range(self._fields()[0]):
            name, before, after = _SLOT.unpack_from(self._map, _HEADER_BYTES + k * _SLOT.size)
            found[name.rstrip(b"\0").decode()] = (before, after)
        return found

    def clear(self) -> None:
        """Set every hit counter to 0."""
        for k in range(self._fields()[0]):
            struct.pack_into("<II", self._map, _HEADER_BYTES + k * _SLOT.size + 56, 0, 0)

    def arm(self, point: str, side: str = "before", *, pid: int = 0, hit: int = 1, action: str = "kill") -> None:
        """Make process `pid` kill or stop itself at a point.

        Args:
            point: a name that `points` lists.
            side: "before" or "after" the change at that point.
            pid: the process; 0 for the first one that reaches the point.
            hit: act at this hit, counted from now; 1 is the next one.
            action: "kill" (SIGKILL) or "stop" (SIGSTOP).
        Raises:
            ValueError: no such point, side or action.
        """
        names = list(self.points())
        if point not in names or side not in SIDES or action not in _ACTIONS:
            raise ValueError(f"no point {point!r}, side {side!r} or action {action!r}; {len(names)} points are loaded")
        self.disarm()
        struct.pack_into("<IIiI", self._map, 8, names.index(point), SIDES.index(side), pid, hit)
        struct.pack_into("<I", self._map, 4, _ACTIONS[action])  # last: this write arms the point

    def disarm(self) -> None:
        """Disarm the point."""
        struct.pack_into("<I", self._map, 4, 0)

    @property
    def armed(self) -> bool:
        """Whether a point is armed and has not acted yet."""
        return self._fields()[1] != 0

    def jitter(self, one_in: int) -> None:
        """Make every process yield its processor at one in `one_in` hits; 0 ends that."""
        struct.pack_into("<I", self._map, 24, one_in)

    def _fields(self) -> tuple[int, ...]:
        return _FIELDS.unpack_from(self._map, 0)


def _mapped(path: Path) -> mmap.mmap:
    with open(path, "r+b") as file:
        return mmap.mmap(file.fileno(), _BYTES)
