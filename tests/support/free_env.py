"""Environments of Python without a GIL (3.14t) with the packages of tests, made once in .cache/free-N; `make check`
runs this first.

FASTRT_FREE_PYTHON names interpreters, separated by ":"; else `python3.14t` on PATH is used. tests/free_python.py builds
them, also one with ThreadSanitizer.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Of the light installation, of the build and of tests. gRPC has no wheels for this Python.
PACKAGES = (
    *("click", "cloudpickle", "cryptography", "numpy", "psutil", "rich", "threadpoolctl"),
    *("pytest", "pytest-benchmark", "pytest-timeout", "pytest-xdist", "hypothesis"),
)


def interpreters() -> list[Path]:
    """The interpreters without a GIL that this machine has."""
    named = os.environ.get("FASTRT_FREE_PYTHON") or shutil.which("python3.14t") or ""
    return [Path(path) for path in named.split(os.pathsep) if path]


def environment(number: int) -> Path:
    """The Python of the environment of an interpreter, by its place in the list."""
    return ROOT / f".cache/free-{number}/bin/python"


def is_whole(python: Path, number: int) -> bool:
    """Whether the environment of an interpreter was made."""
    whole = ROOT / f".cache/free-{number}/whole"
    return whole.exists() and whole.read_text() == f"{python} {PACKAGES}"


def make(python: Path, number: int) -> None:
    """Make the environment of an interpreter, unless it is there and whole.

    This interpreter's pip installs the packages: with ThreadSanitizer, pip would take minutes.
    """
    if is_whole(python, number):
        return
    folder = ROOT / f".cache/free-{number}"
    shutil.rmtree(folder, ignore_errors=True)
    quiet = {**os.environ, "TSAN_OPTIONS": "report_bugs=0"}
    subprocess.run([python, "-m", "venv", "--without-pip", folder], check=True, env=quiet)
    asked = "import sys, sysconfig; print(*sys.version_info[:2], sysconfig.get_path('purelib'), sep='\\n')"
    shown = subprocess.run([environment(number), "-c", asked], check=True, env=quiet, stdout=subprocess.PIPE, text=True)
    major, minor, target = shown.stdout.split("\n")[:3]
    machine, newest = platform.machine(), int(platform.libc_ver()[1].partition(".")[2])
    platforms = [*(f"manylinux_2_{k}_{machine}" for k in range(newest, 4, -1)), f"manylinux2014_{machine}"]
    build = re.findall(r'"((?:setuptools|cython)[>=][^"]*)"', (ROOT / "pyproject.toml").read_text())
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--only-binary", ":all:"]
    pip += ["--target", target, "--python-version", f"{major}.{minor}", "--abi", f"cp{major}{minor}t"]
    pip += [word for name in platforms for word in ("--platform", name)]
    subprocess.run([*pip, *PACKAGES, *build], check=True)
    (folder / "whole").write_text(f"{python} {PACKAGES}")


if __name__ == "__main__":
    for at, interpreter in enumerate(interpreters()):
        make(interpreter, at)
