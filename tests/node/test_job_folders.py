"""Programs that use a node that runs already: its workers find the modules beside the program's script."""

import os
import subprocess
import sys
import textwrap

import pytest

from support.cluster import RunningNode, two_nodes

HELPER = """
    class Odd(Exception):
        pass

    class Point:
        def __init__(self, x):
            self.x = x

    def begin():
        import os

        os.environ["BEGUN"] = str(NUMBER)

    class Counter:
        def add(self, point):
            import helper

            return helper.NUMBER + point.x

    NUMBER = 7

    def number(point=None):
        return NUMBER if point is None else point.x

    def nested():
        import fastrt

        far = {"num_cpus": 0, "resources": {"far": 0.1}}
        return fastrt.get(fastrt.remote(number).options(**far).remote(Point(3)))
"""
PROGRAM = """
    import os, sys
    import fastrt

    sys.path.append(os.path.abspath("elsewhere"))
    os.makedirs("current")
    os.chdir("current")
    for folder, name in ((".", "of_current"), ("../elsewhere", "of_elsewhere")):
        os.makedirs(folder, exist_ok=True)
        with open(f"{folder}/{name}.py", "w") as file:
            file.write("VALUE = 5")
    sys.path.append(os.getcwd())
    import helper, of_elsewhere
    fastrt.init(address="auto")

    def lazy(name="helper"):
        __import__(name)
        return sys.path[-2:]

    def get(code, *args, **options):
        return fastrt.get(fastrt.remote(code).options(**options).remote(*args))

    def raises(times=[]):
        times.append(1)
        raise helper.Odd if len(times) == 1 else KeyError

    class OfMain(Exception):
        pass

    class Again:
        times = 0

        @fastrt.method(retry_exceptions=[helper.Odd, OfMain], max_task_retries=1)
        def raises(self):
            self.times += 1
            if self.times == 1:
                raise helper.Odd
            return self.times, os.environ.get("BEGUN")

    hook = {"worker_process_setup_hook": "helper.begin"}
    far = {"num_cpus": 0, "resources": {"far": 0.1}}
    for where in ({}, far):
        again = fastrt.remote(Again).options(runtime_env=hook if not where else None, **where).remote()
        assert fastrt.get(again.raises.remote())[0] == 2
        for times, caller in ((3, {"num_cpus": 0}), (4, far)):
            asks = fastrt.remote(lambda actor: fastrt.get(actor.raises.remote())).options(**caller)
            assert fastrt.get(asks.remote(again)) == (times, None if where else "7")
        assert get(helper.number, **where) == 7
        assert get(helper.number, helper.Point(2), **where) == 2
        for _ in range(3):
            assert get(helper.number, runtime_env={"env_vars": {"A": "b"}}, **where) == 7
            assert get(lazy, runtime_env={"env_vars": {"A": "b"}}, **where) == [sys.path[0], os.getcwd()]
        assert get(lazy, **where) == [sys.path[0], os.getcwd()]
        get(lazy, "of_current", **where)
        actor = fastrt.remote(helper.Counter).options(**where).remote()
        assert fastrt.get(actor.add.remote(helper.Point(1))) == 8
        try:
            get(raises, retry_exceptions=[helper.Odd], **where)
        except KeyError:
            print("raised again")
        try:
            get(lazy, "of_elsewhere", **where)
        except ModuleNotFoundError:
            print("not found")
    assert get(helper.nested, num_cpus=0) == 3
    print("all found")
"""
# Calls its module until the other program has begun, too, and some more.
SHARES = """
    import os, sys
    import fastrt, helper, of_node

    fastrt.init(address="auto")
    folder = os.path.dirname(sys.path[0])
    open(f"{sys.path[0]}/begun", "w").close()
    more = 50
    while more:
        assert fastrt.get(fastrt.remote(helper.who).remote()) == os.environ["WHO"]
        assert fastrt.get(fastrt.remote(lambda: __import__("helper").who()).remote()) == os.environ["WHO"]
        assert fastrt.get(fastrt.remote(of_node.asks).remote()) == os.environ["WHO"]
        more -= all(os.path.exists(f"{folder}/{name}/begun") for name in "ab")
    print("mine only")
"""
OF_NODE = """
    import fastrt

    @fastrt.remote
    def who():
        import helper

        return helper.who()

    def asks():
        return fastrt.get(who.remote())
"""
OF_RAY = """
    import os
    import helper, ray
    from ray.cluster_utils import Cluster

    os.chdir("/")
    cluster = Cluster()
    cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address)
    actor = ray.remote(helper.Counter).remote()
    print("found", (ray.get(ray.remote(helper.number).remote()), ray.get(actor.add.remote(helper.Point(1)))))
    ray.shutdown()
    cluster.shutdown()
"""


@pytest.fixture
def start(runtime_dir, tmp_path):
    """Start a script in a folder of its own with a module `helper` beside it."""
    started = []

    def make(name, code, helper, *words, **env):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "helper.py").write_text(textwrap.dedent(helper))
        (folder / "driver.py").write_text(textwrap.dedent(code))
        env = {**os.environ, "FASTRT_RUNTIME_DIR": str(runtime_dir), "FASTRT_SPILL_DIR": str(tmp_path / "spill"), **env}
        command = [sys.executable, *words, str(folder / "driver.py")]
        out, err = subprocess.PIPE, subprocess.STDOUT
        started.append(subprocess.Popen(command, stdout=out, stderr=err, text=True, cwd=tmp_path, env=env))
        return started[-1]

    yield make
    for one in started:
        one.kill()
        one.communicate()


def test_workers_of_nodes_that_run_already_find_modules_of_the_script_and_its_current_folder(runtime_dir, start):
    with two_nodes(runtime_dir, 1, "--resources", '{"far": 1}'):
        out = start("program", PROGRAM, HELPER).communicate(timeout=100)[0]
    assert [out.count(line) for line in ("not found", "raised again", "all found")] == [2, 2, 1], out


def test_programs_that_share_a_worker_find_their_own_modules_and_those_that_were_changed_since(
    runtime_dir, start, tmp_path, monkeypatch
):
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "of_node.py").write_text(textwrap.dedent(OF_NODE))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "library"), prepend=os.pathsep)
    node = RunningNode(runtime_dir, "--head", "--port", "0", "--num-workers", "1")
    try:
        helper = "def who(): return '{}'"
        both = [start(name, SHARES, helper.format(name), WHO=name) for name in "ab"]
        for one in both:
            assert "mine only" in (out := one.communicate(timeout=100)[0]), out
        again = start("a", SHARES, helper.format("changed"), WHO="changed")
        assert "mine only" in (out := again.communicate(timeout=100)[0]), out
    finally:
        node.stop()


def test_nodes_of_cluster_utils_find_modules_of_the_script(start):
    out = start("of_ray", OF_RAY, HELPER, "-m", "fastrt.ray").communicate(timeout=100)[0]
    assert "found (7, 8)" in out, out
