"""Folders and files that only this user may change: created with mode 0700 and 0600, checked before use, no links.

Every folder with state, secrets, sockets, logs or spilled values goes through `private_folder`. No other user can
redirect the path of a folder that passes the check, now or later: each folder above it belongs to this user or to root,
and others may write to it only if it is sticky, as /tmp is. So the result of the check stays valid.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fastrt.errors import ConfigError, FastrtError

_OTHERS = 0o077
_LINKS_MAX = 40  # as the kernel's own limit
_TEXT_BYTES_MAX = 1 << 20
RANDOM_BYTES = 17  # a dash and 16 hex digits, see `default_folder`


class UnsafeFolderError(FastrtError):
    """Another user could read or replace a folder or file. The message names it and says what to do."""


def private_folder(path: str | os.PathLike[str], purpose: str) -> Path:
    """Create a folder that only this user may enter, and missing folders above it; check those that exist.

    Args:
        path: of the folder.
        purpose: for the message, such as "the runtime folder (FASTRT_RUNTIME_DIR)".
    Returns:
        The absolute path, without links.
    Raises:
        UnsafeFolderError: the folder is a link, belongs to another user or can be entered by others, or another user
            could replace it.
        OSError: it cannot be created.
    Source:
        `StrictModes` of OpenSSH's sshd, `$XDG_RUNTIME_DIR` of the XDG Base Directory Specification.
    """
    return _checked(Path(os.path.abspath(path)), purpose, make=True)


def has_private_folder(path: str | os.PathLike[str], purpose: str) -> bool:
    """Check a folder as `private_folder` does, without creating it.

    Returns:
        Whether it exists.
    Raises:
        UnsafeFolderError: as for `private_folder`.
    """
    try:
        _checked(Path(os.path.abspath(path)), purpose, make=False)
    except FileNotFoundError:
        return False
    return True


def takes_entries(folder: str | os.PathLike[str]) -> bool:
    """Whether the path is absolute, names a folder, and this process may create files in it."""
    may = os.W_OK | os.X_OK
    return os.path.isabs(folder) and os.path.isdir(folder) and os.access(folder, may, effective_ids=True)


def temporary_folder() -> str:
    """Return the folder of temporary files of this process.

    Raises:
        ConfigError: this process can create files in none of those where `tempfile` looks.
    """
    import tempfile  # here: with all that it imports it takes longer than the rest of this module

    try:
        return tempfile.gettempdir()
    except FileNotFoundError as exc:
        raise ConfigError(
            f"there is no folder for the runtime's files: {exc.strerror}, and $XDG_RUNTIME_DIR is unset or of no use. "
            "Set FASTRT_RUNTIME_DIR to a folder on a disk with room, in which you may write"
        ) from None


def free_bytes(folder: str | os.PathLike[str]) -> int:
    """Return how many bytes this user may still write to the file system of a folder.

    Raises:
        OSError: there is no such folder.
    """
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def default_folder(parent: str | os.PathLike[str], name: str) -> Path:
    """Choose the path of a folder with a known name in a folder that all users share, such as /tmp.

    Another user may create the known name first. Then this user's folder is called NAME-<16 random hex digits>, and
    later processes find it by its owner: in a sticky folder no user can create a folder that belongs to another one.
    That folder stays in use even if the known name becomes free, so that all processes of the user agree.

    Args:
        parent: the shared folder.
        name: the known name; it must contain the user's number.
    Returns:
        The path. Only a folder with a random name is created here, because other processes find it by listing.
    """
    known = Path(os.path.abspath(parent), name)
    if _is_mine(known):
        return known
    found = _with_random_names(known)
    if not found and os.path.lexists(known):
        with suppress(OSError):  # `private_folder` reports why the folder cannot be created
            os.mkdir(f"{known}-{os.urandom(8).hex()}", 0o700)
        found = _with_random_names(known)
    return found[0] if found else known


def open_private(folder: Path, name: str, flags: int) -> int:
    """Open a file of a private folder, relative to the folder itself, without following a link.

    Args:
        folder: from `private_folder`.
        name: of the file, without a slash.
        flags: as for `os.open`. With O_CREAT the file is created by O_EXCL; if `flags` has no O_EXCL, an existing file
            is opened instead.
    Returns:
        A descriptor that is closed on exec.
    Raises:
        UnsafeFolderError: the folder is no longer private, or the file is a link, belongs to another user or has a
            second hard link.
        OSError: it cannot be opened.
    """
    if not name or "/" in name:
        raise ValueError(f"{name!r} is not a file name: give one without a slash")
    at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _check_private(folder, os.fstat(at), f"the folder of {name}")
        return _open_at(at, folder, name, flags | os.O_NOFOLLOW | os.O_CLOEXEC)
    finally:
        os.close(at)


@contextmanager
def private_files() -> Iterator[None]:
    """During a `with` statement, this process creates files and Unix sockets that only its user may access."""
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)


def replace_private(folder: Path, name: str, data: bytes) -> None:
    """Write a file of a private folder atomically: under another name first, which is then renamed.

    It does not wait for the disk: a crash of the machine may leave the old content.

    Args:
        folder: from `private_folder`.
        name: of the file.
        data: its content.
    Raises:
        UnsafeFolderError: as for `open_private`.
        OSError: it cannot be written.
    """
    working = f".{name}.{os.urandom(4).hex()}"
    fd = open_private(folder, working, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        with open(fd, "wb") as file:
            file.write(data)
        os.replace(folder / working, folder / name)
    except BaseException:
        (folder / working).unlink(missing_ok=True)
        raise


def read_private(folder: Path, name: str, bytes_max: int = _TEXT_BYTES_MAX) -> bytes:
    """Read a file of a private folder.

    Args:
        folder: from `private_folder`.
        name: of the file.
        bytes_max: the largest allowed size.
    Raises:
        UnsafeFolderError: as for `open_private`, or the file is larger.
        OSError: it cannot be read.
    """
    with open(open_private(folder, name, os.O_RDONLY), "rb") as file:
        return _read(file.fileno(), folder / name, bytes_max)


def read_secret(path: str | os.PathLike[str]) -> str:
    """Read a file whose content only this user may know, such as a token; its folder need not be private.

    Links are followed if no other user could have created or changed them, as in a volume of Kubernetes.

    Args:
        path: of the file.
    Returns:
        The text, without the space around it.
    Raises:
        UnsafeFolderError: the file belongs to another user, others may read it, or another user could replace it.
        OSError: it cannot be read.
    """
    file = Path(os.path.abspath(path))
    try:
        real = _walk(file, make=False)
    except _StepError as step:
        raise UnsafeFolderError(f"The file {file} is not safe: another user could replace it, as {step}") from None
    fd = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise UnsafeFolderError(f"{file} is not a regular file. Give a file that only you may read")
        if info.st_uid not in _trusted():
            raise UnsafeFolderError(
                f"The file {file} belongs to uid {info.st_uid}, who can read it. Create a file that belongs to you"
            )
        if info.st_mode & _OTHERS:
            raise UnsafeFolderError(
                f"Other users may read the file {file}. Run `chmod 600 {file}`, and replace the secret in it"
            )
        return _read(fd, file, _TEXT_BYTES_MAX).decode("utf-8", "replace").strip()
    finally:
        os.close(fd)


class _StepError(Exception):
    """A folder or link on a path belongs to another user, or another user can change it."""


def _trusted() -> tuple[int, int]:
    """Return the users that control this process anyway: its own and root."""
    return (os.geteuid(), 0)


def _checked(path: Path, purpose: str, make: bool) -> Path:
    try:
        folder = _walk(path.parent, make) / path.name
    except _StepError as step:
        raise UnsafeFolderError(
            f"{path} cannot be {purpose}: another user could replace it, as {step}. Choose another folder, or have "
            "its owner and mode changed"
        ) from None
    if make:
        with suppress(FileExistsError):
            os.mkdir(folder, 0o700)
    _check_private(folder, os.lstat(folder), purpose)
    return folder


def _check_private(folder: Path, info: os.stat_result, purpose: str) -> None:
    why = None
    if stat.S_ISLNK(info.st_mode):
        why = "it is a link. Remove it, or name the folder itself"
    elif not stat.S_ISDIR(info.st_mode):
        why = "it is not a folder. Remove it, or choose another path"
    elif info.st_uid != os.geteuid():
        why = f"it belongs to uid {info.st_uid}, not to uid {os.geteuid()}. Have it removed, or choose another folder"
    elif info.st_mode & _OTHERS:
        mode = stat.S_IMODE(info.st_mode)
        why = f"its mode {mode:o} lets other users in. Look at what it holds, then run `chmod 700 {folder}`"
    if why is not None:
        raise UnsafeFolderError(f"{folder} cannot be {purpose}: {why}")


def _walk(path: Path, make: bool) -> Path:
    """Follow an absolute path and its links from the root; reject a step that another user could redirect.

    Returns:
        The path without links. Its last part need not be a folder.
    """
    here = Path("/")
    left = list(reversed(path.parts[1:]))
    links = 0
    _check_step(here, os.lstat(here))
    while left:
        part = left.pop()
        if part == "..":
            here = here.parent
            continue
        step = here / part
        try:
            info = os.lstat(step)
        except FileNotFoundError:
            if not make:
                raise
            with suppress(FileExistsError):
                os.mkdir(step, 0o700)
            info = os.lstat(step)
        if not stat.S_ISLNK(info.st_mode):
            if left or stat.S_ISDIR(info.st_mode):
                _check_step(step, info)
            here = step
            continue
        links += 1
        if info.st_uid not in _trusted() or links > _LINKS_MAX:
            raise _StepError(f"{step} is a link of uid {info.st_uid}")
        target = Path(os.readlink(step))
        left += reversed(target.parts[1:] if target.is_absolute() else target.parts)
        here = Path("/") if target.is_absolute() else here
    return here


def _check_step(step: Path, info: os.stat_result) -> None:
    if not stat.S_ISDIR(info.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(step))
    if info.st_uid not in _trusted():
        raise _StepError(f"{step} belongs to uid {info.st_uid}")
    if info.st_mode & stat.S_ISVTX:
        return
    if info.st_mode & stat.S_IWOTH or (info.st_mode & stat.S_IWGRP and not _is_private_group(info.st_gid)):
        raise _StepError(f"others may write to {step}, which has mode {stat.S_IMODE(info.st_mode):o}")


def _is_private_group(gid: int) -> bool:
    """Whether this user is the only member of a group.

    With Red Hat's default umask of 002, new folders are writable for such a group. A group of this process that has no
    name is one that the container got for a volume (`fsGroup` in Kubernetes).
    """
    import grp  # imported here, because a folder that a group may write to is rare
    import pwd

    try:
        group = grp.getgrgid(gid)
    except KeyError:
        return gid in (os.getegid(), *os.getgroups())
    try:
        user = pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return user.pw_gid == gid and user.pw_name == group.gr_name and set(group.gr_mem) <= {user.pw_name}


def _is_mine(folder: Path) -> bool:
    try:
        info = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid()


def _with_random_names(known: Path) -> list[Path]:
    """List this user's folders that replace a known name, in the same order for all processes."""
    pattern = re.compile(re.escape(known.name) + "-[0-9a-f]{16}")
    try:
        names = sorted(name for name in os.listdir(known.parent) if pattern.fullmatch(name))
    except OSError:
        return []
    return [known.parent / name for name in names if _is_mine(known.parent / name)]


