"""Programs written for Ray: each runs, with its own check, under fastrt and under Ray, and says the same."""

import importlib.util
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import cloudpickle
import pytest

import fastrt
from fastrt._core.memory.clients import KIND_WORKER, table
from fastrt._core.objects.functions import function_name
from fastrt._core.tasks import actors, tally
from fastrt.store import client as store_client
from support.on_ray import needs_ray, on_ray
from support.ray_env import python_with_ray

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SMALL = {
    "parameter_search": 1,
    "word_shuffle": 4,
    "file_crawler": 60,
    "parameter_server_actor": 25,
    "tree_reduction": 13,
    "actor_pipeline": 20,
    "matrix_blocks": 3,
}
LARGE = {name: size * 8 for name, size in SMALL.items()} | {"parameter_server_actor": 120, "actor_pipeline": 300}
# Tasks run again wherever they were; the players' actors are started again, and so are their calls.
SURVIVE = ["parameter_search", "word_shuffle", "tree_reduction", "parameter_server_actor"]


def load(name):
    """An example as a module, which travels to workers by value, as it does when it is the program."""
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    cloudpickle.register_pickle_by_value(module)
    return module


@pytest.fixture
def example(request):
    module = load(request.param)
    yield module
    cloudpickle.unregister_pickle_by_value(module)
    del sys.modules[module.__name__]


@pytest.mark.usefixtures("rt")
@pytest.mark.parametrize(("example", "name"), [(name, name) for name in SMALL], indirect=["example"])
def test_program_finds_what_it_should(example, name):
    example.check(example.main(fastrt, SMALL[name]), SMALL[name])


def test_program_runs_from_its_file_with_a_switch():
    said = run(sys.executable, "tree_reduction", "--engine", "local", "--size", "5")
    assert said.startswith("[49995000, [0, 1, 2,")


def run(python, name, *options, **env):
    command = [python, EXAMPLES / f"{name}.py", *options]
    path = os.pathsep.join([str(Path(fastrt.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "FASTRT_OBJECT_STORE_MEMORY": "256MiB", **env}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[0]


@needs_ray
@pytest.mark.long
@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", SMALL)
def test_program_says_the_same_on_ray(name, runtime_dir):
    """On Ray itself, and by fastrt's functions on Ray."""
    assert python_with_ray()
    size = ["--size", str(SMALL[name])]
    ours = run(sys.executable, name, *size, FASTRT_RUNTIME_DIR=str(runtime_dir))
    program = [EXAMPLES / f"{name}.py", "--address", "ADDRESS", *size, "--engine"]
    said = on_ray(*program, "ray-itself", "+", *program, "ray").splitlines()
    assert [line for line in said if line.startswith("[")] == [ours, ours]


class Killer:
    """Kills a worker, or the process of an actor of some class, now and then, if a task has succeeded since the last.

    On a busy machine all would else be killed before they have begun, and the program would make no progress.
    """

    def __init__(self, cls):
        self._cls = cls
        self._stop = threading.Event()
        self._random = random.Random(7)
        self._thread = threading.Thread(target=self._run)
        self.killed = 0

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *exc_info):
        self._stop.set()
        self._thread.join()

    def _victims(self):
        client = store_client.require().client
        pids = [row["pid"] for row in table(client.segment) if row["kind"] == KIND_WORKER]
        for index in range(16 if self._cls else 0):
            try:
                about = actors.info(client, index)
            except IndexError:
                break
            if about["pid"] and function_name(client, about["function"]) == self._cls:
                pids.append(about["pid"])
        return pids

    def _run(self):
        before = -1
        while not self._stop.wait(self._random.uniform(0.03, 0.12)):
            succeeded = sum(row[-1][0] for row in tally.outcomes(store_client.require().client))
            pids = self._victims() if succeeded != before else []
            if pids:
                try:
                    os.kill(self._random.choice(pids), signal.SIGKILL)
                except ProcessLookupError:
                    continue
                self.killed += 1
                before = succeeded


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("example", "name"), [(name, name) for name in SURVIVE], indirect=["example"])
def test_program_finds_the_same_while_workers_are_killed(example, name, runtime_dir):
    """Until ten of them have been, over as many runs as that takes."""
    with (
        fastrt.init(2, "256MiB", runtime_dir=runtime_dir, spill_dir=runtime_dir.parent / "spill"),
        Killer("Player" if name == "parameter_server_actor" else None) as killer,  # of all runs: some take 50 ms only
    ):
        while killer.killed < 10:
            example.check(example.main(Retrying, LARGE[name]), LARGE[name])


class Retrying:
    """fastrt with tasks that are retried as often as they may be, as killing many needs it; players start again."""

    put, get, wait = staticmethod(fastrt.put), staticmethod(fastrt.get), staticmethod(fastrt.wait)

    @staticmethod
    def remote(target=None, **options):
        if target is None:
            return lambda target: fastrt.remote(max_retries=250, **options)(target)
        if isinstance(target, type):
            again = {"max_restarts": -1, "max_task_retries": -1} if target.__name__ == "Player" else {}
            return fastrt.remote(**again)(target) if again else fastrt.remote(target)
        return fastrt.remote(max_retries=250)(target)
