"""Stores in processes of their own, one of which is killed in the middle of a transfer."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastrt
from fastrt.config import SHM_DIR
from fastrt.transfer.table import TransferError
from support.sites import PATIENCE_S, TOKEN, Pair, Proxy, Site

BIG = 32 << 20
RATE = 64 << 20  # bytes a second: slow enough to be in the middle
START = f"""
    import os, sys
    import numpy as np
    from fastrt._core.memory.clients import KIND_DRIVER, Client, admit
    from fastrt._core.memory.segment import Segment
    from fastrt.store.client import Store
    from fastrt.net.grpc.identity import Identity
    from fastrt.transfer.pull import Puller
    from fastrt.transfer.source import Source
    from fastrt.transfer.table import Table
    segment = Segment.create(128 << 20, objects_max=1 << 12, tasks_max=1 << 10)
    print(segment.name, flush=True)
    client = Client(segment, *admit(segment, os.getpid(), KIND_DRIVER, "test"))
    table = Table(Store(client, 0.0))
    IDENTITY, BIG = Identity.from_token({TOKEN!r}), {BIG}
"""
SOURCE = """
    table.add(1, table.store.put(np.arange(BIG // 8)))
    source = Source(table, IDENTITY, tls_on_loopback=True)
    print(source.address, flush=True)
    sys.stdin.readline()
    source.close()
    segment.unlink()
"""
TAKER = """
    puller = Puller(table, IDENTITY, tls_on_loopback=True)
    future = puller.pull(1, sys.argv[1])
    print("asked", flush=True)
    future.result()
"""
Spawn = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """Run code in a process with a store of its own; the segment of a killed one is removed."""
    started: list[subprocess.Popen[str]] = []
    segments: list[Path] = []

    def start(code: str, *arguments: str) -> "subprocess.Popen[str]":
        environ = {**os.environ, "PYTHONPATH": str(Path(fastrt.__file__).parents[1])}
        command = [sys.executable, "-c", textwrap.dedent(START) + textwrap.dedent(code), *arguments]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, env=environ, **pipes))
        segments.append(SHM_DIR / line(started[-1]).lstrip("/"))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()
    for segment in segments:
        segment.unlink(missing_ok=True)


def line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_object_of_another_process_arrives(make_site: Callable[..., Site], closing: Callable[[Any], Any], spawn: Spawn):
    there = make_site()
    source = spawn(SOURCE)
    closing(there.puller(tls_on_loopback=True)).pull(1, line(source)).result(PATIENCE_S)
    np.testing.assert_array_equal(there.get(1), np.arange(BIG // 8))
    assert source.communicate("\n")[1] is None
    assert source.returncode == 0


def test_source_killed_midway_is_a_typed_error_and_leaves_nothing(
    make_site: Callable[..., Site], closing: Callable[[Any], Any], spawn: Spawn, wait_until: Callable[..., None]
):
    there = make_site()
    source = spawn(SOURCE)
    proxy = closing(Proxy(line(source), rate=RATE))
    future = closing(there.puller(tls_on_loopback=True)).pull(1, proxy.address)
    wait_until(lambda: proxy.passed > BIG // 8, "some of it")
    source.kill()
    with pytest.raises(TransferError, match="did not arrive, after 4 attempts"):
        future.result(PATIENCE_S)
    assert there.table.coming() == 0
    there.wait_until_empty()


def test_taker_killed_midway_lets_the_source_go_on(sealed: Pair, spawn: Spawn, wait_until: Callable[..., None]):
    sealed.here.put(1, np.arange(BIG // 8))
    proxy = sealed.proxy(rate=RATE)
    taker = spawn(TAKER, proxy.address)
    assert line(taker) == "asked"
    wait_until(lambda: proxy.passed > BIG // 8, "some of it")
    taker.kill()
    taker.wait()
    sealed.here.table.drop(1)
    sealed.here.wait_until_empty()
    sealed.here.put(2, "next")
    assert sealed.puller().pull(2, sealed.source.address).result(PATIENCE_S)