def _open_at(at: int, folder: Path, name: str, flags: int) -> int:
    if flags & os.O_CREAT:
        try:
            return os.open(name, flags | os.O_EXCL, 0o600, dir_fd=at)
        except FileExistsError:
            if flags & os.O_EXCL:
                raise
    # Non-blocking, so that the open does not hang on a FIFO at this path; the flag has no effect on a regular file.
    fd = -1
    try:
        fd = os.open(name, flags & ~(os.O_CREAT | os.O_TRUNC) | os.O_NONBLOCK, dir_fd=at)
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or info.st_nlink != 1:
            raise UnsafeFolderError(
                f"{folder / name} must be a regular file of uid {os.geteuid()} with one name: it belongs to uid "
                f"{info.st_uid} and has {info.st_nlink} names. Find out where it comes from, and remove it"
            )
        if flags & os.O_TRUNC:
            os.ftruncate(fd, 0)
        return fd
    except OSError as exc:
        if exc.errno == errno.ELOOP:
            raise UnsafeFolderError(f"{folder / name} is a link. Find out what made it, and remove it") from None
        raise
    except UnsafeFolderError:
        os.close(fd)
        raise


def _read(fd: int, path: Path, bytes_max: int) -> bytes:
    data = bytearray()
    while len(data) <= bytes_max:
        got = os.read(fd, bytes_max + 1 - len(data))
        if not got:
            return bytes(data)
        data += got
    raise UnsafeFolderError(f"{path} is larger than {bytes_max} bytes, so fastrt did not write it. Remove it")
