"""Build a CPython for another C library than this machine's: musl, or an older glibc.

    python tests/zig_python.py 3.14 ~/pythons/3.14-musl
    python tests/zig_python.py 3.11 ~/pythons/3.11-bullseye --libc bullseye --suite bookworm
    python tests/zig_python.py 3.11 ~/pythons/3.11-aarch64 --suite bookworm --machine aarch64 --helper python3.11

Debian has no Python for musl, and none that fastrt takes for the glibc of its release `bullseye` (2.31), the oldest
that wheels are made for. So this script builds the sources of Debian's Python by `zig cc`, with that C library's
binary from Debian beside it, which the interpreter names as its loader: it runs on this machine, and has nothing of
this machine's C library. It needs no root, and nothing outside the folder changes. It has the modules that `venv`,
NumPy and gRPC import, not OpenSSL: another Python's pip installs packages for it. `ziglang` is installed by pip.

One for another machine is built here all the same, where a Python of the same version for this machine (`--helper`)
does what the new one would have to do meanwhile. qemu starts it, as in tests/debian_python.py.
"""

import argparse
import os
import re
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

from debian_python import ARCHITECTURES, download, patchelf, require_emulator, run, sources, start_by_emulator

HERE = os.uname().machine
# What zig links to, Debian's suite and its packages, and the loader in there; {0} is the machine. Wheels for glibc need
# the library of C++.
LIBRARIES = {
    "musl": ("{0}-linux-musl", "sid", ["musl"], "usr/lib/{0}-linux-musl/libc.so"),
    "bullseye": ("{0}-linux-gnu.2.31", "bullseye", ["libc6", "libstdc++6"], "lib/{0}-linux-gnu/ld-2.31.so"),
}
# What the modules zlib and ctypes contain, with options. The sources of libffi in later suites have no `configure`.
BESIDE = {
    "zlib": ["--static"],
    "libffi": ["--disable-shared", "--disable-docs", "--disable-exec-static-tramp"],
}
SUITE_BESIDE = "bookworm"


def unpack(archive: Path, folder: Path) -> Path:
    """Unpack the sources of one program; return their folder."""
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    found = next(folder.glob("*/configure")).parent
    setup = found / "setup.py"  # of Python up to 3.11: it adds the headers of this machine's C library
    if setup.exists():
        adding = r"self\.add_(multiarch|cross_compiling)_paths\(\)"
        setup.write_text(re.sub(adding, "pass", setup.read_text()))
    return found


def install(sources: Path, folder: Path, options: list[str], environment: dict[str, str], **settings: str) -> None:
    """Build a program and install it; `settings` are variables of its Makefile.

    They are written into it: Python up to 3.11 builds its modules by programs that read it, and would not see what is
    said on make's command line.
    """
    run("./configure", f"--prefix={folder}", *options, cwd=sources, env=environment)
    for makefile in (sources / "Makefile.pre", sources / "Makefile") if settings else ():  # that order: make compares
        text = makefile.read_text()
        for name, value in settings.items():
            text = re.sub(rf"^{name}=.*$", f"{name}={value}", text, flags=re.M)
        makefile.write_text(text)
    run("make", "-j", os.cpu_count(), cwd=sources, env=environment)
    run("make", "install", cwd=sources, env=environment)


def cross_options(machine: str, helper: Path | None) -> list[str]:
    """Return options for Python's `configure`, which cannot run programs of another machine to learn these facts."""
    if machine == HERE:
        return []
    if helper is None:
        raise SystemExit(f"to build a Python for {machine} takes one of its version for this machine: --helper PATH")
    facts = ["ac_cv_file__dev_ptmx=yes", "ac_cv_file__dev_ptc=no", "ac_cv_buggy_getaddrinfo=no"]
    # It takes a `readelf` with a path for one that reads programs of other machines, which each does.
    facts.append(f"READELF={shutil.which('readelf')}")
    return [*hosts(machine), f"--with-build-python={helper}", *facts]


