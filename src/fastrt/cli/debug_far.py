"""A terminal for the debugger of a task on another node: each line is a question to the uplink of that node."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from fastrt.observe.debugging import Said, Waiting

_LOOK_S = 0.3  # between two looks while the code of the task runs


class FarTerminal:
    """Passes lines from the terminal to the debugger, and its text back.

    Args:
        socket_path: of the daemon of the node on this machine, whose uplink asks the other node.
        node, name: NodeID and name of the other node.
        stop: the task that waits there.
    """

    def __init__(self, socket_path: str, node: str, name: str, stop: Waiting) -> None:
        self._socket_path, self._node, self._name, self._stop = socket_path, node, name, stop
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

    def _ask(self, line: str | None = None, interrupt: bool = False) -> Said:
        from fastrt.observe import elsewhere

        said = elsewhere.converse(self._socket_path, self._node, self._stop.pid, line, interrupt=interrupt)
        click.echo(said.after(self._shown), nl=False)
        self._shown = said.screen
        return said
