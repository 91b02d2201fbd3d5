"""`fastrt debug`: a terminal for the debugger of a task that waits at a breakpoint."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING

import click

from fastrt.cli.look import Member, ask_each, members

if TYPE_CHECKING:
    from fastrt.observe.debugging import Waiting
    from fastrt.store.join import Link

_COMPLETE_S = 2.0  # to wait for the words that a word can become
_SIGNAL_MS = 100
_DELIMITERS = " \t\n`@#$%^&*()=+[{]}\\|;:'\",<>?"  # as pdb's own


@click.command(short_help="Debug a task that waits at a breakpoint.")
@click.argument("pid", type=click.IntRange(1), required=False)
@click.option("--list", "lists", is_flag=True, help="Only list those that wait.")
@click.option("--session", help="Only sessions whose names begin with this; see fastrt status.")
@click.option("--node", default="", metavar="NAME|ID", help="Only tasks on this node of the cluster.")
@click.option("--this-node", is_flag=True, help="Do not ask nodes of the cluster on other machines.")
def debug(pid: int | None, lists: bool, session: str | None, node: str, this_node: bool) -> None:
    """Debug a task or a call that waits in breakpoint(), or that has raised: the one of process PID, or the only one.

    All commands of pdb work. c lets the task go on, q ends it. Ctrl-D leaves the task waiting: the command can be
    called again. Ctrl-C stops code that runs. Without PID, several that wait are listed.

    Tasks on other nodes of the session's cluster are listed and debugged, too; there, the tabulator completes no words.
    \f
    Raises:
        click.ClickException: nothing waits, or not in that process.
    """
    from fastrt.errors import FastrtError
    from fastrt.observe import debugging

    found = _waiting(members(session, node, this_node))
    chosen = [(member, one) for member, one in found if pid in (None, one.pid)]
    if not chosen:
        what = f"no task of process {pid}" if pid is not None else "no task"
        others = f"; these do:\n{_listed(found)}" if found else ""
        raise click.ClickException(f"{what} waits in a debugger{others}")
    if lists or len(chosen) > 1 or chosen[0][1].address:
        click.echo(_listed(chosen))
        return
    ((member, one),) = chosen
    if not member.is_here:
        from fastrt.cli.debug_far import FarTerminal

        FarTerminal(str(member.path), member.id, member.name, one).run()
        return
    try:
        link = debugging.attach(member.path, one.pid)
    except FastrtError as exc:
        raise click.ClickException(str(exc)) from exc
    _Terminal(link, one).run()


def _waiting(wanted: list[Member]) -> list[tuple[Member, Waiting]]:
    """The tasks that wait, and their nodes; nodes that do not answer are named."""
    from fastrt.observe import debugging, elsewhere

    found = ask_each(
        wanted, lambda one: [debugging.Waiting.of(stop) for stop in debugging.waiting(one.path)],
        elsewhere.read_stops, "the debuggers of node {} are missing",
    )  # fmt: skip
    return [(member, one) for member, some in found.items() for one in some]


def _listed(found: list[tuple[Member, Waiting]]) -> str:
    """A line for each task that waits, with the command that debugs it, or the address for a client of debugpy."""
    lines = []
    for member, one in found:
        command = f"fastrt debug {one.pid}{f' --node {member.name}' * (not member.is_here)}"
        if one.address:
            command = f"attach a client of debugpy to {one.address}{_reached(member, one.address)}"
        task = f" ({one.task})" if one.task else ""
        lines.append(
            f"{command}: {one.kind} {one.name}{task} {one.reason} at {one.place} in {one.function}, for "
            f"{one.seconds:.0f} s"
        )
    return "\n".join(lines)


def _reached(member: Member, address: str) -> str:
    """How an editor on this machine reaches a port on the loopback of another node."""
    if member.is_here:
        return ""
    host, port = member.address or member.name, address.rpartition(":")[2]
    return f" on node {member.name}, from another machine after: ssh -N -L {port}:{address} {host}"


class _HungUpError(Exception):
    """The debugger has closed the connection while the terminal waited for a line."""


class _Terminal:
    """Passes lines from the terminal to the debugger, and its text back.

    Ctrl-C interrupts a line that is being typed. At any other moment it only wakes the loop that waits for messages,
    which passes it on: so it can come at any moment, also while a message is sent.

    Args:
        link: to the debugger.
        stop: the task that waits there.
    """

    def __init__(self, link: Link, stop: Waiting) -> None:
        self._link, self._stop = link, stop
        self._is_reading = False  # a line from the terminal
        self._woken, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def run(self) -> None:
        """Return when the task goes on, or the user leaves it."""
        from fastrt.store import debugging

        stop = self._stop
        click.echo(
            f"{stop.kind} {stop.name} (pid {stop.pid}) {stop.reason} at {stop.place}. "
            "c lets it go on, q ends it, Ctrl-D leaves it waiting"
        )
        with self._completing(), self._catching_interrupts(), contextlib.closing(self._link):
            while True:
                if self._is_interrupted():
                    self._link.send(debugging.DebugInterrupt())
                    continue
                try:
                    message = self._link.receive()
                except EOFError:
                    click.echo(f"process {stop.pid} has ended")
                    return
                if isinstance(message, debugging.DebugText):
                    click.echo(message.text, nl=False)
                elif isinstance(message, debugging.DebugEnd):
                    click.echo(message.why)
                    return
                elif isinstance(message, debugging.DebugPrompt) and not self._answer(message.prompt):
                    click.echo(f"the task waits on: fastrt debug {stop.pid}")
                    return

    def _is_interrupted(self) -> bool:
        """Wait for a message, which makes this False, or for Ctrl-C."""
        if self._link.waiting():
            return False
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        poll.register(self._link, select.POLLIN)
        if self._woken not in {fd for fd, _ in poll.poll()}:
            return False
        os.read(self._woken, 4096)
        return True

    @contextlib.contextmanager
    def _catching_interrupts(self) -> Iterator[None]:
        before = signal.signal(signal.SIGINT, self._on_interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
            os.close(self._woken)
            os.close(self._wake)

    def _on_interrupt(self, signum: int, frame: FrameType | None) -> None:
        if self._is_reading:
            self._is_reading = False
            raise KeyboardInterrupt
        with contextlib.suppress(BlockingIOError):  # it was pressed often, and wakes the loop already
            os.write(self._wake, b"!")

    def _answer(self, prompt: str) -> bool:
        """Read a line from the terminal and send it; False if the user leaves."""
        from fastrt.store.debugging import DebugLine

        while True:
            try:
                line = self._line(prompt)
            except KeyboardInterrupt:
                click.echo()
                continue
            except EOFError:
                click.echo()
                return False
            except _HungUpError:
                click.echo()
                return True  # the next `receive` says why
            self._link.send(DebugLine(line))
            return True

    def _line(self, prompt: str) -> str:
        """Read a line; a hang-up interrupts it."""
        ended_read, ended = os.pipe()
        watcher = threading.Thread(target=self._watch, args=(ended_read, threading.get_ident()), daemon=True)
        before = signal.signal(signal.SIGUSR1, self._on_hang_up)
        watcher.start()
        try:
            try:
                self._is_reading = True
                return input(prompt)
            finally:
                self._is_reading = False
        finally:
            os.write(ended, b"!")
            watcher.join()
            signal.signal(signal.SIGUSR1, before)
            os.close(ended_read)
            os.close(ended)

    def _watch(self, ended: int, thread: int) -> None:
        """In another thread: interrupt the read when the debugger hangs up."""
        poll = select.poll()
        poll.register(ended, select.POLLIN)
        poll.register(self._link, select.POLLRDHUP)
        if ended in {fd for fd, _ in poll.poll()}:
            return
        poll.unregister(self._link)
        while True:
            signal.pthread_kill(thread, signal.SIGUSR1)
            if poll.poll(_SIGNAL_MS):  # else the signal may have come just before the read
                return

    def _on_hang_up(self, signum: int, frame: FrameType | None) -> None:
        if self._is_reading:
            self._is_reading = False
            raise _HungUpError

    @contextlib.contextmanager
    def _completing(self) -> Iterator[None]:
        """Let the tabulator complete words, if this is a terminal whose Python has readline."""
        if not sys.stdin.isatty():
            yield
            return
        try:
            import readline
        except ImportError:
            yield
            return
        readline.set_completer_delims(_DELIMITERS)
        readline.set_completer(self._complete)
        readline.parse_and_bind("tab: complete")
        yield
        readline.set_completer(None)

    _words: list[str]

    def _complete(self, text: str, number: int) -> str | None:
        """The word with that number that `text` can become; called by readline."""
        import readline

        from fastrt.store.debugging import DebugComplete, DebugNames

        if number == 0:
            begin, end = readline.get_begidx(), readline.get_endidx()
            self._words = []
            try:
                self._link.send(DebugComplete(text, readline.get_line_buffer(), begin, end))
                answer = self._link.receive(_COMPLETE_S)
            except EOFError:
                return None
            if isinstance(answer, DebugNames):
                self._words = answer.names
        return self._words[number] if number < len(self._words) else None
