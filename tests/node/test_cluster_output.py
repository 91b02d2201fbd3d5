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


def test_driver_that_switches_output_off_shows_none(program, nodes):
    out, err = program(SPEAK.replace("LOGS", "False")).finish()
    assert (out, err) == ("", "")
