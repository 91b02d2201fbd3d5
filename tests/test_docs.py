"""Every command and program that the pages show is run, or at least exists as it is written."""

import ast
import functools
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    "README.md", "CONTRIBUTING.md", "docs/start.md",
    "docs/coordination.md", "docs/cluster.md", "docs/resources.md", "docs/scheduler.md",
    "docs/parameter_server.md", "docs/collective.md", "docs/actors.md", "docs/libraries.md",
    "docs/observing.md", "docs/engines.md", "docs/migrating.md", "docs/tasks.md", "docs/environments.md",
    "docs/placement.md", "docs/doctor.md", "docs/data.md", "docs/what_for.md", "docs/why_slow.md", "docs/jax.md",
    "docs/from_dask.md", "docs/from_multiprocessing.md", "docs/metrics.md", "docs/debugging.md", "docs/launching.md",
]  # fmt: skip
# Pages whose programs and commands belong together, and the tests that run them.
ELSEWHERE = {"docs/peers.md": "tests/runtime/test_peers.py"}
# Of these all programs run in each run of the tests, of other pages the first; the others are long tests.
READ_FIRST = ["README.md", "docs/start.md"]
# Programs with these imports run in `make check`, which installs the libraries; JAX has an environment of its own.
LIBRARIES = {"dask": r"^import fastrt\.dask", "joblib": r"^import fastrt\.joblib", "jax": r"^import jax"}
JAX_PYTHON = ROOT / ".cache/jax/0.10.2/bin/python"
NEEDS_A_CLUSTER = 'fastrt.init(address="auto")'
# Commands that take minutes or change the machine: their first words, and the call that shows they exist.
INSTEAD = {
    "fastrt bench": ["fastrt", "bench", "--list"],
    "python bench/compare.py": [sys.executable, str(ROOT / "bench/compare.py"), "--help"],
    "fastrt list": ["fastrt", "list", "--help"],
    "fastrt logs --node": ["fastrt", "logs", "--help"],
    "fastrt memory": ["fastrt", "memory", "--help"],
    "fastrt metrics --grafana": ["fastrt", "metrics", "--grafana"],
    "fastrt metrics": ["fastrt", "metrics", "--help"],
    "fastrt token --metrics": ["fastrt", "token", "--help"],
    "fastrt debug": ["fastrt", "debug", "--help"],
    "fastrt stack": ["fastrt", "stack", "--help"],
    "fastrt flame": ["fastrt", "flame", "--help"],
    "fastrt timeline": ["fastrt", "timeline", "--help"],
    "fastrt start": ["fastrt", "start", "--help"],
    "fastrt doctor --clean": ["fastrt", "doctor", "--help"],
    "fastrt profile transfer": ["fastrt", "profile", "transfer", "--help"],
    "python bench/compare_transfer.py": [sys.executable, str(ROOT / "bench/compare_transfer.py"), "--help"],
    "python bench/compare_two_nodes.py": [sys.executable, str(ROOT / "bench/compare_two_nodes.py"), "--help"],
    "python bench/compare_tables.py": [sys.executable, str(ROOT / "bench/compare_tables.py"), "--help"],
    "python -m fastrt.ray": [sys.executable, "-m", "fastrt.ray", str(ROOT / "tests/migrating/programs/graphs.py")],
    "python bench/compare_programs.py": [sys.executable, str(ROOT / "bench/compare_programs.py"), "--help"],
    "python bench/compare_collective.py": [sys.executable, str(ROOT / "bench/compare_collective.py"), "--help"],
    "fastrt coordinator": ["fastrt", "coordinator", "--help"],
    "fastrt ps": ["fastrt", "ps", "scheduler", "--help"],
    "pip install": [sys.executable, "-m", "pip", "install", "--help"],
}


def blocks(language):
    fence = rf"^```{language}\n(.*?)^```"
    for page in PAGES:
        for number, block in enumerate(re.findall(fence, (ROOT / page).read_text(), re.M | re.S)):
            long = language == "python" and (libraries_of(block) or (number and page not in READ_FIRST))
            marks = [pytest.mark.long] if long else []
            yield pytest.param(block, id=f"{page}-{number}", marks=marks)


def libraries_of(program):
    return [name for name, line in LIBRARIES.items() if re.search(line, program, re.M)]


def commands():
    for param in blocks("console"):
        for line in param.values[0].splitlines():
            if line.startswith("$ "):
                yield pytest.param(line[2:].split("#")[0].strip(), id=line[2:])


