"""Python packages of a `runtime_env`: `pip` or `uv` installs them once for each node and list of packages.

An installation is a virtual environment in the session's folder, named by the SHA-256 of the list and of this Python.
Packages that this Python has already are not installed again, unless the list asks for another version. Processes
that need an installation while another one makes it wait for that. It stays until the node ends.

Source:
    The semantics of `runtime_env={"pip": ...}` of Ray.
"""

from __future__ import annotations

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

from fastrt.errors import RuntimeEnvError
from fastrt.folders import open_private
from fastrt.store.client import Store
from fastrt.tasks.packages import folder_of
from fastrt.tasks.runtime_env import Environment

_TIMEOUT_S = 600.0
_SAID_MAX = 4000  # characters of an installer's output in a message
_KEPT = 64  # lists that a process remembers
_READY = "ready"  # a file in a whole installation
_OTHERS = "fastrt_others.pth"  # makes the packages of this Python visible to the installer


def with_installed(store: Store, environment: Environment) -> Environment:
    """Return an environment whose module path begins with the installed packages of its list.

    Args:
        store: this process's attachment.
        environment: with a list of packages.
    Raises:
        RuntimeEnvError: they cannot be installed.
    """
    for tool, wanted in (("pip", environment.pip), ("uv", environment.uv)):
        if wanted:
            site = str(_installed(folder_of(store), tool, wanted))
            environment = replace(environment, import_paths=(site, *(environment.import_paths or ())))
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


@lru_cache(_KEPT)
def _installed(packages: Path, tool: str, wanted: tuple[str, ...]) -> Path:
    """Return the folder of installed packages; install them if no process of this node has.

    Args:
        packages: the folder of this node's packages.
        tool: pip or uv.
        wanted: the list.
    Raises:
        RuntimeEnvError: they cannot be installed.
    """
    text = json.dumps([tool, wanted, sys.version, sys.prefix])
    name = f"{tool}-{hashlib.sha256(text.encode()).hexdigest()}"
    made = packages / name
    site = made / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    if not (made / _READY).exists():
        with open(open_private(packages, f"{name}.lock", os.O_RDWR | os.O_CREAT), "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (made / _READY).exists():
                shutil.rmtree(made, ignore_errors=True)  # of a process that was killed
                try:
                    _install(tool, wanted, made, site)
                except (OSError, subprocess.SubprocessError) as exc:
                    raise RuntimeEnvError(f"{tool} could not install {', '.join(wanted)}: {exc}") from exc
    return site


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
    (made / _READY).touch(mode=0o600)
