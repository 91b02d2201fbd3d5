"""Build a CPython for another C library than this machine's: musl, or an older glibc.

    python tests/zig_python.py 3.14 ~/pythons/3.14-musl
    python tests/zig_python.py 3.11 ~/pythons/3.11-bullseye --libc bullseye --suite bookworm

Debian has no Python for musl, and none that fastrt takes for the glibc of its release `bullseye` (2.31), the oldest
that wheels are made for. So this script builds the sources of Debian's Python by `zig cc`, with that C library's
binary from Debian beside it, which the interpreter names as its loader: it runs on this machine, and has nothing of
this machine's C library. It needs no root, and nothing outside the folder changes. It has the modules that `venv`,
NumPy and gRPC import, not OpenSSL: another Python's pip installs packages for it. `ziglang` is installed by pip.
"""

import argparse
import os
import re
import sys
import tarfile
import tempfile
from pathlib import Path

from debian_python import download, patchelf, run, sources

MACHINE = os.uname().machine
# What zig links to, Debian's suite and its packages, and the loader in there. Wheels for glibc need the library of C++.
GNU = f"{MACHINE}-linux-gnu"
LIBRARIES = {
    "musl": (f"{MACHINE}-linux-musl", "sid", ["musl"], f"usr/lib/{MACHINE}-linux-musl/libc.so"),
    "bullseye": (f"{GNU}.2.31", "bullseye", ["libc6", "libstdc++6"], f"lib/{GNU}/ld-2.31.so"),
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
        setup.write_text(setup.read_text().replace("self.add_multiarch_paths()", "pass"))
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


def main() -> None:
    words = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    words.add_argument("version", help="for example 3.14")
    words.add_argument("folder", type=Path, help="where to install it; must not exist yet")
    words.add_argument("--libc", default="musl", choices=LIBRARIES, help="the C library (default: musl)")
    words.add_argument("--suite", default="sid", help="Debian's suite that has this version (default: sid)")
    words.add_argument("--archive", type=Path, help="of the sources; Debian's where it is left out")
    given = words.parse_args()
    folder = given.folder.resolve()
    folder.mkdir(parents=True)
    target, suite, packages, inside = LIBRARIES[given.libc]
    run(sys.executable, "-m", "pip", "install", "--quiet", "ziglang")
    with tempfile.TemporaryDirectory(prefix="zig-python-") as name:
        work = Path(name)
        for path in download(packages, suite, work / "libc"):
            run("dpkg-deb", "-x", path, folder / "libc")
        loader = folder / "libc" / inside
        # Without -dynamic zig links programs for musl statically, and they cannot load modules.
        cc = f"{sys.executable} -m ziglang cc -target {target} -dynamic -fno-sanitize=undefined"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        environment.setdefault("ZIG_GLOBAL_CACHE_DIR", str(work / "zig"))
        environment |= {"CC": cc, "CFLAGS": "-fPIC -O1 -w"}
        environment |= {"AR": f"{sys.executable} -m ziglang ar", "RANLIB": f"{sys.executable} -m ziglang ranlib"}
        # Up to 3.11, Python looks for zlib and libffi in the folders that are named here; later ones ask pkg-config.
        environment["CPPFLAGS"] = f"-I{work / 'made/include'}"
        linked = f"-Wl,--dynamic-linker={loader} -Wl,-rpath,{loader.parent}"
        environment["LDFLAGS"] = f"-L{work / 'made/lib'} {linked}"
        for program, archive in sources(list(BESIDE), SUITE_BESIDE, work / "beside").items():
            install(unpack(archive, work / program), work / "made", BESIDE[program], environment)
        environment["PKG_CONFIG_LIBDIR"] = str(work / "made/lib/pkgconfig")
        archive = given.archive
        if archive is None:
            (archive,) = sources([f"python{given.version}"], given.suite, work / "sources").values()
        options = ["--without-ensurepip", "--disable-test-modules"]
        # `configure` does not know zig's targets; wheels have modules with the names of the C library.
        names = f"cpython-{given.version.replace('.', '')}-{MACHINE}-linux-{'musl' if given.libc == 'musl' else 'gnu'}"
        settings = {"SOABI": names, "EXT_SUFFIX": f".{names}.so"}
        install(unpack(archive, work / "python"), folder, options, environment, **settings)
    python = folder / f"bin/python{given.version}"
    if given.libc != "musl":
        # In the old form, which zig does not write and which counts for the modules of wheels, too.
        patchelf("--force-rpath", "--set-rpath", f"{loader.parent}:{folder}/libc/usr/lib/{GNU}", python)
    sys.stdout.write(f"{python}: {run(python, '-c', 'import ctypes, sys, venv, zlib; print(sys.version)')}")


if __name__ == "__main__":
    main()
