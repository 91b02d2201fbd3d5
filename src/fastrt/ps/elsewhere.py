"""Servers on other nodes of a fastrt cluster: an actor there keeps the server's process, and tells the head of it.

The keeper holds one connection to the head. Over that it is told what the server is to be, and tells where it listens,
in each of its lives; its log is the keeper's, or lies in a folder. When the connection ends, whoever ended it, the
server ends; when the head did not want that, the cluster is given up, since what is gone with a node cannot be had
again. A server that begins again takes no push until the head says so: parts may be on their way.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

from fastrt.errors import ConfigError, FastrtError, NotInitializedError
from fastrt.ps.endpoint import Caller
from fastrt.ps.processes import END_S, ServerProcess
from fastrt.ps.refusals import raise_refusal
from fastrt.ps.wire import VERSION, BrokenWireError, Meta, Wire, dial
from fastrt.store import client as store_client
from fastrt.tasks.actor import ActorClass
from fastrt.tasks.handle import kill
from fastrt.tasks.placement import PlacementGroup, PlacementGroupSchedulingStrategy

_DIAL_S = 20.0
_LOOK_S = 0.05


class Keeper:
    """The actor. It has no state of its own: `keep` runs for as long as the server shall."""

    def keep(self, address: str, token: str, index: int) -> None:
        """Keep a server, until the head's connection ends.

        Args:
            address: of the head.
            token: the cluster's.
            index: of the server.
        Raises:
            FastrtError: the head refuses, or the server does not start.
        """
        with contextlib.closing(dial(None, address, _DIAL_S)) as wire:
            raise_refusal(wire.call({"token": token, "version": VERSION, "client": 0}, timeout_s=_DIAL_S)[0])
            settings = _tell(wire, {"index": index, "what": "keep"})["settings"]
            settings["host"] = wire.local_host
            begun, turn = threading.Event(), threading.Lock()

            def tell(what: str, **more: Any) -> None:
                with turn, contextlib.suppress(BrokenWireError):
                    _tell(wire, {"index": index, "what": what, **more})

            def serves(server: ServerProcess) -> None:
                begun.set()
                tell("serves", address=server.address, unix=server.unix, pid=server.pid)

            server = ServerProcess(settings, serves, begun.is_set, lambda why: tell("lost", why=why))
            try:
                server.wait_until_up(settings["start_timeout_s"])
                serves(server)
                wire.wait_closed()
            finally:
                server.end()
                server.wait()


def _tell(wire: Wire, meta: Meta) -> Meta:
    answer: Meta = wire.call({"op": "keeper", **meta})[0]
    raise_refusal(answer)
    return answer


class DistantServer:
    """A server as its head sees it, that an actor keeps; in place of `ServerProcess`.

    Args:
        settings: of `process.main`, and `home`, where the head listens.
        restarted: told when another process has taken a dead one's place.
        frozen: not asked: the head says to each new process when it may take pushes.
        lost: told why, when it is gone for good.
        scheduling: where the actor shall be, as `fastrt.remote` takes it.

    Attributes:
        address: where it listens.
        unix: the name of its Unix socket, on its node.
        pid: of its process now, there.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        restarted: Callable[[Any], None],
        frozen: Callable[[], bool],
        lost: Callable[[str], None],
        scheduling: Any,
    ) -> None:
        self.address = ""
        self.unix: str | None = None
        self.pid = 0
        self._settings = settings
        self._restarted, self._lost = restarted, lost
        self._caller: Caller | None = None
        self._ending, self._up = threading.Event(), threading.Event()
        self._actor = ActorClass(Keeper, scheduling=scheduling).remote()
        home = settings["home"], settings["token"], settings["index"]
        self._kept = self._actor.keep.remote(*home)

    def hear(self, caller: Caller, meta: Meta) -> Meta:
        """What the keeper says, and the answer to it.

        Raises:
            FastrtError: another one keeps the server, or it is to end.
        """
        what = meta.get("what")
        if what == "keep" and self._caller is None and not self._ending.is_set():
            self._caller = caller
            return {"settings": self._settings}
        if caller is not self._caller:
            raise FastrtError(f"server {self._settings['index']} is kept by somebody else, or is to end")
        if what == "serves":
            self.address, self.unix, self.pid = str(meta["address"]), str(meta["unix"]), int(meta["pid"])
            if self._up.is_set():
                self._restarted(self)
            self._up.set()
        elif what == "lost":
            self._fail(str(meta["why"]))
        else:
            raise ValueError(f"{what!r} is nothing that a keeper says")
        return {}

    def gone(self, caller: Caller) -> None:
        """A connection to the head has ended."""
        if caller is self._caller:
            self._fail(f"server {self._settings['index']} is lost, with the actor that kept it or its node")

    def wait_until_up(self, timeout_s: float) -> None:
        """Wait until it serves.

        Raises:
            FastrtError: it does not in this time; the actor's error, if that has ended.
        """
        for _ in range(max(1, int(timeout_s / _LOOK_S))):
            if self._up.wait(_LOOK_S):
                return
            if store_client.wait([self._kept], timeout=0)[0]:
                store_client.get(self._kept)
                break
        raise FastrtError(
            f"server {self._settings['index']} did not start to serve: has any node room for the actor that keeps it, "
            "and does the head's address lead here from there?"
        )

    def pause(self, seconds: float) -> None:
        """Wait a little before it is asked again, or until it is told to end."""
        self._ending.wait(seconds)

    def end(self) -> None:
        """Have it end."""
        self._ending.set()
        if self._caller is not None:
            self._caller.wire.close()

    def wait(self) -> None:
        """Wait for its end; see `end`."""
        with contextlib.suppress(FastrtError, TimeoutError):  # the session has ended before, or the actor has
            if self._caller is not None:
                store_client.wait([self._kept], timeout=END_S)
            kill(self._actor)

    def _fail(self, why: str) -> None:
        if not self._ending.is_set():
            self._lost(why)


def make_distant(scheduling: Any, placement_group: PlacementGroup | None) -> Callable[..., DistantServer]:
    """What starts servers where they shall be; for `Head`.

    Args:
        scheduling: see `start`.
        placement_group: see `start`.
    Raises:
        ConfigError: both are given, or one is none.
        NotInitializedError: this process is in no session of fastrt.
    """
    if placement_group is not None:
        if scheduling is not None or not isinstance(placement_group, PlacementGroup):
            raise ConfigError("servers are placed by scheduling=, or by placement_group=, which takes such a group")
        count = placement_group.bundle_count
        choices: Sequence[Any] = [PlacementGroupSchedulingStrategy(placement_group, k) for k in range(count)]
    else:
        choices = scheduling if isinstance(scheduling, (list, tuple)) else [scheduling]
    if store_client.current() is None:
        raise NotInitializedError(
            "servers are placed on nodes of a fastrt cluster: call fastrt.init(address=...) first"
        )
    try:
        for choice in choices:
            ActorClass(Keeper, scheduling=choice)
        if not choices or None in choices:
            raise ValueError("a node for servers is missing")
    except (TypeError, ValueError) as error:
        raise ConfigError(f"servers cannot be placed by {scheduling!r}: {error}") from None

    def make(settings: dict[str, Any], restarted: Any, frozen: Any, lost: Any) -> DistantServer:
        return DistantServer(settings, restarted, frozen, lost, choices[settings["index"] % len(choices)])

    return make
