"""An environment with torch (CPU build), JAX, scikit-learn, pandas, Polars and PyArrow, made once in .cache/libraries.

`make check` runs this first. fastrt and the test tools come from the environment of the Python that runs this script,
which is searched after the libraries.
"""

import re
import shutil
import site
import subprocess
import sys
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".cache" / "libraries"
TORCH = SpecifierSet(">=2.2,<3")
LIBRARIES = ["scikit-learn>=1.4,<2", "pandas>=2.1,<4", "polars>=1,<3", "pyarrow>=15,<27", "jax[cpu]>=0.4.30,<1"]


def torch_wanted(python: Path) -> str:
    """The newest CPU build of torch where pip looks, such as torch==2.13.0+cpu; where there is none, any build."""
    asked = subprocess.run([python, "-m", "pip", "index", "versions", "torch"], capture_output=True, text=True)
    offered = re.search(r"^Available versions: (.*)$", asked.stdout, re.M)
    versions = [Version(text) for text in offered[1].split(", ")] if offered else []
    builds = [version for version in versions if version.local == "cpu" and TORCH.contains(version.public)]
    return f"torch=={max(builds)}" if builds else f"torch{TORCH}"


def make() -> None:
    """Make the environment, unless it is there and whole."""
    whole = FOLDER / "whole"
    about = " ".join([sys.executable, str(TORCH), *LIBRARIES])
    if whole.exists() and whole.read_text() == about:
        return
    shutil.rmtree(FOLDER, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", FOLDER], check=True)
    python = FOLDER / "bin" / "python"
    command = [python, "-m", "pip", "install", "--quiet", "--no-compile", "--only-binary", ":all:"]
    subprocess.run([*command, torch_wanted(python), *LIBRARIES], check=True)
    add_tools(python)
    whole.write_text(about)


def add_tools(python: Path) -> None:
    """Have the environment find this Python's packages, after its own."""
    ask = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    own = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
    Path(own, "tools.pth").write_text("".join(f"{folder}\n" for folder in site.getsitepackages()))


if __name__ == "__main__":
    make()
