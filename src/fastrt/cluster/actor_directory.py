"""Finds actors of other nodes by name: asks every member of the cluster."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from fastrt._core.memory.clients import Client
from fastrt._core.objects import handles
from fastrt.cluster.jobs import Jobs, node_of, number_of
from fastrt.cluster.peer_stream import Exchange
from fastrt.store.join import Lasting
from fastrt.store.messages import SearchEnded
from fastrt.store.ref import ObjectRef
from fastrt.tasks.actor_handle import JOB_NAME

_CONNECT_S = 2.0  # for streams to nodes that are not connected yet
_CONNECT_STEP_S = 0.01
_ANSWER_S = 5.0
_KEEP_S = 2.0  # time for the asking process to take the actor that was found


class Finder:
    """Answers the daemon's searches for named actors.

    Args:
        client: this process's attachment.
        daemon: the connection to the daemon.
        connected: returns the streams to other nodes, and whether every member has one.
        jobs: the jobs of other nodes whose tasks run here.
    """

    def __init__(
        self, client: Client, daemon: Lasting, connected: Callable[[], tuple[list[Exchange], bool]], jobs: Jobs
    ) -> None:
        self._client = client
        self._daemon = daemon
        self._connected = connected
        self._jobs = jobs
        self._kept: list[tuple[float, ObjectRef]] = []

    async def find(self, ticket: int, name: str) -> None:
        """Ask all nodes for the actor with a name, and send the answer to the daemon.

        Args:
            ticket: the search's number, which the answer repeats.
            name: the actor's name; empty: collect the names that all nodes have. With JOB_NAME: a job's number; the
                answer then has no names but the node of the job's driver and its number there, if they are known.
        """
        if name.startswith(JOB_NAME):
            found_job = self._jobs.name(int(name.removeprefix(JOB_NAME), 16))
            about = [node_of(found_job), f"{number_of(found_job):x}"] if found_job else []
            self._daemon.send(SearchEnded(ticket, about, 0, 0))
            return
        until = time.monotonic() + _CONNECT_S
        exchanges, complete = self._connected()
        while not complete and time.monotonic() < until:
            await asyncio.sleep(_CONNECT_STEP_S)
            exchanges, complete = self._connected()
        asked = [exchange.remote_actors.ask(name) for exchange in exchanges]
        answers = [one.result() for one in (await asyncio.wait(asked, timeout=_ANSWER_S))[0]] if asked else []
        names = sorted({one for names, _ in answers for one in names})
        found = next((ref for _, ref in answers if ref is not None), None)
        where = (0, 0)
        if found is not None:
            self._kept.append((time.monotonic(), found))
            where = found.objref, handles.describe(self._client, found)["index"]
        self._daemon.send(SearchEnded(ticket, names, *where))

    def kept(self) -> set[int]:
        """Numbers of the stand-ins that were found recently: the process that asked may not hold them yet."""
        return {ref.objref for _, ref in self._kept}

    def tidy(self) -> None:
        """Release the stand-ins that were found more than `_KEEP_S` ago."""
        now = time.monotonic()
        self._kept = [one for one in self._kept if now - one[0] < _KEEP_S]
