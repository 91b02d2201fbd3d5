"""The process behind a front: it holds the state and its records, and may die at any moment.

Run by `front` as `python -m fastrt.coordination.keeper CALLS LATER`, the file descriptors of its ends of two socket
pairs. It takes a batch of calls, settles once for all of them, and answers over the first pair what these calls have
decided, for themselves and for earlier ones that waited. What time decides it answers over the second. It ends when
the front closes the pairs, or says so.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from fastrt.coordination.engine import PATHS, Core, Reply
from fastrt.coordination.link import (
    ASIDE,
    CALL,
    END_BYTES,
    FAILED,
    FORGET,
    FULL,
    KEY,
    LONG_VALUE,
    NO_VALUE,
    READY,
    REPLY,
    SETTINGS,
    STOP,
    WITH_VALUE,
    WRITE,
    Frame,
    Link,
    LinkClosed,
    seconds_since,
)
from fastrt.coordination.replica import BYTES_MAX, ENTRY_BYTES, VALUE_BYTES_MAX
from fastrt.coordination.state import Settings
from fastrt.durable import DamagedStateError, Journal
from fastrt.errors import FastrtError
from fastrt.foreign_text import SETTINGS_BYTES_MAX, read_object

_log = logging.getLogger(__name__)


def serve(calls: Link, later: Link) -> None:
    """Serve one front until it says stop.

    Raises:
        LinkClosed: the front is gone.
        StateDirectoryError: the records cannot be read or written.
    """
    first = calls.read_batch()
    if not first or first[0].kind != SETTINGS:
        return
    core = _core(read_object(first[0].body, "the settings of a keeper", own=True, bytes_max=SETTINGS_BYTES_MAX))
    keys = core.state.keys
    tell_all = keys.bytes_count + len(keys) * ENTRY_BYTES <= BYTES_MAX // 2
    told = _packed_keys((key, keys.find(key)) for key in keys.all_keys()) if tell_all else b""
    last_write = str(core.last_write).encode()
    ready = Frame(READY, core.state.settings.incarnation, code=int(tell_all), details=last_write)
    calls.write(told + ready.pack() + END_BYTES)
    was_full = False
    while True:
        deadline = core.next_deadline()
        timeout_s = None if deadline is None else max(0.001, deadline - time.monotonic())
        batch = calls.read_batch(timeout_s)
        for frame in batch or ():
            if frame.kind == CALL:
                core.submit(frame.call, PATHS[frame.path], frame.body, seconds_since(frame.details))
            elif frame.kind == WRITE:
                core.write(frame.call, frame.message.decode("utf-8", "surrogateescape"), frame.body)
            elif frame.kind == FORGET:
                core.forget(frame.call)
            elif frame.kind == STOP:
                calls.write(_packed(core.stop()) + END_BYTES)
                return
        replies = core.settle()
        if batch is not None and not (batch and batch[0].kind == ASIDE):
            full = Frame(FULL, code=int(core.is_full)).pack() if core.is_full != was_full else b""
            was_full = core.is_full
            calls.write(full + _packed_keys(core.take_keys()) + _packed(replies) + END_BYTES)
        elif replies:
            # Neither time nor the front's own writes change a key that it is to be told of.
            later.write(_packed(replies))


def _core(told: dict[str, object]) -> Core:
    settings = Settings(**told["settings"])  # type: ignore[arg-type]
    journal = Journal(Path(str(told["state_dir"])), bool(told["power"]), bool(told["accept_loss"]))
    return Core(settings, journal, front=int(str(told["front"])), owns_log=bool(told["owns_log"]))


def _packed(replies: Iterable[Reply]) -> bytes:
    return b"".join(
        Frame(REPLY, r.call, code=r.code, message=r.message.encode(), details=r.details, body=r.body).pack()
        for r in replies
    )


def _packed_keys(keys: Iterable[tuple[str, bytes | None]]) -> bytes:
    frames = []
    for key, value in keys:
        name = key.encode("utf-8", "surrogateescape")
        if value is None:
            frames.append(Frame(KEY, code=NO_VALUE, message=name).pack())
        elif len(value) > VALUE_BYTES_MAX:
            frames.append(Frame(KEY, code=LONG_VALUE, message=name).pack())
        else:
            frames.append(Frame(KEY, code=WITH_VALUE, message=name, body=value).pack())
    return b"".join(frames)


def _end_with(front: socket.socket, ended: threading.Event) -> None:
    """End this process when the front is gone, whatever the main thread does: a successor waits for the directory.

    What is being written ends where it is, as with any death of this process; the log is made for that.
    """
    poll = select.poll()
    poll.register(front, select.POLLRDHUP)
    poll.poll()
    if not ended.is_set():
        os._exit(0)


def main() -> int:
    """Run on the file descriptors given as arguments; returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    calls, later = (Link(socket.socket(fileno=int(argument))) for argument in sys.argv[1:3])
    ended = threading.Event()
    threading.Thread(target=_end_with, args=(later.socket, ended), name="fastrt-keeper-end", daemon=True).start()
    try:
        serve(calls, later)
    except FastrtError as error:
        ended.set()
        _log.critical("%s", error)
        with contextlib.suppress(LinkClosed):
            is_damage = isinstance(error, DamagedStateError)
            calls.write(Frame(FAILED, code=int(is_damage), message=str(error).encode()).pack() + END_BYTES)
        return 1
    except LinkClosed:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
