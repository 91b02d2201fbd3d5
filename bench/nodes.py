"""Nodes of fastrt on this machine, for programs that compare clusters."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import click


def cluster(stack: ExitStack, store: str, **env: str) -> tuple[str, Callable[..., int], dict[str, str]]:
    """Start a head without workers.

    Args:
        stack: ends the nodes when it is closed.
        store: FASTRT_OBJECT_STORE_MEMORY of each node.
        env: other variables of the nodes.
    Returns:
        The head's address, a function that starts a further node with these options and returns its process id, and
        the variables for drivers.
    Raises:
        click.ClickException: a node did not start.
    """
    from fastrt.runtime.nodefile import nodes_here

    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="frt-")), "rt")
    env |= {"FASTRT_RUNTIME_DIR": str(folder), "FASTRT_OBJECT_STORE_MEMORY": store}
    words = [sys.executable, "-c", "from fastrt.cli.main import main; main()", "start"]

    def node(*options: str) -> int:
        process = subprocess.Popen([*words, *options], env={**os.environ, **env}, stdout=subprocess.PIPE, text=True)
        stack.callback(process.wait)
        stack.callback(process.terminate)
        assert process.stdout is not None
        if not any(line.startswith("use it:") for line in process.stdout):
            raise click.ClickException("a node of fastrt did not start; see above")
        return process.pid

    node("--head", "--port", "0", "--num-workers", "0", "--name", "first")
    (head,) = nodes_here(folder)
    return head.head, lambda *options: node("--address", head.head, *options), env
