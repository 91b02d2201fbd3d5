"""`fastrt profile transfer`: the speed of transfers on this machine, compared with the limits of its hardware."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from fastrt.observe.profile import Profile, Row

_PARTS = ("serialize", "copy", "wire", "wait")


class _Size(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic since click 8.2
    """A number of bytes, such as "4096", "64MiB" or "1GB"."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from fastrt.config import parse_bytes
        from fastrt.errors import ConfigError

        try:
            return value if isinstance(value, int) else parse_bytes(value)
        except ConfigError as exc:
            self.fail(str(exc), param, ctx)


class _NewFile(click.Path):
    """A file that is written after minutes of measuring; this checks beforehand that it can be created."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        folder = path.absolute().parent
        if not (folder.is_dir() and os.access(folder, os.W_OK)):
            self.fail(f"{folder} is no folder where a file can be written.", param, ctx)
        return path


_file = _NewFile(dir_okay=False, writable=True, path_type=Path)


@click.group(short_help="Measure where time goes.")
def profile() -> None:
    """Measure where time goes."""


@profile.command(short_help="Measure put, get and transfer between nodes.")
@click.option("--size", type=_Size(), default="1GiB", show_default=True, help="The largest value; from 1 KiB on.")
@click.option("--chunk", type=_Size(), default="1MiB", show_default=True, help="Size of a message of gRPC's StreamObj.")
@click.option("--plane", type=click.Choice(["grpc", "native", "both"]), default="both", show_default=True)
@click.option("--address", help="HOST:PORT of a node's object store (`store:`); default: a second process here.")
@click.option("--insecure", is_flag=True, help="Allow unencrypted transfers to another machine.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON instead of a table.")
@click.option("--plot", type=_file, help="Draw rates, times, CPU and their parts: a .html or .png file.")
@click.option("--trace", type=_file, help="Write every operation as a trace file.")
def transfer(
    size: int, chunk: int, plane: str, address: str | None, insecure: bool, as_json: bool, plot: Path | None,
    trace: Path | None,
) -> None:  # fmt: skip
    """Measure put, get, and transfer within a node and between nodes, over sizes from 1 KiB up to --size.

    memcpy and plain TCP between warm buffers are measured in the same run, in turns with the others: "of limit" is
    the share of their rate. CPU is seconds of processor time for each GB, here and in the process at the other end.
    "first" is the first operation, on memory that was never touched before. With --address, the token of that node's
    session is read from the file that FASTRT_TOKEN_FILE names.

    A trace file opens in https://ui.perfetto.dev.
    \f
    Raises:
        click.ClickException: an option is out of range, or a needed package is missing, or the other node is
            unreachable.
    """
    import grpc

    from fastrt.errors import FastrtError

    if size < 1024 or not 1024 <= chunk <= 7 << 20:
        raise click.UsageError("--size must be 1 KiB or more, and --chunk from 1 KiB to 7 MiB")
    planes = ("native", "grpc") if plane == "both" else (plane,)
    from fastrt.observe import charts

    try:
        if plot is not None:
            charts.check(plot)
        found = _run(size, planes, address, chunk, insecure, quiet=as_json)
        if plot is not None:
            charts.write(found, plot)
    except FastrtError as exc:
        raise click.ClickException(str(exc)) from exc
    except grpc.RpcError as exc:
        words = exc.details() if isinstance(exc, grpc.Call) else str(exc)
        raise click.ClickException(f"{address or 'the other process'} says: {words}") from exc
    if trace is not None:
        from fastrt.observe import chrome
        from fastrt.observe.profile import events_of

        chrome.write(events_of(found), trace)
    if as_json:
        click.echo(json.dumps(found.to_json(), indent=2))
    else:
        _show(found)


def _run(size: int, planes: tuple[str, ...], address: str | None, chunk: int, insecure: bool, quiet: bool) -> Profile:
    """Measure, with a progress bar on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from fastrt.errors import FastrtError
    from fastrt.net.grpc.auth import read_token
    from fastrt.observe import profile as measured
    from fastrt.observe.profile import size_name

    token = None
    if address is not None:
        if "FASTRT_TOKEN_FILE" not in os.environ:
            raise FastrtError("set FASTRT_TOKEN_FILE to the token file of the session that --address belongs to")
        token = read_token(os.environ["FASTRT_TOKEN_FILE"])
    listed = measured.sizes(size)
    columns = (SpinnerColumn(), TextColumn("{task.description:28}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet) as bar:
        task = bar.add_task("starting", total=len(listed))

        def progress(path: str, done: int, total: int) -> None:
            bar.update(task, completed=done, description=f"{size_name(listed[done])}: {path}")

        return measured.transfer(size, planes, address, token, chunk, insecure, progress)


def _show(found: Profile) -> None:
    from rich import box
    from rich.table import Table

    from fastrt.cli.tables import table_console
    from fastrt.observe.profile import size_name

    console = table_console()
    for nbytes in dict.fromkeys(row.nbytes for row in found.rows):
        table = Table(box=box.SIMPLE, title=f"[bold]{size_name(nbytes)}", title_justify="left")
        table.add_column("path", no_wrap=True)
        for name in ("time", "GB/s", "of limit", "CPU s/GB here", "there", *_PARTS, "first", "rounds"):
            table.add_column(name, justify="right", no_wrap=True)
        for row in found.rows:
            if row.nbytes == nbytes:
                table.add_row(*_cells(row))
        console.print(table)


def _cells(row: Row) -> list[str]:
    from fastrt.cli.bench import seconds

    whole = sum(row.parts.values())
    views = row.path == "get"  # it moves nothing, so a rate would mislead
    return [
        row.path,
        seconds(row.seconds),
        "" if views else f"{row.rate:.3g}",
        f"{row.limit:.0%}" if row.limit else "",
        "" if views or row.cpu_here is None else f"{row.cpu_here:.2f}",
        "" if row.cpu_there is None else f"{row.cpu_there:.2f}",
        *(f"{row.parts[name] / whole:.0%}" if whole and row.parts.get(name) and not views else "" for name in _PARTS),
        seconds(row.first_s),
        str(row.rounds),
    ]
