"""Checkpoints of a whole cluster: one folder for each, written under another name and renamed when it is complete.

All servers are held between the same two pushes (see `checkpoint_cut`), and then each writes its file. If one dies
meanwhile, the cut is made again. An incremental checkpoint holds the embedding rows that changed since the previous
one, which it names, and all dense tables.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastrt._core.transfer import stream
from fastrt.durable.mark import sync_folder
from fastrt.folders import UnsafeFolderError, private_folder
from fastrt.foreign_text import STATE_BYTES_MAX, read_object
from fastrt.ps.errors import CheckpointError, CutLostError, TableTimeoutError
from fastrt.ps.placement import assign
from fastrt.ps.spec import Spec

if TYPE_CHECKING:
    from fastrt.ps.head import Head, HeadOptions

_log = logging.getLogger(__name__)
FORMAT = 2  # 1 had no checksums of files and manifests
_MANIFEST = "manifest.json"
_PREFIX = "checkpoint-"
_SETTLE_S = 30.0
_TRIES = 5


class Checkpoints:
    """Writes and loads checkpoints for the head.

    Args:
        head: the head that this belongs to.

    Attributes:
        must_be_full: whether the next checkpoint cannot be incremental.
    """

    def __init__(self, head: Head) -> None:
        self._head = head
        self._last: Path | None = None
        self._lives: dict[int, str] = {}  # incarnations of the servers that made the last one
        self.must_be_full = True

    def write(self, folder: Path, incremental: bool) -> Path:
        """Write a checkpoint into a folder.

        Args:
            folder: gets a numbered folder for each checkpoint; created if missing.
            incremental: write only changes since the last checkpoint, if that is in the same folder and no server has
                joined, left or died since.
        Returns:
            The folder of this checkpoint.
        Raises:
            CheckpointError: it cannot be written; no folder of its name is left.
        """
        head = self._head
        base = self._last if incremental and not self.must_be_full else None
        if base is not None and (base.parent != folder or not base.is_dir()):
            base = None
        try:
            private_folder(folder, "the folder of checkpoints")
            number = 1 + max((_number(path) for path in folder.iterdir()), default=0)
            working = folder / f".{_PREFIX}{number:08}.{os.getpid()}"
            shutil.rmtree(working, ignore_errors=True)
            working.mkdir(mode=0o700)
        except (OSError, UnsafeFolderError) as error:
            raise CheckpointError(f"Cannot make a checkpoint in {folder}: {error}.") from error
        done = folder / f"{_PREFIX}{number:08}"
        self.must_be_full = False
        try:
            files, built = self._write_files(working, base is not None)
            before = [base.name, _manifest_of(base)["check"]] if base is not None and built else None
            manifest: dict[str, Any] = {"format": FORMAT, "files": files, "base": before}
            manifest["tables"] = [spec.to_json() for spec, _ in head.tables.values()]
            manifest["check"] = json_check(manifest)
            _write_durably(working / _MANIFEST, json.dumps(manifest, indent=1).encode())
            os.rename(working, done)
            sync_folder(folder)
        except BaseException as error:
            self.must_be_full = True  # servers may have noted their changes as written
            shutil.rmtree(working, ignore_errors=True)
            if isinstance(error, (OSError, CutLostError, TableTimeoutError)):
                raise CheckpointError(f"Cannot make a checkpoint in {folder}: {error}.") from error
            raise
        self._last = done
        return done

    def _write_files(self, working: Path, may_build: bool) -> tuple[dict[str, int], bool]:
        """Hold all servers at one cut, and have each write its file.

        Returns:
            The files' checksums by name, and whether the files hold only changes since the last checkpoint.
        Raises:
            CutLostError: servers died in every attempt.
        """
        for attempt in range(_TRIES):
            try:
                return self._write_at_cut(working, may_build and not attempt, secrets.token_hex(8))
            except CutLostError as error:
                if attempt == _TRIES - 1:
                    raise
                _log.warning("the checkpoint is begun again: %s", str(error))
                for path in working.iterdir():
                    path.unlink()
        raise AssertionError

    def _write_at_cut(self, working: Path, may_build: bool, cut: str) -> tuple[dict[str, int], bool]:
        head = self._head
        files = {}
        try:
            latest: dict[str, dict[str, int]] = {}
            lives: dict[int, str] = {}
            for index in head.servers:
                answer = head.ask(index, {"op": "hold", "cut": cut})
                lives[index] = answer["incarnation"]
                for name, clients in answer["latest"].items():
                    known = latest.setdefault(name, {})
                    for client, number in clients.items():
                        known[client] = max(known.get(client, 0), number)
            # A server that died has lost the list of rows that it evicted since the last checkpoint.
            incremental = may_build and lives == self._lives
            for index in head.servers:
                head.ask(index, {"op": "limits", "cut": cut, "latest": latest, "timeout": _SETTLE_S})
            for index in head.servers:
                path = working / f"server-{index}"
                order = {"op": "checkpoint", "cut": cut, "path": str(path), "incremental": incremental}
                files[path.name] = head.ask(index, order)["check"]
            self._lives = lives
            return files, incremental
        finally:
            for index in head.servers:
                head.ask(index, {"op": "release"})

    def load(self, path: Path, options: HeadOptions) -> None:
        """Give the servers, which have no tables yet, the contents of a checkpoint.

        Args:
            path: the folder of one checkpoint, or one with several, of which the newest is used.
            options: gives mode and workers, which may differ from those of the checkpoint.
        Raises:
            CheckpointError: there is no checkpoint, or it is damaged.
        """
        head = self._head
        chain = chain_of(path)
        now = {"workers": options.num_workers, "mode": options.mode, "staleness": options.staleness}
        specs = [Spec.from_json({**found, **now}) for found in chain[-1][1]["tables"]]
        files = [[str(folder / name), check] for folder, manifest in chain for name, check in manifest["files"].items()]
        tables = {spec.name: (spec, assign(spec.parts, sorted(head.servers), k)) for k, spec in enumerate(specs)}
        head.have({})  # a head that ends now has no tables, instead of some from here and some of another cluster
        for index in head.servers:
            mine = []
            for spec, owners in tables.values():
                parts = [part for part, owner in enumerate(owners) if owner == index]
                if parts:
                    mine.append([spec.to_json(), parts])
            head.ask(index, {"op": "restore", "tables": mine, "paths": files, "epoch": head.epoch})
        head.have(tables)


def chain_of(path: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Manifests of the checkpoints that one checkpoint builds upon, the oldest first, itself last.

    Raises:
        CheckpointError: one is missing or damaged.
    """
    if not (path / _MANIFEST).exists():
        numbered = [one for one in path.iterdir() if _number(one)] if path.is_dir() else []
        if not numbered:
            raise CheckpointError(f"There is no checkpoint in {path}.")
        path = max(numbered, key=_number)
    chain: list[tuple[Path, dict[str, Any]]] = []
    base: Any = [path.name, None]
    while base is not None:
        name, check = base
        step = path.parent / name
        manifest = _manifest_of(step)
        if check is not None and manifest["check"] != check:
            raise CheckpointError(f"The checkpoint {step} is not the one that {chain[-1][0]} builds upon.")
        chain.append((step, manifest))
        base = manifest["base"]
    return chain[::-1]


def json_check(value: dict[str, Any]) -> int:
    """Checksum of a JSON object without its "check" entry."""
    plain = {name: one for name, one in value.items() if name != "check"}
    return stream.crc32c(json.dumps(plain, sort_keys=True).encode())


def _manifest_of(folder: Path) -> dict[str, Any]:
    """Read and verify a checkpoint's manifest.

    Raises:
        CheckpointError: it is missing, damaged, or of another format.
    """
    try:
        text = (folder / _MANIFEST).read_bytes()
        manifest = read_object(text, f"the manifest of {folder}", bytes_max=STATE_BYTES_MAX, own=True)
        known = manifest["format"] == FORMAT
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"The checkpoint {folder} cannot be read: {error}.") from error
    if not known:
        raise CheckpointError(f"The checkpoint {folder} has format {manifest['format']}; this version reads {FORMAT}.")
    if manifest.get("check") != json_check(manifest):
        raise CheckpointError(f"The manifest of the checkpoint {folder} is damaged: use an older checkpoint.")
    return manifest


def _number(path: Path) -> int:
    digits = path.name.removeprefix(_PREFIX)
    return int(digits) if path.name.startswith(_PREFIX) and digits.isascii() and digits.isdecimal() else 0


def _write_durably(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)
