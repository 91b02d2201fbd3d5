"""What is attacked: a cluster of two nodes, parameter servers, ranks of collective groups, and honest users of each."""

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil

from fastrt.node.daemon import sweep_sessions
from fastrt.runtime.nodefile import nodes_here

MAIN = [sys.executable, "-c", "from fastrt.cli.main import main; main()"]
EXPORTED = "import fastrt\n\n@fastrt.remote\ndef exported():\n    return 1\n"
PATIENCE_S = 30.0
NODE = ["--num-workers", "1", "--export", "exported_here"]

# Each of these reads one line of JSON for each thing to do, and answers with one line.
LOOP = """
import json, sys
{prepare}
print(json.dumps({{"ready": ready}}), flush=True)
for line in sys.stdin:
    given = json.loads(line)
    try:
        answer = {{"value": do(**given)}}
    except Exception as error:
        answer = {{"error": f"{{type(error).__name__}}: {{error}}"}}
    print(json.dumps(answer), flush=True)
end()
"""
DRIVER = """
import numpy as np, fastrt
rt = fastrt.init(address=sys.argv[1])
@fastrt.remote
def double(array):
    return array * 2
def do():
    # 2 MiB in and out: by the uplinks and the native stream.
    there = double.options(scheduling="two").remote(np.ones(1 << 18))
    return int(fastrt.get(there, timeout=60).sum())
def end():
    fastrt.shutdown()
ready = do()
"""
SERVERS = """
import fastrt.ps, numpy as np
cluster = fastrt.ps.start(1)
table = cluster.table("t", 1000)
def do(**more):
    table.push(np.zeros(1000, np.float32))
    return float(table.pull().sum())
def end():
    cluster.close()
do()
ready = {"address": cluster.address, "token": cluster.token}
"""
RANK = """
import numpy as np, fastrt.collective as collective
def do(name, rank, address):
    with collective.init_group(name=name, rank=rank, world_size=2, address=address, timeout=20) as group:
        return float(group.all_reduce(np.ones(4)).sum())
def end():
    pass
ready = None
"""


class Honest:
    """A process that uses a service as its user does, one thing after the other."""

    def __init__(self, prepare: str, folder: Path, *arguments: str, **env: str) -> None:
        self.errors = folder / f"honest-{len(list(folder.glob('honest-*')))}.stderr"
        script = self.errors.with_suffix(".py")
        script.write_text(LOOP.format(prepare=prepare))
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, str(script), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, **env},
            )
        self.ready = self._answer()["ready"]

    def start(self, **given: Any) -> None:
        """Have it begin."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(given) + "\n")
        self.process.stdin.flush()

    def result(self) -> Any:
        """What came of it."""
        answer = self._answer()
        if "error" in answer:
            raise AssertionError(answer["error"])
        return answer["value"]

    def do(self, **given: Any) -> Any:
        """Begin and wait."""
        self.start(**given)
        return self.result()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            raise AssertionError(f"an honest user ended early:\n{self.errors.read_text()[-3000:]}")
        return json.loads(line)

    def close(self) -> None:
        """End it in order."""
        try:
            self.process.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()


class Service:
    """A command of fastrt's that serves until it is told to end; its error output is kept."""

    def __init__(self, folder: Path, until: str, *words: str, **env: str) -> None:
        self.errors = folder / f"service-{len(list(folder.glob('service-*')))}.stderr"
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [*MAIN, *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, **env},
            )
        self.said = ""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said += line
            if until in line:
                return
        self.close()
        raise AssertionError(f"{words} ended early:\n{self.said}{self.errors.read_text()[-3000:]}")

    def find(self, pattern: str) -> str:
        """The first group of a pattern in what it said."""
        found = re.search(pattern, self.said, re.M)
        assert found is not None, f"{pattern!r} is not in:\n{self.said}"
        return found[1]

    def close(self) -> None:
        """End it as a service manager does."""
        self.process.terminate()
        self.process.communicate(timeout=PATIENCE_S)


