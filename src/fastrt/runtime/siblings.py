"""Processes that share most of their modules, forked from one interpreter instead of each importing them.

The interpreter (`mold`) forks them and ends. While it does, this process adopts its orphans (prctl(2)
PR_SET_CHILD_SUBREAPER), so all of them are its children, as if it had started each: it learns how they end, and none
depends on another. `fastrt start` does not fork them itself, although it has most modules: tasks would inherit its
memory, with the cluster's token. A process that restarts alone is started by `supervise.spawn`, and so is each if
the kernel refuses this, an interpreter has threads from its start, or one needs options that others must
not have.
"""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from fastrt._core.memory.orphans import adopt_orphans, can_adopt_orphans
from fastrt.errors import FastrtError, NodeDiedError
from fastrt.foreign_text import read_json
from fastrt.net.supervise import passed_settings, reap, spawn

_HARMLESS = {"-B", "-s"}  # options that processes for which they were not meant may have, too
_PIDS_BYTES = 1 << 12

_adopting = threading.Lock()


class Sibling(NamedTuple):
    """A process to start.

    Attributes:
        name: shown by `ps` and `top` as `fastrt-NAME`.
        module: the process imports its `main`.
        call: what it runs, such as "main()"; it can use `sys`.
        arguments: for `sys.argv`.
        fds: descriptors that it inherits, beside the standard ones.
        flags: options of its interpreter.
        pipes: whether its standard input and output are pipes of this process; else /dev/null and those of this one.
    """

    name: str
    module: str
    call: str
    arguments: tuple[str, ...] = ()
    fds: tuple[int, ...] = ()
    flags: tuple[str, ...] = ()
    pipes: bool = False


class Stage(NamedTuple):
    """Processes that are forked at the same moment.

    Attributes:
        modules: imported before; they may not start threads, nor begin to use gRPC.
        siblings: the processes.
        env: variables for these processes and those of the next stages.
    """

    modules: tuple[str, ...]
    siblings: tuple[Sibling, ...]
    env: dict[str, str] = {}  # noqa: RUF012  (a default of a named tuple)


class _Adopted(subprocess.Popen[bytes]):
    """A child that this process has not started itself."""

    def __init__(self, pid: int, name: str) -> None:
        self._its_pid = pid
        super().__init__([name])

    def _execute_child(self, *words: Any, **options: Any) -> None:
        self.pid, self._child_created = self._its_pid, True


def start(stages: Sequence[Stage], patience_s: float) -> list[subprocess.Popen[bytes]]:
    """Start processes.

    Args:
        stages: the processes, those that need the fewest modules first.
        patience_s: how long their interpreter may take.
    Returns:
        The processes, in the order of the stages.
    Raises:
        FastrtError: the interpreter ended before it had forked them; its own error output says why.
        NodeDiedError: it took too long.
    """
    flags = {flag for stage in stages for one in stage.siblings for flag in one.flags}
    if flags <= _HARMLESS and can_adopt_orphans():
        together = _start_together(stages, patience_s, sorted(flags))
        if together:
            return together
    children, env = [], dict(os.environ)
    for stage in stages:
        env |= stage.env
        for one in stage.siblings:
            pipe = subprocess.PIPE if one.pipes else None
            more: dict[str, Any] = {"pass_fds": one.fds, "stdin": pipe, "stdout": pipe, "env": dict(env)}
            children.append(spawn(one.module, one.call, *one.arguments, name=one.name, flags=one.flags, **more))
    return children


def _start_together(stages: Sequence[Stage], patience_s: float, flags: Sequence[str]) -> list[subprocess.Popen[bytes]]:
    """Start processes from one interpreter; returns none if it has threads."""
    siblings = [one for stage in stages for one in stage.siblings]
    pipes = {one.name: (os.pipe(), os.pipe()) for one in siblings if one.pipes}
    theirs_of = {name: [into[0], out[1]] for name, (into, out) in pipes.items()}
    ours_of = {name: [into[1], out[0]] for name, (into, out) in pipes.items()}
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    steps = [
        {
            "modules": stage.modules,
            "env": stage.env,
            "processes": [one._asdict() | {"pipes": theirs_of.get(one.name, [])} for one in stage.siblings],
        }
        for stage in stages
    ]
    given = [fd for ends in theirs_of.values() for fd in ends]
    kept = [fd for ends in ours_of.values() for fd in ends]
    try:
        with ours, theirs, passed_settings({"control": theirs.fileno(), "stages": steps}) as plan:
            fds = [theirs.fileno(), plan, *given, *(fd for one in siblings for fd in one.fds)]
            call = "main, call = main(); exec(call)"
            mold = spawn("fastrt.runtime.mold", call, str(plan), name="mold", pass_fds=fds, flags=flags)
            theirs.close()
            pids = _adopt(mold, ours, patience_s)
        if pids:
            kept = []
    finally:
        for fd in given + kept:
            os.close(fd)
    if not pids:
        return []
    children: list[subprocess.Popen[bytes]] = [_Adopted(pid, one.name) for pid, one in zip(pids, siblings, strict=True)]
    for child, one in zip(children, siblings, strict=True):
        if one.pipes:
            child.stdin, child.stdout = os.fdopen(ours_of[one.name][0], "wb"), os.fdopen(ours_of[one.name][1], "rb")
    return children


def _adopt(mold: subprocess.Popen[bytes], control: socket.socket, patience_s: float) -> list[int]:
    """Wait until the processes are forked, and make them children of this process; return their ids."""
    control.settimeout(patience_s)
    try:
        said = control.recv(_PIDS_BYTES)
        if not said:
            raise FastrtError("the runtime cannot start: it ended without a word; see its error output")
        with _adopting:
            before = adopt_orphans(True)
            try:
                control.send(b"!")  # it ends
                reap(mold)
            finally:
                adopt_orphans(before)
    except TimeoutError:
        raise NodeDiedError(f"the processes of the session did not start in {patience_s} s") from None
    except BrokenPipeError:
        pass
    finally:
        reap(mold, 0)
    if mold.returncode:  # they are not children of this process
        raise FastrtError("the processes of the session did not start: the process that forks them was killed")
    pids: list[int] = read_json(said, "the ids of processes", own=True)
    return pids
