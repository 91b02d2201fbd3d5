"""Starts nodes for the tests of this folder."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fastrt.node.daemon import sweep_sessions
from support.cluster import RunningNode


@pytest.fixture
def start(runtime_dir: Path) -> Iterator[Callable[..., RunningNode]]:
    """Start nodes that are stopped at the end of the test: `start(*options)`."""
    with contextlib.ExitStack() as stack:

        def start_one(*options: str) -> RunningNode:
            node = RunningNode(runtime_dir, *options)
            stack.callback(node.stop)
            return node

        yield start_one
    sweep_sessions(runtime_dir, runtime_dir.parent / "spill")  # what was killed is removed by the next that starts
