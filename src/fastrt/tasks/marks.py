"""Marks in the output of a worker: which job and which task or actor the bytes after a mark come from."""

from __future__ import annotations

import re

MARK = b"\x00\x1efastrt "
NAME_MAX = 60
_JOB = re.compile(rb"[0-9a-f]{1,16}")


def mark(job: int, name: str) -> bytes:
    """Write a mark.

    Args:
        job: its number.
        name: of the task or the actor; shortened to NAME_MAX characters.
    """
    return b"%s%x %s\n" % (MARK, job, name[:NAME_MAX].replace("\n", " ").encode("utf-8", "replace"))


def read_mark(about: bytes) -> tuple[int, str]:
    """Read the bytes between MARK and the end of the line; the job is 0 if `mark` has not written them."""
    job, _, name = about.partition(b" ")
    text = name[: 4 * NAME_MAX].decode("utf-8", "replace")[:NAME_MAX]
    return int(job, 16) if _JOB.fullmatch(job) else 0, text
