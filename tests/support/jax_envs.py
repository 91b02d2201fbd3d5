"""Virtual environments with jaxlib from PyPI, made once and kept in .cache/jax; `make check` runs this first.

Each version needs a Python of its time, which is looked for in PATH and in pyenv's folder.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENVS = Path(os.environ.get("FASTRT_JAX_ENVS", ROOT / ".cache" / "jax"))

# version -> Pythons with a wheel of it, packages besides.
VERSIONS = {
    "0.10.2": ((12, 11, 13), ["jax==0.10.2"]),
    "0.6.2": ((12, 11, 10, 13), []),
    "0.4.38": ((12, 11, 10, 13), []),
    "0.4.13": ((11, 10), ["numpy<2", "setuptools"]),
}


def python_of(version: str) -> Path:
    """The interpreter of an environment."""
    return ENVS / version / "bin" / "python"


def interpreter(minors: tuple[int, ...]) -> str | None:
    """A Python 3 of one of the minor versions, the first that is here."""
    for minor in minors:
        if sys.version_info[:2] == (3, minor):
            return sys.executable
        found = shutil.which(f"python3.{minor}")
        candidates = [found] if found else []
        candidates += [str(path) for path in Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python")]
        for path in candidates:
            # A pyenv shim is found in PATH also where the version behind it is not chosen.
            if subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0:
                return path
    return None


def make(version: str) -> None:
    """Make one environment, unless it is there and whole."""
    minors, packages = VERSIONS[version]
    folder, whole = ENVS / version, ENVS / version / "whole"
    if whole.exists():
        return
    python = interpreter(minors)
    if python is None:
        names = ", ".join(f"3.{minor}" for minor in minors)
        raise SystemExit(f"jaxlib {version} has wheels for Python {names}; none of them is on this machine.")
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([python, "-m", "venv", folder], check=True)
    subprocess.run([python_of(version), "-m", "pip", "install", "-q", f"jaxlib=={version}", *packages], check=True)
    whole.touch()


if __name__ == "__main__":
    for name in VERSIONS:
        make(name)
