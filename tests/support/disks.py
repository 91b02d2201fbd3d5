"""A small disk of its own, for tests that fill it."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

_IMAGE_BYTES = 320 << 20  # XFS refuses less than 300 MiB
_ENOUGH = 1 << 20


def with_own_shm(size: str) -> list[str]:
    """Return the words that give a command a /dev/shm of this size, in a mount namespace as a container has one.

    Where that is not allowed, the test is skipped.
    """
    words = ["unshare", "-m"]
    if shutil.which(words[0]) is None or subprocess.run([*words, "true"], capture_output=True, check=False).returncode:
        pytest.skip("mount namespaces cannot be made here")
    return [*words, "sh", "-c", f'mount -t tmpfs -o size={size} none /dev/shm && exec "$@"', "sh"]


@contextlib.contextmanager
def small_disk(tmp_path: Path, nbytes: int, kind: str = "tmpfs") -> Iterator[Path]:
    """Mount a private folder with so many free bytes below `tmp_path`. Where that is not allowed, the test is skipped.

    Args:
        tmp_path: the test's folder.
        nbytes: at most 256 MiB where `kind` is not tmpfs; the rest of the disk is taken by a file.
        kind: of file system: tmpfs, ext4 or xfs; the last two lie in a file of `tmp_path`.
    """
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    folder = tmp_path / "disk"
    folder.mkdir()
    if kind == "tmpfs":
        command = ["mount", "-t", "tmpfs", "-o", f"size={nbytes},mode=0700", "tmpfs", str(folder)]
    else:
        make = shutil.which(f"mkfs.{kind}", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
        if make is None:
            pytest.skip(f"there is no mkfs.{kind} here")
        image = tmp_path / "image"
        with image.open("wb") as file:
            file.truncate(_IMAGE_BYTES)
        subprocess.run([make, "-q", str(image)], check=True, capture_output=True)
        command = ["mount", "-t", kind, "-o", "loop", str(image), str(folder)]
    mounted = subprocess.run(command, check=False, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no disk can be mounted here: {mounted.stderr.strip()}")
    try:
        if kind != "tmpfs":
            _fill(folder, nbytes)
        yield folder
    finally:
        if os.path.ismount(folder):
            subprocess.run(["umount", "-l", str(folder)], check=True)


def _fill(folder: Path, left: int) -> None:
    """Take the space of a disk until about `left` bytes are free."""
    with (folder / "rest").open("wb") as file:
        while True:
            disk = os.statvfs(folder)
            more = min(disk.f_bavail * disk.f_frsize - left, 16 << 20)
            if more < _ENOUGH:
                return
            os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), more)
