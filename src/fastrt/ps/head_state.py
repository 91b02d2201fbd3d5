"""A head's file in `checkpoint_dir`: the folders of its servers and the owners of parts, for the next head.

The file is written under another name and renamed before any process acts on its contents. It has a checksum and a
number. A mark beside it (`fastrt.durable.mark`) names the newest number, so that an outdated copy is refused.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastrt.durable import DamagedStateError, Mark, MarkFile, StateDirectoryError
from fastrt.durable.errors import write_failed
from fastrt.durable.lock import lock_folder
from fastrt.durable.mark import new_mark, sync_folder
from fastrt.folders import UnsafeFolderError, open_private, private_folder
from fastrt.foreign_text import STATE_BYTES_MAX, read_object
from fastrt.ps.checkpoints import json_check
from fastrt.ps.spec import Spec

FORMAT = 3  # 1 had two logs for each server, 2 no checksum
_NAME, _MARK, _LOCK, _PREFIX = "head.json", "head.mark", "lock", "server-"
_log = logging.getLogger(__name__)


class HeadFile:
    """The state file in one folder, which belongs to one head at a time.

    Args:
        folder: created with mode 0700 if missing.
        accept_loss: continue with the intact part of a damaged state, and move the damaged files aside.

    Attributes:
        losses: descriptions of the damage that `accept_loss` accepted.
        known: the servers whose folders existed before this head.
        folders: the name of each server's folder.
        epoch: see `Head`; 0 when there is no state.
        tables: see `Head`.
        options: options of the head that wrote the file.

    Raises:
        DamagedStateError: the file is damaged, missing or outdated, and `accept_loss` is not given.
        StateDirectoryError: another head uses the folder, or it cannot be used.
    """

    def __init__(self, folder: Path, accept_loss: bool = False) -> None:
        self._folder = folder
        self._accept_loss = accept_loss
        self._number = 0
        self._id = new_mark().log_id
        self._mark_file = MarkFile(folder / _MARK)
        self._mark: Mark | None = None
        self.losses: list[str] = []
        self.known: frozenset[int] = frozenset()
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
            lock_folder(self._lock, f"The cluster's folder {folder}")
            self._read()
        except BaseException:
            os.close(self._lock)
            raise

    def _read(self) -> None:
        path = self._folder / _NAME
        problem = ""
        try:
            self._mark = self._mark_file.read()
        except DamagedStateError as error:
            problem = str(error)
        strays = [stray for stray in self._folder.glob(f"{_PREFIX}*") if stray.is_dir()]
        try:
            self._take(read_object(path.read_bytes(), path.name, bytes_max=STATE_BYTES_MAX, own=True))
            number = self._mark.number if self._mark is not None else None
            if number is None:
                if self._number > 1 or problem:  # the first state is written before its mark
                    problem = problem or f"{self._mark_file.path} is missing"
            elif self._mark is not None and self._id != self._mark.log_id:
                problem = f"{path} and {self._mark_file.path} belong to different clusters"
                self.folders, self.tables, self.epoch = {}, {}, 0
            elif not number <= self._number <= number + 1:
                problem = f"{path} and {self._mark_file.path} are not of the same time ({self._number}, not {number})"
        except FileNotFoundError:
            if self._mark is not None or problem or any(map(_has_records, strays)):
                problem = f"{path} is missing; it holds the tables and the folders of the servers"
        except DamagedStateError as error:
            problem = str(error)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            problem = f"{path} cannot be read: {error}"
        if problem:
            self._give_up(problem)
        self.known = frozenset(self.folders)
        for stray in self._folder.glob(f"{_PREFIX}*"):  # of servers that had no parts yet, or have none left
            if stray.name not in self.folders.values():
                shutil.rmtree(stray, ignore_errors=True)

    def _take(self, found: dict[str, Any]) -> None:
        if found["format"] != FORMAT:
            raise StateDirectoryError(
                f"{self._folder / _NAME} has format {found['format']}; this version reads {FORMAT}. Use the fastrt "
                "that wrote it, or another folder."
            )
        if found["check"] != json_check(found):
            raise DamagedStateError(f"{self._folder / _NAME} is damaged: its checksum is wrong")
        self.folders = {int(index): name for index, name in found["folders"].items()}
        self.epoch, self.options, self._number = found["epoch"], found["options"], found["number"]
        self._id = bytes.fromhex(found["id"])
        self.tables = {
            name: (Spec.from_json(one["spec"]), list(one["owners"])) for name, one in found["tables"].items()
        }

    def _give_up(self, problem: str) -> None:
        """Raise, or continue with the intact part of the state.

        Raises:
            DamagedStateError: the loss is not accepted.
        """
        saved = "the tables can be saved" if self.epoch else "no table can be saved without it"
        if not self._accept_loss:
            raise DamagedStateError(
                f"The state of a parameter server cluster in {self._folder} is damaged: {problem}; {saved}. Put the "
                "files back from a copy, restore a checkpoint into another folder, or continue with what can be saved "
                "by accept_loss=True, which keeps the damaged files aside."
            )
        aside = self._folder / f"damaged-{1 + sum(1 for _ in self._folder.glob('damaged-*'))}"
        aside.mkdir(mode=0o700)
        for name in (_NAME, _MARK):
            with contextlib.suppress(FileNotFoundError):
                shutil.copy2(self._folder / name, aside / name)
        for stray in self._folder.glob(f"{_PREFIX}*"):
            if stray.name not in self.folders.values():
                os.rename(stray, aside / stray.name)
        if self._mark is not None:
            self._number = max(self._number, self._mark.number)
        self.losses.append(f"{problem}; {saved}")
        _log.warning("continuing after a loss: %s; %s; the damaged files are in %s", problem, saved, aside)

    def folder_of(self, index: int) -> Path:
        """The folder of a server's log; a new one for a server that is not known."""
        name = self.folders.setdefault(index, f"{_PREFIX}{secrets.token_hex(6)}")
        return self._folder / name

    def forget(self, index: int) -> None:
        """Delete the folder of a server that has ended for good."""
        name = self.folders.pop(index, None)
        if name is not None:
            shutil.rmtree(self._folder / name, ignore_errors=True)

    def write(self, epoch: int, tables: dict[str, tuple[Spec, list[int]]], options: dict[str, Any]) -> None:
        """Write the state durably.

        Raises:
            StateDirectoryError: the disk is full or failing; the state before is still there.
        """
        listed = {name: {"spec": spec.to_json(), "owners": owners} for name, (spec, owners) in tables.items()}
        found = {"format": FORMAT, "epoch": epoch, "folders": self.folders, "tables": listed, "options": options}
        found |= {"number": self._number + 1, "id": self._id.hex()}
        found = read_object(json.dumps(found), _NAME, bytes_max=STATE_BYTES_MAX, own=True)  # the checksum of `_read`
        found["check"] = json_check(found)
        working = self._folder / f".{_NAME}"
        try:
            working.unlink(missing_ok=True)  # left by a head that was killed
            with open(open_private(self._folder, working.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
                file.write(json.dumps(found).encode())
                file.flush()
                os.fsync(file.fileno())
            os.rename(working, self._folder / _NAME)
            sync_folder(self._folder)
        except OSError as error:
            raise write_failed(self._folder / _NAME, error) from error
        self._number += 1
        self._mark = replace(self._mark or new_mark(), log_id=self._id, number=self._number, synced=self._number)
        self._mark_file.create(self._mark)

    def close(self) -> None:
        """Release the folder for another head."""
        self._mark_file.close()
        with contextlib.suppress(OSError):
            os.close(self._lock)
        self._lock = -1


def _has_records(folder: Path) -> bool:
    """Whether a server's folder holds acknowledged records."""
    try:
        mark = MarkFile(folder / "mark").read()
    except DamagedStateError:
        return True
    return mark is not None and bool(mark.generation or mark.number)
