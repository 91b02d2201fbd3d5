"""Another Unix user and the debugger of a task that waits at a breakpoint."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import fastrt
from fastrt.store import client as store_client
from fastrt.store import debugging
from fastrt.store.debugging import Stop
from support.attacks.attacker import Attacker

TRIES = """
import errno
for name, attempt in {
    "list": lambda: os.listdir(os.path.dirname(given["socket"])),
    "read": lambda: os.open(given["socket"] + ".json", os.O_RDONLY),
    "connect": lambda: connect(given["socket"]),
}.items():
    try:
        attempt()
        report[name] = "came in"
    except OSError as exc:
        report[name] = errno.errorcode[exc.errno]
"""
TALKS = """
sock = connect(given["socket"])
shout(sock, b'{"op": "debug_line", "line": "c"}\\n')
report["heard"] = listen(sock, 2.0).decode()
"""


def test_another_user_gets_nothing_from_a_debugger(
    rt: fastrt.Runtime,
    runtime_dir: Path,
    other_uid: int,
    attack: Callable[..., Attacker],
    wait_until: Callable[..., None],
) -> None:
    @fastrt.remote(max_retries=0)
    def waits() -> None:
        breakpoint()

    ref = waits.remote()
    folder = debugging.folder_of(store_client.require().socket_path)
    found: list[Stop] = []

    def stops() -> bool:
        found[:] = debugging.waiting(folder)
        return bool(found)

    wait_until(stops, "the task at the breakpoint")
    socket = folder / str(found[0].pid)
    assert (folder.stat().st_mode & 0o777, socket.stat().st_mode & 0o777) == (0o700, 0o600)
    tried = attack(TRIES, uid=other_uid, socket=str(socket)).finish()
    assert tried == dict.fromkeys(("list", "read", "connect"), "EACCES")
    # Where the folders let other users through, the debugger itself asks the kernel who has come.
    opened = [one for one in (socket, *socket.parents) if one.is_relative_to("/tmp") and one != Path("/tmp")]
    modes = {one: one.stat().st_mode & 0o7777 for one in opened}
    try:
        for one in opened:
            os.chmod(one, 0o777)
        assert "belongs to another user" in attack(TALKS, uid=other_uid, socket=str(socket)).finish()["heard"]
        assert not debugging.waiting(folder)  # a folder that others can change is not read
    finally:
        for one, mode in modes.items():
            os.chmod(one, mode)
    assert stops()  # still: the line was not carried out
    fastrt.cancel(ref)
    with pytest.raises(fastrt.TaskCancelledError):
        fastrt.get(ref)
