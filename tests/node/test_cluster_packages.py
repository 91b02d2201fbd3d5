"""Files of a runtime_env in a cluster: other nodes get them from the node that has them."""

import os
import stat
from pathlib import Path

import pytest

import fastrt
from fastrt.errors import ConfigError, TaskError
from support.cluster import two_nodes

PATIENCE_S = 30.0


@pytest.fixture(scope="module")
def nodes(runtime_dir):
    with two_nodes(runtime_dir, 1, "--labels", "zone=there", of_head=("--labels", "zone=here")) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def rt(runtime_dir, nodes):
    with fastrt.init(address=nodes[0].head, runtime_dir=runtime_dir) as runtime:
        yield runtime


@pytest.fixture(autouse=True)
def both_nodes(rt, wait_until):
    wait_until(lambda: len(fastrt.nodes()) == 2, "both nodes", PATIENCE_S)


@pytest.fixture
def folders(tmp_path):
    desk, wares = tmp_path / "desk", tmp_path / "wares"
    for folder in (desk / "inner", desk / ".git", desk / "data", wares):
        folder.mkdir(parents=True)
    (desk / "inner" / "note.txt").write_text("a note")
    (desk / ".git" / "secret").write_text("x")
    (desk / "data" / "large.bin").write_text("x")
    (desk / "tool.sh").write_text("#!/bin/sh\necho tool")
    (desk / "tool.sh").chmod(0o755)
    (wares / "__init__.py").write_text("NAME = 'wares'")
    return desk, wares


def look():
    import wares

    files = sorted(str(path.relative_to(".")) for path in Path(".").rglob("*") if path.is_file())
    return os.getcwd(), wares.NAME, files, stat.S_IMODE(os.stat("tool.sh").st_mode)


@fastrt.remote(num_cpus=0)
def look_there():
    return look()


@fastrt.remote(num_cpus=0)
def look_from_there():
    return fastrt.get(look_there.options(label_selector={"zone": "here"}).remote())


@fastrt.remote
class Looking:
    def look(self):
        return look()


def test_files_are_carried_to_the_node_of_a_task_and_of_an_actor(rt, folders):
    desk, wares = folders
    env = {"working_dir": str(desk), "py_modules": [str(wares)], "excludes": ["data"]}
    expected = ["inner/note.txt", "tool.sh"]
    there = look_there.options(runtime_env=env, label_selector={"zone": "there"})
    cwd, name, files, mode = fastrt.get(there.remote(), timeout=PATIENCE_S)
    assert (name, files, mode) == ("wares", expected, 0o700)
    assert cwd != str(desk)
    here = look_there.options(runtime_env=env, label_selector={"zone": "here"})
    assert fastrt.get(here.remote(), timeout=PATIENCE_S)[0] == str(desk)  # no copy where the files are
    actor = Looking.options(runtime_env=env, label_selector={"zone": "there"}).remote()
    assert fastrt.get(actor.look.remote(), timeout=PATIENCE_S) == (cwd, name, files, mode)
    fastrt.kill(actor)


def test_files_that_are_gone_are_still_there_for_tasks_and_for_tasks_from_inside(rt, folders):
    desk, wares = folders
    env = {"working_dir": str(desk), "py_modules": [str(wares)], "excludes": ["data/*"]}
    there = look_from_there.options(runtime_env=env, label_selector={"zone": "there"})
    first = fastrt.get(there.remote(), timeout=PATIENCE_S)
    assert first[0] == str(desk)
    (desk / "tool.sh").unlink()
    desk.rename(desk.with_name("moved"))
    wares.rename(wares.with_name("away"))
    cwd, *rest = fastrt.get(there.remote(), timeout=PATIENCE_S)
    assert cwd != str(desk)
    assert rest == ["wares", ["inner/note.txt", "tool.sh"], 0o700]


def test_files_of_a_node_that_is_no_member_are_named(rt, folders):
    from fastrt.tasks.runtime_env import Environment, Package

    lost = Environment(working_dir="/not/there", packages=(Package("/not/there", "0" * 64, "f" * 32),))
    with pytest.raises((TaskError, ConfigError), match=r"/not/there of node f+ could not be got here: .*no member"):
        fastrt.get(look_there.options(runtime_env=lost).remote(), timeout=PATIENCE_S)
    unknown = Environment(working_dir="/not/there", packages=(Package("/not/there", "0" * 64, other_node()),))
    with pytest.raises((TaskError, ConfigError), match=r"could not be got here: .*No such file"):
        fastrt.get(
            look_there.options(runtime_env=unknown, label_selector={"zone": "here"}).remote(), timeout=PATIENCE_S
        )


def other_node():
    return next(node["NodeID"] for node in fastrt.nodes() if not node["IsHere"])
