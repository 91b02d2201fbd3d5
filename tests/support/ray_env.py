"""A virtual environment with Ray from PyPI, made once and kept in .cache/ray; `make check` runs this first."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".cache" / "ray"


def python_with_ray() -> str | None:
    """A Python that has Ray: FASTRT_RAY_PYTHON, this one, or that of the environment made here; else None."""
    named = os.environ.get("FASTRT_RAY_PYTHON")
    if named or importlib.util.find_spec("ray") is not None:
        return named or sys.executable
    return str(FOLDER / "bin" / "python") if (FOLDER / "whole").exists() else None


def make() -> None:
    """Make the environment, unless there is a Python with Ray already."""
    if python_with_ray() is None:
        shutil.rmtree(FOLDER, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", FOLDER], check=True)
        subprocess.run([FOLDER / "bin" / "python", "-m", "pip", "install", "--quiet", "ray"], check=True)
        (FOLDER / "whole").touch()


if __name__ == "__main__":
    make()
