"""A terminal for the debugger of a task on another node: each line is a question to the uplink of that node."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from fastrt.observe.debugging import Said, Waiting

_STAY_S = 3.0  # between two questions while the user types
_LOOK_S = 0.3  # between two looks while the code of the task runs


class FarTerminal:
    """Passes lines from the terminal to the debugger, and its text back.

    Args:
        socket_path: of the daemon of the node on this machine, whose uplink asks the other node.
        node, name: NodeID and name of the other node.
        stop: the task that waits there.
    """

    def __init__(self, socket_path: str, node: str, name: str, stop: Waiting) -> None:
        from fastrt.observe.debugging import Terminal

        self._socket_path, self._node, self._name, self._stop = socket_path, node, name, stop
        self._terminal = Terminal(os.urandom(8).hex(), f"process {os.getpid()} on {platform.node()}", stays=True)
        self._shown = ""

    def run(self) -> None:
        """Return when the task goes on, or the user leaves it.

        Raises:
            click.ClickException: the node does not answer.
        """
        from fastrt.errors import FastrtError

        stop = self._stop
        click.echo(
            f"{stop.kind} {stop.name} (pid {stop.pid} on node {self._name}) {stop.reason} at {stop.place}. "
            "c lets it go on, q ends it, Ctrl-D leaves it waiting"
        )
        try:
            said = self._ask()
            while not said.end:
                said = self._turn(said)
            click.echo(said.end)
        except EOFError:
            self._ask(leaves=True)
            click.echo(f"\nthe task waits on: fastrt debug {stop.pid} --node {self._name}")
        except FastrtError as exc:
            raise click.ClickException(f"node {self._name}: {exc}") from None

    def _turn(self, said: Said) -> Said:
        """Read a line and send it; while the code runs, look whether it stops. Ctrl-C interrupts a line, or the code.

        Raises:
            EOFError: the user leaves.
        """
        line = None
        if said.prompt:
            try:
                with self._staying():
                    line = input(said.prompt)
            except KeyboardInterrupt:
                click.echo()
                return said
            self._shown += f"{said.prompt}{line}\n"  # as the terminal shows it
        try:
            if line is None:
                time.sleep(_LOOK_S)
            return self._ask(line)
        except KeyboardInterrupt:
            return self._ask(interrupt=True)

    @contextlib.contextmanager
    def _staying(self) -> Iterator[None]:
        """Ask now and then while the user types, so that no other terminal takes the task meanwhile."""
        from fastrt.errors import FastrtError
        from fastrt.observe import elsewhere

        typed = threading.Event()

        def ask() -> None:
            while not typed.wait(_STAY_S):
                with contextlib.suppress(FastrtError):  # the next line will say it
                    elsewhere.converse(self._socket_path, self._node, self._stop.pid, terminal=self._terminal)

        asking = threading.Thread(target=ask, name="fastrt-debug-stays", daemon=True)
        asking.start()
        try:
            yield
        finally:
            typed.set()
            asking.join()

    def _ask(self, line: str | None = None, interrupt: bool = False, leaves: bool = False) -> Said:
        from fastrt.observe import elsewhere

        terminal = dataclasses.replace(self._terminal, stays=not leaves)
        said = elsewhere.converse(
            self._socket_path, self._node, self._stop.pid, line, interrupt=interrupt, terminal=terminal
        )
        click.echo(said.after(self._shown), nl=False)
        self._shown = said.screen
        return said
