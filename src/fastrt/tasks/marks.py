"""Marks in the output of a worker: which job and which task or actor the bytes after a mark come from."""

from __future__ import annotations

import re
from typing import NamedTuple

MARK = b"\x00\x1efastrt "
NAME_MAX = 60
_HEX = re.compile(rb"[0-9a-f]{1,16}")
_NO_CONTROLS = dict.fromkeys(range(32), " ")


class Source(NamedTuple):
    """The task or actor that prints.

    Attributes:
        job: its number; 0: unknown.
        name: of the function, or of the actor's class; empty: unknown.
        task: the task's id in `fastrt list tasks`; 0: no task.
        path: the task's id in `runtime_context()`; 0: no task.
        actor: the name that the actor was given, else its number in `fastrt list actors`; empty: no actor.
    """

    job: int = 0
    name: str = ""
    task: int = 0
    path: int = 0
    actor: str = ""


def mark(source: Source) -> bytes:
    """Write a mark; both names are shortened to NAME_MAX characters."""
    job, name, task, path, actor = source
    about = "\x1f".join(one.translate(_NO_CONTROLS)[:NAME_MAX] for one in (actor, name))
    return b"%s%x %x %x %s\n" % (MARK, job, task, path, about.encode("utf-8", "replace"))


def read_mark(about: bytes) -> Source:
    """Read the bytes between MARK and the end of the line; a number is 0 if `mark` has not written it."""
    job, task, path, names = [*about.split(b" ", 3), b"", b"", b""][:4]
    actor, _, name = names.partition(b"\x1f")
    texts = [one[: 4 * NAME_MAX].decode("utf-8", "replace")[:NAME_MAX] for one in (name, actor)]
    return Source(_number(job), texts[0], _number(task), _number(path), texts[1])


def _number(digits: bytes) -> int:
    return int(digits, 16) if _HEX.fullmatch(digits) else 0
