"""The interpreter empties all modules at its end, and then frees the last objects: their destructors print no error."""

import subprocess
import sys

PROGRAM = """
import threading

import numpy as np

import fastrt
from fastrt._core.collective.groups import GroupMemory
from fastrt._core.tables.embedding import EmbeddingMemory
from fastrt._core.tables.versions import Versions
from fastrt.store import client


class Held:
    pass


if __name__ == "__main__":
    held = Held()
    held.itself = held  # freed by the collector, when all modules are empty
    threading.held = held
    with fastrt.init(1, 32 << 20):
        held.store = client.current()
        held.array = fastrt.get(fastrt.put(np.ones(1_000_000)))
    held.group = GroupMemory.create(2)
    held.table = EmbeddingMemory.create(8, 100, True)
    held.versions = Versions.create(4096)
    print("all is made")
"""


def test_nothing_that_is_held_until_the_end_of_the_interpreter_prints_an_error(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    # By `-W default` each process also warns of the files and sockets that it has not closed.
    words = [sys.executable, "-W", "default", tmp_path / "program.py"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "all is made\n", "")
