"""Test builds of the core, each made once for each state of its sources: with failpoints, with sanitizers.

They lie in a folder below build/ for each kind, named by a digest of what they are made of; unchanged modules are
taken from the build before. The Python modules around the compiled ones are links into src/, so they are
always the newest.
"""

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KEPT = 3  # builds; older ones are removed
KINDS = {  # of builds: what setup.py is told
    "crash": {"FASTRT_FAILPOINTS": "1"},
    "address": {"FASTRT_SANITIZE": "address"},
    "thread": {"FASTRT_SANITIZE": "thread"},
    "fuzzer": {"FASTRT_SANITIZE": "fuzzer"},
    "free": {},  # for a Python without a GIL, and for one with ThreadSanitizer
    "free-sanitized": {"FASTRT_SANITIZE": "thread"},
}


def sources(root: Path) -> list[Path]:
    core = root / "src" / "fastrt" / "_core"
    return [root / "setup.py", *sorted(p for p in core.rglob("*") if p.suffix in (".pyx", ".pxd", ".h"))]


def digest(root: Path) -> str:
    found = hashlib.sha256(sys.version.encode())
    for path in sources(root):
        found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()[:16]


def build(root: Path = ROOT, kind: str = "crash") -> Path:
    """Return a folder to put on PYTHONPATH; takes half a minute when the sources are new, a sanitizer's a whole one."""
    home = ROOT / "build" / kind
    home.mkdir(parents=True, exist_ok=True)
    with open(home / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test runs at once
        target = home / digest(root)
        if not (target / "done").exists():
            shutil.rmtree(target, ignore_errors=True)
            older = sorted(home.glob("*/done"), key=lambda path: path.stat().st_mtime)
            if older:
                shutil.copytree(older[-1].parent, target, symlinks=True)  # with its times: what is newer is compiled
                (target / "done").unlink()
            compile_core(root, target, home / "objects", kind)
            link_package(root, target)
            (target / "done").touch()
            for old in older[: max(0, len(older) + 1 - KEPT)]:
                shutil.rmtree(old.parent)
        (target / "done").touch()
        return target


def compile_core(root: Path, target: Path, objects: Path, kind: str = "crash") -> None:
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", target, "--build-temp", objects / "o"]
    done = subprocess.run(command, cwd=root, env={**os.environ, **KINDS[kind]}, capture_output=True)
    if done.returncode:
        raise RuntimeError(f"the test build {kind!r} failed:\n{done.stderr.decode(errors='replace')[-4000:]}")


def link_package(root: Path, target: Path) -> None:
    package, made = root / "src" / "fastrt", target / "fastrt"
    for path in [p for p in package.iterdir() if p.name not in ("_core", "net", "__pycache__")]:
        link(path, made / path.name)
    for path in (package / "_core").rglob("__init__.py"):
        link(path, made / path.relative_to(package))
    grpc = Path("net", "grpc")
    (made / grpc).mkdir(parents=True, exist_ok=True)
    for folder in (grpc.parent, grpc):  # without the descriptors, which are made by a build
        for path in [p for p in (package / folder).iterdir() if p.name not in ("grpc", "descriptors", "__pycache__")]:
            link(path, made / folder / path.name)
    installed = importlib.util.find_spec("fastrt")
    if installed is not None and installed.origin is not None:
        link(Path(installed.origin).parent / grpc / "descriptors", made / grpc / "descriptors")


def link(path: Path, at: Path) -> None:
    if at.is_symlink():
        at.unlink()
    elif at.is_dir():  # what else is compiled: the variant is of the core alone
        shutil.rmtree(at)
    at.symlink_to(path)


def environment(target: Path) -> dict[str, str]:
    """For processes that are to import a test build."""
    return {**os.environ, "PYTHONPATH": str(target), "PYTHONDONTWRITEBYTECODE": "1"}
