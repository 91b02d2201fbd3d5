"""The lines of code that made objects. They are recorded only on request, as that costs microseconds for each call.

The entry of each object has room for a number. It stands for a line, by a hash of "file:line in function"; the texts of
the numbers are appended to a file of each process in the session's folder, once for each line, and go with the session.
The store calls `Sites.note` with the references that `put` and `remote` make, see `Store.note`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from fastrt._core.repair import inspect
from fastrt.errors import FastrtError
from fastrt.folders import open_private, private_folder
from fastrt.store.client import Store

_PACKAGE_DIR = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_FOLDER = "sites"


class Sites:
    """The lines that this process has recorded.

    Args:
        folder: of the session's files of lines.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pid = 0
        self._known: dict[tuple[str, int], int] = {}

    def note(self, made: Any) -> None:
        """Mark references with the line outside of fastrt that is running now.

        Args:
            made: an ObjectRef or a list of them.
        """
        frame = _outside(sys._getframe(1))
        if frame is None:
            return
        place = (frame.f_code.co_filename, frame.f_lineno)
        try:
            number = self._number_of(place, frame.f_code.co_name)
            for ref in made if isinstance(made, list) else [made]:
                inspect.set_site(ref.owner, ref, number)
        except (FastrtError, OSError):
            pass  # the session has just ended, or its folder is gone: the call has done its work

    def _number_of(self, place: tuple[str, int], function: str) -> int:
        if self._pid != os.getpid():
            self._pid, self._known = os.getpid(), {}
        number = self._known.get(place)
        if number is None:
            number = self._known[place] = self._write(f"{place[0]}:{place[1]} in {function}")
        return number

    def _write(self, text: str) -> int:
        import hashlib  # here: it loads OpenSSL, which most processes never need

        number = int.from_bytes(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=4).digest(), "big") or 1
        private_folder(self._folder, "the folder of call sites")
        line = f"{number:08x} {text}\n".encode("utf-8", "backslashreplace")
        fd = open_private(self._folder, str(self._pid), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            os.write(fd, line)
        finally:
            os.close(fd)
        return number


def _outside(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of code that is not fastrt's."""
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE_DIR):
        frame = frame.f_back
    return frame


def start(store: Store) -> None:
    """Record the lines of this process until `store` is closed. No task may have been submitted to it before.

    Args:
        store: this process's attachment; it must say where the daemon's socket is.
    """
    store.note = Sites(Path(store.socket_path).parent / _FOLDER).note


def read(socket_path: str) -> dict[int, str]:
    """Return the lines of code that the numbers of a session's objects stand for.

    Args:
        socket_path: of its daemon.
    Returns:
        "file:line in function" by number; empty when the session does not record.
    """
    found = {}
    for path in (Path(socket_path).parent / _FOLDER).glob("*"):
        try:
            lines = path.read_text("utf-8", "replace").splitlines()
        except OSError:  # the session ends
            continue
        for line in lines:
            number, _, text = line.partition(" ")
            found[int(number, 16)] = text
    return found
