"""The environments of tasks: a worker enters one for a run, and restores its previous state afterwards.

An environment is state of the process: variables, current folder, `sys.path`, and the modules found in its folders.
These modules are removed from `sys.modules` between two runs and put back for the next one, so each worker imports them
once; runs of another job import them again. An actor's process enters its environment once and never leaves it.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from types import ModuleType
from typing import Any

from fastrt._core.tasks import tasks as core
from fastrt.errors import RuntimeEnvError
from fastrt.store import namespaces
from fastrt.store.client import Store
from fastrt.tasks import runtime_env as environments
from fastrt.tasks.functions import FunctionCache
from fastrt.tasks.runtime_env import Environment
from fastrt.tasks.setup_hook import SetupHook
from fastrt.worker.job_folders import JobFolders, file_of, is_below, is_found_in

_ABSENT = re.compile(r"\$\{[A-Z0-9_]+\}")  # variables that do not exist, after those that do were put in
_SCOPES_MAX = 16  # environments whose modules and functions a worker keeps


def localized(store: Store, environment: Environment) -> Environment:
    """Return an environment with the paths that its files have on this node.

    Raises:
        RuntimeEnvError: files of another node cannot be got, or packages cannot be installed.
    """
    if environment.packages:
        from fastrt.worker import packages  # here: few tasks have files

        environment = packages.localized(store, environment)
    if environment.pip or environment.uv:
        from fastrt.worker import installing  # here: few tasks have packages of their own

        environment = installing.with_installed(store, environment)
    return environment


def apply(store: Store, environment: Environment, here: Environment | None = None) -> None:
    """Make an environment that of this process.

    Args:
        store: this process's attachment.
        environment: as it came with the task or actor: those that are submitted from inside inherit it.
        here: with the paths that its files have on this node, if they are known.
    Raises:
        RuntimeEnvError: a path in it does not exist on this machine.
    """
    here = here or localized(store, environment)
    folders = here.folders()
    for path in [*folders, *(here.py_modules or ())]:
        if not os.path.exists(path):
            raise RuntimeEnvError(
                f"the runtime_env names {path}, which is not on this node ({socket.gethostname()}); put it there, or "
                "keep its tasks where it is by scheduling="
            )
    if here.pip or here.uv:
        from fastrt.worker import installing

        installing.check_loaded(here)
    os.environ.update({name: _expanded(value) for name, value in here.env_vars or ()})
    if here.working_dir is not None:
        try:
            os.chdir(here.working_dir)
        except OSError as exc:
            raise RuntimeEnvError(f"the runtime_env's working_dir cannot be entered: {exc}") from exc
    sys.path[:0] = folders
    environments.set_current(environment)


def _expanded(value: str) -> str:
    """The value of a variable, in which `${NAME}` and `$NAME` stand for variables of this process.

    Source:
        `update_envs` in Ray's `_private/utils.py`: of variables that do not exist, `${NAME}` is nothing.
    """
    return _ABSENT.sub("", os.path.expandvars(value)) if "$" in value else value


class Prepared:
    """The changes that an environment's hook has made to this process: variables, module path, current folder.

    A worker leaves the environment after each task. The hook runs once, and its changes are made again for each
    further task.

    Args:
        hook: called now.
    Raises:
        RuntimeEnvError: it failed.
    """

    def __init__(self, hook: SetupHook) -> None:
        before = ProcessState()
        hook.run()
        after = ProcessState()
        self._set = {name: v for name, v in after.variables.items() if before.variables.get(name) != v}
        self._removed = before.variables.keys() - after.variables.keys()
        self._path = [path for path in after.path if path not in before.path]
        self._folder = None if after.folder == before.folder else after.folder

    def again(self) -> None:
        """Make the same changes once more."""
        os.environ.update(self._set)
        for name in self._removed:
            os.environ.pop(name, None)
        sys.path[:0] = self._path
        if self._folder is not None:
            with contextlib.suppress(OSError):
                os.chdir(self._folder)


class ProcessState:
    """A snapshot of the state that an environment changes, except for modules.

    Attributes:
        variables, path, folder: of this process.
    """

    def __init__(self) -> None:
        self.variables = dict(os.environ)
        self.path = list(sys.path)
        self._current = environments.current()
        try:
            self.folder = os.getcwd()
        except FileNotFoundError:  # the folder was removed
            self.folder = "/"

    def restore(self) -> None:
        """Restore the state of the snapshot."""
        for name in os.environ.keys() - self.variables.keys():
            del os.environ[name]
        for name, value in self.variables.items():
            if os.environ.get(name) != value:
                os.environ[name] = value
        sys.path[:] = self.path
        try:
            os.chdir(self.folder)
        except OSError:
            os.chdir("/")
        environments.set_current(self._current)


class Scope:
    """Modules and functions of one environment in this worker.

    Args:
        environment: the environment.
        here: the environment with the paths that its files have on this node.
        store: this process's attachment.
        fixed: names of modules that are never replaced: all that the worker began with.

    Attributes:
        here: as given.
        functions: those that were loaded in it.
    """

    def __init__(self, environment: Environment, here: Environment, store: Store, fixed: Collection[str]) -> None:
        self._environment = environment
        self._store = store
        self.here = here
        self._installations = _installations(store, environment)  # in use as long as its modules can be imported
        self._folders = here.folders()
        self._fixed = fixed
        self._modules: dict[str, ModuleType] = {}  # found in its folders, while they are not in sys.modules
        self._others: dict[str, ModuleType] = {}  # contents of sys.modules outside, while they are there
        self._outside: ProcessState | None = None
        self._before: Environment | None = None  # of an environment that changes nothing
        self._outer_paths: list[str] = []  # sys.path outside
        self._globals_outside: object = None
        self._prepared: Prepared | None = None
        self.functions = FunctionCache(store)

    def enter(self) -> None:
        """Make this environment that of the process.

        Raises:
            RuntimeEnvError: that is not possible.
        """
        if self._environment.changes_nothing:
            self._before = environments.current()
            environments.set_current(self._environment)
            return
        self._outside = ProcessState()
        self._outer_paths = [path for path in map(os.path.abspath, sys.path) if path not in self._folders]
        self._others = dict(sys.modules)
        for name in [name for name in self._top_names() if self._has_other(name)]:
            for inner in [key for key in sys.modules if key == name or key.startswith(name + ".")]:
                del sys.modules[inner]
        sys.modules.update(self._modules)
        self._globals_outside = namespaces.enter(self._environment)  # the names there can be modules of its folders
        try:
            apply(self._store, self._environment, self.here)
            self._set_up()
        except BaseException:
            self.leave()
            raise

    def _set_up(self) -> None:
        hook = self._environment.worker_process_setup_hook
        if self._prepared is not None:
            self._prepared.again()
        elif hook is not None:
            self._prepared = Prepared(hook)

    def leave(self) -> None:
        """Restore the previous environment of the process."""
        if self._environment.changes_nothing:
            environments.set_current(self._before)
            return
        assert self._outside is not None
        namespaces.enter(self._globals_outside)
        new = [(name, module) for name, module in sys.modules.items() if self._others.get(name) is not module]
        self._modules = {name: module for name, module in new if self._is_own(name, module)}
        for name in self._modules:
            del sys.modules[name]
        for name, module in self._others.items():
            sys.modules.setdefault(name, module)
        self._others = {}
        for folder in list(sys.path_importer_cache):
            if any(is_below(folder, mine) for mine in self._folders):
                del sys.path_importer_cache[folder]
        self._outside.restore()

    def _top_names(self) -> set[str]:
        return {name for name in sys.modules if "." not in name and name not in self._fixed}

    def _has_other(self, name: str) -> bool:
        """Whether its folders contain another module of a name than the imported one."""
        for folder in self._folders:
            for path in (f"{folder}/{name}/__init__.py", f"{folder}/{name}.py"):
                if os.path.exists(path):
                    return os.path.realpath(path) != os.path.realpath(file_of(sys.modules[name]))
        return False

    def _is_own(self, name: str, module: Any) -> bool:
        """Whether a module was found in one of its folders, and not in a deeper one that is on `sys.path` outside."""
        return name not in self._fixed and is_found_in(module, self._folders, self._outer_paths)


def _installations(store: Store, environment: Environment) -> list[Any]:
    if not (environment.pip or environment.uv):
        return []
    from fastrt.worker import installing

    return list(installing.of(store, environment))


class Inside:
    """A value that a function returned inside an environment, in which it is also sealed."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Environments:
    """Enters and leaves environments, and keeps the scopes of the last ones.

    Args:
        store: this process's attachment.
        folders: those of the job for which it works.
    """

    def __init__(self, store: Store, folders: JobFolders) -> None:
        self._store = store
        self._job_folders = folders
        self._fixed = frozenset(sys.modules)
        self._scopes: OrderedDict[tuple[int, Environment], Scope] = OrderedDict()
        self._here: tuple[int, Scope] | None = None  # the task for which a scope was entered, and that scope

    def enter(self, task: int, environment: Environment) -> FunctionCache:
        """Enter the environment of a task that this process has claimed.

        Returns:
            The functions that have been loaded in it.
        Raises:
            RuntimeEnvError: it cannot be entered.
        """
        key = core.info(self._store.client, task)["job"], environment
        here = localized(self._store, environment)
        scope = self._scopes.pop(key, None)
        if scope is None or scope.here != here:  # the files have gone from their place meanwhile
            scope = Scope(environment, here, self._store, self._fixed)
        self._scopes[key] = scope
        if len(self._scopes) > _SCOPES_MAX:
            self._scopes.popitem(last=False)
        self._job_folders.again()
        scope.enter()
        self._here = task, scope
        return scope.functions

    def drop_swept(self) -> None:
        """Drop the functions, in all scopes, that no task can name any more."""
        for scope in self._scopes.values():
            scope.functions.drop_swept()

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function to call instead of one for which an environment was entered."""
        return function if self._here is None else lambda *args, **kwargs: Inside(function(*args, **kwargs))

    def sealing(self, seal: Callable[[int, Any], None]) -> Callable[[int, Any], None]:
        """Return a function that seals a value inside the environment in which it was made, and then leaves."""

        def seal_inside(task: int, value: Any) -> None:
            if type(value) is not Inside:
                seal(task, value)
                return
            seal(task, value.value)
            self._leave(task)

        return seal_inside

    def failing(self, fail: Callable[[int, BaseException], None]) -> Callable[[int, BaseException], None]:
        """Return a function that seals an exception inside the environment in which it was raised, and then leaves."""

        def fail_inside(task: int, exc: BaseException) -> None:
            try:
                fail(task, exc)
            finally:
                self._leave(task)

        return fail_inside

    def _leave(self, task: int) -> None:
        if self._here is not None and self._here[0] == task:
            self._here[1].leave()
            self._here = None

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """Leave the environment meanwhile, to run another task on top of the one that has entered it."""
        if self._here is None:
            yield
            return
        here, self._here, inside = self._here, None, ProcessState()
        here[1].leave()
        try:
            yield
        finally:
            here[1].enter()
            inside.restore()
            self._here = here
