"""What a head keeps in `checkpoint_dir`, so that the next one goes on where it was: whose logs there are; who has what.

It is written under another name and renamed, before anybody acts on it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
from pathlib import Path
from typing import Any

from fastrt.durable import StateDirectoryError
from fastrt.folders import UnsafeFolderError, open_private, private_folder
from fastrt.ps.spec import Spec

FORMAT = 2  # 1 had two logs for each server
_NAME, _LOCK, _PREFIX = "head.json", "lock", "server-"


class HeadFile:
    """One folder, which belongs to one head at a time.

    Args:
        folder: made, with mode 0700, when missing.

    Attributes:
        folders: the name of each server's own folder.
        epoch: see `Head`; 0 when nothing is kept.
        tables: see `Head`.
        options: of the head that wrote it.

    Raises:
        StateDirectoryError: another head uses the folder, or it cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.folders: dict[int, str] = {}
        self.epoch = 0
        self.tables: dict[str, tuple[Spec, list[int]]] = {}
        self.options: dict[str, Any] = {}
        try:
            private_folder(folder, "the folder of a cluster's state")
            self._lock = open_private(folder, _LOCK, os.O_RDWR | os.O_CREAT)
        except (OSError, UnsafeFolderError) as error:
            raise StateDirectoryError(f"Cannot use {folder}: {error}.") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read()
        except BlockingIOError:
            os.close(self._lock)
            raise StateDirectoryError(f"{folder} is in use by another cluster. Name another folder.") from None
        except BaseException:
            os.close(self._lock)
            raise

    def _read(self) -> None:
        path = self._folder / _NAME
        try:
            found = json.loads(path.read_bytes())
            if found["format"] != FORMAT:
                raise ValueError(f"format {found['format']}, and this is for {FORMAT}")
            self.folders = {int(index): name for index, name in found["folders"].items()}
            self.epoch, self.options = found["epoch"], found["options"]
            self.tables = {
                name: (Spec.from_json(one["spec"]), list(one["owners"])) for name, one in found["tables"].items()
            }
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise StateDirectoryError(f"Cannot read {path}: {error}. Move it away to begin empty.") from error
        for stray in self._folder.glob(f"{_PREFIX}*"):  # of servers that had no parts yet, or none any more
            if stray.name not in self.folders.values():
                shutil.rmtree(stray, ignore_errors=True)

    def folder_of(self, index: int) -> Path:
        """Where a server keeps its log; a new one for a server that is not known."""
        name = self.folders.setdefault(index, f"{_PREFIX}{secrets.token_hex(6)}")
        return self._folder / name

    def forget(self, index: int) -> None:
        """A server has ended for good."""
        name = self.folders.pop(index, None)
        if name is not None:
            shutil.rmtree(self._folder / name, ignore_errors=True)

    def write(self, epoch: int, tables: dict[str, tuple[Spec, list[int]]], options: dict[str, Any]) -> None:
        """Keep what is so from now on.

        Raises:
            StateDirectoryError: the disk is full or failing; what was kept before is there still.
        """
        listed = {name: {"spec": spec.to_json(), "owners": owners} for name, (spec, owners) in tables.items()}
        found = {"format": FORMAT, "epoch": epoch, "folders": self.folders, "tables": listed, "options": options}
        working = self._folder / f".{_NAME}"
        try:
            working.unlink(missing_ok=True)  # of a head that was killed
            with open(open_private(self._folder, working.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
                file.write(json.dumps(found).encode())
                file.flush()
                os.fsync(file.fileno())
            os.rename(working, self._folder / _NAME)
            fd = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            raise StateDirectoryError(f"Cannot keep what a cluster is in {self._folder}: {error}.") from error

    def close(self) -> None:
        """Let another head have the folder."""
        with contextlib.suppress(OSError):
            os.close(self._lock)
        self._lock = -1
