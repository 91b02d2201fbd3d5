"""The folders in which a program's modules lie: they travel with its code to nodes that the program has not started.

A node that a program starts has the module path of that program. A node that runs already knows nothing of the program,
so each function, class and list of exceptions that the program sends carries the folder of its script and its current
folder. They are noted before the code itself is unpickled, because its module may be imported then. What a worker sends
on carries them, too.
"""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
import weakref
from collections.abc import Callable
from typing import Any, Protocol


class _Sender(Protocol):
    def forget(self) -> None: ...


_senders: weakref.WeakSet[_Sender] = weakref.WeakSet()
_here: tuple[str, ...] = ()  # of the program for which this process works
_arrived: Callable[[tuple[str, ...], bool], None] | None = None


def of_program(with_current: bool) -> tuple[str, ...]:
    """Return the folders of this program, which uses a node that runs already.

    Args:
        with_current: whether its current folder is one: tasks without a `working_dir` find modules there.
    Source:
        The semantics of `connect` in Ray's `_private/worker.py`: a script's folder counts if it is on `sys.path`.
    """
    found = []
    main = (
        getattr(sys.modules.get("__main__"), "__file__", None) or (sys.argv or [""])[0]
    )  # absolute, if it is a script
    script = os.path.dirname(os.path.realpath(main))
    installed = [sysconfig.get_path(name) for name in ("purelib", "platlib")]
    searched = [os.path.realpath(path) for path in sys.path if isinstance(path, str)]
    if script in searched and script not in map(os.path.realpath, installed):
        found.append(script)
    if with_current:
        with contextlib.suppress(FileNotFoundError):  # the folder was removed
            found.append(os.getcwd())
    return tuple(dict.fromkeys(found))


def here() -> tuple[str, ...]:
    """Return the folders that code carries which this process sends."""
    return _here


def set_here(folders: tuple[str, ...]) -> None:
    """Set the folders that code carries which this process sends, and call `forget` of all senders of code."""
    global _here
    if folders != _here:
        for user in list(_senders):
            user.forget()
    _here = folders


def bind(sender: _Sender) -> None:
    """Call `sender.forget()` when the folders change: it sends its code again then."""
    _senders.add(sender)


def install(arrived: Callable[[tuple[str, ...], bool], None]) -> None:
    """Call a function with the folders of code that this process, a worker, is about to unpickle.

    Args:
        arrived: gets the folders, and whether they are for an actor's own process only.
    """
    global _arrived
    _arrived = arrived


def carrying(value: Any, to_actor: bool = False) -> Any:
    """Return an object to pickle instead of a value, or of the name before some code, so that it carries the folders.

    Args:
        value: the value.
        to_actor: whether the folders are for the process of an actor only; others may have the value by its handles.
    """
    return _Carrying(value, _here, to_actor) if _here else value


class _Folders:
    def __init__(self, folders: tuple[str, ...], to_actor: bool) -> None:
        self._folders = folders
        self._to_actor = to_actor

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, (self._folders, self._to_actor)


class _Carrying:
    """A value that is unpickled after its folders were noted."""

    def __init__(self, value: Any, folders: tuple[str, ...], to_actor: bool) -> None:
        self._value = value
        self._folders = _Folders(folders, to_actor)

    def __reduce__(self) -> tuple[Any, ...]:
        return _second, (self._folders, self._value)


def _arrive(folders: tuple[str, ...], to_actor: bool) -> None:
    if _arrived is not None:
        _arrived(folders, to_actor)


def _second(_: None, value: Any) -> Any:
    return value
