"""`fastrt`: the command group.

Subcommands are imported when they are called, not when they are listed, so that `fastrt --help` and shell completion
stay quick: the coordinator, for example, imports gRPC.
"""

from __future__ import annotations

import importlib
from typing import Any

import click

# name -> ("module:attribute", one line for the list)
_COMMANDS = {
    "bench": ("fastrt.cli.bench:bench", "Run the benchmark suites and print a table."),
    "config": ("fastrt.cli.config:config", "Show every setting, its value and its origin."),
    "coordinator": ("fastrt.cli.coordinator:coordinator", "Serve a coordination service for JAX and TensorFlow."),
    "dashboard": ("fastrt.cli.dashboard:dashboard", "Show running programs in a browser."),
    "debug": ("fastrt.cli.debug:debug", "Debug a task that waits at a breakpoint."),
    "demo": ("fastrt.cli.demo:demo", "Count words of source files, in parallel and in one process."),
    "doctor": ("fastrt.cli.doctor:doctor", "Check whether fastrt can work on this machine."),
    "flame": ("fastrt.cli.stack:flame", "Draw a flame graph of a worker, actor or driver."),
    "list": ("fastrt.cli.list:list_", "List tasks, actors, objects or workers."),
    "logs": ("fastrt.cli.logs:logs", "Show what tasks and actors have printed."),
    "manifest": ("fastrt.cli.manifest:manifest", "Print a Job for Kubernetes that runs a program."),
    "memory": ("fastrt.cli.memory:memory", "Show the store's memory by process and by line of code."),
    "metrics": ("fastrt.cli.metrics:metrics", "Print or serve a session's figures for Prometheus."),
    "profile": ("fastrt.cli.profile:profile", "Measure put, get and transfer between nodes."),
    "protos": ("fastrt.cli.protos:protos", "Write the .proto files, for programs in other languages."),
    "ps": ("fastrt.cli.ps:ps", "Serve the scheduler of a parameter-server cluster."),
    "stack": ("fastrt.cli.stack:stack", "Show the stacks of workers, actors and drivers."),
    "run": ("fastrt.cli.run:run", "Run a program on this machine, or on all machines of a job."),
    "start": ("fastrt.cli.start:start", "Run a node of a cluster."),
    "status": ("fastrt.cli.status:status", "Show the sessions that run on this machine."),
    "token": ("fastrt.cli.token:token", "Show a cluster's token, or issue certificates."),
    "timeline": ("fastrt.cli.timeline:timeline", "Write a session's timeline for https://ui.perfetto.dev."),
    "stop": ("fastrt.cli.stop:stop", "End this user's nodes on this machine."),
}


class LazyGroup(click.Group):
    """A group whose subcommands are imported on first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all subcommands, without importing any."""
        return sorted({*super().list_commands(ctx), *_COMMANDS})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a subcommand; None if there is none of that name."""
        if cmd_name not in _COMMANDS:
            return super().get_command(ctx, cmd_name)
        module, _, attribute = _COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run a subcommand.

        Raises:
            click.ClickException: a package that only clusters need is missing; the text says what to install.
        """
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as exc:
            from fastrt.net import packages

            advice = packages.advice(exc.name)
            if advice is None:
                raise
            raise click.ClickException(advice) from exc

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the subcommands, without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, _COMMANDS[name][1]) for name in self.list_commands(ctx)])


def _show_version(ctx: click.Context, param: click.Parameter, wanted: bool) -> None:
    """Print which build this is, and end."""
    if not wanted or ctx.resilient_parsing:
        return
    import fastrt
    from fastrt.observe.build import this_build

    click.echo("\n".join(this_build(fastrt.__version__).lines()))
    ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version, help="Show which build it is."
)
def main() -> None:
    """fastrt: tasks and objects over shared memory, with compiled hot paths."""
