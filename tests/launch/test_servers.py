"""`fastrt run --ps N`: parameter servers that the program finds, and that end after it."""

import pytest

TRAIN = """
import os
import numpy as np
import fastrt
from fastrt import ps

@fastrt.remote
def pull(cluster):
    return float(cluster.table("w", (8,), init=0.0, optimizer=ps.SGD(lr=1.0)).pull()[0])

with fastrt.init(), ps.connect() as cluster:
    table = cluster.table("w", (8,), init=0.0, optimizer=ps.SGD(lr=1.0))
    other = {node["NodeID"]: node for node in fastrt.nodes()}.popitem()[0]
    task = pull.options(scheduling=other).remote(cluster) if WORKERS == 2 else None
    table.push(np.full(8, -2.0, np.float32))
    print(table.pull()[0], len([one for one in cluster.nodes() if one.role.name == "SERVER"]))
    print(fastrt.get(task, timeout=30) in (0.0, 2.0) if task else "alone")
"""


@pytest.mark.long  # the servers of two ranks serve in each run
def test_program_alone_finds_its_servers_and_they_end_with_it(command, program):
    code, out, err = command.run("--ps", "2", "--num-workers", "1", program(TRAIN.replace("WORKERS", "1")))
    assert (code, out) == (0, "2.0 2\nalone\n"), err


def test_servers_of_two_ranks_serve_the_program_and_tasks_of_the_other_node(command, program):
    path = program(TRAIN.replace("WORKERS", "2"))
    words = ("--ps", "2", "--ps-mode", "async", "--ps-workers", "2", "--num-workers", "1")
    words += ("--size", "2", "--head", "127.0.0.1", "--job", "ps")
    first, other = (command.start("--rank", str(rank), *words, path) for rank in range(2))
    out, err = first.communicate(timeout=50)
    assert (first.returncode, out) == (0, "2.0 2\nTrue\n"), err
    assert "Traceback" not in err
    assert other.communicate(timeout=60) == ("", "")
    assert other.returncode == 0


def test_connect_without_servers_says_what_to_do(command, program):
    code, _, err = command.run("--num-workers", "1", program("from fastrt import ps\nps.connect()\n"))
    assert code == 1
    assert "run this program with `fastrt run --ps N`" in err
