"""Detects kills by the kernel for lack of memory: SIGKILL alone does not name its sender.

The kernel counts such kills before it sends the signal: for each memory control group (version 2 `memory.events`,
version 1 `memory.oom_control`) and for the whole machine (`oom_kill` in /proc/vmstat; all readable without
privilege). Counters name no process. The message therefore says only that a counter rose at about the time of the
worker's death.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path

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
        self._files = [*_group_files(proc / "self"), proc / "vmstat"]
        self._looks: deque[tuple[float, dict[Path, int]]] = deque()
        self.look(now)

    def look(self, now: float) -> None:
        """Read the counters, unless that was done less than half a second ago; every tick of the daemon calls this."""
        if self._looks and now - self._looks[-1][0] < _LOOK_S:
            return
        self._looks.append((now, {path: _oom_kills(path) for path in self._files}))
        while len(self._looks) > 1 and now - self._looks[1][0] >= _WINDOW_S:
            self._looks.popleft()

    def story(self) -> str:
        """Say in words which counter rose in the last seconds; empty when the kernel has killed no process."""
        before = self._looks[0][1]
        for path in self._files:
            if _oom_kills(path) > before[path]:
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


def _oom_kills(path: Path) -> int:
    """The counter `oom_kill` of one file; 0 where there is none, as for a group that was removed."""
    try:
        with path.open("rb") as file:
            for line in file:
                if line.startswith(b"oom_kill "):
                    return int(line.split()[1])
    except (OSError, ValueError, IndexError):
        pass
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
