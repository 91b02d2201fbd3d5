"""The options of a coordinator's job, which `fastrt coordinator` and `fastrt start` share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

_DURABILITY_HELP = "Failures that saved state survives: of processes (default), or of the machine's power (uses fsync)."
_CLEAR_HELP = "Clear keys, barriers and errors when no task is connected any more, before the next run."
# By click's names of the options.
_OPTIONS: dict[str, dict[str, Any]] = {
    "job": {"default": "jax_worker", "show_default": True, "help": "The job's name; JAX always uses jax_worker."},
    "heartbeat_timeout": {"default": 100.0, "show_default": True, "help": "Seconds until a silent task is dead."},
    "register_timeout": {
        "default": 3600.0,
        "show_default": True,
        "help": "Seconds that the first task waits for all others to register.",
    },
    "shutdown_timeout": {
        "default": 300.0,
        "show_default": True,
        "help": "Seconds that the first task to end waits for the others; 0: it does not wait.",
    },
    "durability": {"type": click.Choice(["process", "power"]), "default": "process", "help": _DURABILITY_HELP},
    "recoverable": {"is_flag": True, "help": "Let tasks die and reconnect without failing the others."},
    "clear_after_shutdown": {"is_flag": True, "help": _CLEAR_HELP},
    "allow_anonymous": {"is_flag": True, "help": "Serve clients on other machines without certificates."},
}
JOB_OPTIONS = tuple(_OPTIONS)


def job_options(prefix: str = "", variables: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add the options of a job to a command.

    Args:
        prefix: text before the help of each option.
        variables: whether an environment variable can set each option too: FASTRT_HEARTBEAT_TIMEOUT sets
            --heartbeat-timeout.
    """

    def give(command: Callable[..., Any]) -> Callable[..., Any]:
        for name, about in reversed(_OPTIONS.items()):
            words = {**about, "help": prefix + about["help"]}
            if variables:
                words["envvar"] = f"FASTRT_{name.upper()}"
            command = click.option("--" + name.replace("_", "-"), **words)(command)
        return command

    return give


def job_settings(given: dict[str, Any]) -> dict[str, Any]:
    """The job's options under the field names of `CoordinatorOptions`."""
    return {
        "num_tasks": given["num_tasks"],
        "job": given["job"],
        "heartbeat_timeout_s": given["heartbeat_timeout"],
        "register_timeout_s": given["register_timeout"],
        "shutdown_timeout_s": given["shutdown_timeout"],
        "recoverable": given["recoverable"],
        "clear_after_shutdown": given["clear_after_shutdown"],
        "power": given["durability"] == "power",
        "allow_anonymous": given["allow_anonymous"],
    }
