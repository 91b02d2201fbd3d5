"""The two build steps that metadata cannot express: compile the Cython core and some plain Python modules beside it,
and compile the protocol descriptors.

Everything else is in pyproject.toml. Two switches for test builds, each with a build folder of its own so that its
objects never end up in a wheel:

    FASTRT_FAILPOINTS=1        compile in the points where tests kill the process
    FASTRT_SANITIZE=address    compile with AddressSanitizer and UndefinedBehaviorSanitizer
    FASTRT_SANITIZE=thread     compile with ThreadSanitizer
    FASTRT_SANITIZE=fuzzer     as address, and every branch and comparison is reported to a fuzzer

And two for wheels: FASTRT_DEBUG_INFO=1 keeps lines and functions for debuggers, which .ci/wheels.py moves into files
beside the wheel. FASTRT_CYTHON_CACHE names a folder that keeps the C code for later builds of the same sources.
"""

import gc
import importlib.util
import json
import os
import re
import subprocess
import sysconfig
import uuid
from collections import Counter
from importlib import metadata
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist
from setuptools.modified import newer_group

gc.disable()  # half of Cython's time was the search for cycles in its trees; a process then needs 0.4 GB at most

CORE = Path("src/fastrt/_core")
# Plain Python that is compiled too, each with the types in a .pxd beside it; without a compiled file it runs as it is.
# docs/adr/0005-compiled-python.md
# Compiled, they would turn the GIL on where Python has none.
PLAIN = [
    *[Path("src/fastrt/scheduler", f"{name}.py") for name in ("events", "objects", "policy", "records", "state")],
    *[Path("src/fastrt/node", f"{name}.py") for name in ("other_nodes", "placing")],
] * (not sysconfig.get_config_var("Py_GIL_DISABLED"))
# The module of the functions that Cython needs in nearly every other one. That they are compiled once takes a quarter
# off the compiler's time, and a fifth off the size of all modules.
SHARED = "fastrt._core.cython_shared"
BUILD_FILE = "fastrt/build.json"  # read by fastrt.observe.build
COMMIT_FILE = "COMMIT"  # in an sdist only
DESCRIPTORS = Path("fastrt/net/grpc/descriptors")
# Without a GIL there is no package of grpcio-tools; then the program protoc on PATH compiles the .proto files.
HAS_TOOLS = importlib.util.find_spec("grpc_tools") is not None
FAILPOINTS = os.environ.get("FASTRT_FAILPOINTS", "0") not in ("", "0")
SANITIZE = os.environ.get("FASTRT_SANITIZE", "")
DEBUG_INFO = os.environ.get("FASTRT_DEBUG_INFO", "0") not in ("", "0")
CYTHON_CACHE = os.environ.get("FASTRT_CYTHON_CACHE") or None
SANITIZERS = {
    "": [],
    "address": ["-fsanitize=address,undefined"],
    "thread": ["-fsanitize=thread"],
    "fuzzer": ["-fsanitize=address,undefined", "-fsanitize-coverage=trace-pc,trace-cmp"],
}
if SANITIZE not in SANITIZERS:
    raise SystemExit(f"FASTRT_SANITIZE={SANITIZE!r}: only {', '.join(filter(None, SANITIZERS))} are known")

