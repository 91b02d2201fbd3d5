"""Rendezvous of ranks on several machines: rank 0 publishes its address in a coordinator, the others connect to it.

Rank 0 collects the address of each rank and answers with the whole list. A key that a killed rank 0 left over, or that
a stranger wrote, leads nowhere: a rank that follows such a key tries again, and rank 0 writes its key again each
second. Rank 0 and the others prove the group's secret to each other before they exchange any other data.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import time
from collections.abc import Callable, Collection
from typing import Any, NamedTuple
from urllib.parse import quote

from fastrt._core.memory.segment import boot_hash
from fastrt.collective.access import Access, Invitation, check_types
from fastrt.collective.greetings import GREETING_S, Greetings, dial, receive_text, send_text
from fastrt.coordination.client import Keys, open_keys
from fastrt.coordination.errors import CoordinationError, CoordinationTimeoutError
from fastrt.errors import CollectiveMismatch, CollectiveTimeout, PeerDied
from fastrt.foreign_text import ForeignTextError, check_object
from fastrt.net.address import own_host_toward
from fastrt.net.grpc.sealed import Link
from fastrt.net.grpc.visitors import BACKLOG, hold_silent

_RETRY_S = 0.05
_LOOK_S = 1.0  # interval at which rank 0 renews its key, and missing ranks are checked
_ANSWER_BYTES = 4096, 1024  # most bytes of an answer: fixed part, and part for each rank
_HELLO = {"place": list, "world_size": int, "wish": str}
Watch = Callable[[Collection[int]], None]


class Place(NamedTuple):
    """Address of one rank. Processes of one node share memory."""

    rank: int
    node: str
    host: str
    port: int
    pid: int


class Assembled(NamedTuple):
    """The result of a rendezvous."""

    group_id: str
    access: Access
    places: list[Place]
    listener: socket.socket  # accepts other ranks' connections to this one

    def __repr__(self) -> str:  # without the token
        return f"Assembled({self.group_id}, {len(self.places)} ranks)"


def node_identity() -> str:
    """Common to the processes that can share memory: boot, network namespace and user."""
    return f"{boot_hash():x}-{os.stat('/proc/self/ns/net').st_ino}-{os.getuid()}"


def assemble(
    address: str,
    name: str,
    rank: int,
    world_size: int,
    timeout: float,
    node: str,
    access: Access,
    wish: str = "",
    watch: Watch | None = None,
) -> Assembled:
    """Wait for all ranks of a group, on any machines.

    Args:
        address: `host:port` of the coordinator.
        name: the common name of the group.
        rank, world_size: this process's number, and the number of ranks.
        timeout: seconds.
        node: processes with the same value share memory.
        access: the group's secret.
        wish: must be the same on all ranks.
        watch: called now and then with the missing ranks; raises PeerDied when one of them cannot come.
    Returns:
        Addresses of all ranks.
    Raises:
        PeerDied: raised by `watch`.
        CollectiveTimeout: not all ranks came in time.
        CollectiveMismatch: two processes have the same rank, or the ranks disagree about the group.
    """
    deadline = time.monotonic() + timeout
    host = own_host_toward(address)
    listener = socket.create_server((host, 0), backlog=BACKLOG)
    hold_silent(listener)
    place = Place(rank, node, host, listener.getsockname()[1], os.getpid())
    part = _Part(name, place, world_size, wish, access, listener, deadline, watch)
    try:
        with open_keys(address) as keys:
            return part.gather(keys) if rank == 0 else part.follow(keys)
    except CoordinationError as error:
        listener.close()
        raise CollectiveTimeout(f"group {name!r}: the coordinator at {address}: {error}") from None
    except BaseException:
        listener.close()
        raise


class _Part(NamedTuple):
    """One rank's part in a rendezvous."""

    name: str
    place: Place
    world_size: int
    wish: str
    access: Access
    listener: socket.socket
    deadline: float
    watch: Watch | None

    @property
    def _key(self) -> str:
        # Quoted, because a deletion includes all keys below: no group's key may be below another group's key.
        return f"fastrt/groups/name={quote(self.name, safe='')}"

    def gather(self, keys: Keys) -> Assembled:
        """Run rank 0's part: collect the addresses of all ranks and send each the whole list."""
        group_id = secrets.token_hex(16)
        host, tls = self.place.host, self.access.uses_tls(self.place.host)
        invitation = Invitation(host, self.place.port, secrets.token_hex(16), self.world_size, tls)
        text = invitation.pack(self.name, self.access)
        keys.set(self._key, text, overwrite=True, timeout_s=self.deadline - time.monotonic())
        there: dict[int, tuple[Link | None, Place]] = {0: (None, self.place)}
        greetings = Greetings(self.listener, self.access, _purpose(self.name, invitation.nonce))
        look_at = time.monotonic() + _LOOK_S
        try:
            while len(there) < self.world_size:
                _drop_the_gone(there)
                if time.monotonic() > look_at:
                    self._refuse_late(there, greetings.refused)
                    keys.set(self._key, text, overwrite=True, timeout_s=max(self.deadline - time.monotonic(), 0.1))
                    if self.watch is not None:
                        self.watch([q for q in range(self.world_size) if q not in there])
                    look_at = time.monotonic() + _LOOK_S
                self._refuse_late(there, greetings.refused)
                for came, hello in greetings.wait(0.05):
                    self._admit(came, hello, there)
            keys.delete(self._key, timeout_s=max(self.deadline - time.monotonic(), 1.0))
            places = [there[q][1] for q in range(self.world_size)]
            _send_all(there, {"group_id": group_id, "places": places})
            return Assembled(group_id, self.access, places, self.listener)
        except PeerDied as error:
            _send_all(there, {"died": str(error), "rank": error.rank})
            raise
        finally:
            greetings.close()
            for link, _ in there.values():
                if link is not None:
                    link.close()

    def _refuse_late(self, there: dict[int, tuple[Link | None, Place]], refused: str) -> None:
        if time.monotonic() > self.deadline:
            missing = ", ".join(str(q) for q in range(self.world_size) if q not in there)
            text = f"group {self.name!r}: of {self.world_size} ranks these did not come in time: {missing}"
            _send_all(there, {"timeout": text})
            hint = f". The last caller that was refused: {refused}. All ranks need the same token" if refused else ""
            raise CollectiveTimeout(text + hint)

    def _admit(self, link: Link, hello: dict[str, Any], there: dict[int, tuple[Link | None, Place]]) -> None:
        """Accept a rank, or send it the reason of the refusal."""
        try:
            check_object(hello, "a rank's greeting", _HELLO)
            place = _place(hello["place"])
            why = self._refusal(place, hello, there)
            if why is None:
                there[place.rank] = link, place
                return
            send_text(link, {"mismatch": f"group {self.name!r}: {why}"})
        except (OSError, ForeignTextError):
            pass
        link.close()

    def _refusal(self, place: Place, hello: dict[str, Any], there: dict[int, tuple[Link | None, Place]]) -> str | None:
        if hello["world_size"] != self.world_size or hello["wish"] != self.wish:
            return (
                f"rank {place.rank} expects {hello['world_size']} ranks {hello['wish']}, "
                f"rank 0 expects {self.world_size} {self.wish}"
            )
        if not 0 <= place.rank < self.world_size:
            return f"there is no rank {place.rank}"
        if place.rank in there:
            pids = f"process {there[place.rank][1].pid} and process {place.pid}"
            return f"rank {place.rank} comes twice, as {pids}"
        return None

    def follow(self, keys: Keys) -> Assembled:
        """Run another rank's part: find rank 0, send it this rank's address, and wait for the list."""
        why = ""
        while time.monotonic() < self.deadline:
            left = self.deadline - time.monotonic()
            try:
                text = keys.get(self._key, left if self.watch is None else min(left, _LOOK_S))
            except CoordinationTimeoutError as error:
                why = why or str(error)  # a key that was refused before says more
                if self.watch is not None and time.monotonic() < self.deadline:
                    self.watch([0])
                continue
            try:
                invitation = Invitation.read(text, self.name, self.access)
                self._compare(invitation)
                return self._read_answer(self._ask(invitation))
            except CollectiveTimeout:
                raise  # before OSError, which it is a kind of
            except (OSError, ForeignTextError) as error:
                why = str(error)  # the key is from a rank 0 that has ended, or from a stranger
            if self.watch is not None:
                self.watch([0])
            time.sleep(_RETRY_S)
        raise CollectiveTimeout(
            f"group {self.name!r}: rank 0 did not come in time ({why or 'no time was left'}). "
            "All ranks need the same name and token"
        )

    def _compare(self, invitation: Invitation) -> None:
        """Refuse a rank 0 with another encryption setting: no message may switch this rank's encryption off."""
        if invitation.tls != self.access.uses_tls(invitation.host):
            other, mine = ("TLS", "no TLS") if invitation.tls else ("no TLS", "TLS")
            raise CollectiveMismatch(
                f"group {self.name!r}: rank 0 wants {other} at {invitation.host}, rank {self.place.rank} wants {mine}; "
                "give insecure= to all ranks or to none"
            )

    def _ask(self, invitation: Invitation) -> dict[str, Any]:
        hello = {"place": self.place, "world_size": self.world_size, "wish": self.wish}
        where, purpose = (invitation.host, invitation.port), _purpose(self.name, invitation.nonce)
        patience = max(min(self.deadline - time.monotonic(), GREETING_S), 0.1)
        with contextlib.closing(dial(where, self.access, purpose, hello, patience)) as link:
            bytes_max = _ANSWER_BYTES[0] + _ANSWER_BYTES[1] * self.world_size
            return receive_text(link, "rank 0's answer", bytes_max, self.deadline + 1.0)

    def _read_answer(self, answer: dict[str, Any]) -> Assembled:
        if "mismatch" in answer:
            raise CollectiveMismatch(str(answer["mismatch"]))
        if "died" in answer:
            check_object(answer, "rank 0's answer", {"rank": int})
            raise PeerDied(str(answer["died"]), answer["rank"])
        if "timeout" in answer:
            raise CollectiveTimeout(str(answer["timeout"]))
        check_object(answer, "rank 0's answer", {"group_id": str, "places": list})
        places = [_place(one) for one in answer["places"]]
        if [place.rank for place in places] != list(range(self.world_size)):
            raise ForeignTextError(f"rank 0's answer lists {len(places)} ranks, not those of the group")
        return Assembled(answer["group_id"], self.access, places, self.listener)


def _purpose(name: str, nonce: str) -> str:
    return f"fastrt collective gather {nonce} {name}"


def _place(values: Any) -> Place:
    return Place(*check_types(values, "a rank's place", int, str, str, int, int))


def _drop_the_gone(there: dict[int, tuple[Link | None, Place]]) -> None:
    """Forget ranks that have closed their connection: they may be started again and come once more."""
    poll = select.poll()
    links = {link.fileno(): (rank, link) for rank, (link, _) in there.items() if link is not None}
    for fd in links:
        poll.register(fd, select.POLLIN)
    for fd, _ in poll.poll(0) if links else ():
        rank, gone = links[fd]
        del there[rank]
        gone.close()


def _send_all(there: dict[int, tuple[Link | None, Place]], answer: dict[str, Any]) -> None:
    for link, _ in there.values():
        try:
            if link is not None:
                send_text(link, answer)
        except OSError:
            continue  # the rank has ended: the group's first operation will fail