def hosts(machine: str) -> list[str]:
    """Return the options that name both machines to a `configure`; none if they are the same."""
    return [] if machine == HERE else [f"--host={machine}-linux-gnu", f"--build={HERE}-linux-gnu"]


def compilers(work: Path, target: str, loader: Path) -> dict[str, str]:
    """The environment of a build by zig, whose programs are started by this loader."""
    # Without -dynamic zig links programs for musl statically, and they cannot load modules.
    cc = f"{sys.executable} -m ziglang cc -target {target} -dynamic -fno-sanitize=undefined"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment.setdefault("ZIG_GLOBAL_CACHE_DIR", str(work / "zig"))
    environment |= {"CC": cc, "CFLAGS": "-fPIC -O1 -w"}
    environment |= {"AR": f"{sys.executable} -m ziglang ar", "RANLIB": f"{sys.executable} -m ziglang ranlib"}
    # Up to 3.11, Python looks for zlib and libffi in the folders that are named here; later ones ask pkg-config.
    environment["CPPFLAGS"] = f"-I{work / 'made/include'}"
    environment["PKG_CONFIG_LIBDIR"] = str(work / "made/lib/pkgconfig")
    linked = f"-Wl,--dynamic-linker={loader} -Wl,-rpath,{loader.parent}"
    environment["LDFLAGS"] = f"-L{work / 'made/lib'} {linked}"
    return environment


def main() -> None:
    words = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    words.add_argument("version", help="for example 3.14")
    words.add_argument("folder", type=Path, help="where to install it; must not exist yet")
    words.add_argument("--libc", default="musl", choices=LIBRARIES, help="the C library (default: musl)")
    words.add_argument("--suite", default="sid", help="Debian's suite that has this version (default: sid)")
    words.add_argument("--archive", type=Path, help="of the sources; Debian's where it is left out")
    words.add_argument("--machine", default=HERE, choices=ARCHITECTURES, help="for which machine (default: this one)")
    words.add_argument("--helper", type=Path, help="for another machine: a Python of this version for this one")
    given = words.parse_args()
    folder, machine = given.folder.resolve(), given.machine
    require_emulator(machine)
    crossing = cross_options(machine, given.helper)
    folder.mkdir(parents=True)
    target, suite, packages, inside = LIBRARIES[given.libc]
    run(sys.executable, "-m", "pip", "install", "--quiet", "ziglang")
    with tempfile.TemporaryDirectory(prefix="zig-python-") as name:
        work = Path(name)
        for path in download(packages, suite, work / "libc", machine=machine):
            run("dpkg-deb", "-x", path, folder / "libc")
        loader = folder / "libc" / inside.format(machine)
        environment = compilers(work, target.format(machine), loader)
        for program, archive in sources(list(BESIDE), SUITE_BESIDE, work / "beside").items():
            options = [*BESIDE[program], *(hosts(machine) if program != "zlib" else [])]
            install(unpack(archive, work / program), work / "made", options, environment)
        archive = given.archive
        if archive is None:
            (archive,) = sources([f"python{given.version}"], given.suite, work / "sources").values()
        options = ["--without-ensurepip", "--disable-test-modules", *crossing]
        # `configure` does not know zig's targets; wheels have modules with the names of the C library.
        names = f"cpython-{given.version.replace('.', '')}-{machine}-linux-{'musl' if given.libc == 'musl' else 'gnu'}"
        settings = {"SOABI": names, "EXT_SUFFIX": f".{names}.so"}
        install(unpack(archive, work / "python"), folder, options, environment, **settings)
    python = folder / f"bin/python{given.version}"
    if given.libc != "musl":
        # In the old form, which zig does not write and which counts for the modules of wheels, too.
        libraries = f"{loader.parent}:{folder}/libc/usr/lib/{machine}-linux-gnu"
        patchelf("--force-rpath", "--set-rpath", libraries, python)
    if machine != HERE:
        start_by_emulator(python, machine)
    sys.stdout.write(f"{python}: {run(python, '-c', 'import ctypes, sys, venv, zlib; print(sys.version)')}")


if __name__ == "__main__":
    main()
