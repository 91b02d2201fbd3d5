"""The process that `fastrt run --hosts` starts on another machine by ssh: a node, until standard input ends."""

from __future__ import annotations

import os
import sys
import threading

from fastrt.errors import FastrtError
from fastrt.foreign_text import SETTINGS_BYTES_MAX, read_object
from fastrt.launch.detect import Place
from fastrt.launch.job import JobOptions, run
from fastrt.launch.program import end_as
from fastrt.launch.ssh import STARTED
from fastrt.net.address import split_address

_ORDER = "the order of `fastrt run --hosts`, which must have the same version on all machines"
# See `JobOptions.order`.
_FIELDS: dict[str, type | tuple[type, ...]] = dict.fromkeys(("address", "folder", "name", "token"), str)
_FIELDS |= {
    "rank": int,
    "size": int,
    "settings": dict,
    "jax": bool,
    "patience_s": float,
    "timeout_s": float,
    "grace_s": float,
}


def main() -> int:
    """Run the node that the first line of standard input orders.

    Returns:
        The exit code.
    """
    sys.stdout.write(f"{STARTED}\n")
    sys.stdout.flush()
    line, over = _take_input()
    if not line:
        return 0  # the process at the other end has gone already
    try:
        order = read_object(line, _ORDER, _FIELDS, bytes_max=SETTINGS_BYTES_MAX)
        host, port = split_address(order["address"])
        place = Place("ssh", order["rank"], order["size"], head=host, port=port).check()
        _enter(order["folder"])
        seconds = {name: order[name] for name in ("patience_s", "timeout_s", "grace_s")}
        options = JobOptions(
            [], order["settings"], order["token"], name=order["name"], over=over, jax=order["jax"], **seconds
        )
        return end_as(run(place, options))
    except FastrtError as exc:
        sys.stderr.write(f"{exc}\n")
        return 1


def _take_input() -> tuple[bytes, threading.Event]:
    """Read the first line of standard input, and watch for its end; processes started from now on do not see it."""
    fd = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(nothing, 0)
    os.close(nothing)
    pipe = os.fdopen(fd, "rb")
    line = pipe.readline(SETTINGS_BYTES_MAX)
    over = threading.Event()

    def watch() -> None:
        while pipe.read(1):
            continue
        over.set()

    threading.Thread(target=watch, name="fastrt-input", daemon=True).start()
    return line, over


def _enter(folder: str) -> None:
    try:
        os.chdir(folder)
    except OSError as exc:
        sys.stderr.write(
            f"the working folder {folder} cannot be entered here ({exc.strerror}): {os.getcwd()} is used\n"
        )
