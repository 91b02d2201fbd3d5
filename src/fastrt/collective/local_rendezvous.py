"""Rendezvous of the ranks of one machine by a name alone, and creation of the memory that they share.

Rank 0 listens on an abstract Unix socket whose address is a hash of user, session and name; the others connect as soon
as it exists. When all have come, rank 0 creates the memory, a memfd, and sends a descriptor of it to each. Neither has
an entry in a file system, so nothing is left over, even if any process is killed at any time. Both sides ask the kernel
for the other's user id and only talk to the same user.
"""

from __future__ import annotations

import array
import hashlib
import json
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from fastrt._core.collective.groups import GroupMemory
from fastrt.errors import CollectiveMismatch, CollectiveTimeout, PeerDied
from fastrt.foreign_text import check_object, read_object

_RETRY_S = 0.002  # first interval between attempts to reach rank 0; doubled up to
_RETRY_S_MAX = 0.05
_MESSAGE_BYTES_MAX = 1 << 16


class Met(NamedTuple):
    """The result of a rendezvous."""

    memory: GroupMemory
    group_id: str  # random, the same on all ranks


def meet(
    name: str, rank: int, world_size: int, timeout: float, wish: str = "", watch: Callable[[], None] | None = None
) -> Met:
    """Wait for all ranks of a group on this machine.

    Args:
        name: the common name.
        rank: this process's number among them.
        world_size: number of ranks.
        timeout: seconds.
        wish: must be the same on all ranks.
        watch: called now and then during the wait; raises PeerDied when a missing rank cannot come.
    Returns:
        The memory, attached, and the group's id.
    Raises:
        CollectiveTimeout: not all ranks came in time.
        CollectiveMismatch: two processes have the same rank, or the ranks disagree about the group.
        PeerDied: a rank ended while the group was made.
    """
    address = "\0fastrt-group-" + hashlib.sha256(f"{os.getuid()}/{name}".encode()).hexdigest()[:40]
    me = {"rank": rank, "world_size": world_size, "wish": wish, "pid": os.getpid(), "version": 1}
    deadline = time.monotonic() + timeout
    if rank == 0:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            if _bind(listener, address):
                return _Gathering(name, listener, me, deadline, watch).run()
    return _join(name, address, me, deadline, watch)


def _bind(listener: socket.socket, address: str) -> bool:
    try:
        listener.bind(address)
    except OSError:  # another rank 0 is gathering under this name: it will refuse a second one with a message
        return False
    listener.listen(64)
    return True


