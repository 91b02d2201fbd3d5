"""Gets packages of a `runtime_env` from the nodes that made them, and unpacks each once for its node.

A package is asked for by its digest, through this node's uplink, and checked against the digest before it is opened.
Names in an archive that lead out of its folder, links and too much data are refused. An unpacked package stays until
the node ends.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import socket
import stat
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path, PurePosixPath

from fastrt.errors import AttachError, RuntimeEnvError
from fastrt.folders import open_private, private_folder
from fastrt.foreign_text import read_json
from fastrt.store import join
from fastrt.store.client import Store
from fastrt.store.messages import AskNode, NodePage
from fastrt.tasks.packages import BYTES_MAX, FILES_MAX, FOLDER, PART_BYTES, QUESTION, folder_of
from fastrt.tasks.runtime_env import Environment, Package

_ANSWER_S = 30.0  # for one part
_SLACK_S = 2.0
_ARCHIVE_BYTES_MAX = BYTES_MAX + (64 << 20)  # data that does not get smaller, and the list of files
_PIECE = 1 << 20


def localized(store: Store, environment: Environment) -> Environment:
    """Return an environment with the paths that its files have on this node.

    Files of another node are got from there first. Where this node's own files are gone, its package has them.

    Args:
        store: this process's attachment.
        environment: as it came with a task or an actor.
    Raises:
        RuntimeEnvError: a package cannot be got.
    """
    here = store.client.segment.session
    moved: dict[str, str] = {}
    for package in environment.packages:
        if not os.path.exists(package.path) or (package.node != here and package.digest):
            moved[package.path] = str(_unpacked(store, package))
    if not moved:
        return environment
    modules = environment.py_modules
    return replace(
        environment,
        working_dir=environment.working_dir and moved.get(environment.working_dir, environment.working_dir),
        py_modules=modules
        and tuple(os.path.join(moved[path], os.path.basename(path)) if path in moved else path for path in modules),
    )


def _unpacked(store: Store, package: Package) -> Path:
    """Return the folder of an unpacked package; get and unpack it if no process of this node has."""
    if not package.digest:
        raise RuntimeEnvError(
            f"the runtime_env names {package.path} of node {package.node}, which is not on this node "
            f"({socket.gethostname()}), and has more than {BYTES_MAX >> 20} MiB or {FILES_MAX:,} files: exclude what "
            "tasks do not need by excludes=, or put it on each node"
        )
    folder = folder_of(store)
    found = folder / package.digest
    if found.exists():
        return found
    try:
        with _locked(folder, f"{package.digest}.lock"):
            if not found.exists():
                if not (folder / f"{package.digest}.zip").exists():
                    _fetch(store, package, folder)
                _unpack(folder, package.digest)
    except (OSError, ValueError, AttachError, zipfile.BadZipFile) as exc:
        raise RuntimeEnvError(
            f"the files of the runtime_env at {package.path} of node {package.node} could not be got here: {exc}"
        ) from exc
    return found


@contextlib.contextmanager
def _locked(folder: Path, name: str) -> Iterator[None]:
    with open(open_private(folder, name, os.O_RDWR | os.O_CREAT), "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fetch(store: Store, package: Package, folder: Path) -> None:
    """Write the archive of a package of another node, once it is whole and has the right digest."""
    socket_path = str(Path(store.socket_path).parent / join.UPLINK_SOCKET)
    working, digest, offset = f".{os.urandom(8).hex()}", hashlib.sha256(), 0
    filters = json.dumps({"digest": package.digest})
    try:
        with open(open_private(folder, working, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as out:
            while True:
                question = AskNode(package.node, QUESTION, filters, str(offset), 0, int(_ANSWER_S * 1000))
                page = join.inquire(socket_path, question, NodePage, _ANSWER_S + _SLACK_S)
                if page.error:
                    raise ValueError(page.error)
                rows = read_json(page.rows, "a part of a package", bytes_max=4 * PART_BYTES)
                part = base64.b64decode(rows[0], validate=True) if rows else b""
                if not part:
                    break
                offset += len(part)
                if offset > _ARCHIVE_BYTES_MAX:
                    raise ValueError(f"it has more than {_ARCHIVE_BYTES_MAX} bytes")
                digest.update(part)
                out.write(part)
        if digest.hexdigest() != package.digest:
            raise ValueError(f"its {offset} bytes have the digest {digest.hexdigest()}, not {package.digest}")
        os.replace(folder / working, folder / f"{package.digest}.zip")
    finally:
        (folder / working).unlink(missing_ok=True)


def _unpack(folder: Path, digest: str) -> None:
    """Unpack an archive into a folder of its own, which gets its name when it is whole."""
    working = private_folder(folder / f".{os.urandom(8).hex()}", f"the folder of a package ({FOLDER})")
    try:
        with open(open_private(folder, f"{digest}.zip", os.O_RDONLY), "rb") as file, zipfile.ZipFile(file) as archive:
            left, entries = BYTES_MAX, archive.infolist()
            if len(entries) > FILES_MAX:
                raise ValueError(f"it has {len(entries)} files; at most {FILES_MAX} are allowed")
            for entry in entries:
                left -= _unpack_entry(archive, entry, working, left)
        os.replace(working, folder / digest)
    finally:
        shutil.rmtree(working, ignore_errors=True)


def _unpack_entry(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, into: Path, left: int) -> int:
    """Write one file of an archive; returns its size, which is at most `left`."""
    name, mode = PurePosixPath(entry.filename), entry.external_attr >> 16
    if name.is_absolute() or ".." in name.parts or not name.parts or "\\" in entry.filename or not stat.S_ISREG(mode):
        raise ValueError(f"its entry {entry.filename[:200]!r} is no file inside of it")
    path = into.joinpath(*name.parts)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    size = 0
    with archive.open(entry) as source, open(os.open(path, flags, 0o700 if mode & 0o100 else 0o600), "wb") as out:
        while part := source.read(_PIECE):
            size += len(part)
            if size > left:
                raise ValueError(f"its files have more than {BYTES_MAX} bytes")
            out.write(part)
    return size
