"""`runtime_env={...}`: the environment of a task or an actor: variables, working folder, modules.

An environment is checked where it is given, and travels with its tasks and actors. Tasks that are submitted from inside
inherit it. Only a worker that enters an environment, and an actor's process, change their variables, folder and path.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import ModuleType
from typing import Any, Protocol

from fastrt.errors import ConfigError, UnsupportedError
from fastrt.tasks.setup_hook import SetupHook, hook_of

OPTION = "runtime_env"
_HOOK = "worker_process_setup_hook"
_REQUIREMENTS_MAX = 1 << 16  # characters of a list of packages
_INSTALLERS = ("conda", "container", "image_uri")


@dataclass(frozen=True)
class Package:
    """Files of an environment as an archive, see `fastrt.tasks.packages`.

    Attributes:
        path: of the folder or file on the node that has made the archive.
        digest: the SHA-256 of the archive, in hex digits; empty: there is none, because the files are too large.
        node: the id of that node.
    """

    path: str
    digest: str
    node: str


@dataclass(frozen=True)
class Environment:
    """A checked `runtime_env`. A field that was not given is None.

    Attributes:
        env_vars: variables, by name and in its order.
        working_dir: the current folder, and the first place where modules are looked for.
        py_modules: packages and modules, each imported by the name of its folder or file.
        import_paths: folders in which modules are looked for.
        pip, uv: packages that are installed for it, as lines of a requirements file.
        worker_process_setup_hook: a function that a worker, or an actor's process, calls before its first task there.
        excludes: patterns of files that other nodes do not need.
        packages: archives of the working folder and of the modules, for other nodes; not part of a `runtime_env`.
        namespace: of names of actors; not part of a `runtime_env`, but inherited with it.
        actor_lifetime: of actors that are made inside without a lifetime; not part of a `runtime_env` either.
        strategy: the placement group to run in, and whether tasks from inside run there, too; from another option.
    """

    env_vars: tuple[tuple[str, str], ...] | None = None
    working_dir: str | None = None
    py_modules: tuple[str, ...] | None = None
    import_paths: tuple[str, ...] | None = None
    pip: tuple[str, ...] | None = None
    uv: tuple[str, ...] | None = None
    worker_process_setup_hook: SetupHook | None = None
    excludes: tuple[str, ...] = ()
    packages: tuple[Package, ...] = ()
    namespace: str | None = None
    actor_lifetime: str | None = None
    strategy: Any = None

    @property
    def changes_nothing(self) -> bool:
        """Whether it changes nothing in a process that enters it."""
        return self == Environment(namespace=self.namespace, actor_lifetime=self.actor_lifetime, strategy=self.strategy)

    def extended_by(self, own: Environment | None) -> Environment:
        """Return the environment that tasks submitted from inside this one inherit.

        Args:
            own: the task's own `runtime_env`: its variables are added to these, its other fields replace these.
        """
        if own is None:
            return self
        merged = {name: mine if other is None else other for name, mine, other in _pairs(self, own)}
        if self.env_vars is not None and own.env_vars is not None:
            merged["env_vars"] = tuple(sorted({**dict(self.env_vars), **dict(own.env_vars)}.items()))
        mine = own.paths()
        merged["excludes"] = own.excludes if mine else self.excludes
        merged["packages"] = own.packages + tuple(one for one in self.packages if one.path not in mine)
        return Environment(**{**merged, "strategy": own.strategy})

    def paths(self) -> list[str]:
        """Return the paths of the working folder and of the modules."""
        return [*([] if self.working_dir is None else [self.working_dir]), *(self.py_modules or ())]

    def folders(self) -> list[str]:
        """Return the folders that come first on the module path."""
        first = [] if self.working_dir is None else [self.working_dir]
        parents = [os.path.dirname(path) for path in self.py_modules or ()]
        return list(dict.fromkeys([*first, *parents, *(self.import_paths or ())]))

    def for_ray(self) -> dict[str, Any]:
        """Return the environment in the form that Ray takes.

        Raises:
            UnsupportedError: Ray has no such field.
        """
        if self.import_paths is not None:
            raise UnsupportedError("runtime_env's import_paths has no counterpart in Ray; name packages in py_modules")
        if self.worker_process_setup_hook is not None:
            raise UnsupportedError(f"Ray takes {_HOOK} for a whole program only: give it to init(runtime_env=...)")
        given = {
            "env_vars": None if self.env_vars is None else dict(self.env_vars),
            "working_dir": self.working_dir,
            "py_modules": None if self.py_modules is None else list(self.py_modules),
            "excludes": list(self.excludes) or None,
            "pip": None if self.pip is None else list(self.pip),
            "uv": None if self.uv is None else list(self.uv),
        }
        return {name: value for name, value in given.items() if value is not None}


class _Bound(Protocol):
    def forget(self) -> None: ...


_FIELDS = tuple(field.name for field in fields(Environment))
_KEYS = tuple(name for name in _FIELDS if name not in ("packages", "namespace", "actor_lifetime", "strategy"))
_CONFIG = "config"  # of Ray's; without effect
FIELDS = (*_KEYS, _CONFIG)  # that a `runtime_env` may have
_current: Environment | None = None
_heritage: Environment | None = None  # for tasks of this process: the current one without the placement group
_bound: weakref.WeakSet[_Bound] = weakref.WeakSet()


def current() -> Environment | None:
    """Return the environment of this process: a worker's or an actor's, or the job's default."""
    return _current


