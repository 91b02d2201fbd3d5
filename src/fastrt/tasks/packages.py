"""Packages: the files of a `runtime_env` as archives, so that nodes without these files can run its tasks.

A process makes a package before it submits the first task with an environment, if its node belongs to a cluster. The
archive lies in the folder of the node's session under the SHA-256 of its bytes; equal files make equal archives. A
worker of another node asks that node for it, part by part (`fastrt.worker.packages`).
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import stat
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fastrt.errors import ConfigError
from fastrt.folders import open_private, private_folder
from fastrt.store import join
from fastrt.tasks.runtime_env import Environment, Package

if TYPE_CHECKING:
    from fastrt.store.client import Store

FOLDER = "packages"  # in a session's folder
QUESTION = "package"  # of another node, see `cluster.questions`
PART_BYTES = 192 << 10  # of one answer, before base64
BYTES_MAX = 512 << 20  # of the files of a package together
FILES_MAX = 50_000
ALWAYS_EXCLUDED = (".git", ".venv", "venv", "__pycache__")
_MOMENT = (1980, 1, 1, 0, 0, 0)  # of all entries: an archive depends on the files' contents only

_made: dict[tuple[str, Environment], Environment] = {}


def folder_of(store: Store) -> Path:
    """Return the folder of this node's packages, which is made if it is missing."""
    return private_folder(Path(store.socket_path).parent / FOLDER, "the folder of packages")


def packed(store: Store, environment: Environment | None) -> Environment | None:
    """Return an environment whose files other nodes can ask this node for.

    It is the same one if the node belongs to no cluster, or if it names no files. Files are read at the first call for
    an environment; later changes of them stay on this node. Files that are too large are not packed.

    Args:
        store: of the process that submits.
        environment: of its task or actor.
    """
    if environment is None or not environment.paths():
        return environment
    folder = Path(store.socket_path).parent
    if not (folder / join.UPLINK_SOCKET).exists():
        return environment
    key = (str(folder), environment)
    if key not in _made:
        has = {package.path for package in environment.packages}
        wanted = [path for path in environment.paths() if path not in has and os.path.exists(path)]
        node = store.client.segment.session
        found = [_pack(store, node, path, path != environment.working_dir, environment.excludes) for path in wanted]
        _made[key] = replace(environment, packages=(*environment.packages, *found))
    return _made[key]


def read_part(folder: Path, digest: str, offset: int) -> bytes:
    """Return at most `PART_BYTES` of an archive from an offset on; nothing behind its end.

    Args:
        folder: of the session that made it.
        digest: its name, 64 hex digits.
        offset: in bytes.
    Raises:
        ValueError: the digest or the offset is malformed.
        OSError: there is no such package.
    """
    if len(digest) != hashlib.sha256().digest_size * 2 or set(digest) - set("0123456789abcdef"):
        raise ValueError(f"{digest[:80]!r} is no digest of a package")
    if offset < 0:
        raise ValueError(f"a package has no offset {offset}")
    with open(open_private(folder / FOLDER, f"{digest}.zip", os.O_RDONLY), "rb") as file:
        file.seek(offset)
        return file.read(PART_BYTES)


def _pack(store: Store, node: str, path: str, with_name: bool, excludes: tuple[str, ...]) -> Package:
    """Write the archive of a folder or file.

    Args:
        store, node: of this process.
        path: absolute.
        with_name: whether names in the archive begin with the path's own name, as those of a module do.
        excludes: patterns of names, or of paths below the folder, that are left out.
    Returns:
        The package; one without a digest if it is too large.
    """
    top = f"{os.path.basename(path)}/" if with_name else ""
    files: list[tuple[str, str]] = []
    nbytes = 0
    for inner, file in _files(path, excludes):
        nbytes += os.path.getsize(file)
        files.append((f"{top}{inner}" if inner else os.path.basename(path), file))
        if nbytes > BYTES_MAX or len(files) > FILES_MAX:
            return Package(path, "", node)
    folder = folder_of(store)
    working = f".{os.urandom(8).hex()}"
    try:
        with open(open_private(folder, working, os.O_RDWR | os.O_CREAT | os.O_EXCL), "w+b") as out:
            with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
                for name, file in files:
                    _add(archive, name, file)
            out.seek(0)
            digest = hashlib.sha256()
            while part := out.read(1 << 20):
                digest.update(part)
        os.replace(folder / working, folder / f"{digest.hexdigest()}.zip")
    except OSError as exc:
        raise ConfigError(f"the files of the runtime_env at {path} could not be packed: {exc}") from exc
    finally:
        (folder / working).unlink(missing_ok=True)
    return Package(path, digest.hexdigest(), node)


def _add(archive: zipfile.ZipFile, name: str, file: str) -> None:
    entry = zipfile.ZipInfo(name, _MOMENT)
    entry.compress_type = zipfile.ZIP_DEFLATED
    is_program = bool(os.stat(file).st_mode & stat.S_IXUSR)
    entry.external_attr = (stat.S_IFREG | (0o700 if is_program else 0o600)) << 16
    with open(file, "rb") as source, archive.open(entry, "w", force_zip64=True) as out:
        while part := source.read(1 << 20):
            out.write(part)


def _files(path: str, excludes: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield the path below `path` ("" for `path` itself) and the real path of each file, in order of name."""
    if os.path.isfile(path):
        yield "", path
        return
    for folder, inner, names in os.walk(path):
        below = os.path.relpath(folder, path)
        prefix = "" if below == "." else f"{below}/"
        inner[:] = sorted(name for name in inner if not _is_excluded(name, prefix + name, excludes))
        for name in sorted(names):
            file = os.path.join(folder, name)
            if not _is_excluded(name, prefix + name, excludes) and os.path.isfile(file):
                yield prefix + name, file


def _is_excluded(name: str, below: str, excludes: tuple[str, ...]) -> bool:
    patterns = [pattern.strip("/") for pattern in excludes]
    return name in ALWAYS_EXCLUDED or any(
        fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(below, pattern) for pattern in patterns
    )
