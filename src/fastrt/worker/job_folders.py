"""The modules of programs that share this worker: each program's tasks find those of its own folders.

The folders come with a program's code (`fastrt.store.job_folders`). They are the last ones on `sys.path`, so they hide
nothing that is installed on the node. When the worker gets a task of another program, it takes them off, and out of
`sys.modules` the modules that were found in them, until the next task of this one. A program that runs again is another
job: it imports its modules again. Between tasks of one program nothing is done.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from types import ModuleType
from typing import Any

from fastrt.store import job_folders
from fastrt.tasks.functions import FunctionCache, Loaded

_JOBS_MAX = 16  # programs whose modules and functions a worker keeps


class _Part:
    """Folders of a job, the modules that were found there, and the functions that were loaded with them."""

    def __init__(self, folders: tuple[str, ...], loaded: Loaded) -> None:
        self.folders = folders
        self.loaded = loaded
        self._added: list[str] = []  # those that are on `sys.path` because of this job
        self._own: dict[str, ModuleType] = {}
        self._counted = 0  # modules, when they were looked through

    def enter(self) -> None:
        """Add the folders to the module path, and bring the modules back."""
        missing = [one for one in self.folders if one not in sys.path and os.path.isdir(one)]
        self._added += [one for one in missing if one not in self._added]
        sys.path += missing
        for name, module in self._own.items():
            sys.modules.setdefault(name, module)

    def leave(self, fixed: Collection[str]) -> None:
        """Take the folders off the module path, and their modules away.

        Args:
            fixed: names of modules that stay.
        """
        if not self._added:
            return
        if len(sys.modules) != self._counted:
            outer = [os.path.abspath(path) for path in sys.path if isinstance(path, str) and path not in self._added]
            found = [(name, one) for name, one in list(sys.modules.items()) if name not in fixed]
            self._own = {name: one for name, one in found if is_found_in(one, self._added, outer)}
            self._counted = len(sys.modules)
        for name in self._own:
            sys.modules.pop(name, None)
        sys.path[:] = [path for path in sys.path if path not in self._added]
        self._added = []


class JobFolders:
    """Enters and leaves the folders of jobs.

    Args:
        functions: of this process, of which each job with folders gets a part of its own.
        use: called with the functions of another job.

    Attributes:
        adds_only: whether this process keeps all folders, because it is an actor's.
    """

    adds_only = False

    def __init__(self, functions: FunctionCache, use: Callable[[dict[int, Any]], object]) -> None:
        self._functions = functions
        self._use = use
        self._fixed = frozenset(sys.modules)
        self._job = 0
        self._others = self._here = _Part((), functions.kept)  # `others`: of all jobs without folders
        self._parts: OrderedDict[tuple[int, tuple[str, ...]], _Part] = OrderedDict()
        self._last: dict[int, _Part] = {}  # the latest part of a job
        job_folders.install(self.arrive)

    def enter_job(self, job: int) -> None:
        """Note that the next task is of this job, and not of that of the one before."""
        self._job = job
        part = self._last.get(job, self._others)
        if part is not self._others:
            self._parts.move_to_end((job, part.folders))
        self._switch(part)

    def arrive(self, folders: tuple[str, ...], to_actor: bool = False) -> None:
        """Note that code of the current job lies in these folders; called before it is unpickled.

        Args:
            folders: as the code carries them.
            to_actor: whether they are for an actor's process only.
        """
        if self.adds_only:
            sys.path += [one for one in folders if one not in sys.path and os.path.isdir(one)]
            job_folders.set_here(job_folders.here() or folders)
            return
        if to_actor:
            return
        key = self._job, folders
        part = self._parts.pop(key, None) or _Part(folders, Loaded())
        self._parts[key] = self._last[self._job] = part
        self._switch(part)
        part.enter()  # also where it was entered before: an environment that ended has restored the path before it
        if len(self._parts) > _JOBS_MAX:
            (job, _), oldest = self._parts.popitem(last=False)
            if self._last.get(job) is oldest:
                del self._last[job]

    def again(self) -> None:
        """Add the current folders to the module path again, before an environment is entered that is left later."""
        self._here.enter()

    def drop_swept(self) -> None:
        """Drop the functions, of all jobs, that no task can name any more."""
        for part in (self._others, *self._parts.values()):
            self._functions.kept = part.loaded
            self._functions.drop_swept()
        self._functions.kept = self._here.loaded

    def _switch(self, part: _Part) -> None:
        if part is self._here:
            return
        self._here.leave(self._fixed)
        self._here = part
        part.enter()
        job_folders.set_here(part.folders)
        self._functions.kept = part.loaded
        self._use(part.loaded.functions)


def is_found_in(module: Any, folders: Sequence[str], outer: Sequence[str]) -> bool:
    """Whether a module was found in one of some folders, and not in a deeper one that is on the path without them.

    Args:
        module: any object of `sys.modules`.
        folders: the folders.
        outer: the other folders of the path.
    """
    file = file_of(module)
    if not file:
        return False
    mine = max((len(folder) for folder in folders if is_below(file, folder)), default=-1)
    return mine >= 0 and mine > max((len(path) for path in outer if is_below(file, path)), default=-1)


def file_of(module: Any) -> str:
    """Return a module's file, of a namespace package its folder. Modules can be any objects, also ones that raise."""
    with contextlib.suppress(Exception):
        spec = module.__spec__
        file = getattr(module, "__file__", None) or (spec.origin if spec is not None else None)
        if file is None and spec is not None and spec.submodule_search_locations:
            file = next(iter(spec.submodule_search_locations))
        return os.path.abspath(file) if isinstance(file, str) else ""
    return ""


def is_below(path: str, folder: str) -> bool:
    """Whether a path is a folder or something in it."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")