VARIANT = "".join(["-failpoints" * FAILPOINTS, f"-{SANITIZE}" * bool(SANITIZE)])
SANITIZER_FLAGS = [*SANITIZERS[SANITIZE], "-fno-omit-frame-pointer", "-g"] if SANITIZE else []
# By -O1 a module compiles in 60 % of the time that it takes by -O2, and in a quarter without optimization. A sanitizer
# needs the speed.
OPTIMIZE = "-O0" if FAILPOINTS and not SANITIZE else "-O1"
# A test build is for debuggers, and the sanitizers have checks of their own that _FORTIFY_SOURCE would hide. In a
# normal build -g0 comes after the -g that Python's own flags hold, and -s drops the symbols that nothing links to.
HARDENING = ["-fstack-protector-strong", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=3"] if not VARIANT else []
HARDENING += [] if VARIANT else ["-g1" if DEBUG_INFO else "-g0"]
STRIPPING = ["-Wl,--build-id=sha1"] if DEBUG_INFO else [] if VARIANT else ["-Wl,-s"]
HARDENED_LINK = ["-Wl,-z,relro,-z,now", "-Wl,-z,noexecstack", *STRIPPING]
# No -march=native: a wheel runs on every CPU of its architecture. The segment's words are read through several
# types, hence no-strict-aliasing.
COMPILE_FLAGS = [OPTIMIZE, "-std=gnu11", "-fno-strict-aliasing", "-pthread", *HARDENING, *SANITIZER_FLAGS]
# Of lines that Cython writes.
COMPILE_FLAGS += ["-Wno-sign-compare", "-Wno-discarded-qualifiers"]
# Passes of GCC that find little in code that Cython writes: a fifth of its time. Without them, tasks, puts and
# the scheduler's lives are as fast. Clang knows none of these names.
LEFT_OUT = (
    *("tree-dominator-opts", "tree-pta", "tree-pre", "tree-vrp"),
    *("forward-propagate", "cprop-registers", "gcse"),
)
# Of loops over arrays, where such passes pay.
LOOPS = ("collective", "embedding", "optimizer", "reduce")
# Loops over arrays need the vectoriser at its full reach: 0.9 instead of 5 GB/s of int8 sums without it; and sqrtf is
# an instruction only where it need not set errno.
FLAGS_OF = {"reduce": ["-O3"], "optimizer": ["-O3", "-fno-math-errno", "-fno-trapping-math"]}
# What tasks, puts and gets pass through, and the loops of queues, collectives, tables and listings. With these by -O1,
# too, a submission takes 1.5 % more instructions.
HOT = (
    *("channel", "collective", "embedding", "fifo", "refcount"),
    *("cython_shared", "arena", "clients", "errors", "pool", "priority_queue", "queue", "trace", "wait"),
    *("bulk", "handles", "mailbox", "objects", "pending", "references", "scalar"),
    *("calls", "inbox", "records", "runner", "submission", "tasks"),
    *("holdings", "pages", "passes"),
)
# Modules of which no call is on the path of a task, a put or a get: what sets up, lists, repairs or calls the kernel.
# They compile in 40 % of the time by -Og, and are as small as by -O2.
RARE = (
    *("background", "populate", "private", "segment", "shm", "write_guard"),
    *("actors", "cancel", "fsck", "functions", "generator_relay", "inspect", "mapped", "remote", "spill", "unread"),
    *("audit", "connections", "dlpack", "groups", "naming", "operands", "unread_list"),
    *("chunk", "failures", "recovery", "stream"),
)
if not VARIANT:
    FLAGS_OF |= {name: ["-O2"] for name in HOT} | {name: ["-Og"] for name in RARE}
# The scheduler's state machine takes 1.9 % more instructions by -O1, and compiles in 60 % of the time. By -Og it takes
# 8 % more than by -O1.
PLAIN_FLAGS = ["-O1"]
DIRECTIVES = {
    "language_level": 3,
    "boundscheck": False,
    "wraparound": False,
    "initializedcheck": False,
    "cdivision": True,
    "allow_none_for_extension_args": False,  # None would be taken for a client, and crash
    "binding": True,  # signatures that the stubs are checked against
    "auto_pickle": False,  # two methods for each class that nothing calls; without them Python refuses to pickle it
}
# Python's own rules where they differ from C's: an index is checked, and so is None.
PLAIN_DIRECTIVES = {
    "language_level": 3,
    "binding": True,
    "nonecheck": True,
    "annotation_typing": False,
    "auto_pickle": False,
}


def extensions() -> list[Extension]:
    """One extension for each .pyx and plain module, and the one that Cython writes for all of them.

    All but that one depend on all headers and .pxd files, shared by inlining.
    """
    depends = ["setup.py"] + [str(path) for pattern in ("*.pxd", "*.h") for path in sorted(CORE.rglob(pattern))]
    depends += [str(path.with_suffix(".pxd")) for path in PLAIN]
    links = ["-pthread", *HARDENED_LINK, *SANITIZER_FLAGS]
    return [
        Extension(
            SHARED,
            [f"src/{SHARED.replace('.', '/')}.c"],
            extra_compile_args=[*COMPILE_FLAGS, *FLAGS_OF.get("cython_shared", [])],
            extra_link_args=links,
        ),
        *(
            Extension(
                ".".join(path.relative_to("src").with_suffix("").parts),
                [str(path)],
                include_dirs=[str(CORE / "include")],
                define_macros=[("FRT_FAILPOINTS", "1")] if FAILPOINTS else [],
                libraries=["rt"],  # shm_open before glibc 2.34
                depends=depends,
                extra_compile_args=[*COMPILE_FLAGS, *(PLAIN_FLAGS if path in PLAIN else FLAGS_OF.get(path.stem, []))],
                extra_link_args=links,
            )
            for path in [*sorted(CORE.rglob("*.pyx")), *([] if VARIANT else PLAIN)]  # a test build is of the core alone
        ),
    ]


def packages() -> list[str]:
    """The packages below src/, and bench/ under the name fastrt.bench."""
    bench = ["fastrt.bench"] if Path("bench/__init__.py").exists() else []
    return find_packages("src") + bench + [f"fastrt.bench.{name}" for name in find_packages("bench")]


class BuildCore(build_ext):
    """Cythonizes into the build folder, all files at once, then compiles on all CPUs."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()

    def build_extensions(self) -> None:
        if not self.force and all(self.is_current(ext) for ext in self.extensions):
            return  # Cython would look for two seconds, and find nothing to do
        from Cython.Build import cythonize

        sources = {}
        for directives, plain in ((DIRECTIVES, False), (PLAIN_DIRECTIVES, True)):
            made = cythonize(
                [
                    Extension(ext.name, list(ext.sources), depends=list(ext.depends))
                    for ext in self.extensions
                    if (Path(ext.sources[0]) in PLAIN) == plain
                ],
                nthreads=os.cpu_count() or 1,
                build_dir="build/cython",  # the same for all builds: they differ in the C compiler's options only
                include_path=["src"],
                compiler_directives=directives,
                shared_utility_qualified_name=SHARED,
                shared_utility_features_disabled=["MemoryView"],  # the core has none, and it is most of that module
                emit_linenums=True,  # debuggers show the .pyx, and a failpoint is named by the line there
                force=self.force,
                cache=CYTHON_CACHE,
                quiet=not self.verbose,
            )
            sources.update({ext.name: ext.sources for ext in made})
        for ext in self.extensions:
            ext.sources = sources[ext.name]
        # The longest first, so that no CPU is left without work while another one compiles it at the end.
        self.extensions.sort(key=lambda ext: -Path(ext.sources[0]).stat().st_size)
        # Python's own link command may name the folder it was built in. The modules need nothing from there, and a
        # folder that another user can make on the next machine would be searched for the C library.
        self.compiler.linker_so = [word for word in self.compiler.linker_so if not word.startswith("-Wl,-rpath")]
        if not VARIANT:
            self.leave_passes_out()
        super().build_extensions()

    def is_current(self, ext: Extension) -> bool:
        """Whether a module was made after the last change of all that it is made from."""
        written = [] if ext.name == SHARED else ext.sources  # Cython writes that one itself
        return not newer_group([*written, *ext.depends], self.get_ext_fullpath(ext.name))

    def leave_passes_out(self) -> None:
        flags = [f"-fno-{name}" for name in LEFT_OUT]
        attempt = [*self.compiler.compiler_so, "-Werror", *flags, "-E", "-x", "c", os.devnull]
        if subprocess.run(attempt, capture_output=True, check=False).returncode:
            return  # another compiler than GCC
        for ext in self.extensions:
            if Path(ext.sources[0]).stem not in LOOPS:
                ext.extra_compile_args += flags


class BuildPython(build_py):
    """Also writes one descriptor set for each folder of protos/, and removes the files of an earlier build."""

    def run(self) -> None:
        if not self.editable_mode:
            self.remove_leftovers()
        super().run()
        for folder, target in self.descriptor_sets():
            compile_descriptors(folder, target)
        if not self.editable_mode:
            for path in sorted(Path("protos").glob("*/*.proto")):
                self.copy_file(str(path), str(self.proto_in_wheel(path)))
            Path(self.build_lib, BUILD_FILE).write_text(json.dumps(build_facts(), indent=2) + "\n")

    def remove_leftovers(self) -> None:
        """Remove an earlier build's files, or a file deleted since would be in the next wheel; objects stay."""
        build = self.get_finalized_command("build_ext")
        keep = {Path(build.build_lib, build.get_ext_filename(ext.name)) for ext in build.extensions or []}
        for path in Path(self.build_lib).rglob("*"):
            if path.is_file() and path not in keep:
                path.unlink()

    def descriptor_sets(self) -> list[tuple[Path, Path]]:
        root = Path("src" if self.editable_mode else self.build_lib) / DESCRIPTORS
        folders = sorted({path.parent for path in Path("protos").glob("*/*.proto")})
        return [(folder, root / f"{folder.name}.binpb") for folder in folders]

    def proto_in_wheel(self, path: Path) -> Path:
        """Where `fastrt protos` finds a file of protos/."""
        target = Path(self.build_lib, "fastrt", path)
        target.parent.mkdir(parents=True, exist_ok=True)
        return target

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        made = [target for _, target in self.descriptor_sets()]
        if not self.editable_mode:
            made += [self.proto_in_wheel(path) for path in sorted(Path("protos").glob("*/*.proto"))]
            made.append(Path(self.build_lib, BUILD_FILE))
        return super().get_outputs(include_bytecode) + [str(path) for path in made]


class Wheel(bdist_wheel):
    """Also writes the software bill of materials beside the metadata, where PEP 770 puts it."""

    def write_wheelfile(self, wheelfile_base: str, **about: str) -> None:
        super().write_wheelfile(wheelfile_base, **about)
        about_this = self.distribution.metadata
        requirements = self.distribution.install_requires
        made = bill_of_materials(about_this.get_name(), about_this.get_version(), requirements)
        target = Path(wheelfile_base, "sboms", "fastrt.cdx.json")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(made, indent=2) + "\n")


