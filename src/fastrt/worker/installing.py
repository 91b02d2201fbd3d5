"""Python packages of a `runtime_env`: `pip` or `uv` installs them once for each node and list of packages.

An installation is a virtual environment in the session's folder, named by the SHA-256 of the list and of this Python.
Packages that this Python has already are not installed again, unless the list asks for another version. While a
process makes an installation, workers put the tasks that need it aside (`worker.held.HeldTasks`), and run others.
Actors, and workers whose task has resources of its own, wait. Other workers take their places meanwhile, as long as
the node may start some.

A process that uses an installation holds a shared lock on a file beside it, which the kernel releases when the process
ends, however it ends. After a new installation, those that no process uses are removed, the longest unused first, as
long as all together have more than `CACHE_BYTES`. A remover holds the lock alone, and first removes the file that says
that the installation is whole: one that is killed leaves nothing that looks whole. The rest goes when the node ends.

Source:
    The semantics of `runtime_env={"pip": ...}` of Ray, and of its `RAY_RUNTIME_ENV_PIP_CACHE_SIZE_GB`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import venv
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from weakref import WeakValueDictionary

from fastrt.errors import RuntimeEnvError
from fastrt.folders import open_private
from fastrt.store.client import Store
from fastrt.tasks.packages import folder_of
from fastrt.tasks.runtime_env import Environment

CACHE_BYTES = 10 << 30  # of a node's installations that no process uses and the others together, as in Ray
_TIMEOUT_S = 600.0
_SAID_MAX = 4000  # characters of an installer's output in a message
_KEPT = 64  # lists that a process remembers
_READY = "ready"  # a file in a whole installation, with its bytes; its time is that of the last process's first use
_LOCK = ".lock"  # shared: the installation is used, or about to be
_MAKING = ".making"  # a lock of its own: who waits for the installer must not wait for those that use what it made
_OTHERS = "fastrt_others.pth"  # makes the packages of this Python visible to the installer


class Installation:
    """The installed packages of a list. They are not removed as long as a process has this object.

    Args:
        site: the folder of the packages.
        lock: descriptor of the file whose shared lock keeps them.

    Attributes:
        site: as given.
    """

    def __init__(self, site: Path, lock: int) -> None:
        self.site = site
        self._lock = lock

    def __del__(self) -> None:
        os.close(self._lock)


_in_use: WeakValueDictionary[tuple[Path, str, tuple[str, ...]], Installation] = WeakValueDictionary()
_latest: list[Installation] = []  # until the scope of the task has it; that of an actor stays here


def of(store: Store, environment: Environment) -> list[Installation]:
    """Return the installations of an environment's lists, which are made where they are missing.

    Args:
        store: this process's attachment.
        environment: with or without lists.
    Raises:
        RuntimeEnvError: they cannot be installed.
    """
    found = []
    for tool, wanted in _lists_of(environment):
        packages = folder_of(store)
        is_there = (packages, tool, wanted) in _in_use or (place_of(packages, tool, wanted) / _READY).exists()
        with contextlib.nullcontext() if is_there or not store.may_sleep() else store.blocked():
            found.append(_installed(packages, tool, wanted))
    return found


def is_being_made(store: Store, environment: Environment) -> bool:
    """Whether another process is making an installation of an environment's lists now.

    Args:
        store: this process's attachment.
        environment: with or without lists.
    """
    return any(_is_locked(place_of(folder_of(store), tool, wanted)) for tool, wanted in _lists_of(environment))


def _is_locked(made: Path) -> bool:
    if (made / _READY).exists():
        return False
    try:
        lock = os.open(made.with_name(made.name + _MAKING), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # no process has begun to make it, or the folder is another user's: `of` says so
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def _lists_of(environment: Environment) -> list[tuple[str, tuple[str, ...]]]:
    return [(tool, wanted) for tool, wanted in (("pip", environment.pip), ("uv", environment.uv)) if wanted]


def with_installed(store: Store, environment: Environment) -> Environment:
    """Return an environment whose module path begins with the installed packages of its list.

    Args:
        store: this process's attachment.
        environment: with a list of packages.
    Raises:
        RuntimeEnvError: they cannot be installed.
    """
    _latest[:] = of(store, environment)
    for installation in _latest:
        paths = (str(installation.site), *(environment.import_paths or ()))
        environment = replace(environment, import_paths=paths)
    return environment


def check_loaded(environment: Environment) -> None:
    """Refuse packages of which this process has loaded another version already, and cannot load theirs.

    Args:
        environment: as `with_installed` returned it, when other modules of its names have been removed.
    Raises:
        RuntimeEnvError: there is such a package.
    """
    folder = (environment.import_paths or ("",))[0]
    for name in _modules_in(folder):
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is not None and not Path(file).is_relative_to(folder):
            raise RuntimeEnvError(
                f"the runtime_env installs {name}, and this worker began with another one, {file}: import it in "
                "the program after init, or leave it out of the list"
            )


@lru_cache(_KEPT)
def _modules_in(folder: str) -> tuple[str, ...]:
    """The names of the modules in a folder of packages."""
    paths = Path(folder).glob("*") if folder else ()
    return tuple(
        path.name.removesuffix(".py") for path in paths if path.suffix == ".py" or (path / "__init__.py").exists()
    )


def place_of(packages: Path, tool: str, wanted: tuple[str, ...]) -> Path:
    """Return the folder of a list's installation; arguments as for `_installed`."""
    text = json.dumps([tool, wanted, sys.version, sys.prefix])
    return packages / f"{tool}-{hashlib.sha256(text.encode()).hexdigest()}"


