"""What tasks and actors print on other nodes reaches the driver, with the node's name; a driver can switch it off."""

import pytest

from support.cluster import two_nodes

SPEAK = """
import os, sys, fastrt

@fastrt.remote
def speak(k):
    print("said", k)
    print("complained", k, file=sys.stderr)

@fastrt.remote
def nested():
    return fastrt.get(speak.options(scheduling="two").remote("inside"))

@fastrt.remote
class Speaker:
    def speak(self):
        print("called")

with fastrt.init(address="auto", log_to_driver=LOGS):
    fastrt.get(speak.options(scheduling="two").remote("directly"))
    fastrt.get(nested.options(scheduling="two").remote())
    speaker = Speaker.options(scheduling="two").remote()
    fastrt.get(speaker.speak.remote())
    fastrt.get(speak.options(scheduling="one").remote("here"))
"""


@pytest.fixture(scope="module")
def nodes(runtime_dir):
    with two_nodes(runtime_dir, 2) as both:
        yield both


def said(text):
    """The lines of tasks, without the numbers of their processes."""
    lines = [line.split(" pid=")[0] + line.lstrip("(").partition(" ")[2].lstrip("pid=0123456789") for line in text]
    return sorted(line for line in lines if line.startswith("("))


def test_output_of_tasks_and_actors_on_another_node_reaches_the_driver(program, nodes):
    out, err = program(SPEAK.replace("LOGS", "True")).finish()
    assert said(out.splitlines()) == [
        "(Speaker, node=two) called", "(speak) said here", "(speak, node=two) said directly",
        "(speak, node=two) said inside",
    ]  # fmt: skip
    assert said(err.splitlines()) == [
        "(speak) complained here", "(speak, node=two) complained directly", "(speak, node=two) complained inside"
    ]  # fmt: skip


BORROWS = """
import fastrt, os, threading

@fastrt.remote
def nap():
    threading.Event().wait(0.2)
    return fastrt.get_runtime_context().get_node_id()

with fastrt.init(address=ADDRESS, log_to_driver=False):
    ran = set()
    while len(ran) < 2:  # until its node has forwarded some
        ran |= set(fastrt.get([nap.remote() for _ in range(8)]))
    print("forwarded", flush=True)
    while not os.path.exists(PATH):
        threading.Event().wait(0.02)
"""

HOLDS = """
import fastrt, os, threading

@fastrt.remote
def hold(path):
    print("holds", flush=True)
    open(path + ".begun", "w").close()
    while not os.path.exists(path):
        threading.Event().wait(0.02)
    return "held"

with fastrt.init(address=ADDRESS):
    print("got", fastrt.get(hold.options(scheduling="two").remote(PATH)))
"""


def test_task_of_another_node_outlives_the_drivers_of_the_node_that_runs_it(program, nodes, tmp_path, wait_until):
    """Its output reaches its own driver. Before, it belonged to the driver whose task the node had forwarded last."""
    one, two = (repr(str(node.note.socket_path)) for node in nodes)
    leave, end = tmp_path / "leave", tmp_path / "end"
    other = program(BORROWS.replace("ADDRESS", two).replace("PATH", repr(str(leave))))
    other.wait_for_line("forwarded")
    driver = program(HOLDS.replace("ADDRESS", one).replace("PATH", repr(str(end))))
    wait_until((tmp_path / "end.begun").exists, "the task to begin")
    leave.touch()
    other.finish()
    end.touch()
    out, _ = driver.finish()
    assert out.splitlines()[-1] == "got held"
    assert said(out.splitlines()) == ["(hold, node=two) holds"]


PRINTS = """
import fastrt, os, threading

@fastrt.remote
def say(what):
    print(what)

@fastrt.remote
def nested():
    fastrt.get(say.options(scheduling="two").remote("nested"))

@fastrt.remote
def back():
    fastrt.get(say.options(scheduling="one").remote("there and back"))

@fastrt.remote
class Built:
    def __init__(self):
        print("built")
        fastrt.get(say.options(scheduling="two").remote("by the constructor"))

    def call(self):
        print("called")

def until(path):
    while not os.path.exists(path):
        threading.Event().wait(0.02)

with fastrt.init(address="auto"):
    if OTHERS:
        print("waits", flush=True)
        until(PATH)
        fastrt.get([say.options(scheduling=node).remote("mine") for node in ("one", "two")])
        print("got", flush=True)
    else:
        fastrt.get([say.options(scheduling="two").remote("direct"), nested.options(scheduling="two").remote()])
        built = Built.options(scheduling="two").remote()
        fastrt.get(built.call.remote())
        fastrt.get([say.options(scheduling="one").remote("here"), back.options(scheduling="two").remote()])
        if os.fork() == 0:
            fastrt.get(say.options(scheduling="one").remote("of a child"))
            os._exit(0)
    until(PATH)
"""


def test_driver_shows_no_output_of_another_drivers_tasks_on_any_node(program, nodes, tmp_path):
    path = tmp_path / "go"
    text = PRINTS.replace("PATH", repr(str(path)))
    other = program(text.replace("OTHERS", "True"))
    other.wait_for_line("waits")
    driver = program(text.replace("OTHERS", "False"))
    lines = [driver.wait_for_line("(").rstrip() for _ in range(8)]
    path.touch()
    assert said(lines) == [
        "(Built, node=two) built", "(Built, node=two) called", "(say) here", "(say) of a child",
        "(say) there and back", "(say, node=two) by the constructor", "(say, node=two) direct",
        "(say, node=two) nested",
    ]  # fmt: skip
    driver.finish()
    out, err = other.finish()
    assert (said(out.splitlines()), err) == (["(say) mine", "(say, node=two) mine"], "")


def test_driver_that_switches_output_off_shows_none(program, nodes):
    out, err = program(SPEAK.replace("LOGS", "False")).finish()
    assert (out, err) == ("", "")
