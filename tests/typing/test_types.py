"""The types of the public API, as type checkers read them: `cases.py` says which lines are wrong."""

import importlib.util
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import typing
from pathlib import Path

import pytest

import fastrt
import fastrt.collective
import fastrt.ps
from fastrt.actor import Actor
from fastrt.tasks.actor_handle import ActorMethod

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CASES = HERE / "cases.py"
CHECKER_S = 300  # the first run reads all of fastrt and NumPy


def check(found, output, mark):
    """Compare the lines that a checker reports with those that have a mark."""
    lines = CASES.read_text().splitlines()
    marked = {number for number, line in enumerate(lines, 1) if re.search(mark, line)}
    assert len(marked) > 100
    assert sum("assert_type(" in line for line in lines) > 200
    missed = [f"{number}: {lines[number - 1]}" for number in sorted(marked - found)]
    assert (missed, found - marked) == ([], set()), output


def run(*command):
    environment = {**os.environ, "MYPYPATH": str(ROOT / "src")}
    return subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, cwd=ROOT, env=environment, timeout=CHECKER_S
    )


@pytest.mark.timeout(CHECKER_S)
def test_mypy_reports_the_wrong_lines_only():
    pytest.importorskip("mypy")
    result = run("mypy", "--no-error-summary", "--hide-error-context", str(CASES))
    found = re.findall(r"^(\S+?):(\d+): error: ", result.stdout, re.M)
    assert {Path(path).name for path, _ in found} == {CASES.name}, result.stdout + result.stderr
    check({int(line) for _, line in found}, result.stdout, "  # wrong: ")


@pytest.mark.long  # mypy reads the same cases in every run
@pytest.mark.timeout(CHECKER_S)
@pytest.mark.skipif(not importlib.util.find_spec("pyright"), reason="pyright is not installed")
def test_pyright_reports_the_wrong_lines_only():
    result = run("pyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(HERE))
    found = [one for one in json.loads(result.stdout)["generalDiagnostics"] if one["severity"] == "error"]
    check({one["range"]["start"]["line"] + 1 for one in found}, "\n".join(map(str, found)), "  # wrong")


# Half a second each: they are programs of Rust, and keep nothing.
OTHER_CHECKERS = {
    # The preset, because pyrefly takes mypy's settings from pyproject.toml otherwise.
    "pyrefly": (
        "check --preset default --output-format min-text --search-path src --python-interpreter-path",
        r"^ERROR (\S+?):(\d+):",
        "  # wrong|  # not for pyrefly",
    ),
    "ty": ("check --output-format concise --extra-search-path src --python", r"^(\S+?):(\d+):\d+: error", "  # wrong"),
}


@pytest.mark.parametrize("name", OTHER_CHECKERS)
def test_other_checker_reports_the_wrong_lines_only(name):
    words, error, mark = OTHER_CHECKERS[name]
    program = shutil.which(name, path=sysconfig.get_path("scripts"))
    if program is None:
        pytest.skip(f"{name} is not installed")
    command = [program, *words.split(), sys.executable, "--python-version", "3.10", str(CASES)]
    output = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=CHECKER_S).stdout
    found = re.findall(error, output, re.M)
    assert {Path(path).name for path, _ in found} == {CASES.name}, output
    check({int(line) for _, line in found}, output, mark)


def test_types_can_be_written_at_run_time():
    assert typing.get_args(fastrt.ObjectRef[int]) == (int,)
    assert typing.get_args(fastrt.ObjectRefGenerator[str]) == (str,)
    assert typing.get_args(fastrt.collective.Handle[int]) == typing.get_args(fastrt.ps.Handle[int]) == (int,)
    for made in (fastrt.RemoteFunction, ActorMethod, fastrt.ActorClass):
        assert typing.get_origin(made[[int], str]) is made
    assert typing.get_origin(fastrt.ActorHandle[int]) is fastrt.ActorHandle
    assert "remote" in vars(fastrt.RemoteFunction)
    assert fastrt.RemoteFunction.remote.__qualname__ == "RemoteFunction.remote"


def test_operations_of_groups_are_plain_methods_at_run_time():
    assert inspect.isfunction(vars(fastrt.collective.Group)["reduce"])
    assert "op" in inspect.signature(fastrt.collective.Group.all_reduce).parameters


def test_base_of_typed_actors_adds_nothing():
    class Plain:
        __slots__ = ()

    assert set(dir(Actor)) == set(dir(Plain))