def captured() -> Any:
    """Return the strategy of tasks that are submitted here without one; None: the default."""
    strategy = None if _current is None else _current.strategy
    if strategy is None or not strategy.placement_group_capture_child_tasks:
        return None
    return replace(strategy, placement_group_bundle_index=-1)


def inherited(own: Environment | None) -> Environment | None:
    """Return the environment of a task that is submitted here with the environment `own`."""
    return own if _heritage is None else _heritage.extended_by(own)


def grouped(own: Environment | None, strategy: Any) -> Environment | None:
    """Return an environment with another placement group, or with none."""
    if strategy is None and (own is None or own.strategy is None):
        return own
    found = replace(own or Environment(), strategy=strategy)
    return None if found == Environment() else found


def set_current(environment: Environment | None) -> None:
    """Change the environment of this process, and call `forget` of everything bound to the former one."""
    global _current, _heritage
    if environment != _current:
        for user in list(_bound):
            user.forget()
    _current, _heritage = environment, None if environment is None else grouped(environment, None)


def bind(user: _Bound) -> None:
    """Call `user.forget()` when the inherited environment changes; until then it need not look."""
    _bound.add(user)


def environment_of(given: Any) -> Environment | None:
    """Check a `runtime_env`; relative paths are taken from here.

    Args:
        given: a dict, None, or an `Environment`, which was checked where it was given.
    Returns:
        The environment; None when `given` is empty.
    Raises:
        TypeError: it, or a value of it, has the wrong type.
        ConfigError: an unknown key, a variable that cannot be set, or a path that does not exist.
        SerializationError: the setup hook cannot be pickled.
    """
    if given is None or isinstance(given, Environment):
        return given
    if not isinstance(given, Mapping):
        raise TypeError(f"runtime_env is {given!r}; it must be a dict like {{'env_vars': {{'NAME': 'value'}}}}")
    for key in given:
        if key not in FIELDS:
            raise ConfigError(_unknown(key))
    about = {key: value for key, value in given.items() if value is not None}
    check_config(about.get(_CONFIG, {}))
    found = Environment(
        _variables(about["env_vars"]) if "env_vars" in about else None,
        _folder("working_dir", about["working_dir"]) if "working_dir" in about else None,
        _modules(about["py_modules"]) if "py_modules" in about else None,
        _folders(about["import_paths"]) if "import_paths" in about else None,
        _requirements("pip", about["pip"]) if "pip" in about else None,
        _requirements("uv", about["uv"]) if "uv" in about else None,
        hook_of(about[_HOOK]) if _HOOK in about else None,
        _patterns(about.get("excludes", ())),
    )
    if found.pip is not None and found.uv is not None:
        raise ConfigError("runtime_env has pip and uv; give one of them")
    return None if found == Environment() else found


def _pairs(one: Environment, other: Environment) -> list[tuple[str, Any, Any]]:
    return [(key, getattr(one, key), getattr(other, key)) for key in _FIELDS]


def check_config(config: Any) -> None:
    """Check Ray's settings of the making of an environment, which change nothing here.

    Raises:
        TypeError: they are no dict, or a value has another type.
        ValueError: the seconds are neither above 0 nor -1, which is no limit.
    """
    if not isinstance(config, Mapping):
        raise TypeError(f"runtime_env's config is {config!r}; it must be a dict or a RuntimeEnvConfig")
    seconds = config.get("setup_timeout_seconds", -1)
    if not isinstance(seconds, int) or isinstance(seconds, bool):
        raise TypeError(f"setup_timeout_seconds is {seconds!r}; it must be a whole number of seconds")
    if seconds <= 0 and seconds != -1:
        raise ValueError(f"setup_timeout_seconds is {seconds}; it must be above 0, or -1 for no limit")
    if not isinstance(config.get("eager_install", True), bool):
        raise TypeError(f"eager_install is {config['eager_install']!r}; it must be True or False")


