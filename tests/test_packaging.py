"""What a user gets by `pip install`: complete, quick to import, and helpful when it was not built."""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import fastrt

ROOT = Path(__file__).resolve().parents[1]
IMPORT_SECONDS = 0.060
GENERATED = (".c", ".so", ".binpb", ".pyc")


def python(code, **env):
    """Run `code` in a fresh interpreter; return what it printed and its errors."""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=50, env={**os.environ, **env}
    )
    return result.stdout.strip(), result.stderr


@pytest.fixture
def unbuilt(tmp_path):
    """A copy of the sources without anything compiled."""
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns(*(f"*{end}" for end in GENERATED)))
    return tmp_path / "src"


def test_tests_run_on_the_installed_package():
    assert ROOT / "src" not in Path(fastrt.__file__).parents


def test_import_takes_less_than_60_ms():
    # Of the processor, and the best of some: the machine may be busy, the package cannot be quicker than it is.
    code = "import time; t = time.process_time(); import fastrt; print(time.process_time() - t)"
    assert min(float(python(code)[0]) for _ in range(7)) < IMPORT_SECONDS


def test_import_leaves_heavy_modules_alone():
    heavy = ("grpc", "google.protobuf", "numpy", "cryptography", "psutil", "rich", "click", "asyncio")
    code = f"import sys, fastrt; fastrt.init, fastrt.remote; print([name for name in {heavy} if name in sys.modules])"
    assert python(code) == ("[]", "")


def test_version_is_the_same_everywhere():
    declared = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)[1]
    assert fastrt.__version__ == importlib.metadata.version("fastrt") == declared


def test_installed_files_are_complete():
    installed = {str(path) for path in importlib.metadata.files("fastrt")}
    for source in (ROOT / "src/fastrt").rglob("*"):
        if source.suffix in (".py", ".pyi", ".pxd", ".h", ".typed") or source.name == "py.typed":
            assert source.relative_to(ROOT / "src").as_posix() in installed
        elif source.suffix == ".pyx":
            module = source.relative_to(ROOT / "src").with_suffix("").as_posix()
            assert any(name.startswith(f"{module}.cpython-") for name in installed)
    for folder in {path.parent.name for path in (ROOT / "protos").glob("*/*.proto")}:
        assert f"fastrt/net/grpc/descriptors/{folder}.binpb" in installed
    assert "fastrt/build.json" in installed
    for proto in (ROOT / "protos").rglob("*.proto"):
        assert f"fastrt/{proto.relative_to(ROOT).as_posix()}" in installed
    for module in (ROOT / "bench").rglob("*.py"):
        assert f"fastrt/bench/{module.relative_to(ROOT / 'bench').as_posix()}" in installed
    assert not [name for name in installed if name.endswith((".c", ".pyx"))]


def test_bill_of_materials_names_parts_and_dependencies():
    (place,) = (path for path in importlib.metadata.files("fastrt") if path.name == "fastrt.cdx.json")
    assert re.fullmatch(r"fastrt-[\d.]+\.dist-info/sboms/fastrt\.cdx\.json", place.as_posix())
    found = json.loads(place.read_text())
    assert (found["bomFormat"], found["specVersion"]) == ("CycloneDX", "1.6")
    assert found["metadata"]["component"]["version"] == fastrt.__version__
    parts = {one["name"] for one in found["components"] if one["scope"] == "required"}
    beside = {one["name"] for one in found["components"] if one["scope"] == "excluded"}
    assert parts == {"cython", "grpcio-tools"}
    requirements = [one for one in importlib.metadata.requires("fastrt") if "extra ==" not in one]
    assert beside == {re.match(r"[\w.-]+", one)[0] for one in requirements}
    assert all(re.match(r"\d", one["version"]) for one in found["components"] if one["scope"] == "required")
    (itself,) = found["dependencies"]
    assert set(itself["dependsOn"]) == {one["bom-ref"] for one in found["components"]}


def test_wheel_has_no_files_of_others_without_a_licence():
    # A new kind of file, such as a script of a web page: its licence belongs into the wheel, and its part in setup.py.
    known = {
        *(".binpb", ".css", ".h", ".html", ".js", ".json", ".proto", ".pxd", ".py", ".pyc", ".pyi", ".so", ".svg"),
        *(".typed", ""),
    }  # fmt: skip
    files = [path for path in importlib.metadata.files("fastrt") if path.parts[0] == "fastrt"]
    assert len(files) > 300
    assert {path.suffix for path in files} <= known
    assert any(path.name == "LICENSE" and "licenses" in path.parts for path in importlib.metadata.files("fastrt"))


def test_importing_setup_builds_nothing():
    # The processes that compile import the main program again, by Python 3.14's start method.
    path = str(ROOT / "setup.py")
    code = f"import runpy, os; os.chdir({str(ROOT)!r}); runpy.run_path({path!r}, run_name='__mp_main__'); print('done')"
    assert python(code) == ("done", "")


def test_record_of_a_build_names_each_level_of_optimization():
    # Most modules have their own: one level would hide what tasks, puts and gets pass through.
    code = f"import runpy, os; os.chdir({str(ROOT)!r}); print(runpy.run_path('setup.py')['build_facts']()['flags'])"
    for level in ("-O1", "-O2", "-O3", "-Og"):
        assert re.search(rf"'{level} \(\d+ modules\)'", python(code)[0])


def test_unbuilt_tree_says_what_to_do(unbuilt):
    _, errors = python("import fastrt; fastrt.init", PYTHONPATH=str(unbuilt))
    assert "ImportError" in errors
    assert "it is not built" in errors
    assert "pip install ." in errors


def test_tree_built_for_another_python_says_so(unbuilt):
    (unbuilt / "fastrt/_core/memory/errors.cpython-39-x86_64-linux-gnu.so").write_bytes(b"")
    _, errors = python("import fastrt; fastrt.init", PYTHONPATH=str(unbuilt))
    assert "built for another Python (cpython-39-x86_64-linux-gnu.so)" in errors
    assert "pip install ." in errors


@pytest.mark.timeout(120)
def test_sdist_holds_what_a_build_needs(tmp_path):
    ignored = shutil.ignore_patterns(".*", "build", "dist", "wheelhouse", "*.egg-info", *(f"*{e}" for e in GENERATED))
    tree = Path(shutil.copytree(ROOT, tmp_path / "tree", ignore=ignored))
    build = [sys.executable, "-m", "build", "--sdist", "--no-isolation", "--skip-dependency-check", str(tree)]
    subprocess.run(build, check=True, capture_output=True, timeout=100)
    (archive,) = (tree / "dist").iterdir()
    with tarfile.open(archive) as tar:
        packed = {name.partition("/")[2] for name in tar.getnames()}
    needed = {"setup.py", "pyproject.toml", "LICENSE", "README.md", "Makefile"}
    for folder in ("src", "protos", "bench", "tests"):
        needed |= {str(p.relative_to(ROOT)) for p in (ROOT / folder).rglob("*") if p.is_file()}
    needed = {name for name in needed if not name.endswith(GENERATED) and ".egg-info" not in name}
    assert sorted(needed - packed) == []
    assert not [name for name in packed if name.endswith(GENERATED)]
