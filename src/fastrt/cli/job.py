"""The options of a coordinator's job, which `fastrt coordinator` and `fastrt start` share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

_DURABILITY_HELP = "What kept state survives: the death of processes (default), or of the machine's power (an fsync)."
_CLEAR_HELP = "When no task is connected any more, the next run finds no keys, barriers or errors of the last one."
# By the name that click gives each.
_OPTIONS: dict[str, dict[str, Any]] = {
    "job": {"default": "jax_worker", "show_default": True, "help": "The job's name; JAX always says jax_worker."},
    "heartbeat_timeout": {"default": 100.0, "show_default": True, "help": "A task silent for longer (s) is dead."},
    "register_timeout": {
        "default": 3600.0,
        "show_default": True,
        "help": "The first task waits so long (s) for all.",
    },
    "shutdown_timeout": {
        "default": 300.0,
        "show_default": True,
        "help": "The first to end waits so long (s); 0: not.",
    },
    "durability": {"type": click.Choice(["process", "power"]), "default": "process", "help": _DURABILITY_HELP},
    "recoverable": {"is_flag": True, "help": "Tasks may die and come back without the others failing."},
    "clear_after_shutdown": {"is_flag": True, "help": _CLEAR_HELP},
    "allow_anonymous": {"is_flag": True, "help": "Serve beyond this machine to clients without certificates."},
}
JOB_OPTIONS = tuple(_OPTIONS)


def job_options(prefix: str = "", variables: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command the options of a job.

    Args:
        prefix: goes before what each says for help.
        variables: whether each can be set by a variable too: --heartbeat-timeout by FASTRT_HEARTBEAT_TIMEOUT.
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
    """What was given for a job, as `CoordinatorOptions` calls it."""
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
