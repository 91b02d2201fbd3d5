"""A session's figures for Prometheus, read from its shared memory at each scrape; between scrapes this costs nothing.

`exposition` gives one text; `MetricsServer` serves it, for `fastrt start --metrics-port` and `fastrt metrics --port`.
The number of series is bounded: functions and processes beyond a limit are added up under the name "other".
"""

from __future__ import annotations

import hmac
import math
import os
import re
import ssl
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from fastrt._core.memory import arena, clients
from fastrt._core.objects import spill
from fastrt.config import RESOURCE_PARTS
from fastrt.errors import AttachError, FastrtError
from fastrt.net.address import check_bind
from fastrt.net.http_server import Answer, Request, SmallHttpServer
from fastrt.observe import listing, program_metrics, reading
from fastrt.observe.listing import Row
from fastrt.store import join
from fastrt.store.client import Store
from fastrt.store.messages import ListNodes, NodeList, NodeRow
from fastrt.tasks.labels import is_selector
from fastrt.tasks.resources import INSIDE, is_implied

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
FUNCTIONS_MAX = 100  # functions with series of their own
PROCESSES_MAX = 256
OTHER = "other"
_DAEMON_S = 1.0  # the daemon's patience for a question; the rest comes from shared memory
_BEARER = "Bearer "
_TASK_STATES = ("waiting", "ready", "claimed", "running", "blocked", "ending")
_ACTOR_STATES = ("starting", "alive", "restarting", "dead")
_WORKER_STATES = ("idle", "running", "blocked")


class SessionCollector(Collector):
    """Reads one session's tables at each `collect`.

    Args:
        store: an attachment of this process to the session.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def describe(self) -> Iterable[Metric]:
        """Nothing: the registry would read the tables to find the names."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Read the tables.

        Raises:
            FastrtError: the session has ended.
        """
        begun = time.perf_counter()
        counts = reading.counts(self._store)
        rows = [row for row in clients.table(self._store.client.segment) if not self._is_me(row)]
        yield from self._about(self._nodes())
        yield from _tasks(counts)
        yield from _processes(rows)
        yield from _memory(self._store, counts)
        yield from _of_program(Path(self._store.socket_path).parent)
        family = GaugeMetricFamily("fastrt_scrape_duration_seconds", "Time that reading these figures took.")
        family.add_metric([], time.perf_counter() - begun)
        yield family

    def _is_me(self, row: Row) -> bool:
        """Whether a row is this process, which joined the session only to read its tables."""
        return bool(row["kind"] == clients.KIND_TOOL and row["client"] == self._store.client.index)

    def _nodes(self) -> list[NodeRow]:
        """The nodes that the daemon knows, this one first; none if it does not answer at once."""
        try:
            found = join.inquire(self._store.socket_path, ListNodes(), NodeList, timeout_s=_DAEMON_S)
        except AttachError:
            return []
        return [found.here, *found.others]

    def _about(self, nodes: list[NodeRow]) -> Iterator[Metric]:
        name = nodes[0].name if nodes else ""
        session = self._store.client.segment.session
        about = GaugeMetricFamily(
            "fastrt_info", "The session, with the value 1.", labels=["session", "node", "version"]
        )
        about.add_metric([session, name, version("fastrt")], 1)
        yield about
        yield _gauge("fastrt_daemon_up", "Whether the node daemon answered this scrape's question.", float(bool(nodes)))
        yield _gauge("fastrt_nodes", "Nodes of the cluster that this node knows, itself included.", len(nodes))
        amounts = GaugeMetricFamily(
            "fastrt_resources", "Amounts of this node's resources, in all and free.", labels=["resource", "kind"]
        )
        for row in nodes[:1]:
            for kind, parts in (("total", row.total), ("free", row.free)):
                for resource, amount in parts.items():
                    # Amounts of groups are part of the node's.
                    if INSIDE not in resource and not is_selector(resource) and not is_implied(resource):
                        amounts.add_metric([resource, kind], amount / RESOURCE_PARTS)
        yield amounts


def exposition(store: Store) -> bytes:
    """A session's figures in Prometheus' text format, of the content type CONTENT_TYPE.

    Args:
        store: an attachment of this process to the session.
    Raises:
        FastrtError: the session has ended.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(SessionCollector(store))
    return bytes(generate_latest(registry))


