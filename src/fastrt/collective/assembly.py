"""How ranks of several machines find each other: rank 0 tells the coordinator where it listens, the others go there.

It collects where each rank is, and answers with the whole list. A key that a killed rank 0 has left leads nowhere, so
whoever follows it looks again. The list's token admits ranks to each other; the coordinator's own network is trusted.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import select
import socket
import time
from collections.abc import Callable, Collection
from typing import Any, NamedTuple
from urllib.parse import quote

from fastrt._core.segment import boot_hash
from fastrt.collective.frames import dial
from fastrt.collective.greetings import GREETING_S, Greetings
from fastrt.coordination.client import Keys, open_keys
from fastrt.coordination.errors import CoordinationError, CoordinationTimeoutError
from fastrt.errors import CollectiveMismatch, CollectiveTimeout, PeerDied

_RETRY_S = 0.05
_LOOK_S = 1.0  # how often ranks that have not come are looked at, if somebody can
Watch = Callable[[Collection[int]], None]


class Place(NamedTuple):
    """Where one rank is: processes of one node share memory."""

    rank: int
    node: str
    host: str
    port: int
    pid: int


class Assembled(NamedTuple):
    """What a rank knows when all have come."""

    group_id: str
    token: str
    places: list[Place]
    listener: socket.socket  # this rank's, where others may connect to it

    def __repr__(self) -> str:  # without the token
        return f"Assembled({self.group_id}, {len(self.places)} ranks)"


def node_identity() -> str:
    """What processes that can share memory have in common: boot, network namespace and user."""
    return f"{boot_hash():x}-{os.stat('/proc/self/ns/net').st_ino}-{os.getuid()}"


def assemble(
    address: str,
    name: str,
    rank: int,
    world_size: int,
    timeout: float,
    node: str,
    wish: str = "",
    watch: Watch | None = None,
) -> Assembled:
    """Wait for all ranks of a group, wherever they are.

    Args:
        address: of the coordinator, `host:port`.
        name: what all ranks call the group.
        rank, world_size: this process's place.
        timeout: seconds.
        node: which processes share memory with this one: those that say the same.
        wish: must be the same on all ranks.
        watch: called now and then with ranks that are waited for; raises PeerDied when one of them cannot come.
    Returns:
        Where everybody is.
    Raises:
        PeerDied: see `watch`.
        CollectiveTimeout: they did not all come in time.
        CollectiveMismatch: two have the same rank, or they disagree about the group.
    """
    deadline = time.monotonic() + timeout
    host = _own_host(address)
    listener = socket.create_server((host, 0), backlog=256)
    place = Place(rank, node, host, listener.getsockname()[1], os.getpid())
    hello = {"place": place, "world_size": world_size, "wish": wish}
    take_part = _gather if rank == 0 else _follow
    try:
        with open_keys(address) as keys:
            # Quoted, because a key is deleted with all below it: no group's key may be below another's.
            key = f"fastrt/groups/name={quote(name, safe='')}"
            return take_part(keys, key, name, hello, listener, deadline, watch)
    except CoordinationError as error:
        listener.close()
        raise CollectiveTimeout(f"group {name!r}: the coordinator at {address}: {error}") from None
    except BaseException:
        listener.close()
        raise


def _own_host(address: str) -> str:
    """This machine's address as it reaches the coordinator."""
    host, _, port = address.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))
        return str(probe.getsockname()[0])


def _gather(
    keys: Keys,
    key: str,
    name: str,
    mine: dict[str, Any],
    listener: socket.socket,
    deadline: float,
    watch: Watch | None,
) -> Assembled:
    size: int = mine["world_size"]
    group_id, token = secrets.token_hex(8), secrets.token_hex(16)
    port = listener.getsockname()[1]
    where = json.dumps({"host": mine["place"].host, "port": port, "token": token})
    keys.set(key, where, overwrite=True, timeout_s=deadline - time.monotonic())
    there: dict[int, tuple[socket.socket | None, Place]] = {0: (None, mine["place"])}
    look_at = time.monotonic() + _LOOK_S
    greetings = Greetings(listener)
    try:
        while len(there) < size:
            _drop_the_gone(there)
            if watch is not None and time.monotonic() > look_at:
                watch([q for q in range(size) if q not in there])
                look_at = time.monotonic() + _LOOK_S
            if time.monotonic() > deadline:
                missing = ", ".join(str(q) for q in range(size) if q not in there)
                text = f"group {name!r}: of {size} ranks these did not come in time: {missing}"
                _tell_all(there, {"timeout": text})
                raise CollectiveTimeout(text)
            for greeted, line in greetings.wait(0.05):
                _admit(greeted, line, there, mine, token, name)
        keys.delete(key, timeout_s=max(deadline - time.monotonic(), 1.0))
        places = [there[q][1] for q in range(size)]
        _tell_all(there, {"group_id": group_id, "places": places})
        return Assembled(group_id, token, places, listener)
    except PeerDied as error:
        _tell_all(there, {"died": str(error), "rank": error.rank})
        raise
    finally:
        greetings.close()
        for sock, _ in there.values():
            if sock is not None:
                sock.close()


