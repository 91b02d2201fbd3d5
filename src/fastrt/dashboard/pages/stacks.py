"""Stacks of processes, read when a button asks for one: also of a process that hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from fastrt.dashboard import sections
from fastrt.dashboard.pages import far
from fastrt.dashboard.sections import Section
from fastrt.dashboard.watched import Watched
from fastrt.errors import FastrtError
from fastrt.observe import elsewhere, stacks
from fastrt.observe.stacks import Stack
from fastrt.store.client import Store

_KEPT = 16  # stacks of a session


class StackReading:
    """Reads the stacks of one process in a thread, which takes a second on a busy machine.

    Args:
        read_stacks: reads them.

    Attributes:
        at: when it was asked for, in seconds since the epoch.
        is_done: whether `text` or `why` is there.
        text: the stacks of its threads.
        why: why they cannot be read.
    """

    def __init__(self, read_stacks: Callable[[], list[Stack]]) -> None:
        self._read_stacks = read_stacks
        self.at, self.is_done, self.text, self.why = time.time(), False, "", ""
        threading.Thread(target=self._read, name="fastrt-stack", daemon=True).start()

    def _read(self) -> None:
        try:
            self.text = "\n\n".join(stacks.as_text(one) for one in self._read_stacks())
        except FastrtError as exc:
            self.why = str(exc)
        finally:
            self.is_done = True


def read(session: Watched, store: Store, body: Mapping[str, Any]) -> str:
    """Start to read the stacks of a process: it stops for some milliseconds and is not changed.

    Raises:
        ValueError: the body names no worker, actor or driver of the session, or no node of its cluster.
    """
    pid, node = body.get("pid"), body.get("node", "")
    if type(pid) is not int or not isinstance(node, str):
        raise ValueError("the request names no process")
    if node:
        far.name_of(store, {"node": node})
        known = _reading(session, node, pid, lambda: elsewhere.read_stack(store.socket_path, node, pid))
    else:
        process = next((one for one in stacks.processes(store) if one.pid == pid), None)
        if process is None:
            raise ValueError("the request names no worker, actor or driver of this session")
        known = _reading(session, node, pid, lambda: stacks.read(process))
    session.stacks[node, pid] = known
    for old in list(session.stacks)[:-_KEPT]:
        del session.stacks[old]
    return "its stack is being read"


def _reading(session: Watched, node: str, pid: int, read_stacks: Callable[[], list[Stack]]) -> StackReading:
    """The reading that has not ended yet, or else a new one."""
    known: StackReading | None = session.stacks.pop((node, pid), None)
    return StackReading(read_stacks) if known is None or known.is_done else known


def of_process(session: Watched, pid: int | None, kind: str, node: str = "") -> list[Section]:
    """The button that asks for the stack of a process, and the stack; nothing for a process without user code."""
    if pid is None or kind not in stacks.KINDS:
        return []
    button = sections.buttons("ask-stack", [("Show its stack", "do/stack", {"pid": pid, "node": node}, "")])
    found = session.stacks.get((node, pid))
    if found is None:
        return [button]
    at = time.strftime("%H:%M:%S", time.localtime(found.at))
    if found.why:
        return [button, sections.text("stack", f"The stack of process {pid} cannot be read: {found.why}", "warn")]
    return [button, sections.lines("stack", f"Stack of process {pid} at {at}", found.text, "It is being read.")]
