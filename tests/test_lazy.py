"""Names that are imported at their first use, and the modules that `import fastrt` does and does not load."""

import ast
import importlib
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import fastrt
from fastrt import lazy

PACKAGES = ("fastrt", "fastrt.util", "fastrt.membership", "fastrt.scheduler")
# Modules of fastrt and of the standard library that `import fastrt` loads beside those of an empty program.
MODULES_MAX = 40
# Never loaded by `import fastrt`, and what they would cost. A name ends at a dot: the modules below it count, too.
NOT_LOADED = (
    *("asyncio", "click", "cloudpickle", "concurrent", "cryptography", "ctypes", "dataclasses", "google", "grpc"),
    *("hashlib", "inspect", "json", "logging", "multiprocessing", "numpy", "pickle", "posix_ipc", "psutil", "rich"),
    *("socket", "ssl", "subprocess", "threadpoolctl", "threading"),
    *("fastrt._core", "fastrt.config", "fastrt.node", "fastrt.runtime", "fastrt.store", "fastrt.tasks"),
)
# A program that runs tasks needs no more of what is not fastrt's than before.
RUNNING_NOT_LOADED = ("asyncio", "click", "cryptography", "google", "grpc", "multiprocessing", "numpy", "rich", "ssl")


def loaded_by(code):
    """The modules that a fresh interpreter loads for some code, beside those of an empty program."""
    lists = [
        subprocess.run(
            [sys.executable, "-c", f"{words}\nimport sys\nprint(*sys.modules)"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for words in ("pass", code)
    ]
    return set(lists[1]) - set(lists[0])


def among(names, loaded):
    return sorted(name for name in loaded if any(name == one or name.startswith(one + ".") for one in names))


def test_import_loads_few_modules():
    loaded = loaded_by("import fastrt")
    assert among(NOT_LOADED, loaded) == []
    assert among(["fastrt"], loaded) == ["fastrt", "fastrt.lazy"]
    assert len(loaded) < MODULES_MAX, sorted(loaded)


def test_driver_loads_no_packages_of_services():
    loaded = loaded_by("import fastrt\nfastrt.init, fastrt.get, fastrt.remote, fastrt.ObjectRef, fastrt.TaskError")
    assert "fastrt.runtime.driver" in loaded
    assert among(RUNNING_NOT_LOADED, loaded) == []


def test_daemon_loads_no_plans_of_tasks_and_actors():
    loaded = loaded_by("import fastrt.node.__main__, fastrt.node.daemon")
    assert "fastrt.node.actors" in loaded
    assert among(("fastrt.tasks.actor_handle", "fastrt.tasks.method", "fastrt.tasks.options"), loaded) == []
    assert among(RUNNING_NOT_LOADED, loaded) == []


def test_worker_has_what_tasks_use_from_the_start(rt):
    @fastrt.remote
    def loads():
        before = set(sys.modules)
        left = "fastrt.runtime", "fastrt.observe", "fastrt.util"  # for sessions and listings
        assert "fastrt.runtime.driver" in before
        names = [name for home, some in fastrt._HOMES.items() if not home.startswith(left) for name in some.split()]
        for name in names:
            getattr(fastrt, name)
        return len(names), sorted(set(sys.modules) - before)

    count, loaded = fastrt.get(loads.remote())
    assert count > 40
    assert loaded == []


@pytest.mark.parametrize(
    "code",
    [
        "import fastrt; print(fastrt.get(fastrt.put(1)))",
        pytest.param("from fastrt import put, get; print(get(put(1)))", marks=pytest.mark.long),
        "from fastrt.util import Pool; print(Pool(1).apply(abs, (-1,)))",
        "from fastrt.util.queue import Queue; q = Queue(); q.put(1); print(q.get())",
        "from fastrt.actor import ActorClass; import builtins; print(ActorClass(complex).remote(1).__class__ and 1)",
    ],
)
def test_first_name_that_is_used_starts_a_session_which_ends_with_the_program(code, runtime_dir, wait_until):
    settings = {"RUNTIME_DIR": str(runtime_dir), "NUM_WORKERS": "1", "OBJECT_STORE_MEMORY": "64MiB"}
    env = {**os.environ, **{f"FASTRT_{name}": value for name, value in settings.items()}}
    before = set(runtime_dir.rglob("node.sock"))  # of another test's session
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert (done.stdout, done.stderr, done.returncode) == ("1\n", "", 0)
    wait_until(lambda: set(runtime_dir.rglob("node.sock")) == before, "the session has ended, too")


@pytest.mark.parametrize("name", PACKAGES)
def test_lazy_names_are_those_for_type_checkers(name):
    package = importlib.import_module(name)
    tree = ast.parse(Path(package.__file__).read_text())
    (checked,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    declared = {(node.module, alias.name) for node in checked.body for alias in node.names}
    homes = {
        pair
        for module, names in package._HOMES.items()
        for pair in [(module, one) for one in names.split()] or [tuple(module.rsplit(".", 1))]
    }
    assert homes == declared


@pytest.mark.parametrize("name", PACKAGES)
def test_every_public_name_can_be_read_and_is_listed(name):
    package = importlib.import_module(name)
    assert set(package.__all__) <= set(dir(package))
    for one in package.__all__:
        assert getattr(package, one) is vars(package)[one]  # read at once from now on


def test_wrong_name_is_refused_with_the_nearest_one():
    with pytest.raises(AttributeError, match=r"module 'fastrt' has no attribute 'remot'") as caught:
        fastrt.remot  # noqa: B018
    assert (caught.value.name, caught.value.obj) == ("remot", fastrt)
    with pytest.raises(ImportError, match="cannot import name 'remot'"):
        from fastrt import remot  # noqa: F401


def test_module_that_cannot_be_imported_says_why(monkeypatch):
    read, _ = lazy.attach("fastrt", {"fastrt.absent": "name"})
    with pytest.raises(ModuleNotFoundError, match=r"fastrt\.absent"):
        read("name")


def test_star_import_brings_every_public_name():
    names = {}
    exec("from fastrt import *", names)  # noqa: S102
    assert set(fastrt.__all__) <= names.keys()
    assert pickle.loads(pickle.dumps(names["get"])) is fastrt.get
