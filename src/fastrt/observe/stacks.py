"""Stacks of running processes, read from outside by py-spy: a process that hangs, also in C, has nothing to do for it.

py-spy stops the process for some milliseconds and reads its memory. The kernel allows that for processes of the same
user, with more limits on some machines: `why_refused` explains them. Workers and actors allow it by
`prctl(PR_SET_PTRACER)` (`worker.zygote`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastrt.errors import FastrtError
from fastrt.foreign_text import ForeignTextError, check_object, read_json
from fastrt.observe import listing, reading
from fastrt.store.client import Store

KINDS = ("driver", "worker", "actor")  # of processes that run user code
_PACKAGE_DIR = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
_READ_S = 20.0  # for one process; a busy machine needs a second
_SAMPLES_PER_S = 100
_OUTPUT_BYTES_MAX = 64 << 20  # a thousand threads with the deepest recursion that Python allows by default
_FRAMES_MAX = 500  # of one thread, the latest, that another node is sent
_TEXT_MAX = 500  # characters of one name or path there
_REFUSALS = ("Permission denied", "Operation not permitted", "os error 1)", "os error 13)")


class StackError(FastrtError):
    """The stacks of a process cannot be read; the text says why and what to do."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One call on a stack.

    Attributes:
        function: its name.
        file: of the code; a library or "" for native code.
        line: from 1; 0: unknown, as in native code.
    """

    function: str
    file: str
    line: int

    @property
    def is_user_code(self) -> bool:
        """Whether it is Python code outside of fastrt."""
        return self.line > 0 and not self.file.startswith((_PACKAGE_DIR, "<string>"))


@dataclass(frozen=True, slots=True)
class Stack:
    """The stack of one thread.

    Attributes:
        thread: its name.
        thread_id: its number for the kernel; 0 if unknown.
        is_active: whether it uses a CPU, rather than sleeps in the kernel.
        has_gil: whether it holds the interpreter's lock.
        frames: the calls, the latest one last.
    """

    thread: str
    thread_id: int
    is_active: bool
    has_gil: bool
    frames: tuple[Frame, ...]

    @property
    def user_frames(self) -> tuple[Frame, ...]:
        """The frames without those of fastrt that have called user code; all if there is no user code."""
        for place, frame in enumerate(self.frames):
            if frame.is_user_code:
                return self.frames[place:]
        return self.frames

    def to_row(self) -> dict[str, Any]:
        """The stack for another node; of a deep one the latest calls, and of a long name its end."""
        frames = [
            [frame.function[-_TEXT_MAX:], frame.file[-_TEXT_MAX:], frame.line] for frame in self.frames[-_FRAMES_MAX:]
        ]
        return {
            "thread": self.thread[:_TEXT_MAX], "thread_id": self.thread_id, "is_active": self.is_active,
            "has_gil": self.has_gil, "frames": frames,
        }  # fmt: skip

    @classmethod
    def from_row(cls, row: Any) -> Stack:
        """The stack that another node has sent as `to_row`.

        Raises:
            ForeignTextError: the row is no stack.
        """
        fields = {"thread": str, "thread_id": int, "is_active": bool, "has_gil": bool, "frames": list}
        check_object(row, "a stack of another node", fields)
        for frame in row["frames"]:
            if not isinstance(frame, list) or [type(one) for one in frame] != [str, str, int]:
                raise ForeignTextError("a stack of another node has a malformed call")
        frames = tuple(Frame(*frame) for frame in row["frames"])
        return cls(row["thread"], row["thread_id"], row["is_active"], row["has_gil"], frames)


@dataclass(frozen=True, slots=True)
class Process:
    """A process of a session that runs user code.

    Attributes:
        pid: its number.
        kind: "driver", "worker" or "actor".
        tasks: the ids of the tasks and calls that it runs, with their names.
    """

    pid: int
    kind: str
    tasks: Mapping[str, str]

    @classmethod
    def from_row(cls, row: Any) -> Process:
        """The process that another node has sent as the object of its fields.

        Raises:
            ForeignTextError: the row is no process.
        """
        what = "a process of another node"
        check_object(row, what, {"pid": int, "kind": str, "tasks": dict})
        return cls(row["pid"], row["kind"], check_object(row["tasks"], what, dict.fromkeys(row["tasks"], str)))


def processes(store: Store) -> list[Process]:
    """List the processes of a session on this node that run user code, by pid.

    Args:
        store: any process's attachment.
    """
    running: dict[int, dict[str, str]] = {}
    for state in ("running", "blocked"):
        for row in reading.page(store, "tasks", {"state": state}, limit=0).rows:
            if row["pid"] is not None:
                running.setdefault(row["pid"], {})[row["task_id"]] = row["name"]
    rows = sorted(listing.workers(store), key=lambda row: row["pid"])
    return [Process(row["pid"], row["kind"], running.get(row["pid"], {})) for row in rows if row["kind"] in KINDS]


def process(store: Store, pid: int) -> Process:
    """The process of a session on this node with that number.

    Args:
        store: any process's attachment.
        pid: its number.
    Raises:
        StackError: it is no worker, actor or driver of the session.
    """
    found = processes(store)
    for one in found:
        if one.pid == pid:
            return one
    there = ", ".join(str(one.pid) for one in found)
    raise StackError(f"process {pid} is no worker, actor or driver of this session; there are: {there}")


def read(process: Process, *, native: bool = False) -> list[Stack]:
    """Read the stacks of all threads of a process, which stops for some milliseconds.

    Args:
        process: one of `processes`: this reads no other processes of the user.
        native: include the frames of C, C++ and Cython code.
    Raises:
        StackError: py-spy is not installed, or the process has ended, or the kernel refuses it.
    """
    words = [_py_spy(), "dump", "--json", "--full-filenames", "--pid", str(process.pid), *["--native"] * native]
    try:
        result = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=_READ_S)
    except subprocess.TimeoutExpired:
        raise StackError(
            f"process {process.pid} could not be read within {_READ_S:.0f} s: the machine is very busy, or the process "
            "sleeps in the kernel where no signal reaches it"
        ) from None
    if result.returncode != 0:
        raise StackError(_why_failed(process, result.stderr.decode("utf-8", "replace")))
    said = result.stdout.decode("utf-8", "replace")
    return [_stack(row) for row in read_json(said, "the output of py-spy", bytes_max=_OUTPUT_BYTES_MAX, own=True)]


def as_text(stack: Stack, *, full: bool = False) -> str:
    """Write the stack of one thread for people, a line for each call.

    Args:
        stack: from `read`.
        full: include the frames of fastrt that have called user code.
    """
    state = "runs" if stack.is_active else "sleeps"
    words = [f"thread {stack.thread or stack.thread_id} {state}{', holds the GIL' * stack.has_gil}, latest call last"]
    for frame in stack.frames if full else stack.user_frames:
        place = f"{frame.file}:{frame.line}" if frame.line else frame.file
        words.append(f"  {frame.function}  {place}")
    return "\n".join(words)


def record(process: Process, seconds: float, out: Path, *, idle: bool = False) -> None:
    """Sample the stacks of a process and write a flame graph.

    Args:
        process: one of `processes`.
        seconds: for how long, at 100 samples a second; whole seconds.
        out: the new file: SVG, or for https://www.speedscope.app if its name ends with `.json`.
        idle: also count threads that sleep.
    Raises:
        StackError: as `read`, or no sample had a running thread, or the file cannot be written.
    """
    kind = "speedscope" if out.suffix == ".json" else "flamegraph"
    words = [
        _py_spy(), "record", "--pid", str(process.pid), "--duration", str(max(1, round(seconds))), "--output", str(out),
        "--format", kind, "--rate", str(_SAMPLES_PER_S), *["--idle"] * idle,
    ]  # fmt: skip
    with open(out, "wb"):  # py-spy would report only after the samples that it cannot write
        pass
    result = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True)
    said = result.stderr.decode("utf-8", "replace") + result.stdout.decode("utf-8", "replace")
    if result.returncode == 0 and out.stat().st_size:
        return
    if not out.stat().st_size:
        out.unlink()
    if "No stack counts found" in said or result.returncode == 0:
        raise StackError(f"no thread of process {process.pid} used a CPU; count sleeping threads, too: --idle")
    raise StackError(_why_failed(process, said))


def why_refused(kind: str, scope: int | None) -> str:
    """Explain why the kernel does not let this user read a process of the same user.

    Args:
        kind: of the process: "driver", "worker" or "actor".
        scope: `kernel.yama.ptrace_scope`; None: the kernel has no such setting.
    """
    if scope == 1 and kind == "driver":
        return (
            "kernel.yama.ptrace_scope is 1: drivers can be read by root only. Run the command by sudo, or let the "
            "program call prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY). Workers and actors can be read"
        )
    if scope == 2:
        return "kernel.yama.ptrace_scope is 2: only root can read other processes. Run the command by sudo"
    if scope is not None and scope >= 3:
        return (
            f"kernel.yama.ptrace_scope is {scope}: not even root can read other processes until this machine starts "
            "with another value"
        )
    return (
        "the kernel does not allow it. In a container, allow it by --cap-add=SYS_PTRACE; a debugger that is attached "
        "already must leave first"
    )


def _ptrace_scope() -> int | None:
    try:
        return int(_PTRACE_SCOPE.read_text())
    except (OSError, ValueError):
        return None


def _why_failed(process: Process, said: str) -> str:
    """The reason for people, from py-spy's standard error."""
    if not os.path.exists(f"/proc/{process.pid}"):
        return f"process {process.pid} has ended"
    if any(words in said for words in _REFUSALS):
        return f"process {process.pid} cannot be read: {why_refused(process.kind, _ptrace_scope())}"
    first = next((line for line in said.splitlines() if line.startswith("Error: ")), "Error: it says nothing")
    return f"py-spy cannot read process {process.pid}: {first.removeprefix('Error: ')}"


def _py_spy() -> str:
    """The path of py-spy: beside this Python, or on PATH."""
    beside = os.path.join(sysconfig.get_path("scripts"), "py-spy")
    found = beside if os.access(beside, os.X_OK) else shutil.which("py-spy")
    if found is None:
        raise StackError("stacks are read by py-spy, which is not installed; run: pip install 'fastrt[debug]'")
    return found


def _stack(row: dict[str, Any]) -> Stack:
    frames = [
        Frame(str(frame["name"]), str(frame["filename"] or ""), int(frame["line"] or 0)) for frame in row["frames"]
    ]
    return Stack(
        str(row["thread_name"] or ""), int(row["os_thread_id"] or 0), bool(row["active"]), bool(row["owns_gil"]),
        tuple(reversed(frames)),
    )  # fmt: skip