class SourceArchive(sdist):
    """Also writes the commit into the archive, where git cannot be asked later."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        if commit := commit_here():
            Path(base_dir, COMMIT_FILE).write_text(commit + "\n")


def commit_here() -> str:
    """The commit of this tree, with a "+" if files differ from it; "" if it is unknown."""
    if Path(COMMIT_FILE).exists():
        return Path(COMMIT_FILE).read_text().strip()
    if not Path(".git").exists():  # not a repository that happens to contain this folder
        return ""
    answers = []
    for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"]):
        try:
            asked = subprocess.run(["git", *words], capture_output=True, text=True)
        except OSError:
            return ""
        if asked.returncode:
            return ""
        answers.append(asked.stdout.strip())
    return answers[0] + "+" * bool(answers[1])


def build_facts() -> dict[str, object]:
    """The facts that `fastrt --version` prints about a build."""
    layout = re.search(r"^#define FRT_LAYOUT_VERSION (\d+)", (CORE / "include/layout.h").read_text(), re.M)
    # The last option of a module counts; so each module has one level.
    levels = Counter([word for word in ext.extra_compile_args if word[:2] == "-O"][-1] for ext in extensions())
    flags = [f"{level} ({count} modules)" for level, count in levels.most_common()]
    flags += [*["failpoints"] * FAILPOINTS, *[f"sanitizer {SANITIZE}"] * bool(SANITIZE)]
    flags += ["hardened"] * bool(HARDENING)
    return {"commit": commit_here(), "layout": int(layout[1]) if layout else 0, "flags": flags}


def bill_of_materials(name: str, version: str, requirements: list[str]) -> dict[str, object]:
    """Describe a wheel in CycloneDX 1.6: its parts from other projects, and the packages beside it.

    Parts are in the wheel: Cython writes code of its own into every compiled module, and the descriptor sets hold
    Protobuf's well-known types. Packages that pip installs beside the wheel have the scope "excluded" and no version:
    their bounds are in the metadata. Equal builds have equal files: there is no time, and the serial number is derived.
    """
    itself = f"pkg:pypi/{name}@{version}"
    types = "Protobuf's well-known types are in the descriptor sets"
    if HAS_TOOLS:
        proto = ("grpcio-tools", metadata.version("grpcio-tools"), "Apache-2.0 AND BSD-3-Clause", types)
    else:
        shown = subprocess.run(["protoc", "--version"], capture_output=True, text=True, check=True).stdout
        proto = ("protobuf", shown.split()[-1], "BSD-3-Clause", types)
    cython = ("cython", metadata.version("cython"), "Apache-2.0", "its support code is in every compiled module")
    parts = [
        {
            "type": "library", "name": part, "version": newest, "description": use, "scope": "required",
            "licenses": [{"expression": licence}], "purl": f"pkg:pypi/{part}@{newest}", "bom-ref": part,
        }
        for part, newest, licence, use in (cython, proto)
    ]  # fmt: skip
    needed = sorted({re.split(r"[ <>=!~;\[]", requirement)[0] for requirement in requirements})
    beside = [
        {"type": "library", "name": one, "scope": "excluded", "purl": f"pkg:pypi/{one}", "bom-ref": one}
        for one in needed
    ]
    commit = commit_here()
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, f'{itself}#{commit}')}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library", "name": name, "version": version, "purl": itself, "bom-ref": itself,
                "licenses": [{"license": {"id": "Apache-2.0"}}],
                "properties": [{"name": "fastrt:commit", "value": commit}] if commit else [],
            }
        },
        "components": [*parts, *beside],
        "dependencies": [{"ref": itself, "dependsOn": [one["bom-ref"] for one in [*parts, *beside]]}],
    }  # fmt: skip


def compile_descriptors(folder: Path, target: Path) -> None:
    """Compile the .proto files of one folder, with everything they import, into one file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    files = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*.proto"))]
    command = ["protoc", "--include_imports", f"--descriptor_set_out={target}", f"-I{folder}"]
    if HAS_TOOLS:
        import grpc_tools
        from grpc_tools import protoc

        code = protoc.main([*command, f"-I{Path(grpc_tools.__file__).parent / '_proto'}", *files])
    else:
        code = subprocess.run([*command, *files]).returncode
    if code != 0:
        raise SystemExit(f"protoc refused a file of {folder}; its message is above")


if __name__ == "__main__":  # the processes that cythonize import this file again, by Python 3.14's start method
    setup(
        packages=packages(),
        ext_modules=extensions(),
        cmdclass={"build_ext": BuildCore, "build_py": BuildPython, "bdist_wheel": Wheel, "sdist": SourceArchive},
        options={"build": {"build_base": f"build/variant{VARIANT}"}} if VARIANT else {},
    )