class Scene:
    """Services, each started when it is first asked for; `close` ends them, `errors` is what they have written.

    Args:
        folder: a short path, for sockets.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runtime_dir, self.spill_dir = folder / "rt", folder / "spill"
        self.stack = contextlib.ExitStack()
        self.outputs: list[Path] = []
        self._lock = threading.Lock()
        self._groups = 0
        self._parents: list[int] = []
        self.state_dir, self.ps_token_file = folder / "state", folder / "ps-token"

    @cached_property
    def ranks(self) -> list[Honest]:
        """Two processes that make groups together."""
        return [self._honest(RANK, FASTRT_TOKEN_FILE=str(self.token_file)) for _ in range(2)]

    @cached_property
    def ps(self) -> Service:
        """The scheduler of a cluster of parameter servers, with all its ports."""
        words = ["ps", "scheduler", "--address", "127.0.0.1:0", "--num-workers", "1", "--num-servers", "1"]
        words += ["--grpc-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0"]
        return self._service("HTTP on", *words, "--token-file", str(self.ps_token_file))

    @cached_property
    def servers(self) -> Honest:
        """A worker that has started a parameter server."""
        return self._honest(SERVERS)

    @cached_property
    def driver(self) -> Honest:
        """A driver on the first of the two nodes, which uses the second."""
        return self._honest(DRIVER, self.head)

    @cached_property
    def head_node(self) -> Service:
        """The head, with a scheduler and a coordinator beside it."""
        (self.folder / "modules").mkdir()
        (self.folder / "modules" / "exported_here.py").write_text(EXPORTED)
        served = ["--scheduler-port", "0", "--coordinator-port", "0", "--num-tasks", "1"]
        served += ["--state-dir", str(self.state_dir)]
        return self._service("use it:", "start", "--head", "--port", "0", "--name", "one", *served, *NODE)

    @cached_property
    def head_note(self) -> Any:
        """What the head's node has noted of itself."""
        assert self.head_node
        return self._note("one")

    @cached_property
    def node_note(self) -> Any:
        """What the other node has noted of itself."""
        words = ["start", "--address", self.head, "--scheduler", self.scheduler, "--name", "two", *NODE]
        self._service("use it:", *words)
        return self._note("two")

    @property
    def head(self) -> str:
        """The head's address."""
        return str(self.head_note.head)

    @property
    def token_file(self) -> Path:
        """With the cluster's token."""
        return Path(self.head_note.token_file)

    @property
    def scheduler(self) -> str:
        """The scheduler's address."""
        return self.head_node.find(r"^scheduler: +(\S+)")

    @property
    def coordinator(self) -> str:
        """The coordinator's address."""
        return self.head_node.find(r"^coordinator: +(\S+)")

    @property
    def store(self) -> str:
        """The address of the head's object store."""
        return self.head_node.find(r"^store: +(\S+)")

    def close(self) -> None:
        """End everything, last first."""
        self.stack.close()
        sweep_sessions(self.runtime_dir, self.spill_dir)

    def errors(self) -> str:
        """What all processes have written to their standard error so far."""
        return "".join(path.read_text(errors="replace") for path in self.outputs)

    @property
    def environment(self) -> dict[str, str]:
        """For every process of the scene."""
        path = os.pathsep.join(filter(None, [str(self.folder / "modules"), os.environ.get("PYTHONPATH", "")]))
        return {
            "FASTRT_RUNTIME_DIR": str(self.runtime_dir),
            "FASTRT_SPILL_DIR": str(self.spill_dir),
            "FASTRT_OBJECT_STORE_MEMORY": "128MiB",
            "PYTHONPATH": path,
        }

    def processes(self) -> list[psutil.Process]:
        """Every process of the scene, those that they started too."""
        found = []
        for parent in self._parents:
            with contextlib.suppress(psutil.NoSuchProcess):
                found += [psutil.Process(parent), *psutil.Process(parent).children(recursive=True)]
        return found

    def next_group(self) -> str:
        """A name that no group has had."""
        with self._lock:
            self._groups += 1
            return f"group-{self._groups}"

    def _note(self, name: str) -> Any:
        (note,) = [note for note in nodes_here(self.runtime_dir) if note.name == name]
        return note

    def _service(self, until: str, *words: str) -> Service:
        made = Service(self.folder, until, *words, **self.environment)
        self._keep(made)
        return made

    def _honest(self, prepare: str, *arguments: str, **env: str) -> Honest:
        made = Honest(prepare, self.folder, *arguments, **self.environment, **env)
        self._keep(made)
        return made

    def _keep(self, made: Any) -> None:
        self.stack.callback(made.close)
        self.outputs.append(made.errors)
        self._parents.append(made.process.pid)