class MetricsServer:
    """Serves a session's figures at /metrics until `close`.

    A request must carry `Authorization: Bearer TOKEN`, unless TLS demands a certificate of the client.

    Args:
        store: an attachment of this process to the session, which outlives the server.
        address: where to listen, `host:port`; port 0 takes any free one.
        bearer: the token; None only with a `tls` that demands certificates.
        tls: None serves in the clear, on loopback only.

    Attributes:
        address: `host:port` with the actual port.

    Raises:
        InsecureBindError: the address is not loopback, and there is no `tls`.
        OSError: the address cannot be bound.
    """

    def __init__(self, store: Store, address: str, bearer: str | None, tls: ssl.SSLContext | None = None) -> None:
        if bearer is None and (tls is None or tls.verify_mode != ssl.CERT_REQUIRED):
            raise ValueError("a server without a bearer token needs TLS that demands certificates")
        encryption = "Use TLS (--tls-cert, --tls-key)"
        check_bind(address, authenticated=True, encrypted=tls is not None, encryption=encryption)
        self._bearer = bearer
        self._lock = threading.Lock()  # one scrape at a time
        self._store = store
        self._server = SmallHttpServer(address, tls, self._answer, _refusal)
        self.address = self._server.address

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop serving."""
        self._server.stop()

    def session_lives(self) -> bool:
        """Whether a scrape would find the session."""
        try:
            arena.room(self._store.client)
        except FastrtError:
            return False
        return os.path.exists(self._store.socket_path)

    def _answer(self, request: Request) -> Answer:
        if not self._may_read(request.headers.get("authorization", "")):
            words = "This needs the header `Authorization: Bearer TOKEN`; docs/metrics.md says where the token is."
            return _refusal(401, words, ("WWW-Authenticate", "Bearer"))
        if request.path not in ("/metrics", "/"):
            return _refusal(404, f"There is nothing at {request.path}; the figures are at /metrics.")
        if request.method != "GET":
            return _refusal(405, "Figures are read with GET.")
        try:
            with self._lock:
                return Answer(200, exposition(self._store), CONTENT_TYPE)
        except FastrtError as exc:
            return _refusal(503, f"The session has ended: {exc}")

    def _may_read(self, header: str) -> bool:
        if self._bearer is None:
            return True
        given = header.encode("latin-1", "replace")
        return hmac.compare_digest(given, (_BEARER + self._bearer).encode("latin-1"))


def _refusal(status: int, words: str, *headers: tuple[str, str]) -> Answer:
    return Answer(status, f"{words}\n".encode(), "text/plain; charset=utf-8", headers)


def _gauge(name: str, words: str, value: float) -> Metric:
    return GaugeMetricFamily(name, words, value=value)


def _counter(name: str, words: str, value: float) -> Metric:
    return CounterMetricFamily(name, words, value=value)


def _tasks(counts: reading.Counts) -> Iterator[Metric]:
    yield _gauge("fastrt_ready_queue_tasks", "Tasks that are ready and that no worker has taken yet.", counts.queued)
    family = GaugeMetricFamily(
        "fastrt_tasks", "Tasks and calls of actors that have not ended.", labels=["function", "state"]
    )
    shown: dict[str, Counter[str]] = {OTHER: Counter()}  # always there: an idle session shows 0, not nothing
    for one in counts.tasks:
        name = one.name if one.name in shown or len(shown) <= FUNCTIONS_MAX else OTHER
        shown.setdefault(name, Counter()).update(one.states)
    for name, states in shown.items():
        for state in _TASK_STATES:
            family.add_metric([name, state], states[state])
    yield family
    actors = GaugeMetricFamily("fastrt_actors", "Actors; a dead one counts while a handle exists.", labels=["state"])
    for state in {**dict.fromkeys(_ACTOR_STATES), **counts.actors}:
        actors.add_metric([state], counts.actors.get(state, 0))
    yield actors


def _processes(rows: list[Row]) -> Iterator[Metric]:
    states = Counter(dict.fromkeys(_WORKER_STATES, 0))
    kinds: Counter[str] = Counter()
    labels = ["kind", "slot"]
    cpu = CounterMetricFamily("fastrt_process_cpu_seconds", "Processor time that a process used.", labels=labels)
    memory = GaugeMetricFamily(
        "fastrt_process_resident_memory_bytes", "Resident memory of a process; pages of the store count in each.",
        labels=labels,
    )  # fmt: skip
    used: dict[tuple[str, str], list[float]] = {}
    for number, row in enumerate(rows):
        kind = _kind(row)
        kinds[kind] += 1
        if row["kind"] == clients.KIND_WORKER:
            states["idle" if row["task"] is None else "blocked" if row["blocked"] else "running"] += 1
        found = _use_of(row["pid"])
        if found is not None:
            sums = used.setdefault((kind, str(row["client"]) if number < PROCESSES_MAX else OTHER), [0.0, 0.0])
            sums[0] += found[0]
            sums[1] += found[1]
    for (kind, slot), (seconds, nbytes) in used.items():
        cpu.add_metric([kind, slot], seconds)
        memory.add_metric([kind, slot], nbytes)
    workers = GaugeMetricFamily("fastrt_workers", "Worker processes by what they do.", labels=["state"])
    for state, count in states.items():
        workers.add_metric([state], count)
    processes = GaugeMetricFamily("fastrt_processes", "Processes of the session.", labels=["kind"])
    for kind, count in sorted(kinds.items()):
        processes.add_metric([kind], count)
    yield from (workers, processes, cpu, memory)


def _kind(row: Row) -> str:
    """The kind of a process; the uplink is one of its own, though it joins as a tool."""
    if row["kind"] == clients.KIND_TOOL and row["name"] == "uplink":
        return "uplink"
    return listing.KINDS.get(row["kind"], OTHER)


def _use_of(pid: int) -> tuple[float, int] | None:
    """Processor time in seconds and resident bytes; None if the process has just ended."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            times = process.cpu_times()
            return times.user + times.system, process.memory_info().rss
    except psutil.Error:
        return None


