"""A small disk of its own, for tests that fill it."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(tmp_path: Path, nbytes: int) -> Iterator[Path]:
    """Mount a private folder of so many bytes below `tmp_path`. Where that is not allowed, the test is skipped."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={nbytes},mode=0700", "tmpfs", str(folder)]
    mounted = subprocess.run(command, check=False, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no disk can be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
