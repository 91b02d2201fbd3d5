"""Which line of code made each object: written down only where it is asked for, as it costs microseconds a call.

Each object's entry has room for a number. It stands for a line, by a hash of "file:line in function"; what the numbers
mean is appended to a file of each process in the session's folder, once for each line, and goes with the session.
While nobody asks, nothing of this is called: `start` puts itself in front of `put` and `remote`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any

from fastrt._core.repair import inspect
from fastrt.errors import FastrtError
from fastrt.folders import open_private, private_folder
from fastrt.store.client import Store
from fastrt.store.generator import ObjectRefGenerator
from fastrt.store.ref import ObjectRef
from fastrt.tasks.actor_class import ActorClass
from fastrt.tasks.actor_handle import ActorHandle, ActorMethod
from fastrt.tasks.remote import RemoteFunction

_PACKAGE_DIR = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_FOLDER = "sites"


class Sites:
    """The lines of this process, while it records; see `start`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pid = 0
        self._known: dict[tuple[str, int], int] = {}
        self._undo: list[Callable[[], None]] = []

    def wrap(self, cls: type, name: str) -> None:
        """Have what a method returns marked with the line that called it."""
        plain = cls.__dict__[name]

        @wraps(plain)
        def marked(*args: Any, **kwargs: Any) -> Any:
            made = plain(*args, **kwargs)
            try:
                self.note(made)
            except (FastrtError, OSError):
                pass  # the session has just ended, or its folder is gone: the call has done what it should
            return made

        setattr(cls, name, marked)
        self._undo.append(lambda: setattr(cls, name, plain))

    def note(self, made: Any) -> None:
        """Mark references with the line outside of fastrt that is running now."""
        frame = _outside(sys._getframe(1))
        if frame is None:
            return
        place = (frame.f_code.co_filename, frame.f_lineno)
        if self._pid != os.getpid():
            self._pid, self._known = os.getpid(), {}
        number = self._known.get(place)
        if number is None:
            number = self._known[place] = self._write(f"{place[0]}:{place[1]} in {frame.f_code.co_name}")
        for ref in made if isinstance(made, (list, tuple)) else [made]:
            if isinstance(ref, ActorHandle):
                ref = ref._actor_ref
            elif isinstance(ref, ObjectRefGenerator):
                ref = ref.completed()
            if isinstance(ref, ObjectRef) and not ref.owner.forked:
                inspect.set_site(ref.owner, ref, number)

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

    def forget(self) -> None:
        """Record no more."""
        while self._undo:
            self._undo.pop()()


def _outside(frame: FrameType | None) -> FrameType | None:
    """The innermost frame that is not fastrt's own."""
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE_DIR):
        frame = frame.f_back
    return frame


def _kinds(cls: type[Any]) -> Iterator[type[Any]]:
    """A class and all that are derived from it: some kinds of functions and methods submit in their own way."""
    yield cls
    for kind in cls.__subclasses__():
        yield from _kinds(kind)


_sites: Sites | None = None


def start(store: Store) -> None:
    """Record from now on, in this process, until `store` is closed.

    Args:
        store: this process's attachment; it must say where the daemon's socket is.
    """
    global _sites
    if _sites is not None:
        _sites.forget()
    _sites = Sites(Path(store.socket_path).parent / _FOLDER)
    _sites.wrap(Store, "put")
    for cls in (*_kinds(RemoteFunction), *_kinds(ActorMethod), *_kinds(ActorClass)):
        if "remote" in cls.__dict__:
            _sites.wrap(cls, "remote")
    store.users.add(_sites)


def read(socket_path: str) -> dict[int, str]:
    """What the numbers of a session's objects mean.

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
