"""The lock of a folder of records: one process at a time may use the folder."""

from __future__ import annotations

import fcntl
import time

from fastrt.durable.errors import StateDirectoryError

# A killed process holds its locks until the kernel has removed it; the keeper of a killed front holds them until it has
# noticed that.
_DYING_S = 3.0
_LOOK_AGAIN_S = 0.02


def lock_folder(lock: int, what: str) -> None:
    """Lock a folder for this process until the descriptor is closed; waits briefly for a process that is ending.

    Args:
        lock: descriptor of the folder's lock file.
        what: the folder, in words, for the error.

    Raises:
        StateDirectoryError: another process uses the folder.
    """
    if not take_lock(lock, _DYING_S):
        raise StateDirectoryError(f"{what} is in use by another process. Stop it, or name another one.")


def take_lock(lock: int, patience_s: float) -> bool:
    """Lock a file for this process until the descriptor is closed; False when another process holds it.

    Args:
        lock: descriptor of the file.
        patience_s: how long to wait for the other process, in seconds.

    Raises:
        OSError: the file system has no locks.
    """
    until = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
        time.sleep(_LOOK_AGAIN_S)
