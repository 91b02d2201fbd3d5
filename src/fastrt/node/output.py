"""Forwards output of workers: to the drivers of this node, and by the uplink to other nodes.

Every line goes to the log files first (`log_files`). For drivers repeated lines are folded (`folding`), and a flood is
cut at `log_rate` with a count. When a driver reads too slowly, the pipes of the workers are not read, and a worker that
prints waits. Output from other nodes is dropped then, and counted.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable

from fastrt.config import Config
from fastrt.node.folding import Folding
from fastrt.node.log_files import LogFiles
from fastrt.node.logs import Forwarding, LogPipe, Meter, Peek, Printed
from fastrt.node.members import Members
from fastrt.store.join import Link
from fastrt.store.messages import Log, Message, ReadsOutput, RemoteOutput

_BACKLOG_BYTES = 1 << 20  # of output that a driver has not read yet
_COMEBACK_S = 2.0  # in which drivers connect to a new daemon; output of workers waits for them


class Output:
    """The pipes of all workers and actors, and the drivers that read them.

    Args:
        selector: watches the pipes.
        members: the session's processes; their `logs` says what each reads.
        config: the settings `log_...`.
        uplink: returns the connection to this node's uplink; None while there is none.
        session, about: for `LogFiles`.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        members: Members,
        config: Config,
        uplink: Callable[[], Link | None],
        session: str,
        about: Callable[[], dict[str, str]],
    ) -> None:
        self._selector = selector
        self._members = members
        self._log_to_driver = config.log_to_driver
        self._uplink = uplink
        self._peek = Peek()
        self._unclaimed: list[LogPipe] = []  # of processes that the zygote has not named yet, in order
        self._pipes: dict[int, list[LogPipe]] = {}
        self._muted: list[LogPipe] = []  # not read while a driver is far behind
        self._files = LogFiles(config.runtime_dir, session, config.log_bytes, about, self.log)
        self._folding = Folding() if config.log_fold else None
        self._meter = Meter(config.log_rate) if config.log_rate else None
        self._forwarding = Forwarding()
        self._left_out = 0  # lines from other nodes, while a driver was far behind
        self._reported: tuple[Link, bool] | None = None  # the uplink, and whether it knows of a reader
        self._comeback_until = 0.0

    def await_readers(self) -> None:
        """Hold output back for a moment: drivers of an earlier daemon are about to connect."""
        self._comeback_until = time.monotonic() + _COMEBACK_S

    # ---- pipes ----

    def add(self, out: int, err: int) -> None:
        """Keep the pipes of a process that the zygote was ordered to fork."""
        for fd, is_error in ((out, False), (err, True)):
            self._unclaimed.append(LogPipe(fd, is_error, self._on_output, self._peek))

    def claim(self, pid: int) -> None:
        """Read the pipes of the oldest process that had no pid yet."""
        pipes, self._unclaimed = self._unclaimed[:2], self._unclaimed[2:]
        self._pipes[pid] = pipes
        for pipe in pipes:
            pipe.pid = pid
            self._selector.register(pipe, selectors.EVENT_READ, self._on_readable)

    def adopt(self, pid: int, out: int, err: int) -> None:
        """Read the pipes of a process that an earlier daemon ordered."""
        self._unclaimed, rest = [], self._unclaimed
        self.add(out, err)
        self.claim(pid)
        self._unclaimed = rest

    def give_up(self) -> None:
        """Drop the pipes of the oldest process that had no pid yet: it could not be forked."""
        for pipe in self._unclaimed[:2]:
            pipe.drain()
        self._unclaimed = self._unclaimed[2:]

    def end(self, pid: int) -> None:
        """Read the rest of the pipes of a process that has ended."""
        for pipe in self._pipes.pop(pid, []):
            if pipe in self._muted:
                self._muted.remove(pipe)
            elif pipe.fd in self._selector.get_map():
                self._selector.unregister(pipe)
            pipe.drain()
        if self._folding is not None:
            self._folding.forget(pid)

    def drain(self) -> None:
        """Read the rest of all pipes, and pass on the lines that were held back."""
        for pipes in [*self._pipes.values(), self._unclaimed]:
            for pipe in pipes:
                pipe.drain()
        self.pass_on_rest()
        self._files.close()
        self._peek.close()

    def pass_on_rest(self) -> None:
        """Pass on folded lines, and the count of those that were left out: a driver is about to leave."""
        for folded in self._folding.rest() if self._folding is not None else ():
            self._pass_on(folded)
        self._report_cut()

    def _on_readable(self, pipe: LogPipe) -> None:
        if self._drivers_lag():
            # The worker that prints waits, as it would for any slow reader of its output; nothing is lost.
            self._selector.unregister(pipe)
            self._muted.append(pipe)
        elif not pipe.read():
            self._selector.unregister(pipe)

    # ---- readers ----

    def log(self, text: str, is_error: bool = True, is_update: bool = False) -> None:
        """Print lines at the drivers of this node."""
        self.post(Log(text, is_error, is_update))

    def post(self, message: Message) -> None:
        """Send a message to the drivers of this node."""
        for link in self._readers():
            link.post(message)

    def on_remote_output(self, link: Link, message: RemoteOutput) -> None:
        """Print output of other nodes at the driver of its job; drop and count it while a driver is far behind."""
        if self._drivers_lag():
            self._left_out += message.text.count("\n")
        else:
            log = Log(message.text, message.is_error, message.is_update)
            for member in self._members:
                if member.link is not None and member.logs == "all" and message.job in (0, member.job):
                    member.link.post(log)

    def tend(self) -> None:
        """Send backlogs and unfinished lines, report dropped lines, and tell the uplink whether a driver reads."""
        for member in self._members:
            if member.link is not None:
                member.link.flush()
        if self._muted and not self._drivers_lag():
            for pipe in self._muted:
                self._selector.register(pipe, selectors.EVENT_READ, self._on_readable)
            self._muted.clear()
        now, uplink = time.monotonic(), self._uplink()
        for pipes in self._pipes.values():
            for pipe in pipes:
                if pipe.has_rest and pipe not in self._muted:
                    pipe.pass_on_unfinished(now)
        for folded in self._folding.due() if self._folding is not None else ():
            self._pass_on(folded)
        if self._meter is not None and self._meter.is_ready:
            self._report_cut()
        self._forwarding.tend(uplink)
        if self._left_out and not self._drivers_lag():
            self.log(f"fastrt: {self._left_out} lines from other nodes were left out: this program read too slowly\n")
            self._left_out = 0
        reads = any(member.logs == "all" for member in self._members)
        if uplink is not None and self._reported != (uplink, reads):
            self._reported = uplink, reads
            uplink.post(ReadsOutput(reads))

    def _on_output(self, printed: Printed) -> None:
        """Write output of a worker to the log files, and pass on the lines that are not folded."""
        self._files.write(printed)
        for shown in (printed,) if self._folding is None else self._folding.take(printed):
            self._pass_on(shown)

    def _pass_on(self, printed: Printed) -> None:
        """Print output of a worker at its driver, and forward it if its task may come from another node."""
        if self._meter is None or not self._readers() or self._meter.passes(printed.lines):
            log = Log(printed.text(), printed.is_error, printed.is_update)
            for link in self._members.readers(printed.source.job):
                link.post(log)
        owner = self._members.by_index((printed.source.job & 0xFFFF) - 1)
        if self._log_to_driver and (owner is None or owner.kind != "driver"):
            self._forwarding.forward(printed, self._uplink())

    def _report_cut(self) -> None:
        if self._meter is not None and self._meter.cut:
            self.log(f"fastrt: {self._meter.note()}; `fastrt logs` shows them\n")

    def _readers(self) -> list[Link]:
        return [member.link for member in self._members if member.link is not None and member.logs]

    def _drivers_lag(self) -> bool:
        links = self._readers()
        if not links and time.monotonic() < self._comeback_until:
            return True  # the drivers that read before connect in a moment
        return any(link.backlog > _BACKLOG_BYTES for link in links)
