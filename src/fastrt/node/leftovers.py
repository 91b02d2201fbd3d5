"""The remains of crashed sessions: segments in /dev/shm, folders of sockets and logs, folders of spilled values.

The next session that starts removes them, and so does `fastrt doctor --clean`. Folders of sessions on other machines or
in other containers stay; see `store/session_folder.py`.
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fastrt._core.memory import segment
from fastrt.config import RUNTIME_FOLDER, SHM_DIR
from fastrt.folders import UnsafeFolderError, has_private_folder, private_folder
from fastrt.store.join import answers
from fastrt.store.session_folder import may_be_removed
from fastrt.store.spill_storage import ObjectStorage, url_in


@dataclass(frozen=True)
class Leftovers:
    """The remains of crashed sessions of this user.

    Attributes:
        segments: paths in /dev/shm.
        folders: of sessions, in the runtime folder and in the spill folder.
        shm_bytes: memory that the segments take.
    """

    segments: list[Path]
    folders: list[Path]
    shm_bytes: int

    @property
    def sessions(self) -> list[str]:
        """The names of the sessions."""
        return sorted({path.name.removeprefix("fastrt-") for path in [*self.segments, *self.folders]})


def find_leftovers(runtime_dir: Path, spill_dir: Path) -> Leftovers:
    """Find what `sweep_sessions` would remove, and change nothing."""
    segments = [SHM_DIR / name.lstrip("/") for name in segment.leftovers()]
    nbytes = 0
    for path in segments:
        with suppress(FileNotFoundError):
            nbytes += os.stat(path).st_blocks * 512
    dead = {path.name.removeprefix("fastrt-") for path in segments}
    return Leftovers(sorted(segments), _folders(runtime_dir, spill_dir, dead), nbytes)


def sweep_sessions(runtime_dir: Path, spill_dir: Path) -> None:
    """Remove segments, folders and spilled values of crashed sessions; create the runtime folder for this user only.

    Raises:
        UnsafeFolderError: the runtime folder belongs to another user, or others may enter or replace it.
    """
    private_folder(runtime_dir, RUNTIME_FOLDER)
    segment.sweep()
    for folder in _folders(runtime_dir, spill_dir, set()):
        url = url_in(folder) if folder.parent == spill_dir else ""
        if url:
            ObjectStorage(url, folder.name).remove_all()
        shutil.rmtree(folder, ignore_errors=True)


def _folders(runtime_dir: Path, spill_dir: Path, dead: set[str]) -> list[Path]:
    """List the folders of sessions without a segment, or with one that is about to be removed."""
    found = []
    for parent in (runtime_dir, spill_dir):
        for folder in sorted(parent.iterdir()) if parent.is_dir() else ():
            gone = folder.name in dead or not (SHM_DIR / f"fastrt-{folder.name}").exists()
            # A session that ends removes its segment first: while its daemon answers, the daemon removes the rest.
            if (
                re.fullmatch("[0-9a-f]{32}", folder.name)
                and gone
                and not answers(str(runtime_dir / folder.name / "node.sock"))
                and _is_private(folder)
                and may_be_removed(folder)
            ):
                found.append(folder)
    return found


def _is_private(folder: Path) -> bool:
    try:
        return has_private_folder(folder, "a session's folder")
    except (UnsafeFolderError, OSError):
        return False  # another user's: a spill folder may be shared