def _memory(store: Store, counts: reading.Counts) -> Iterator[Metric]:
    by_state: dict[str, list[int]] = {state: [0, 0] for state in ("pending", "sealed", "spilled", "remote")}
    for one in counts.objects:
        sums = by_state.setdefault(one.state, [0, 0])
        sums[0] += one.count
        sums[1] += one.bytes
    objects = GaugeMetricFamily("fastrt_objects", "Objects of the store.", labels=["state"])
    nbytes = GaugeMetricFamily("fastrt_object_bytes", "Bytes of the values of these objects.", labels=["state"])
    for state, (count, size) in by_state.items():
        objects.add_metric([state], count)
        nbytes.add_metric([state], size)
    yield from (objects, nbytes)
    used, committed, most = arena.room(store.client)
    yield _gauge("fastrt_store_used_bytes", "Bytes of the store that values and tables take, in whole pages.", used)
    yield _gauge("fastrt_store_committed_bytes", "Bytes of the store that have memory.", committed)
    yield _gauge("fastrt_store_limit_bytes", "Bytes that the store may take.", most)
    words = {
        "spilled": "moved from the store to files",
        "restored": "brought back from files into the store",
        "mapped": "written to files at once, because the store had no room",
    }
    totals: dict[str, Any] = spill.totals(store.client)
    for what, meaning in words.items():
        yield _counter(f"fastrt_{what}_objects", f"Values {meaning}.", totals[f"{what}_objects"])
        yield _counter(f"fastrt_{what}_bytes", f"Bytes of values {meaning}.", totals[f"{what}_bytes"])


def _of_program(session_folder: Path) -> Iterator[Metric]:
    """The figures that programs record by `fastrt.util.metrics`, added up over processes; gauges by process."""
    series, left_out = program_metrics.read(session_folder)
    sums: dict[str, dict[tuple[str, ...], list[float]]] = {}  # by name, then by the values of the labels
    firsts: dict[str, program_metrics.Definition] = {}
    keys: dict[str, list[str]] = {}
    for one in series:
        tags = dict.fromkeys(key for key, _ in one.definition.tags)
        keys[one.definition.name] = list(dict.fromkeys([*keys.get(one.definition.name, []), *tags]))
    for one in series:
        what = one.definition
        first = firsts.setdefault(what.name, what)
        if (first.kind, first.boundaries) != (what.kind, what.boundaries):
            left_out += 1  # two metrics of one name
            continue
        given = dict(what.tags)
        labels = tuple(_plain(given.get(key, "")) for key in keys[what.name])
        if what.kind == program_metrics.GAUGE:
            if one.pid:
                key = (*labels, str(one.pid))
                sums.setdefault(what.name, {})[key] = list(one.values)
            continue
        kept = sums.setdefault(what.name, {}).setdefault(labels, [0.0] * what.size)
        for k, value in enumerate(one.values):
            kept[k] += value
    for name, rows in sorted(sums.items()):
        yield _family_of(firsts[name], keys[name], rows)
    if left_out:
        yield _gauge("fastrt_program_series_left_out", "Series of programs that are not shown.", left_out)


def _family_of(what: program_metrics.Definition, keys: list[str], rows: dict[tuple[str, ...], list[float]]) -> Metric:
    names = _label_names(keys, what.kind)
    about = _plain(what.description) or f"{what.name} of the program."
    if what.kind == program_metrics.GAUGE:
        gauge = GaugeMetricFamily(what.name, about, labels=[*names, "pid"])
        for labels, values in rows.items():
            gauge.add_metric(labels, values[0])
        return gauge
    if what.kind == program_metrics.COUNTER:
        counter = CounterMetricFamily(what.name, about, labels=names)
        for labels, values in rows.items():
            counter.add_metric(labels, values[0])
        return counter
    histogram = HistogramMetricFamily(what.name, about, labels=names)
    for labels, values in rows.items():
        buckets, total = [], 0.0
        for bound, count in zip([*what.boundaries, math.inf], values[:-1], strict=True):
            total += count
            buckets.append(("+Inf" if bound == math.inf else str(bound), total))
        histogram.add_metric(labels, buckets, values[-1])
    return histogram


def _label_names(keys: list[str], kind: str) -> list[str]:
    """Names of labels that Prometheus takes, each another one: one wrong name would cost the whole scrape."""
    taken = {"pid"} if kind == program_metrics.GAUGE else {"le"} if kind == program_metrics.HISTOGRAM else set()
    names = []
    for key in keys:
        name = re.sub(r"^__+", "_", re.sub(r"[^a-zA-Z0-9_]|^(?=[0-9])", "_", key)) or "_"
        while name in taken:
            name += "_"
        taken.add(name)
        names.append(name)
    return names


def _plain(text: str) -> str:
    """Text that can be encoded."""
    return text.encode("utf-8", "replace").decode()
