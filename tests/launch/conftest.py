"""Fixtures of the tests of `fastrt run`: a key, folders, and the command."""

import os
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from support.cluster import FASTRT
from support.jobs import needs
from support.machines import Machines
from support.netns import UnavailableError


class Command:
    """Starts `fastrt run`; all that it starts must have ended by itself when the test ends."""

    def __init__(self, env: dict[str, str]) -> None:
        self.env = env
        self._started: list[subprocess.Popen[str]] = []

    def start(self, *words: str, within: Sequence[str] = (), **variables: str) -> "subprocess.Popen[str]":
        """Start `fastrt run` with these words, after a command such as mpirun."""
        return self.also([*within, *FASTRT, "run", *words], **variables)

    def also(self, words: Sequence[str], **variables: str) -> "subprocess.Popen[str]":
        """Start another command in the same environment."""
        process = subprocess.Popen(
            words,
            env={**self.env, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._started.append(process)
        return process

    def run(self, *words: str, **about: Any) -> tuple[int, str, str]:
        """Run it to its end; its exit code, output and error output."""
        process = self.start(*words, **about)
        out, err = process.communicate(timeout=50)
        return process.returncode, out, err

    def close(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.communicate()


@pytest.fixture
def command(runtime_dir, tmp_path):
    """`fastrt run` with its key and its folders in this test's own."""
    env = {**os.environ, "FASTRT_RUNTIME_DIR": str(runtime_dir), "FASTRT_KEY_FILE": str(tmp_path / "keys" / "key")}
    env |= {"FASTRT_OBJECT_STORE_MEMORY": "64MiB", "FASTRT_SPILL_DIR": str(tmp_path / "spill")}
    made = Command(env)
    yield made
    made.close()


@pytest.fixture
def program(tmp_path) -> Callable[[str], str]:
    """Write a program; its path."""

    def write(text: str) -> str:
        path = tmp_path / "app.py"
        path.write_text(text)
        return str(path)

    return write


@pytest.fixture
def machines(tmp_path):
    needs("ip", "unshare")
    try:
        made = Machines(tmp_path, ["ctl", "n1", "n2"])
    except UnavailableError as exc:
        pytest.skip(f"network namespaces cannot be made: {exc}")
    yield made
    made.close()
