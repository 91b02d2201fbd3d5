"""The title of a worker or an actor's process: the command line that `ps` and `top -c` show.

`setproctitle` sets it where it is installed, so that a program that uses that library, too, finds what it expects.
Otherwise the title is written over the arguments that the process was started with, from which the kernel reads
`/proc/PID/cmdline`. A title is set once in a process: one for each task would cost more than a task.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
from pathlib import Path

_ARG_START, _ARG_END = 45, 46  # fields of /proc/self/stat after the name, see proc(5)


def set_title(title: str) -> None:
    """Set the title of this process; characters beyond the length of its first command line are left out."""
    with contextlib.suppress(OSError):  # /proc is not mounted
        name = Path("/proc/self/comm").read_bytes()
        try:
            importlib.import_module("setproctitle").setproctitle(title)
        except ImportError:
            _write(title.encode("utf-8", "replace").replace(b"\0", b" "))
        else:
            Path("/proc/self/comm").write_bytes(name.rstrip())  # the library changes the short name, too


def _write(title: bytes) -> None:
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    if len(fields) <= _ARG_END:  # an emulator such as qemu leaves them out
        return
    start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
    if start and end > start:  # else the kernel hides them
        title = title[: end - start - 1]
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, title, len(title))