def _unknown(key: object) -> str:
    there = f"there are: {', '.join(_KEYS)}"
    if key in _INSTALLERS:
        return (
            f"runtime_env has the key {key!r}: only pip and uv install something for a task; install it on the nodes "
            f"before they start, or name the folder of installed packages in import_paths; {there}"
        )
    return f"runtime_env has the key {key!r}, which is not known; {there}"


def _variables(given: Any) -> tuple[tuple[str, str], ...]:
    if not isinstance(given, Mapping):
        raise TypeError(f"runtime_env's env_vars is {given!r}; it must be a dict of text by name")
    for name, value in given.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"runtime_env's env_vars has {name!r}: {value!r}; names and values must be text")
        if not name or "=" in name or "\0" in name + value:
            raise ConfigError(f"runtime_env's env_vars has {name!r}: {value!r}; no variable can be called or be that")
    return tuple(sorted(given.items()))


def _path(key: str, given: Any) -> str:
    if not isinstance(given, (str, os.PathLike)) or not isinstance(os.fspath(given), str):
        raise TypeError(f"runtime_env's {key} has {given!r}; it must be the path of something on this machine")
    return os.path.abspath(os.path.expanduser(os.fspath(given)))


def _folder(key: str, given: Any) -> str:
    path = _path(key, given)
    if not os.path.isdir(path):
        raise ConfigError(f"runtime_env's {key} is {os.fspath(given)!r}, and {path} is no folder here: make it first")
    return path


def _listed(key: str, given: Any) -> Sequence[Any]:
    if not isinstance(given, (list, tuple)):
        raise TypeError(f"runtime_env's {key} is {given!r}; it must be a list")
    return given


def _folders(given: Any) -> tuple[str, ...]:
    return tuple(_folder("import_paths", path) for path in _listed("import_paths", given))


def _requirements(key: str, given: Any) -> tuple[str, ...]:
    """Read a list of packages, {"packages": a list}, or the path of a requirements file."""
    if isinstance(given, Mapping):
        unknown = [name for name, value in given.items() if name != "packages" and value not in (None, False)]
        if unknown or "packages" not in given:
            raise ConfigError(
                f"runtime_env's {key} has {', '.join(map(repr, unknown)) or 'no packages'}; it must be "
                "{'packages': [...]} and nothing else"
            )
        given = given["packages"]
    if isinstance(given, (str, os.PathLike)):
        path = _path(key, given)
        try:
            with open(path, encoding="utf-8") as file:
                given = file.read(_REQUIREMENTS_MAX + 1).splitlines()
        except (OSError, UnicodeError) as exc:
            raise ConfigError(f"runtime_env's {key} is {given!r}, and {path} cannot be read here: {exc}") from exc
    lines = []
    for line in _listed(key, given):
        if not isinstance(line, str) or "\n" in line or "\r" in line:
            raise TypeError(f"runtime_env's {key} has {line!r}; it must be a package, such as 'requests==2.31'")
        plain = line.strip()
        if plain and not plain.startswith("#"):
            lines.append(os.path.abspath(plain) if os.path.exists(plain) else plain)
    if sum(map(len, lines)) > _REQUIREMENTS_MAX:
        raise ConfigError(f"runtime_env's {key} has more than {_REQUIREMENTS_MAX} characters")
    return tuple(lines)


def _patterns(given: Any) -> tuple[str, ...]:
    for pattern in _listed("excludes", given):
        if not isinstance(pattern, str) or not pattern.strip("/") or pattern.startswith("!"):
            raise ConfigError(
                f"runtime_env's excludes has {pattern!r}; it must be a pattern such as 'data/*' or '*.csv'"
            )
    return tuple(given)


def _modules(given: Any) -> tuple[str, ...]:
    listed = [_path_of(one) if isinstance(one, ModuleType) else one for one in _listed("py_modules", given)]
    paths = tuple(_path("py_modules", path) for path in listed)
    for path in paths:
        name = os.path.basename(path).removesuffix(".py")
        if not name.isidentifier() or not (os.path.isdir(path) or (path.endswith(".py") and os.path.isfile(path))):
            raise ConfigError(
                f"runtime_env's py_modules has {path!r}; it must be a package's folder or a .py file that is there, "
                "called as it is imported"
            )
    return paths


def _path_of(module: ModuleType) -> str:
    """Return the folder of an imported package, or the file of a module."""
    found = next(iter(getattr(module, "__path__", ())), None) or getattr(module, "__file__", None)
    if found is None:
        raise ConfigError(f"runtime_env's py_modules has the module {module.__name__!r}, which has no file")
    return str(found)
