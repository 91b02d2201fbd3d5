"""The folders of one session, each with a mark that says where the session runs.

Several machines may share the folder above by a network file system, and several containers by a volume. Each sees the
folders of the others' sessions, but neither their segments in /dev/shm nor their sockets, so it cannot ask whether they
run. By the mark it knows them from dead sessions of its own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from fastrt._core.memory.segment import boot_hash
from fastrt.config import SHM_DIR
from fastrt.folders import UnsafeFolderError, private_folder, read_private, replace_private

MARK = ".machine"
_MARK_BYTES_MAX = 256
_MAKING_S = 60.0  # between the making of a folder and its mark
_BEAT_S = 600.0
_SILENT_S = 86_400.0  # for a machine that was suspended, and for clocks that disagree


def make_session_folder(path: Path, purpose: str) -> Path:
    """Create a folder of a session that runs here, as `private_folder` does, and mark it.

    Raises:
        UnsafeFolderError, OSError: as for `private_folder`.
    """
    folder = private_folder(path, purpose)
    if not (folder / MARK).exists():
        replace_private(folder, MARK, " ".join(_here()).encode())
    return folder


def may_be_removed(folder: Path) -> bool:
    """Whether a session's folder may be removed if nothing of the session is found on this machine.

    That is so if the session was of this /dev/shm or of an earlier boot of this machine, or if it has given no sign for
    a day.
    """
    try:
        mark = read_private(folder, MARK, _MARK_BYTES_MAX).decode("ascii", "replace").split()
        age = time.time() - os.stat(folder / MARK).st_mtime
    except FileNotFoundError:
        with suppress(FileNotFoundError):
            return time.time() - os.stat(folder).st_mtime > _MAKING_S
        return False
    except (OSError, UnsafeFolderError):
        return False
    machine, boot, shm = _here()
    if mark[1:] == [boot, shm]:  # a namespace may give the machine another name
        return True
    return (mark[:1] == [machine] and mark[1:2] != [boot]) or age > _SILENT_S


class Beat:
    """Shows other machines every ten minutes that the session runs.

    Args:
        folders: of the session. One may be missing.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        self._at = time.monotonic()

    def tend(self, now: float) -> None:
        """Touch the marks when it is time."""
        if now - self._at > _BEAT_S:
            self._at = now
            for folder in self._folders:
                with suppress(OSError):
                    os.utime(folder / MARK)


def _here() -> list[str]:
    """Return what names this machine, its boot, and this process's /dev/shm: containers have one each."""
    identity = os.uname().nodename
    with suppress(OSError):
        identity += Path("/etc/machine-id").read_text()
    import hashlib  # here: it loads OpenSSL, which most processes never need

    machine = hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()
    return [machine, f"{boot_hash():x}", f"{os.stat(SHM_DIR).st_dev:x}"]