def _user_of(connection: socket.socket) -> int:
    """The uid of the peer's process, recorded by the kernel when it listened or connected."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int(struct.unpack("3i", raw)[1])


def _send(connection: socket.socket, message: dict[str, Any], fd: int | None = None) -> None:
    body = json.dumps(message).encode()
    rights = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
    connection.sendmsg([body], rights)


def _receive(connection: socket.socket) -> tuple[dict[str, Any], int | None]:
    """Receive a message and the descriptor that came with it; raises EOFError when the peer is gone."""
    body, rights, _, _ = connection.recvmsg(_MESSAGE_BYTES_MAX, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, data in rights:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data)
    if not body:
        raise EOFError("the peer is gone")
    return read_object(body, "a rank's message", bytes_max=_MESSAGE_BYTES_MAX), fds[0] if fds else None


class _Gathering:
    """Rank 0's part: accepts the other ranks until all have come."""

    def __init__(
        self,
        name: str,
        listener: socket.socket,
        me: dict[str, Any],
        deadline: float,
        watch: Callable[[], None] | None,
    ) -> None:
        self.name = name
        self.watch = watch
        self.listener = listener
        self.me = me
        self.deadline = deadline
        self.size: int = me["world_size"]
        self.there: dict[int, tuple[socket.socket, dict[str, Any]]] = {}
        self.selector = selectors.DefaultSelector()

    def run(self) -> Met:
        """Accept all ranks, create the memory, and send it to them."""
        try:
            self.selector.register(self.listener, selectors.EVENT_READ)
            while len(self.there) < self.size - 1:
                self._wait_for_more()
            self.listener.close()  # frees the name for the next group
            return self._hand_out()
        except CollectiveTimeout as error:
            self._send_all({"error": "CollectiveTimeout", "text": str(error)})
            raise
        except PeerDied as error:
            self._send_all({"error": "PeerDied", "text": str(error), "rank": error.rank})
            raise
        finally:
            self.selector.close()
            for connection, _ in self.there.values():
                connection.close()

    def _wait_for_more(self) -> None:
        left = self.deadline - time.monotonic()
        if left <= 0:
            missing = sorted(set(range(1, self.size)) - set(self.there))
            raise CollectiveTimeout(
                f"group {self.name!r}: rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} of {self.size} "
                "did not come in time"
            )
        if self.watch is not None:
            self.watch()
        for key, _ in self.selector.select(min(left, 0.1)):
            if key.fileobj is self.listener:
                try:
                    connection, _ = self.listener.accept()
                except OSError:  # it has disconnected, or this process has no descriptor left
                    time.sleep(_RETRY_S_MAX)
                    continue
                connection.settimeout(1.0)
                self._admit(connection)
            else:
                self._hear(key.data)

    def _admit(self, connection: socket.socket) -> None:
        """Accept a rank, or send it the reason of the refusal."""
        try:
            if _user_of(connection) != os.getuid():
                raise EOFError("another user")
            hello, _ = _receive(connection)
            check_object(hello, "a rank's greeting", {"rank": int, "pid": int})
            refusal = self._refusal(hello)
            if refusal:
                _send(connection, {"error": "CollectiveMismatch", "text": f"group {self.name!r}: {refusal}"})
                raise EOFError(refusal)
        except (OSError, EOFError, ValueError):
            connection.close()
            return
        self.there[hello["rank"]] = connection, hello
        self.selector.register(connection, selectors.EVENT_READ, hello["rank"])

    def _refusal(self, hello: dict[str, Any]) -> str | None:
        rank = hello.get("rank")
        if hello.get("version") != self.me["version"]:
            return "the ranks run different versions of fastrt"
        if hello.get("world_size") != self.size or hello.get("wish") != self.me["wish"]:
            return (
                f"rank {rank} expects {hello.get('world_size')} ranks {hello.get('wish')}, "
                f"rank 0 expects {self.size} {self.me['wish']}"
            )
        other = self.me if rank == 0 else self.there[rank][1] if rank in self.there else None
        if other is not None:
            return f"rank {rank} comes twice, as process {other['pid']} and process {hello['pid']}"
        return None if isinstance(rank, int) and 0 < rank < self.size else f"there is no rank {rank}"

    def _hear(self, rank: int) -> None:
        """Forget a rank whose connection is readable: it has ended, but may be started again and come once more."""
        connection, _ = self.there.pop(rank)
        self.selector.unregister(connection)
        connection.close()

    def _hand_out(self) -> Met:
        group_id = secrets.token_hex(8)
        memory = GroupMemory.attach(GroupMemory.create(self.size), 0, self.size)
        for rank in sorted(self.there):
            self._each(rank, lambda c: _send(c, {"group_id": group_id}, memory.fd))
        for rank in sorted(self.there):
            self._each(rank, lambda c: _receive(c))
        for rank in sorted(self.there):
            self._each(rank, lambda c: _send(c, {"go": True}))
        return Met(memory, group_id)

    def _each(self, rank: int, action: Any) -> None:
        connection, hello = self.there[rank]
        connection.settimeout(max(self.deadline - time.monotonic(), 1.0))
        try:
            action(connection)
        except (OSError, EOFError, ValueError):
            text = f"rank {rank} (process {hello['pid']}) ended while group {self.name!r} was made"
            raise PeerDied(text, rank) from None

    def _send_all(self, message: dict[str, Any]) -> None:
        for connection, _ in self.there.values():
            try:
                _send(connection, message)
            except OSError:
                continue  # it has ended too


def _join(name: str, address: str, me: dict[str, Any], deadline: float, watch: Callable[[], None] | None) -> Met:
    """Run the part of a rank other than 0. If rank 0 ends early, wait for a restarted one."""
    pause, user = _RETRY_S, os.getuid()
    while time.monotonic() < deadline:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            try:
                connection.setblocking(False)  # a listener that does not accept must not block this rank
                connection.connect(address)
                user = _user_of(connection)
                if user == os.getuid():
                    connection.settimeout(max(deadline - time.monotonic(), 0.1))
                    _send(connection, me)
                    return _await_memory(connection, me, deadline)
            except (ConnectionError, BlockingIOError, EOFError):
                pass
        if watch is not None:
            watch()
        time.sleep(pause)
        pause = min(2 * pause, _RETRY_S_MAX)
    if user != os.getuid():
        raise CollectiveTimeout(
            f"group {name!r}: a process of another user (uid {user}) holds the address of this name, so the ranks "
            "cannot meet. Use another name, or give address= and token="
        )
    raise CollectiveTimeout(
        f"group {name!r}: rank 0 did not come in time. All ranks must use the same name, as the same user, in the "
        "same session of fastrt or all outside of one"
    )


def _await_memory(connection: socket.socket, me: dict[str, Any], deadline: float) -> Met:
    memory: GroupMemory | None = None
    group_id = ""
    while True:
        connection.settimeout(max(deadline - time.monotonic() + 1.0, 0.1))  # rank 0's timeout comes first
        try:
            answer, fd = _receive(connection)
        except TimeoutError:
            raise CollectiveTimeout("rank 0 sent nothing more while the group was made") from None
        except (OSError, EOFError):
            if memory is None:
                raise EOFError("rank 0 is gone") from None
            raise PeerDied("rank 0 ended while the group was made", 0) from None
        if "error" in answer:
            if answer["error"] == "PeerDied":
                raise PeerDied(answer["text"], answer["rank"])
            raise (CollectiveTimeout if answer["error"] == "CollectiveTimeout" else CollectiveMismatch)(answer["text"])
        if fd is not None:
            memory = GroupMemory.attach(fd, me["rank"], me["world_size"])
            group_id = answer["group_id"]
            _send(connection, {"attached": True})
        elif memory is not None:
            return Met(memory, group_id)
