"""One process of a job: rank 0 runs the head, a node and the program; each other rank a node until it has ended."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fastrt.config import Config, cpu_count
from fastrt.errors import AttachError, FastrtError
from fastrt.launch.board import Board, open_board
from fastrt.launch.detect import PRIVATE, Place
from fastrt.launch.jax import Door
from fastrt.launch.meeting import Attendance, Meeting, attend, enter, ports_of
from fastrt.launch.program import Program, Signals
from fastrt.launch.secret import token_of_job
from fastrt.launch.servers import ServerOptions, Servers
from fastrt.launch.ssh import SshHost, SshNodes, address_towards
from fastrt.net.address import is_loopback_host, join_address, reachable
from fastrt.net.grpc.identity import Identity, new_token
from fastrt.runtime.node_service import Node, NodeOptions, start_session
from fastrt.runtime.nodes import nodes_at
from fastrt.runtime.session import Embedded, start

ADDRESS = "FASTRT_ADDRESS"  # where `fastrt.init` in the program finds its node
_JAX = "jax"  # the door to the coordinator, and its socket
_TICK_S = 0.05
_QUIET_TICK_S = 1.0  # once all nodes are there
_NOTICE_S = 0.5  # for rank 0 to say that the whole job ends
_START_S = 2.0  # for the start of a node whose job is over
_STORE_BYTES_MIN = 16 << 20
_ENDING = frozenset((signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT))


@dataclass(frozen=True)
class JobOptions:
    """The options of `fastrt run`.

    Attributes:
        words: the command of the program.
        settings: of each node, as for `Config.load`.
        token: of the cluster; empty: it is derived from the user's key and the job's name.
        host: address of this machine for the others; empty: it is found.
        min_nodes: nodes that must be there before the program starts; 0: all.
        patience_s: after so long the missing nodes are named.
        timeout_s: so long the job waits for `min_nodes`.
        grace_s: time for the program and running tasks after SIGTERM.
        quiet: whether only faults are printed.
        jax: whether rank 0 serves a coordinator for JAX.
        servers: the job's parameter servers.
        hosts: machines on which ssh starts the other nodes.
        python: the interpreter there.
        name: of this process's node; empty: that of the machine.
        over: ends this process's node when it is set.
    """

    words: Sequence[str]
    settings: Mapping[str, Any] = field(default_factory=dict)
    token: str = field(default="", repr=False)
    host: str = ""
    min_nodes: int = 0
    patience_s: float = 30.0
    timeout_s: float = 300.0
    grace_s: float = 30.0
    quiet: bool = False
    jax: bool = False
    servers: ServerOptions = field(default_factory=ServerOptions)
    hosts: Sequence[SshHost] = ()
    python: str = sys.executable
    name: str = ""
    over: threading.Event = field(default_factory=threading.Event)

    def order(self, size: int, address: str, token: str) -> dict[str, Any]:
        """Return what a node on another machine needs to know, besides its rank and name; see `remote.main`.

        Args:
            size: processes of the job.
            address: of the meeting.
            token: of the job.
        """
        about = {"size": size, "address": address, "token": token, "settings": dict(self.settings)}
        seconds = {name: float(getattr(self, name)) for name in ("patience_s", "timeout_s", "grace_s")}
        return {**about, **seconds, "folder": os.getcwd(), "jax": self.jax}


def run(place: Place, options: JobOptions) -> int:
    """Run this process's part of a job.

    Returns:
        The program's exit code, or minus the signal that ended it; 0 on the other ranks.
    Raises:
        FastrtError: the job cannot start; the message says why.
    """
    with Signals() as signals:
        if options.hosts:
            names = [str(host) for host in options.hosts]
            place = Place("ssh", 0, 1 + len(names), hosts=(socket.gethostname(), *names))
            options = replace(options, token=options.token or new_token())
        if place.size == 1:
            if not options.jax:
                return _run_alone(options, signals)
            place = replace(place, head="127.0.0.1", meets="port")
            options = replace(options, token=options.token or new_token())
        board = open_board(place)
        try:
            if board is not None:
                place = _known(place, board)
            identity_token = options.token or token_of_job(_named(place))
            for name in [name for name in os.environ if name.startswith(PRIVATE)]:
                del os.environ[name]  # after the board is open; see PRIVATE
            part = _First if place.rank == 0 else _Other
            return part(place, options, signals, board, identity_token).run()
        finally:
            if board is not None:
                board.close()


def _known(place: Place, board: Board) -> Place:
    return Place(**{**vars(place), "size": place.size or board.size(), "job": board.job}).check()


def _named(place: Place) -> str:
    """Return the job's name.

    Raises:
        FastrtError: it has none.
    """
    if not place.job:
        raise FastrtError("the processes of this job need a common secret: give --job NAME, or a token (--token-file)")
    return place.job


def _run_alone(options: JobOptions, signals: Signals) -> int:
    """Run the program on this machine alone: in a session without a head, a port or a certificate."""
    runtime = start(Config.load(**options.settings))
    try:
        with Servers(options.servers, runtime.socket_path, "", options.timeout_s) as servers:
            env = _environment(runtime.socket_path, **servers.variables)
            program = Program(options.words, env, signals, options.grace_s, _Speaker().say)
            return program.wait(lambda: None, _QUIET_TICK_S)
    finally:
        runtime.close()


def _environment(socket_path: str, **more: str) -> dict[str, str]:
    return {**os.environ, ADDRESS: socket_path, **more}


class _Speaker:
    """Prints lines for people to standard error: standard output belongs to the program."""

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet

    def say(self, text: str) -> None:
        sys.stderr.write(f"fastrt: {text}\n")
        sys.stderr.flush()

    def note(self, text: str) -> None:
        if not self._quiet:
            self.say(text)


class _Part:
    """The part of a job that one process has.

    Args:
        place: of this process.
        options: of the job.
        signals: of this process.
        board: of an MPI job; None: the processes meet at ports.
        token: of the job.
    """

    def __init__(self, place: Place, options: JobOptions, signals: Signals, board: Board | None, token: str) -> None:
        self.place, self.options, self.signals, self.board, self.token = place, options, signals, board, token
        self.identity = Identity.from_token(token)
        speaker = _Speaker(options.quiet)
        self.say, self.note = speaker.say, speaker.note
        host = socket.gethostname().partition(".")[0]
        self.name = options.name or (host if place.local_size == 1 else f"{host}-{place.local_rank}")

        self.door: Door | None = None

    def run(self) -> int:
        """Run it."""
        if self.options.jax:
            self.door = Door(self.place.size, self.place.rank, self.connect_to_coordinator)
            os.environ.update(self.door.variables())  # before the session starts: tasks see them, too
        try:
            return self.run_node()
        finally:
            if self.door is not None:
                self.door.close()

    def run_node(self) -> int:
        """Run this process's node until the job is over."""
        raise NotImplementedError

    def connect_to_coordinator(self) -> socket.socket:
        """Connect to the job's coordinator for JAX.

        Raises:
            OSError, FastrtError: it cannot be reached now.
        """
        raise NotImplementedError

    def config(self) -> Config:
        """Return the settings of this process's node: a share of the machine if several processes of the job are on it.

        Raises:
            ConfigError: a setting is wrong.
        """
        settings = dict(self.options.settings)
        config = Config.load(**settings)
        share = self.place.local_size
        if share > 1:
            if settings.get("num_workers") is None and cpu_count() == (os.cpu_count() or 1):  # not bound to some CPUs
                settings["num_workers"] = max(1, config.num_workers // share)
            if settings.get("object_store_memory") is None:
                settings["object_store_memory"] = max(_STORE_BYTES_MIN, config.object_store_memory // share)
            config = Config.load(**settings)
        return config

    def node_options(self, config: Config, host: str, head: str | None) -> NodeOptions:
        """Return the options of this process's node at an address of this machine."""
        listen = join_address(host, 0)
        grace_s = self.options.grace_s
        return NodeOptions(
            config=config, head=head, listen=listen, host=host, name=self.name, token=self.token, grace_s=grace_s
        )

    def watched(self, node: Node) -> threading.Thread:
        """Start a thread that restarts the node's processes that are killed."""

        def watch() -> None:
            try:
                node.run()
            except FastrtError as exc:
                self.say(f"the node {self.name} ends: {exc}")
                os.kill(os.getpid(), signal.SIGTERM)

        thread = threading.Thread(target=watch, name="fastrt-node", daemon=True)
        thread.start()
        return thread


class _First(_Part):
    """Rank 0: the head, a node, the meeting and the program."""

    _coordinator = ""  # path of its Unix socket
    _host = ""
    ssh: SshNodes | None = None

    def run_node(self) -> int:
        meeting = Meeting(self.identity, self.place.size, self.place.port, self.say)
        try:
            self._host = self.options.host or address_towards(self.options.hosts) or _host_of(self.place.head)
            if self.options.hosts:
                order = self.options.order(self.place.size, join_address(self._host, meeting.port), self.token)
                self.ssh = SshNodes(self.options.hosts, self.options.python, order, self.options.timeout_s, self.say)
            if self.board is not None:
                addresses = [join_address(host, meeting.port) for host in _own_hosts(self.options.host)]
                threading.Thread(target=self._publish, args=[",".join(addresses)], daemon=True).start()
            try:
                node = self._node(self._host, meeting)
            except FastrtError as exc:
                meeting.refuse(f"it cannot start: {exc}")
                raise
            with node:
                watching = self.watched(node)
                try:
                    return self._serve(node, meeting)
                finally:
                    if self.ssh is not None:
                        self.ssh.end()
                    meeting.close()
                    node.stop()
                    watching.join()
        finally:
            meeting.close()
            if self.ssh is not None:
                self.ssh.close()

    def connect_to_coordinator(self) -> socket.socket:
        """Connect to the coordinator of this node."""
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(self._coordinator)
        except OSError:
            sock.close()
            raise
        return sock

    def _node(self, host: str, meeting: Meeting) -> Node:
        """Start the head's node, and on it the coordinator if the job wants one.

        The meeting opens as soon as the head serves: the other nodes join while the rest of this one starts.

        Raises:
            FastrtError: it cannot start.
        """
        config = self.config()
        options = self.node_options(config, host, None)
        runtime, ahead = start_session(config, is_head=True)
        doors = {}
        if self.options.jax:
            self._coordinator = str(Path(runtime.socket_path).with_name(_JAX))  # the folder is this user's alone
            job = {"num_tasks": self.place.size}
            options = replace(options, coordinator=f"unix:{self._coordinator}", job=job)
            doors[_JAX] = self.connect_to_coordinator
        return Node(options, runtime, ahead, lambda head: meeting.open({"port": int(head.rpartition(":")[2])}, doors))

    def _publish(self, text: str) -> None:
        assert self.board is not None
        try:
            self.board.publish(text)
        except FastrtError as exc:
            self.say(f"the addresses of rank 0 cannot be published: {exc}")

    def _serve(self, node: Node, meeting: Meeting) -> int:
        """Wait for the nodes, run the program, and report who comes and goes meanwhile."""
        roll = _Roll(node, meeting, self)
        code = roll.wait()
        if code is not None:
            return code
        options = self.options
        host = self._host if self.place.size > 1 else ""
        with Servers(options.servers, node.socket_path, host, options.timeout_s) as servers:
            env = _environment(node.socket_path, **servers.variables)
            program = Program(options.words, env, self.signals, options.grace_s, self.say)

            def look() -> None:
                if program.ends_soon:
                    meeting.end_soon()
                roll.look()

            return program.wait(look, _TICK_S)


class _Roll:
    """The nodes that are there, those that are missing, and why."""

    def __init__(self, node: Node, meeting: Meeting, part: _First) -> None:
        self._node, self._meeting, self._part, self._ssh = node, meeting, part, part.ssh
        self._there: dict[str, str] = {}  # names by node
        self._since = time.monotonic()
        self._reports = 1
        self._looked_at = 0.0

    def wait(self) -> int | None:
        """Wait until enough nodes are there.

        Returns:
            An exit code if a signal ended the wait; else None.
        Raises:
            FastrtError: too few nodes came in time; the message says which are missing, and why.
        """
        options = self._part.options
        wanted = options.min_nodes or self._part.place.size
        while True:
            self.look()
            if len(self._there) >= wanted:
                return None
            for number in self._part.signals.take():
                if number in _ENDING:
                    self._part.say(f"ended by {signal.Signals(number).name} before the program had started")
                    return -number
            if self._ssh is not None and self._part.place.size - len(self._ssh.lost()) < wanted:
                raise FastrtError(f"{wanted} nodes are wanted, and these cannot come:\n{self._missing()}")
            if time.monotonic() > self._since + options.timeout_s:
                came = f"{len(self._there)} of {wanted} nodes came in {options.timeout_s:g} s (--timeout)"
                raise FastrtError(f"{came}:\n{self._missing()}")
            time.sleep(_TICK_S)

    def look(self) -> None:
        """Print which nodes have come and gone; and which are missing after a while."""
        now = time.monotonic()
        size = self._part.place.size
        is_whole = len(self._there) >= size
        if now < self._looked_at + (_QUIET_TICK_S if is_whole else _TICK_S):
            return
        self._looked_at = now
        try:
            rows = {row["NodeID"]: row for row in nodes_at(self._node.socket_path)}
        except AttachError:
            return  # the daemon is being replaced
        for node in rows.keys() - self._there.keys():
            self._there[node] = self._part.name if rows[node]["IsHere"] else rows[node]["NodeName"]
            workers = int(rows[node]["Resources"].get("CPU", 0))
            self._part.note(f"node {len(self._there)} of {size}: {self._there[node]}, {workers} workers")
        for node in self._there.keys() - rows.keys():
            self._part.say(f"node {self._there.pop(node)} has left: {len(self._there)} of {size} are there")
        if len(self._there) < size and now > self._since + self._reports * self._part.options.patience_s:
            self._reports += 1
            self._part.say(
                f"after {now - self._since:.0f} s {len(self._there)} of {size} nodes are there:\n{self._missing()}"
            )

    def _missing(self) -> str:
        arrivals = self._meeting.arrivals()
        there = set(self._there.values())
        lines = []
        for rank in range(1, self._part.place.size):
            arrival = arrivals.get(rank)
            if arrival is not None and arrival.name in there:
                continue
            lines.append(f"  {self._part.place.host_of(rank)}: {self._why(rank, arrival)}")
        return "\n".join(lines)

    def _why(self, rank: int, arrival: Any) -> str:
        if arrival is not None:
            return arrival.refused or f"its node {arrival.name} has connected and is starting, or it has left"
        if self._ssh is not None and self._ssh.why(rank):
            return self._ssh.why(rank)
        if self._part.place.hosts:
            host = self._part.place.hosts[rank]
            try:
                socket.getaddrinfo(host, None)
            except OSError:
                return f"has not connected, and its name {host} is not resolved here"
        return f"has not connected to port {self._meeting.port} of this machine; its own output says why"


class _Other(_Part):
    """A node that the job has beside the first one, until the program has ended."""

    _meeting = ""  # its address, once it has been reached

    def run_node(self) -> int:
        # The session starts while this process waits for rank 0, whose node takes as long to start.
        finding: Future[Attendance] = Future()
        threading.Thread(target=_fill, args=[finding, self._attend], name="fastrt-attend", daemon=True).start()
        config = self.config()
        runtime, ahead = start_session(config, is_head=False)
        try:
            attendance = self._found(finding)
        except BaseException:
            ahead.close()
            runtime.end_for_all()
            raise
        if attendance is None:
            ahead.close()
            runtime.end_for_all()
            return 0
        self._meeting = attendance.address
        over = self.options.over
        is_up = threading.Event()
        threading.Thread(target=_wait_for_end, args=[attendance, over], name="fastrt-end", daemon=True).start()
        threading.Thread(target=self._give_up, args=[runtime, is_up], name="fastrt-give-up", daemon=True).start()
        try:
            host = self.options.host or attendance.host
            with Node(self.node_options(config, host, attendance.where["head"]), runtime, ahead) as node:
                is_up.set()
                watching = self.watched(node)
                try:
                    self._wait(node, attendance, watching)
                finally:
                    node.stop()
                    watching.join()
        finally:
            attendance.close()
        return 0

    def connect_to_coordinator(self) -> socket.socket:
        """Connect to rank 0's coordinator by its meeting."""
        if not self._meeting:
            raise ConnectionRefusedError("rank 0 has not been reached yet")
        return enter(self.identity, self._meeting, _JAX, self.place.rank, self.name)

    def _give_up(self, runtime: Embedded, is_up: threading.Event) -> None:
        """End this process if the job is over before the node is up: its uplink would wait for the ended head."""
        self.options.over.wait()
        if is_up.wait(_START_S):
            return
        if self.board is not None:
            self.board.close()
        runtime.end_for_all()
        os._exit(0)

    def _found(self, finding: Future[Attendance]) -> Attendance | None:
        """Wait for the connection to rank 0; None when a signal ends the wait."""
        while True:
            try:
                return finding.result(_TICK_S)
            except FutureTimeoutError:  # before Python 3.11 it is another class than TimeoutError
                if self.options.over.is_set() or set(self.signals.take()) & _ENDING:
                    return None

    def _attend(self) -> Attendance:
        found = [] if self.board is None else self.board.read().split(",")

        def addresses() -> Sequence[str]:
            if found:
                return found
            port = self.place.port
            hosts = _resolved(self.place.head)
            return [join_address(host, one) for one in ([port] if port else ports_of(self.identity)) for host in hosts]

        options = self.options
        return attend(
            self.identity, addresses, self.place.rank, self.name, options.patience_s, options.timeout_s, self.say
        )

    def _wait(self, node: Node, attendance: Attendance, watching: threading.Thread) -> None:
        """Wait until the job is over, or the node has left after SIGTERM, in `grace_s` at the latest.

        When the job gets SIGTERM, all ranks do: then the node stays for the program as long as it may.
        """
        since: float | None = None
        leaves = False
        while watching.is_alive() and not self.options.over.is_set():
            time.sleep(_TICK_S)
            for number in self.signals.take():
                if number == signal.SIGTERM and since is not None:
                    return
                if number == signal.SIGTERM:
                    since = time.monotonic()
                    self.say(f"node {self.name} got SIGTERM: it leaves in {self.options.grace_s:g} s at most (--grace)")
            waited = 0.0 if since is None else time.monotonic() - since
            if waited > self.options.grace_s and (since is not None):
                return
            if waited > _NOTICE_S and not leaves and not attendance.ends_soon:
                leaves = True
                node.leave()


def _wait_for_end(attendance: Attendance, over: threading.Event) -> None:
    attendance.wait()
    over.set()


def _fill(future: Future[Any], function: Callable[[], Any]) -> None:
    try:
        future.set_result(function())
    except BaseException as exc:
        future.set_exception(exc)


def _resolved(host: str) -> list[str]:
    """Return the IPv4 addresses of a host.

    Raises:
        OSError: its name cannot be resolved; the message says so.
    """
    try:
        rows = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except socket.gaierror as exc:
        raise OSError(f"the name {host} of rank 0's machine is not resolved here: {exc.strerror}") from None
    return list(dict.fromkeys(str(row[4][0]) for row in rows))


def _host_of(name: str) -> str:
    """Return the address by which the other machines reach this one: that of its name in the job, if it is here."""
    try:
        hosts = _resolved(name) if name else []
    except OSError:
        hosts = []
    for host in hosts:
        if not is_loopback_host(host) and _is_here(host):
            return host
    if name and is_loopback_host(name):
        return "127.0.0.1"
    return reachable("0.0.0.0:1").rpartition(":")[0]


def _own_hosts(given: str) -> list[str]:
    """Return all addresses by which others may reach this machine, the one of its default route first."""
    if given:
        return [given]
    import psutil

    first = reachable("0.0.0.0:1").rpartition(":")[0]
    cards = [one.address for card in psutil.net_if_addrs().values() for one in card if one.family == socket.AF_INET]
    return list(dict.fromkeys([first, *(host for host in cards if not is_loopback_host(host)), "127.0.0.1"]))


def _is_here(host: str) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
        return True
