"""Detects kills by the kernel for lack of memory: SIGKILL alone does not name its sender.

The kernel counts such kills before it sends the signal: for each memory control group (version 2 `memory.events`,
version 1 `memory.oom_control`) and for the whole machine (`oom_kill` in /proc/vmstat; all readable without
privilege). Counters name no process. The message therefore says only that a counter rose at about the time of the
worker's death.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path

_PIECE_BYTES = 1 << 14
_LOOK_S = 0.5
# A victim with gigabytes takes seconds to end after the counter has risen.
_WINDOW_S = 5.0
LACK = "for lack of memory"
_NO_LIMIT = 1 << 60  # version 1 writes "none" as a number near 2^63


class KillCounters:
    """The counters of kills for lack of memory, with their values of the last seconds.

    Args:
        now: monotonic time, in seconds.
        proc: where proc(5) is mounted.
    """

    def __init__(self, now: float, proc: Path = Path("/proc")) -> None:
        self._counters = [_Counter(path) for path in (*_group_files(proc / "self"), proc / "vmstat")]
        self._looks: deque[tuple[float, list[int]]] = deque()
        self.look(now)

    def look(self, now: float) -> None:
        """Read the counters, unless that was done less than half a second ago; every tick of the daemon calls this."""
        if self._looks and now - self._looks[-1][0] < _LOOK_S:
            return
        self._looks.append((now, [counter.read() for counter in self._counters]))
        while len(self._looks) > 1 and now - self._looks[1][0] >= _WINDOW_S:
            self._looks.popleft()

    def story(self) -> str:
        """Say in words which counter rose in the last seconds; empty when the kernel has killed no process."""
        before = self._looks[0][1]
        for counter, count in zip(self._counters, before, strict=True):
            if counter.read() > count:
                path = counter.path
                if path.name == "vmstat":
                    return f"the kernel killed a process of this machine {LACK} at that moment"
                return (
                    f"the kernel killed a process of its memory control group {LACK} at that moment "
                    f"({path.parent}, {_limit(path.parent)})"
                )
        return ""


def _group_files(process: Path) -> Iterator[Path]:
    """The counter files of a process's control groups: its own first, then the groups above it."""
    try:
        groups = [line.split(":", 2) for line in (process / "cgroup").read_text().splitlines()]
        mounts = [line.split() for line in (process / "mountinfo").read_text().splitlines()]
    except OSError:
        return
    for fields in mounts:
        # id, parent, device, root, mount point, options, any number of fields, "-", type, source, options
        kind, _, options = fields[fields.index("-") + 1 :][:3]
        root, top = fields[3], Path(fields[4])
        for _, controllers, own in groups:
            if kind == "cgroup2" and controllers == "":
                name = "memory.events"
            elif kind == "cgroup" and "memory" in options.split(",") and "memory" in controllers.split(","):
                name = "memory.oom_control"
            else:
                continue
            # In a container the mount may begin below the hierarchy's root.
            inside = own[len(root.rstrip("/")) :] if (own + "/").startswith(root.rstrip("/") + "/") else ""
            folder = top / inside.lstrip("/")
            for group in [folder, *folder.parents]:
                if (group / name).exists():
                    yield group / name
                if group == top:
                    break


class _Counter:
    """The counter `oom_kill` of one file, which stays open: an idle daemon reads it once a second.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._descriptor = -1

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def read(self) -> int:
        """Return the counter; 0 where there is none, as for a group that is gone."""
        if self._descriptor < 0:
            return 0
        try:
            text, count = b"\n", b""
            while b"\n" not in count and (piece := os.pread(self._descriptor, _PIECE_BYTES, len(text) - 1)):
                text += piece
                count = text.partition(b"\noom_kill ")[2]
            return int(count.partition(b"\n")[0] or 0)
        except (OSError, ValueError):
            return 0


def _limit(folder: Path) -> str:
    for name in ("memory.max", "memory.limit_in_bytes"):
        try:
            text = (folder / name).read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < _NO_LIMIT:
            return f"limited to {int(text) >> 20} MiB"
    return "without a limit of its own"
