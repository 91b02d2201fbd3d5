"""Build a CPython without a GIL (3.14t) from the sources of Debian's Python.

    python tests/free_python.py 3.14t ~/pythons/3.14t
    python tests/free_python.py 3.14t ~/pythons/3.14t-tsan --thread-sanitizer
    python tests/free_python.py 3.14t ~/pythons/3.14t --archive python3.14_3.14.4.orig.tar.xz

Debian has no package of it. This machine's compiler builds it, with the libraries whose headers are here: those of zlib
and libffi are needed, and OpenSSL's for pip. It needs no root, and nothing outside the folder changes.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

from debian_python import run, sources
from zig_python import install, unpack


def main() -> None:
    words = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    words.add_argument("version", help="for example 3.14t")
    words.add_argument("folder", type=Path, help="where to install it; must not exist yet")
    words.add_argument("--suite", default="sid", help="Debian's suite that has this version (default: sid)")
    words.add_argument("--archive", type=Path, help="of the sources; Debian's where it is left out")
    words.add_argument("--thread-sanitizer", action="store_true", help="with ThreadSanitizer, for tests")
    given = words.parse_args()
    folder = given.folder.resolve()
    if folder.exists():
        words.error(f"{folder} exists already")
    options = ["--disable-gil", "--disable-test-modules", *["--with-thread-sanitizer"] * given.thread_sanitizer]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    # The interpreter itself runs during the build; what is reported of it is not ours.
    environment |= {"CFLAGS": "-O2 -w -g1" if given.thread_sanitizer else "-O2 -w -g0", "TSAN_OPTIONS": "report_bugs=0"}
    with tempfile.TemporaryDirectory(prefix="free-python-") as name:
        archive = given.archive
        if archive is None:
            (archive,) = sources([f"python{given.version.rstrip('t')}"], given.suite, Path(name, "sources")).values()
        install(unpack(archive, Path(name, "python")), folder, options, environment)
    python = folder / f"bin/python{given.version}"
    shown = run(python, "-c", "import ctypes, ssl, sys, venv, zlib; print(sys.version)", env=environment)
    sys.stdout.write(f"{python}: {shown}")


if __name__ == "__main__":
    main()
