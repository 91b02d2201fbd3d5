"""The keeper: the process behind a front. It holds the state and its records, and may die at any moment.

`front` runs it as `python -m fastrt.coordination.keeper CALLS LATER`, with the file descriptors of its ends of two
socket pairs. It reads a batch of calls, settles once for all of them, and sends over the first pair the answers to
these calls and to earlier ones that they released. Answers that deadlines cause go over the second pair. It ends when
the front closes the pairs, or sends STOP.
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
    """Serve one front until it sends STOP.

    Raises:
        LinkClosed: the front is gone.
        StateDirectoryError: the records cannot be read or written.
    """
    first = calls.read_batch()
    if not first or first[0].kind != SETTINGS:
        return
    core = _core(read_object(first[0].body, "the settings of a keeper", own=True, bytes_max=SETTINGS_BYTES_MAX))
    keys = core.state.keys
    send_all = keys.bytes_count + len(keys) * ENTRY_BYTES <= BYTES_MAX // 2
    known = _packed_keys((key, keys.find(key)) for key in keys.all_keys()) if send_all else b""
    last_write = str(core.last_write).encode()
    ready = Frame(READY, core.state.settings.incarnation, code=int(send_all), details=last_write)
    calls.write(known + ready.pack() + END_BYTES)
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
            # Neither deadlines nor the front's own writes change a key that must be reported to it.
            later.write(_packed(replies))


def _core(given: dict[str, object]) -> Core:
    settings = Settings(**given["settings"])  # type: ignore[arg-type]
    journal = Journal(Path(str(given["state_dir"])), bool(given["power"]), bool(given["accept_loss"]))
    return Core(settings, journal, front=int(str(given["front"])), owns_log=bool(given["owns_log"]))


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
    """End this process when the front is gone, even if the main thread is busy: a successor waits for the directory.

    A write under way is cut off, as by any death of this process; the log is made for that.
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
