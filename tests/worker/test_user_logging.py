"""The setting `logging`: what the module `logging` does in workers and actors."""

import json
import logging
import os

import pytest

import fastrt
from fastrt.node.log_files import find_folders
from fastrt.observe import log_files

LOG = logging.getLogger("app.part")


@fastrt.remote
def work():
    LOG.debug("detail %d", 7)
    LOG.info("done")
    try:
        raise KeyError("gone")
    except KeyError:
        LOG.exception("failed")
    return fastrt.get_runtime_context().get_task_id()


@fastrt.remote
class Speaker:
    def __init__(self):
        LOG.info("made")

    def speak(self):
        LOG.warning("called")


@pytest.fixture
def lines(runtime_dir):
    """Run a task and an actor with a setting; returns what the task returned, and the lines of both."""

    def run(setting):
        with fastrt.init(1, "64MiB", log_to_driver=False, runtime_dir=runtime_dir, logging=setting) as runtime:
            task = fastrt.get(work.remote())
            speaker = Speaker.options(name="bob").remote()
            fastrt.get(speaker.speak.remote())
            del speaker
        found = [one for one in find_folders(runtime_dir) if one.session == runtime.session]  # none without output
        return task, [line.text for folder in found for line in log_files.read(folder.path).lines]

    return run


def test_level_by_name_applies_in_tasks_and_actors_before_their_code(lines):
    _, found = lines("DEBUG")
    wanted = ["DEBUG app.part: detail 7", "INFO app.part: done", "INFO app.part: made", "WARNING app.part: called"]
    assert [line for line in found if line in wanted] == wanted
    assert not [line for line in lines(logging.ERROR)[1] if "done" in line or "called" in line]


def test_json_writes_an_object_a_line_with_task_and_node(lines):
    task, found = lines("json")
    rows = {row["message"]: row for row in map(json.loads, found)}
    assert set(rows) == {"done", "failed", "made", "called"}
    assert {rows["done"][key] for key in ("level", "logger", "name", "task_id", "node")} == {
        "INFO", "app.part", "work", task, os.uname().nodename
    }  # fmt: skip
    assert rows["failed"]["exception"].endswith("KeyError: 'gone'")
    assert (rows["called"]["actor"], rows["called"]["name"]) == ("bob", "Speaker")


def test_dictionary_is_applied_by_dict_config(lines, tmp_path):
    setting = {
        "version": 1,
        "formatters": {"short": {"format": "<%(message)s>"}},
        "handlers": {"file": {"class": "logging.FileHandler", "filename": str(tmp_path / "log"), "formatter": "short"}},
        "loggers": {"app": {"level": "INFO", "handlers": ["file"]}},
    }
    lines(setting)
    assert {"<done>", "<made>", "<called>"} <= set((tmp_path / "log").read_text().splitlines())


def test_dictionary_that_fails_in_a_worker_is_reported_and_the_task_runs(lines, tmp_path):
    handler = {"class": "logging.FileHandler", "filename": str(tmp_path / "none" / "log")}
    task, found = lines({"version": 1, "handlers": {"file": handler}})
    assert task is not None
    assert "fastrt: the setting logging could not be applied in a worker:" in found
