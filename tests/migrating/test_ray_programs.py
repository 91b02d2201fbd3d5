"""Programs written for Ray: they print the same on fastrt by `python -m fastrt.ray`, and on Ray."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fastrt
from support.on_ray import needs_ray
from support.ray_env import python_with_ray

PROGRAMS = Path(__file__).parent / "programs"
BOTH = ["ids", "errors", "results", "actors", "graphs", "tools"]
# Ray answers the state API by its dashboard only, which needs more packages than ray_env.py installs.
OURS = ["listings"]


def expected(name):
    text = (PROGRAMS / f"{name}.py").read_text()
    return re.sub(r"^# ?", "", text.partition("# prints:\n")[2], flags=re.M)


def parts_of(said):
    """Split an output into the texts that each program printed, by its name."""
    found = re.split(r"^== (\w+).*\n", said, flags=re.M)
    return dict(zip(found[1::2], found[2::2], strict=True))


def run(command, timeout, **env):
    env = {**os.environ, "PYTHONPATH": str(Path(fastrt.__file__).parents[1]), **env}
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_programs_print_what_they_say_on_fastrt(runtime_dir):
    names = BOTH + OURS
    command = [sys.executable, "-m", "fastrt.ray", PROGRAMS / "all_programs.py", *names]
    said = run(command, 50, FASTRT_RUNTIME_DIR=str(runtime_dir), FASTRT_OBJECT_STORE_MEMORY="256MiB")
    parts = parts_of(said)
    assert parts.pop("end") == "False\n"
    assert parts == {name: expected(name) for name in names}
    assert all(parts.values())
    assert "'node_id', 'node_ip_address', 'session_dir'" in said


@needs_ray
@pytest.mark.long
@pytest.mark.timeout(240)
def test_programs_print_the_same_on_ray():
    # `init` starts a cluster of its own, whether or not another test has one at the moment.
    env = {"PYTHONPATH": "", "PYTHONWARNINGS": "ignore", "RAY_AUTH_MODE": "disabled", "RAY_ADDRESS": "local"}
    parts = parts_of(run([python_with_ray(), PROGRAMS / "all_programs.py", *BOTH], 230, **env))
    assert parts.pop("end") == "False\n"
    assert parts == {name: expected(name) for name in BOTH}


def test_unmodified_program_and_its_modules_and_workers_import_ray(tmp_path, runtime_dir):
    """Also by an import inside a task, in a module beside the program, and in a child process."""
    (tmp_path / "beside.py").write_text(
        "import ray\nfrom ray.util.queue import Queue\n\n@ray.remote\ndef helper(x):\n    import ray as again\n"
        "    return again is ray, Queue.__name__, ray.get_runtime_context().get_task_name(), x\n"
    )
    (tmp_path / "program.py").write_text(
        "import subprocess, sys\nimport beside\nimport ray\n\n"
        "@ray.remote\ndef task():\n    from ray.util.placement_group import placement_group\n"
        "    return callable(placement_group), ray.get(beside.helper.remote(1))\n\n"
        "if __name__ == '__main__':\n"
        "    with ray.init(num_cpus=1, _metrics_export_port=1) as context:\n"
        "        print(sys.argv[1:], ray.get(task.remote()), callable(ray.util.placement_group))\n"
        "        print(context['node_id'] == ray.get_runtime_context().get_node_id())\n"
        "    print(subprocess.check_output([sys.executable, '-c', 'import ray; print(ray.__name__)'], text=True))\n"
    )
    env = {"FASTRT_RUNTIME_DIR": str(runtime_dir), "FASTRT_OBJECT_STORE_MEMORY": "64MiB"}
    said = run([sys.executable, "-m", "fastrt.ray", tmp_path / "program.py", "a", "--b"], 50, **env)
    assert said.splitlines()[0] == "['a', '--b'] (True, (True, 'Queue', 'helper', 1)) True"
    assert said.splitlines()[1:3] == ["True", "fastrt.ray"]
    (tmp_path / "named.py").write_text("import sys, ray\nprint(__name__, sys.argv[1:], ray.__name__)\n")
    path = os.pathsep.join([str(tmp_path), str(Path(fastrt.__file__).parents[1])])
    said = run([sys.executable, "-m", "fastrt.ray", "-m", "named", "x"], 50, PYTHONPATH=path)
    assert said == "__main__ ['x'] fastrt.ray\n"
    said = run(
        [sys.executable, "-m", "fastrt.ray", "-c", "import sys, ray\nprint(__name__, sys.argv, ray.__name__)", "y"], 50
    )
    assert said == "__main__ ['-c', 'y'] fastrt.ray\n"


@pytest.mark.parametrize(
    ("words", "code", "first"),
    [
        ([], 2, "usage: python -m fastrt.ray PROGRAM.py [ARGUMENTS]"),
        (["-x"], 2, "usage: python -m fastrt.ray PROGRAM.py [ARGUMENTS]"),
        (["--help"], 0, "usage: python -m fastrt.ray PROGRAM.py [ARGUMENTS]"),
        (["nowhere.py"], 2, "python -m fastrt.ray: there is no file 'nowhere.py'"),
    ],
)
def test_command_without_a_program_says_how_it_is_called(words, code, first):
    done = subprocess.run([sys.executable, "-m", "fastrt.ray", *words], capture_output=True, text=True, timeout=50)
    assert (done.returncode, (done.stderr or done.stdout).splitlines()[0]) == (code, first)