@pytest.fixture
def cluster(monkeypatch, tmp_path_factory):
    """The cluster of docs/cluster.md, for programs that need one."""
    folder = tempfile.mkdtemp(prefix="frt-")  # sockets need short names
    monkeypatch.setenv("FASTRT_RUNTIME_DIR", folder)
    monkeypatch.setenv("FASTRT_OBJECT_STORE_MEMORY", "64MiB")

    def run(*words):
        result = subprocess.run(["fastrt", *words], capture_output=True, text=True, timeout=50)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    started = []

    def start():
        started.append(True)
        head = re.search(r"--address (\S+)", run("start", "--head", "--port", "0", "--num-workers", "0", "--detach"))[1]
        run("start", "--address", head, "--num-workers", "2", "--detach")
        assert f"the head of the cluster at {head}" in run("status")

    yield start
    if started:
        run("stop")
    shutil.rmtree(folder)


@pytest.mark.parametrize("program", list(blocks("python")))
def test_program_of_the_pages_runs(program, tmp_path, cluster, monkeypatch):
    for library in libraries_of(program):
        if library == "jax" and JAX_PYTHON.exists():
            monkeypatch.setenv("JAX_PYTHON", str(JAX_PYTHON))
        else:
            pytest.importorskip(library, reason=f"{library} is not installed: `make check` installs it")
    if NEEDS_A_CLUSTER in program:
        cluster()
    path = tmp_path / "example.py"
    path.write_text(program)
    result = subprocess.run([sys.executable, path], cwd=tmp_path, capture_output=True, text=True, timeout=50)
    assert result.returncode == 0, result.stderr
    # A comment behind a print is what it prints.
    expected = re.findall(r"^ *print\(.*\)\s+#\s+(.+)$", program, re.M)
    assert [line for line in result.stdout.splitlines() if line in expected] == expected


PRINTS = """
import fastrt

with fastrt.init(num_workers=1, object_store_memory="64MiB"):
    fastrt.get(fastrt.remote(print).remote("a line for the logs"))
"""


@pytest.mark.timeout(150)
@pytest.mark.parametrize("command", list(commands()))
def test_command_of_the_pages_works(command, tmp_path):
    words = command.split()
    if words[0] == "make":
        words = ["make", "-n", "-C", str(ROOT), *words[1:]]  # the target exists; running it here would not end
        run_once(*words)
        return
    for start, call in INSTEAD.items():
        if command.startswith(start):
            run_once(*call)
            return
    if command.startswith("fastrt logs"):
        run_once(sys.executable, "-c", PRINTS)
    run(words, tmp_path)


def run(words, cwd):
    assert shutil.which(words[0]), f"{words[0]} is not a command here"
    result = subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=140)
    assert result.returncode == 0, result.stdout + result.stderr


@functools.cache
def run_once(*words):
    """What only shows that a command exists, of all those that it stands for."""
    run(words, ROOT)


def test_other_pages_have_tests_that_run_them():
    for page, test in ELSEWHERE.items():
        assert page in (ROOT / test).read_text()


def test_make_alone_lists_every_target():
    listed = subprocess.run(["make", "-s", "-C", str(ROOT)], capture_output=True, text=True, check=True).stdout
    targets = re.search(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.M)[1].split()
    assert len(targets) <= 12  # as many as one sees at a glance: a further one has to replace one of them
    assert re.findall(r"make (\w+) ", listed) == targets


def test_import_order_of_the_architecture_page_is_the_one_that_is_checked():
    tidy = ast.parse((ROOT / "tests/test_tidy.py").read_text())
    orders = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in tidy.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") in ("LAYERS", "CORE_LAYERS")
    }
    text = (ROOT / "docs/architecture.md").read_text()
    shown = [" ".join(block.split()) for block in re.findall(r"^```text\n(.*?)^```", text, re.M | re.S)]
    assert shown == [orders["LAYERS"], orders["CORE_LAYERS"]]


def test_every_page_is_in_the_index():
    index = (ROOT / "docs/README.md").read_text()
    pages = [str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")]
    assert [page for page in pages if page != "README.md" and f"]({page})" not in index] == []


def test_files_that_the_guides_for_contributors_name_exist():
    places = ("", "src/fastrt/", "tests/", "tests/crash/", "tests/fuzz/")
    missing = []
    for page in ("CONTRIBUTING.md", "docs/architecture.md"):
        text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.M | re.S)
        names = re.findall(r"`([\w./*]*/[\w.*]+\.(?:py|pyx|pxd|h|md|proto)|(?:src|tests|docs|protos)/[\w/]*)`", text)
        missing += [f"{page}: {name}" for name in names if not any(list(ROOT.glob(place + name)) for place in places)]
    assert missing == []
