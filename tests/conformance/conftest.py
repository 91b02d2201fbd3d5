"""Real jaxlib, in environments of its own. Only `make check` makes those and collects these tests."""

import contextlib
import json
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fastrt.coordination import Coordinator, CoordinatorOptions
from support.jax_envs import python_of

CLIENT = Path(__file__).with_name("jax_client.py")

if "FASTRT_JAX" not in os.environ:
    collect_ignore_glob = ["test_jax_*.py"]
else:
    import support.grpc_opened  # noqa: F401


class Process:
    """A process that runs jax_client.py in one version's environment."""

    def __init__(self, version: str, mode: str, port: int, *arguments: Any) -> None:
        self.reads_stdin = mode == "member"
        words = [str(python_of(version)), str(CLIENT), mode, str(port), *(json.dumps(item) for item in arguments)]
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def ask(self, method: str, *arguments: Any) -> Any:
        """Have a member make a call; its outcome, None when it has died."""
        self.tell(method, *arguments)
        return self.hear()

    def tell(self, method: str, *arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([method, *arguments]) + "\n")
        self.process.stdin.flush()

    def hear(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def ended(self, timeout: float = 60.0) -> tuple[int, list[Any], str]:
        """Exit code, lines and errors once the process ends by itself."""
        if not self.reads_stdin:
            out, err = self.process.communicate(timeout=timeout)
        else:
            self.process.wait(timeout)  # its standard input stays open, or it would end of that
            out, err = self.process.communicate()
        return self.process.returncode, [json.loads(line) for line in out.splitlines()], err

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


@pytest.fixture
def spawn() -> Iterator[Callable[..., Process]]:
    """Start processes of jax_client.py; they are ended with the test."""
    started: list[Process] = []

    def start(*arguments: Any) -> Process:
        started.append(Process(*arguments))
        return started[-1]

    yield start
    for one in started:
        one.end()


def reserved(stack: contextlib.ExitStack) -> int:
    """A port for jaxlib's service, which cannot take any free one and say which.

    It stays bound here, without listening, while jaxlib's service (gRPC sets SO_REUSEPORT) binds it as well: nobody
    else gets it in the second that jaxlib takes to start.
    """
    held = stack.enter_context(socket.socket())
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind(("127.0.0.1", 0))
    return int(held.getsockname()[1])


@pytest.fixture
def services(spawn: Any) -> Iterator[Callable[..., list[int]]]:
    """Ports of jaxlib's own service and of fastrt's, both for the same job."""
    with contextlib.ExitStack() as stack:

        def start(version: str, tasks: int, options: dict[str, Any]) -> list[int]:
            port = reserved(stack)
            assert spawn(version, "service", port, tasks, options).hear() == "serving"
            ours = Coordinator(
                CoordinatorOptions(
                    num_tasks=tasks,
                    heartbeat_timeout_s=options.get("heartbeat_timeout", 100),
                    register_timeout_s=options.get("register_timeout", 60),
                    shutdown_timeout_s=options.get("shutdown_timeout", 60),
                )
            )
            stack.enter_context(ours)
            return [port, int(ours.address.rpartition(":")[2])]

        yield start
