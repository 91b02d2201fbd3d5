"""fastrt on one machine without the packages of clusters and services: gRPC and protobuf."""

import importlib.metadata
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Tests of one node, by folder or file.
ONE_NODE = (
    *("tests/tasks/test_remote.py", "tests/tasks/test_actor.py", "tests/tasks/test_endings.py", "tests/worker"),
    *("tests/store/test_ref.py", "tests/store/test_client.py", "tests/util/test_pool.py"),
    *("tests/runtime/test_driver.py", "tests/cli/test_demo.py"),
)
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
WORDS = "clusters and services need packages that are not installed; run: pip install "
# docs/start.md names these.
BARE = ("click", "cloudpickle", "cryptography", "numpy", "psutil", "rich", "threadpoolctl")
TOOLS = ("pytest", "pytest-benchmark", "pytest-timeout", "pytest-xdist", "hypothesis")


def installed(names: tuple[str, ...]) -> set[str]:
    """Distributions with all that they require, as far as it is installed."""
    found: set[str] = set()
    queue = list(names)
    while queue:
        name = re.sub(r"[-_.]+", "-", queue.pop()).lower()
        if name in found:
            continue
        try:
            required = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        found.add(name)
        queue += [re.match(r"[\w.-]+", line)[0] for line in required if "extra ==" not in line]
    return found


def make(folder: Path, names: tuple[str, ...] = BARE + TOOLS) -> Path:
    """Make the environment; return its Python. fastrt itself is in it, without the rest of its dependencies."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (there,) = folder.glob("lib/python*/site-packages")
    here = Path(sysconfig.get_path("purelib"))
    tops = {
        path.parts[0]
        for name in [*installed(names), "fastrt"]
        for path in importlib.metadata.files(name) or []
        if path.parts[0] not in ("..", "__pycache__")
    }
    for top in tops:
        (there / top).symlink_to(here / top)
    return folder / "bin/python"


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """The Python of a light installation."""
    return make(tmp_path_factory.mktemp("light") / "venv")


def run(python, *words, seconds=50):
    env = {name: value for name, value in os.environ.items() if name != "FASTRT_LONG"}
    env["PATH"] = f"{python.parent}:/usr/bin:/bin"  # not with `fastrt` of the full installation
    return subprocess.run([python, *words], capture_output=True, text=True, timeout=seconds, env=env, cwd=ROOT)


def test_documented_packages_are_those_of_this_test():
    words = re.search(
        r"^\$ pip install --no-deps fastrt && pip install (.+)$", (ROOT / "docs/start.md").read_text(), re.M
    )
    assert tuple(words[1].split()) == BARE


def test_light_install_has_no_packages_of_services(bare):
    code = "import fastrt, importlib.util as u; print([n for n in ('grpc', 'google') if u.find_spec(n)])"
    assert run(bare, "-c", code).stdout == "[]\n"


def test_values_beyond_the_store_go_to_files_in_a_light_install(bare):
    code = """
import fastrt
with fastrt.init(num_workers=1, object_store_memory="64MiB"):
    refs = [fastrt.put(bytes([k]) * (24 << 20)) for k in range(6)] + [fastrt.put(bytes(96 << 20))]
    print([len(fastrt.get(ref)) >> 20 for ref in refs])
"""
    done = run(bare, "-c", code)
    assert (done.returncode, done.stdout) == (0, f"{[24] * 6 + [96]}\n"), done.stderr[-3000:]


def test_tasks_and_actors_run_in_a_light_install(bare):
    code = """
import fastrt

@fastrt.remote(num_cpus=1)
def double(value):
    return 2 * value

@fastrt.remote
def doubles(count):
    yield from fastrt.get([double.remote(k) for k in range(count)])

@fastrt.remote
class Counter:
    count = 0
    def add(self, amount):
        self.count += amount
        return self.count

with fastrt.init(num_workers=2, object_store_memory="64MiB"):
    counter = Counter.remote()
    print([fastrt.get(ref) for ref in doubles.remote(3)], fastrt.get([counter.add.remote(k) for k in (1, 2)]))
    try:
        fastrt.get(double.remote(None))
    except TypeError as exc:
        print(type(exc).__name__, len(fastrt.nodes()))
"""
    done = run(bare, "-c", code)
    assert (done.returncode, done.stdout) == (0, "[0, 2, 4] [1, 3]\nTaskError(TypeError) 1\n"), done.stderr[-3000:]


@pytest.mark.parametrize(
    "words",
    [["start", "--head"], ["coordinator", "serve"]],
)
def test_command_that_needs_more_says_what_to_install(bare, words):
    done = run(bare, "-c", "import sys; from fastrt.cli.main import main; main(sys.argv[1:])", *words)
    assert done.returncode == 1
    assert done.stderr.startswith(
        "Error: clusters and services need packages that are not installed; run: pip install "
    )
    assert "grpcio grpcio-health-checking grpcio-reflection protobuf" in done.stderr
    assert "Traceback" not in done.stderr


def test_import_that_needs_more_says_what_to_install(bare):
    done = run(bare, "-c", "import fastrt.net.grpc.auth")
    assert done.stderr.splitlines()[-1].startswith(f"ModuleNotFoundError: {WORDS}")


def test_tests_of_one_node_start_no_cluster():
    paths = [ROOT / name for name in ONE_NODE]
    files = [file for path in paths for file in (path.rglob("test_*.py") if path.is_dir() else [path])]
    starting = {file.name for file in files if "support.cluster import" in file.read_text()}
    assert starting <= {"test_debugpy.py"}  # it skips its tests without the extra


@pytest.mark.long
@pytest.mark.timeout(900)
def test_tests_of_one_node_pass_in_a_light_install(bare):
    done = run(bare, *PYTEST, "-n", "2", "--dist", "loadfile", *ONE_NODE, seconds=850)
    assert done.returncode == 0, done.stdout[-3000:]