def _installed(packages: Path, tool: str, wanted: tuple[str, ...]) -> Installation:
    """Return the installation of a list; install it if no process of this node has.

    Args:
        packages: the folder of this node's packages.
        tool: pip or uv.
        wanted: the list.
    Raises:
        RuntimeEnvError: they cannot be installed.
    """
    key = packages, tool, wanted
    found = _in_use.get(key)
    if found is not None:
        return found
    made = place_of(packages, tool, wanted)
    site = made / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    lock = open_private(packages, made.name + _LOCK, os.O_RDWR | os.O_CREAT)
    found = Installation(site, lock)
    fcntl.flock(lock, fcntl.LOCK_SH)  # from now on no other process removes it
    is_new = not (made / _READY).exists()
    if is_new:
        with open(open_private(packages, made.name + _MAKING, os.O_RDWR | os.O_CREAT), "wb") as making:
            fcntl.flock(making, fcntl.LOCK_EX)
            is_new = not (made / _READY).exists()  # another process has made it meanwhile
            if is_new:
                shutil.rmtree(made, ignore_errors=True)  # of a process that was killed
                try:
                    _install(tool, wanted, made, site)
                except (OSError, subprocess.SubprocessError) as exc:
                    raise RuntimeEnvError(f"{tool} could not install {', '.join(wanted)}: {exc}") from exc
    os.utime(made / _READY)
    _in_use[key] = found
    if is_new:
        remove_unused(packages, CACHE_BYTES)
    return found


def remove_unused(packages: Path, most: int) -> None:
    """Remove installations that no process uses, the longest unused first, until all have at most that many bytes.

    Args:
        packages: the folder of a node's packages.
        most: bytes.
    """
    whole: list[tuple[float, int, Path]] = []
    for ready in [*packages.glob(f"pip-*/{_READY}"), *packages.glob(f"uv-*/{_READY}")]:
        with contextlib.suppress(OSError, ValueError):  # another process removes it
            whole.append((ready.stat().st_mtime, int(ready.read_text()), ready))
    total = sum(size for _, size, _ in whole)
    for _, size, ready in sorted(whole):
        if total <= most:
            return
        made = ready.parent
        with open(open_private(packages, made.name + _LOCK, os.O_RDWR | os.O_CREAT), "wb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # it is used, or another process removes it
                continue
            ready.unlink(missing_ok=True)
            shutil.rmtree(made, ignore_errors=True)
        total -= size


def _install(tool: str, wanted: tuple[str, ...], made: Path, site: Path) -> None:
    venv.EnvBuilder(symlinks=True, with_pip=False).create(made)
    os.chmod(made, 0o700)
    python = str(made / "bin" / "python")
    others = [path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")]
    (site / _OTHERS).write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in others))
    listed = made / "requirements.txt"
    listed.write_text("".join(f"{line}\n" for line in wanted))
    if tool == "pip":
        command = [python, "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check"]
    else:
        command = [shutil.which("uv") or "uv", "pip", "install", "--quiet", "--python", python]
    # It stays in the group of this process, which the node ends as a whole.
    done = subprocess.run(
        [*command, "-r", str(listed)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=_TIMEOUT_S,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )
    if done.returncode != 0:
        raise subprocess.SubprocessError(done.stdout[-_SAID_MAX:].strip() or f"it ended with {done.returncode}")
    size = sum(os.lstat(os.path.join(folder, file)).st_size for folder, _, files in os.walk(made) for file in files)
    temporary = made / f"{_READY}.new"
    temporary.write_text(f"{size}")
    temporary.rename(made / _READY)
