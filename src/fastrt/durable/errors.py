"""Errors of durable state: a directory that cannot be used, a full disk, damaged files."""

from __future__ import annotations

import errno
import os

from fastrt.errors import FastrtError

_FULL = (errno.ENOSPC, errno.EDQUOT)


class StateDirectoryError(FastrtError):
    """A state directory cannot be used: it is in use, of another version, damaged or not writable."""


class DiskFullError(StateDirectoryError):
    """The disk under a state directory is full, or a quota is used up. Nothing of the failed write was kept."""


class DamagedStateError(StateDirectoryError):
    """Files of a state directory are damaged: acknowledged records are missing, or cannot be proved complete."""


def write_failed(path: str | os.PathLike[str], error: OSError) -> StateDirectoryError:
    """The error for a write to a file that failed."""
    folder = os.path.dirname(os.path.abspath(path))
    if error.errno in _FULL:
        return DiskFullError(f"The disk is full: {path} cannot grow ({error.strerror}). Free space in {folder}.")
    return StateDirectoryError(f"Cannot write {path}: {error}. Check the disk, or move the state directory.")