def _drop_the_gone(there: dict[int, tuple[socket.socket | None, Place]]) -> None:
    """Forget ranks that have closed their connection: they may be started again and come anew."""
    socks = {sock: rank for rank, (sock, _) in there.items() if sock is not None}
    for sock in select.select(list(socks), [], [], 0)[0] if socks else ():
        sock.close()
        del there[socks[sock]]


def _admit(
    sock: socket.socket,
    line: bytes,
    there: dict[int, tuple[socket.socket | None, Place]],
    mine: dict[str, Any],
    token: str,
    name: str,
) -> None:
    """Take a rank in, or tell it why not; whoever does not know the token is shown out."""
    try:
        hello = json.loads(line)
        if not hmac.compare_digest(hello["token"], token):
            raise ValueError("a stranger")
        place = Place(*hello["place"])
        why = None
        if hello["world_size"] != mine["world_size"] or hello["wish"] != mine["wish"]:
            why = (
                f"rank {place.rank} expects {hello['world_size']} ranks {hello['wish']}, "
                f"rank 0 expects {mine['world_size']} {mine['wish']}"
            )
        elif place.rank in there:
            pids = f"process {there[place.rank][1].pid} and process {place.pid}"
            why = f"rank {place.rank} comes twice, as {pids}"
        if why is None:
            there[place.rank] = sock, place
            return
        sock.sendall(json.dumps({"mismatch": f"group {name!r}: {why}"}).encode() + b"\n")
    except (OSError, ValueError, KeyError, TypeError):
        pass
    sock.close()


def _tell_all(there: dict[int, tuple[socket.socket | None, Place]], answer: dict[str, Any]) -> None:
    body = json.dumps(answer).encode() + b"\n"
    for sock, _ in there.values():
        try:
            if sock is not None:
                sock.sendall(body)
        except OSError:
            continue  # it ended meanwhile: the group's first operation will tell


def _follow(
    keys: Keys,
    key: str,
    name: str,
    mine: dict[str, Any],
    listener: socket.socket,
    deadline: float,
    watch: Watch | None,
) -> Assembled:
    while time.monotonic() < deadline:
        left = deadline - time.monotonic()
        try:
            where = json.loads(keys.get(key, left if watch is None else min(left, _LOOK_S)))
        except CoordinationTimeoutError as error:
            if watch is not None and time.monotonic() < deadline:
                watch([0])
                continue
            raise CollectiveTimeout(f"group {name!r}: rank 0 did not come in time ({error})") from None
        hello = json.dumps({**mine, "token": where["token"]}).encode()
        try:
            with dial((where["host"], where["port"]), hello, GREETING_S) as sock:
                sock.settimeout(max(deadline - time.monotonic() + 1.0, 0.1))
                with sock.makefile("rb") as stream:
                    answer = json.loads(stream.readline() or b"{}")
        except (OSError, ValueError):
            answer = {}
        if "mismatch" in answer:
            raise CollectiveMismatch(answer["mismatch"])
        if "died" in answer:
            raise PeerDied(answer["died"], answer["rank"])
        if "timeout" in answer:
            raise CollectiveTimeout(answer["timeout"])
        if "places" in answer:
            places = [Place(*one) for one in answer["places"]]
            return Assembled(answer["group_id"], where["token"], places, listener)
        if watch is not None:
            watch([0])
        time.sleep(_RETRY_S)  # what the key says is of a rank 0 that is gone
    raise CollectiveTimeout(f"group {name!r}: rank 0 did not come in time")
