"""`fastrt config`: every setting, its value, and where the value comes from."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click

from fastrt.cli.tables import table_console
from fastrt.config import origins

_PREFIX = "FASTRT_"
_SECRET = ("TOKEN", "SECRET", "PASSWORD", "KEY")
_SECRET_FILES = ("_FILE", "_TLS_KEY")  # these name a file, which is no secret
# Variables that are neither settings of a runtime nor options of `fastrt start`: name -> default and meaning.
_OTHERS = {"FASTRT_FULL_TRACEBACK": ("0", "errors show the frames of fastrt too")}
_SIZES = ("object_store_memory", "memory", "lineage_bytes", "keep_bytes", "log_rate", "log_bytes")


@click.command(short_help="Show every setting, its value and its origin.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
@click.option("--changed", is_flag=True, help="Only settings that do not have their default.")
def config(as_json: bool, changed: bool) -> None:
    """Show every setting, its value, and where it comes from: its default, or a variable of the environment.

    A keyword of `fastrt.init` and an option of a command go before the variable; they exist only where they are given,
    so this command cannot show them. Secrets are hidden. The exit code is 1 if a value cannot be used.

    \f
    Raises:
        SystemExit: always, with the exit code.
    """
    from fastrt.errors import ConfigError

    rows = [row for row in _rows() if not changed or row["source"] != "default"]
    problem = ""
    if not any(row["error"] for row in rows):
        from fastrt.config import Config

        try:
            Config.load()
        except ConfigError as exc:  # the settings do not fit together
            problem = str(exc)
    if as_json:
        click.echo(json.dumps({"settings": rows, "problem": problem}, indent=2))
    else:
        _show(rows)
        if problem:
            click.echo(f"these settings do not fit together: {problem}", err=True)
    raise SystemExit(int(bool(problem) or any(row["error"] for row in rows)))


def unread_variables() -> list[str]:
    """List the variables FASTRT_... of the environment that no part of fastrt reads."""
    known = {origin.variable for origin in origins()} | {row["variable"] for row in _option_rows()} | _OTHERS.keys()
    return sorted(name for name in os.environ if name.startswith(_PREFIX) and name not in known)


def _rows() -> list[dict[str, Any]]:
    rows = []
    for origin in origins():
        row = _row(origin.name, origin.variable, "init, fastrt start", origin.value, origin.is_default)
        rows.append({**row, "error": origin.error})
    names = {row["variable"] for row in rows}
    rows += [row for row in _option_rows() if row["variable"] not in names]
    for variable, (default, meaning) in _OTHERS.items():
        text = os.environ.get(variable)
        rows.append(_row(meaning, variable, "every process", default if text is None else text, text is None))
    rows += [_row("(unknown)", name, "no part of fastrt", os.environ[name], False) for name in unread_variables()]
    return rows


def _option_rows() -> list[dict[str, Any]]:
    """Return the options of `fastrt start` that variables can set."""
    from fastrt.cli.start import start

    rows = []
    for option in start.params:
        variable = option.envvar
        if isinstance(variable, str):
            text = os.environ.get(variable) or None
            default = option.default if isinstance(option.default, (str, int, float)) else None
            if default is None and getattr(option, "is_flag", False):
                default = False
            value = default if text is None else text
            name = max(option.opts, key=len)
            rows.append(_row(name, variable, "fastrt start", value, text is None))
    return rows


def _row(name: str, variable: str, user: str, value: Any, is_default: bool) -> dict[str, Any]:
    hidden = not is_default and any(word in variable for word in _SECRET) and not variable.endswith(_SECRET_FILES)
    shown = "(hidden)" if hidden else str(value) if isinstance(value, Path) else value
    source = "default" if is_default else "environment"
    return {"name": name, "variable": variable, "value": shown, "source": source, "for": user, "error": ""}


def _show(rows: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE)
    for name in ("setting", "value", "from", "variable", "for"):
        table.add_column(name, overflow="fold")
    for row in rows:
        value = f"[bold red]{escape(row['error'])}[/]" if row["error"] else escape(_words(row["name"], row["value"]))
        source = row["source"] if row["source"] == "default" else f"[bold]{row['source']}[/]"
        table.add_row(escape(row["name"]), value, source, row["variable"], row["for"])
    table_console().print(table)


def _words(name: str, value: Any) -> str:
    from fastrt.config import size_text

    if value is None:
        return "-"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value} ({size_text(value)})" if name in _SIZES and value else str(value)
