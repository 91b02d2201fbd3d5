"""The compiled modules as the compiler and the linker left them: hardened, and without debug information."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import fastrt

PACKAGE = Path(fastrt.__file__).parent
SOURCES = Path(__file__).resolve().parents[1] / "src" / "fastrt"
# Modules that put bytes of other processes into buffers of a size known to the compiler.
CHECKED_COPIES = {
    *("memory/segment", "memory/clients", "tasks/tasks", "objects/handles", "objects/spill", "transfer/stream"),
    *("transfer/chunk", "collective/reduce", "refcounts/refcount"),
}


@pytest.fixture(scope="module")
def headers() -> dict[str, str]:
    """What readelf prints of each compiled module, by the module's name."""
    if shutil.which("readelf") is None:
        pytest.skip("readelf is not here; it comes with the compiler (package binutils)")
    paths = sorted(PACKAGE.rglob("*.so"))
    found = {}
    for path in paths:
        done = subprocess.run(["readelf", "-W", "-l", "-d", "-S", "--dyn-syms", path], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        found[path.relative_to(PACKAGE).as_posix().split(".")[0]] = done.stdout
    return found


def lacking(headers: dict[str, str], pattern: str) -> Iterator[str]:
    return (name for name, text in headers.items() if not re.search(pattern, text, re.M))


def having(headers: dict[str, str], pattern: str) -> Iterator[str]:
    return (name for name, text in headers.items() if re.search(pattern, text, re.M))


def test_every_compiled_module_is_looked_at(headers):
    built = {path.relative_to(SOURCES).with_suffix("").as_posix() for path in (SOURCES / "_core").rglob("*.pyx")}
    assert built
    assert built <= headers.keys()
    assert "scheduler/state" in headers  # plain Python that is compiled


def test_relocations_are_read_only_once_loaded(headers):
    assert not list(lacking(headers, r"^\s*GNU_RELRO"))
    assert not list(lacking(headers, r"\(FLAGS_1\).*\bNOW\b"))


def test_no_stack_is_executable(headers):
    assert not list(lacking(headers, r"^\s*GNU_STACK.* RW +0x"))


def test_no_folder_is_searched_for_libraries(headers):
    assert not list(having(headers, r"\((RPATH|RUNPATH)\)"))


def test_stack_protector_guards_every_module(headers):
    assert not list(lacking(headers, r"\bUND __stack_chk_fail\b"))


def test_copies_into_buffers_of_known_size_are_checked(headers):
    checked = set(having(headers, r"\bUND __\w+_chk\b"))
    assert {f"_core/{name}" for name in CHECKED_COPIES} <= checked


def test_no_debug_information_is_in_the_modules(headers):
    assert not list(having(headers, r"^\s*\[ *\d+\] \.(z?debug_\w+|symtab)\b"))
