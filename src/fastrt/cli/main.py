"""`fastrt`: the command group.

Subcommands are imported when they are called or listed, and import what they need when they run, so that
`fastrt --help` and shell completion stay quick.
"""

from __future__ import annotations

import importlib

import click

# name -> "module:attribute"; a name of two words would be a group of its own.
_COMMANDS = {
    "bench": "fastrt.cli.bench:bench",
    "coordinator": "fastrt.cli.coordinator:coordinator",
    "demo": "fastrt.cli.demo:demo",
    "status": "fastrt.cli.status:status",
}


class LazyGroup(click.Group):
    """A group whose subcommands are imported on first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all subcommands, without importing any."""
        return sorted({*super().list_commands(ctx), *_COMMANDS})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a subcommand, importing it if need be; None when there is none of that name."""
        where = _COMMANDS.get(cmd_name)
        if where is None:
            return super().get_command(ctx, cmd_name)
        module, _, attribute = where.partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="fastrt", prog_name="fastrt")
def main() -> None:
    """fastrt: tasks and objects over shared memory, with compiled hot paths."""
