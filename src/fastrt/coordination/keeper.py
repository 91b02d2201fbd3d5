"""The process behind a front: it holds the state and its records, and may die at any moment.

Run by `front` as `python -m fastrt.coordination.keeper CALLS LATER`, the file descriptors of its ends of two socket
pairs. It takes a batch of calls, settles once for all of them, and answers over the first pair what these calls have
decided, for themselves and for earlier ones that waited. What time decides it answers over the second. It ends when
the front closes the pairs, or says so.
"""

from __future__ import annotations

import json
import logging
import socket
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from fastrt.coordination.core import PATHS, Core, Reply
from fastrt.coordination.link import (
    CALL,
    END_BYTES,
    FORGET,
    KEY,
    READY,
    REPLY,
    SETTINGS,
    STOP,
    Frame,
    Link,
    LinkClosed,
    seconds_since,
)
from fastrt.coordination.replica import VALUE_BYTES_MAX
from fastrt.coordination.state import Settings
from fastrt.durable import Journal
from fastrt.errors import FastrtError

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
    core = _core(json.loads(first[0].body))
    calls.write(Frame(READY, core.state.settings.incarnation).pack() + END_BYTES)
    while True:
        deadline = core.next_deadline()
        timeout_s = None if deadline is None else max(0.001, deadline - time.monotonic())
        batch = calls.read_batch(timeout_s)
        for frame in batch or ():
            if frame.kind == CALL:
                core.submit(frame.call, PATHS[frame.path], frame.body, seconds_since(frame.details))
            elif frame.kind == FORGET:
                core.forget(frame.call)
            elif frame.kind == STOP:
                calls.write(_packed(core.stop()) + END_BYTES)
                return
        replies = core.settle()
        if batch is not None:
            calls.write(_packed_keys(core.take_keys()) + _packed(replies) + END_BYTES)
        elif replies:
            # Time alone changes no key, so there is none to tell of.
            later.write(_packed(replies))


def _core(told: dict[str, object]) -> Core:
    settings = Settings(**told["settings"])  # type: ignore[arg-type]
    journal = Journal(Path(str(told["state_dir"])), bool(told["power"]))
    return Core(settings, journal, front=int(str(told["front"])))


def _packed(replies: Iterable[Reply]) -> bytes:
    return b"".join(
        Frame(REPLY, r.call, code=r.code, message=r.message.encode(), details=r.details, body=r.body).pack()
        for r in replies
    )


def _packed_keys(keys: Iterable[tuple[str, bytes | None]]) -> bytes:
    frames = []
    for key, value in keys:
        name = key.encode("utf-8", "surrogateescape")
        if value is None or len(value) > VALUE_BYTES_MAX:
            frames.append(Frame(KEY, message=name).pack())
        else:
            frames.append(Frame(KEY, code=1, message=name, body=value).pack())
    return b"".join(frames)


def main() -> int:
    """Run on the file descriptors given as arguments; returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    calls, later = (Link(socket.socket(fileno=int(argument))) for argument in sys.argv[1:3])
    try:
        serve(calls, later)
    except FastrtError as error:
        _log.critical("%s", error)
        return 1
    except LinkClosed:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
