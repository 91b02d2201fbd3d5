"""Servers on other nodes of a fastrt cluster: an actor there keeps the server's process, and tells the head of it.

The keeper holds one connection to the head. Over that it is told what the server is to be, and tells where it listens,
in each of its lives; its log is the keeper's, or lies in a folder. When the connection ends, whoever ended it, the
server ends. When the head did not want that, another keeper has the server go on from its folder, which only one
process at a time can use; without a folder the cluster is given up, since what is gone with a node cannot be had again.
A server that begins again takes no push until the head says so: parts may be on their way.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from fastrt.errors import ConfigError, FastrtError, NotInitializedError
from fastrt.net.grpc.trust import trust_of
from fastrt.net.supervise import RestartLimit
from fastrt.ps.endpoint import Caller
from fastrt.ps.remote_errors import raise_refusal
from fastrt.ps.server_process import END_S, ServerProcess
from fastrt.ps.wire import VERSION, BrokenWireError, Meta, Wire, dial
from fastrt.store import client as store_client
from fastrt.tasks.actor_class import ActorClass
from fastrt.tasks.actor_handle import kill
from fastrt.tasks.placement_group import PlacementGroup, PlacementGroupSchedulingStrategy

_log = logging.getLogger(__name__)
_DIAL_S = 20.0
_LOSSES_MAX, _LOSSES_S = 3, 60.0
_LOOK_S = 0.05


class Keeper:
    """The actor. It has no state of its own: `keep` runs for as long as the server shall."""

    def keep(self, address: str, token: str, index: int, insecure: bool = False) -> None:
        """Keep a server, until the head's connection ends.

        Args:
            address: of the head.
            token: the cluster's.
            index: of the server.
            insecure: the cluster was started so.
        Raises:
            FastrtError: the head refuses, or the server does not start.
        """
        with contextlib.closing(dial(None, address, trust_of(token, insecure), _DIAL_S)) as wire:
            raise_refusal(wire.call({"version": VERSION, "client": 0}, timeout_s=_DIAL_S)[0])
            told = _tell(wire, {"index": index, "what": "keep"})
            settings = told["settings"]
            settings["host"] = wire.local_host
            begun, turn = threading.Event(), threading.Lock()
            if told["again"]:
                begun.set()

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
        self._ending, self._up, self._back = threading.Event(), threading.Event(), threading.Event()
        self._actors = ActorClass(Keeper, scheduling=scheduling)
        self._restarts = RestartLimit(_LOSSES_MAX, _LOSSES_S)
        self._successor: threading.Thread | None = None
        self._keep()

    def _keep(self) -> None:
        """Have an actor keep it."""
        self._actor = self._actors.remote()
        home = [self._settings[name] for name in ("home", "token", "index", "insecure")]
        self._kept = self._actor.keep.remote(*home)

    def hear(self, caller: Caller, meta: Meta) -> Meta:
        """What the keeper says, and the answer to it.

        Raises:
            FastrtError: another one keeps the server, or it is to end.
        """
        what = meta.get("what")
        if what == "keep" and self._caller is None and not self._ending.is_set():
            self._caller = caller
            return {"settings": self._settings, "again": self._up.is_set()}
        if caller is not self._caller:
            raise FastrtError(f"server {self._settings['index']} is kept by somebody else, or is to end")
        if what == "serves":
            self.address, self.unix, self.pid = str(meta["address"]), str(meta["unix"]), int(meta["pid"])
            self._settings |= {"accept_loss": False, "expected": True}  # only of damage that was there at first
            if self._up.is_set():
                self._restarted(self)
            self._up.set()
            self._back.set()
        elif what == "lost":
            self._fail(str(meta["why"]))
        else:
            raise ValueError(f"{what!r} is nothing that a keeper says")
        return {}

    def gone(self, caller: Caller) -> None:
        """A connection to the head has ended."""
        if caller is not self._caller or self._ending.is_set():
            return
        why = f"server {self._settings['index']} is lost, with the actor that kept it or its node"
        may_restart = self._restarts.allows_another()
        if self._settings["folder"] is None or not self._up.is_set() or not may_restart:
            self._fail(why)
            return
        _log.warning("%s; another one goes on from its folder", why)
        self._caller = None
        self._back.clear()
        self._successor = threading.Thread(target=self._keep_again, args=(why,), name="fastrt-ps-keep", daemon=True)
        self._successor.start()

    def _keep_again(self, why: str) -> None:
        """In a thread: have another actor keep it."""
        try:
            with contextlib.suppress(FastrtError):
                kill(self._actor)  # only its connection may be lost
            self._keep()
            self._wait_for(self._back, self._settings["start_timeout_s"])
        except (FastrtError, TimeoutError) as error:
            self._fail(f"{why}, and did not begin again: {error}")

    def wait_until_up(self, timeout_s: float) -> None:
        """Wait until it serves.

        Raises:
            FastrtError: it does not in this time; the actor's error, if that has ended.
        """
        self._wait_for(self._up, timeout_s)

    def _wait_for(self, event: threading.Event, timeout_s: float) -> None:
        for _ in range(max(1, int(timeout_s / _LOOK_S))):
            if event.wait(_LOOK_S) or self._ending.is_set():
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
        if self._successor is not None:
            self._successor.join()
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
