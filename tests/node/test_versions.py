"""Nodes and drivers with other versions of fastrt, Python or cloudpickle are refused with a table of both sides'."""

import asyncio
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import fastrt
from fastrt.cluster.membership import JOIN
from fastrt.net.grpc import streams
from fastrt.net.grpc.descriptors import message_set
from fastrt.net.grpc.identity import Identity
from fastrt.net.grpc.streams import Access
from support.cluster import START, RunningNode

Report = message_set("node").message("fastrt.node.Report")
SOURCE = Path(fastrt.__file__).parent
OTHER = "0.0.1"
TABLE = rf"! fastrt +{re.escape(fastrt.__version__)} +{re.escape(OTHER)}$"


@pytest.fixture(scope="module")
def head(runtime_dir):
    node = RunningNode(runtime_dir, "--head", "--port", "0", "--num-workers", "1", "--name", "one")
    yield node
    node.stop()


def installation(folder, version):
    """Make another installation of fastrt in a folder: links to this one, with a version of its own."""
    shutil.copytree(
        SOURCE, folder / "fastrt", copy_function=os.symlink, ignore=shutil.ignore_patterns("__pycache__", "__init__.py")
    )
    for path in SOURCE.rglob("__init__.py"):
        shutil.copy(path, folder / "fastrt" / path.relative_to(SOURCE))
    first = folder / "fastrt" / "__init__.py"
    text = first.read_text()
    assert f'__version__ = "{fastrt.__version__}"' in text
    first.write_text(text.replace(f'__version__ = "{fastrt.__version__}"', f'__version__ = "{version}"'))


@pytest.fixture
def another(tmp_path, runtime_dir):
    """Variables with which Python finds another installation of fastrt, of another version."""
    folder = tmp_path / "other"
    installation(folder, OTHER)
    env = {**os.environ, "PYTHONPATH": str(folder), "FASTRT_RUNTIME_DIR": str(runtime_dir)}
    return {**env, "FASTRT_OBJECT_STORE_MEMORY": "64MiB"}


def ended(*words, env):
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    return done.returncode, done.stdout, done.stderr


def test_node_of_another_version_is_refused_with_a_table(head, another):
    words = ("--address", head.head, "--num-workers", "1", "--name", "two")
    code, out, err = ended(*START, *words, env=another)
    assert code == 1, out + err
    assert "refuses two: its versions differ; install the same ones on all machines:" in err
    assert re.search(TABLE, err, re.M), err
    assert "Traceback" not in err


def test_driver_of_another_version_is_refused_with_a_table(head, another):
    program = f"import fastrt\nprint(fastrt.__version__)\nfastrt.init(address={head.note.socket_path!r})\n"
    code, out, err = ended(sys.executable, "-c", program, env=another)
    assert (code, out) == (1, f"{OTHER}\n"), err
    assert "AttachError: its versions differ; install the same ones on all machines:" in err
    assert re.search(TABLE, err, re.M), err


def test_node_that_is_too_old_to_say_its_version_is_refused_in_words(head):
    access = Access(Identity.from_token(Path(head.note.token_file).read_text().strip()))
    why = asyncio.run(refusal(head.head, access, Report(node="a" * 32, address="127.0.0.1:7", name="old")))
    assert "the head refuses old: its versions differ" in why
    assert re.search(r"! Python +3\.\d+ +unknown$", why, re.M), why


async def refusal(address, access, report):
    channel, call = streams.open_stream(address, access, message_set("node"), JOIN)
    try:
        stream = call()
        await stream.write(report)
        return str((await stream.code(), await stream.details())[1])
    finally:
        await channel.close()


def test_process_that_is_too_old_to_say_its_version_is_refused_in_words(head):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(head.note.socket_path)
        sock.sendall(b'{"op": "join", "kind": "driver", "name": "old", "logs": ""}\n')
        with sock.makefile() as lines:
            answer = json.loads(lines.readline())
    assert answer["op"] == "refused"
    assert answer["error"] == "message 'join' has no field 'versions'; another version of fastrt has other fields"


def test_another_numpy_is_warned_about_once(head, runtime_dir, tmp_path, monkeypatch):
    installation(tmp_path, fastrt.__version__)
    about = tmp_path / "numpy-0.1.dist-info"  # beside fastrt: its processes look there first
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 0.1\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    others = [
        RunningNode(runtime_dir, "--address", head.head, "--num-workers", "1", "--name", name)
        for name in ("second", "third")
    ]
    for node in others:
        node.stop()
    # Each node is looked at before it is let in, and both were in.
    err = os.read(head.process.stderr.fileno(), 1 << 16).decode()
    assert err.count("has NumPy 0.1") == 1, err
