"""Servers in this very process, with real endpoints and journals, and workers of them, which are threads."""

import math
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastrt.net.grpc.trust import trust_of
from fastrt.ps import SGD, Adagrad, Adam, Constant, Embedding, Momentum, Table
from fastrt.ps.client import Session
from fastrt.ps.endpoint import Endpoint
from fastrt.ps.handles import Background
from fastrt.ps.head import Head, HeadOptions
from fastrt.ps.initializers import Initial
from fastrt.ps.journal import FolderMedium, Journal, MemoryMedium
from fastrt.ps.placement import divide
from fastrt.ps.server import Server
from fastrt.ps.server_process import ServerProcess
from fastrt.ps.spec import Spec
from fastrt.ps.start import _first_values
from support.threads import together


class Kept(MemoryMedium):
    """Duplicates of the descriptors, so that the next life finds them open."""

    def open(self, name: str) -> int:
        return os.dup(super().open(name))


class Place(ServerProcess):
    """A server in this process; its log outlives it as that of a process does."""

    def __init__(self, settings: dict[str, Any], restarted: Any, frozen: Any, lost: Any) -> None:
        self._settings, self._frozen = settings, frozen
        self.trust = trust_of(settings["token"], settings["insecure"])
        self._fds = MemoryMedium.make()
        self.address, self.unix = f"{settings['host']}:0", f"fastrt-test-{secrets.token_hex(6)}"
        self.awake()

    def awake(self) -> None:
        """Begin a life."""
        folder = self._settings["folder"]
        medium = Kept(self._fds) if folder is None else FolderMedium(Path(folder))
        journal = Journal(medium, False, self._settings["accept_loss"], self._settings["expected"])
        self.server = Server(self._settings["index"], secrets.token_hex(4), journal, self.trust, self._frozen())
        self.endpoint = Endpoint(self.server, self.trust, self.address, self.unix)
        self.address = self.endpoint.address

    def die(self) -> None:
        """End it; what is not in the journal is lost."""
        self.endpoint.close()
        self.server.journal.close()

    def wait_until_up(self, timeout_s: float) -> None:
        pass

    def pause(self, seconds: float) -> None:
        threading.Event().wait(seconds)

    def end(self) -> None:
        pass

    def wait(self) -> None:
        self.die()
        while self._fds:
            os.close(self._fds.pop())


class Site:
    """A head whose servers are in this process, and workers that are threads; nobody is in a membership."""

    def __init__(self, servers: int, workers: int = 1, **options: Any) -> None:
        self.head = Head(HeadOptions(servers, workers, **options), Place)
        self.head.start()
        self.sessions: list[Session] = []
        self.closed = False

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        for session in self.sessions:
            session.close()
        self.head.close()

    @property
    def places(self) -> dict[int, Any]:
        return dict(self.head.servers)

    def worker(self, rank: int = 0) -> Session:
        """A worker's connection."""
        session = Session(self.head.address, self.head.token, 20.0, self.head.options.insecure)
        session._rank = rank
        self.sessions.append(session)
        return session

    def table(self, session: Session, name: str, shape: Any, optimizer: Any, init: Any = 0.0, **more: Any) -> Table:
        first, values = _first_values(name, init, shape)
        cuts = tuple(divide(math.prod(shape), more.pop("parts", None)))
        spec = Spec(name, "dense", shape, optimizer, first, cuts, **more)
        return Table(session, self._define(session, spec, values), Background())

    def embedding(self, session: Session, name: str, dim: int, optimizer: Any, **more: Any) -> Embedding:
        init: Initial = more.pop("init", Constant(0.0))
        spec = Spec(name, "embedding", (dim,), optimizer, init, **more)
        return Embedding(session, self._define(session, spec, None), Background())

    def _define(self, session: Session, spec: Spec, values: Any) -> Spec:
        ours = {"mode": None, "staleness": None, "workers": None}
        session.ask({"op": "define", "spec": {**spec.to_json(), **ours}}, [] if values is None else [values])
        return session.refresh(0, 0.0).tables[spec.name][0]

    def scale(self, servers: int) -> None:
        """Move parts to so many servers; those that have none stay up."""
        self.head.add([k for k in range(servers) if k not in self.head.servers])
        self.head.move_to(list(range(servers)))


@pytest.fixture
def site() -> Iterator[Callable[..., Site]]:
    """Make a site: `site(servers, workers, **options)`."""
    made: list[Site] = []

    def make(servers: int, workers: int = 1, **options: Any) -> Site:
        made.append(Site(servers, workers, **options))
        return made[-1]

    yield make
    while made:  # and let go of them: pytest keeps the fixture for longer
        made.pop().close()


@pytest.fixture(name="together")
def together_fixture() -> Callable[..., None]:
    """See `together`."""
    return together


class Local:
    """The same optimizer in NumPy and float64, in this process."""

    def __init__(self, optimizer: Any, first: Any) -> None:
        self.optimizer = optimizer
        self.param = first.astype(np.float64)
        self.states = [np.full(first.shape, value, np.float64) for value in optimizer.states]
        self.step = 0

    def update(self, g: Any, rows: Any = slice(None)) -> None:
        o, p, s = self.optimizer, self.param[rows], [one[rows] for one in self.states]
        self.step += 1
        g = g.astype(np.float64)
        if isinstance(o, SGD):
            p = p - o.lr * (g + o.weight_decay * p)
        elif isinstance(o, Momentum):
            s[0] = o.momentum * s[0] + g
            p = p - o.lr * (g + o.momentum * s[0] if o.nesterov else s[0])
        elif isinstance(o, Adagrad):
            s[0] = s[0] + g * g
            p = p - o.lr * g / (np.sqrt(s[0]) + o.eps)
        elif isinstance(o, Adam):
            s[0] = o.beta1 * s[0] + (1 - o.beta1) * g
            s[1] = o.beta2 * s[1] + (1 - o.beta2) * g * g
            decay = getattr(o, "weight_decay", 0.0)
            mean, square = s[0] / (1 - o.beta1**self.step), s[1] / (1 - o.beta2**self.step)
            p = p - o.lr * decay * p - o.lr * mean / (np.sqrt(square) + o.eps)
        else:
            total = s[0] + g * g
            s[1] = s[1] + g - (np.sqrt(total) - np.sqrt(s[0])) / o.lr * p
            s[0] = total
            kept = np.maximum(np.abs(s[1]) - o.l1, 0)
            p = -np.sign(s[1]) * kept / (np.sqrt(total) / o.lr + 2 * o.l2)
        self.param[rows] = p
        for whole, part in zip(self.states, s, strict=True):
            whole[rows] = part


@pytest.fixture
def local() -> type[Local]:
    """See `Local`."""
    return Local
