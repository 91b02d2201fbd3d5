"""herd7, which checks small programs in a memory model, made once in .cache/herd7; `make check` runs this first.

Debian's sid has it (package herdtools7). The package and its C library are only unpacked, by apt's addresses and keys
of this machine; without apt, `FASTRT_HERD7` may name a herd7, or one is on PATH.
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".cache" / "herd7"


def herd7() -> list[str] | None:
    """The words of the command, or None if there is no herd7."""
    if words := shlex.split(os.environ.get("FASTRT_HERD7", "")):
        return words
    if found := shutil.which("herd7"):
        return [found]
    if not (FOLDER / "whole").exists():
        return None
    (loader,) = FOLDER.glob("usr/lib/*/ld-linux-*.so.*")
    command = [loader, "--library-path", loader.parent, FOLDER / "usr/bin/herd7"]
    return [*map(str, command), "-set-libdir", str(FOLDER / "usr/share/herdtools7/herd")]


def make() -> None:
    """Make the folder, unless there is a herd7."""
    if herd7() is not None:
        return
    sys.path.insert(0, str(ROOT / "tests"))
    import debian_python

    shutil.rmtree(FOLDER, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="herd7-") as name:
        for package in debian_python.download(["herdtools7"], "sid", Path(name)):
            subprocess.run(["dpkg-deb", "--extract", package, FOLDER], check=True)
    (FOLDER / "whole").touch()


if __name__ == "__main__":
    make()
