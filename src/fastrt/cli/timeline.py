"""`fastrt timeline`: the timeline of a session's processes, as a file that Perfetto opens."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from fastrt.cli.look import joined, sockets

if TYPE_CHECKING:
    from fastrt.observe.timeline import Format


@click.command(short_help="Write a session's timeline for https://ui.perfetto.dev.")
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--seconds", type=click.FloatRange(0, 3600, min_open=True), help="Record for so long from now on.")
@click.option(
    "--format",
    "chosen",
    type=click.Choice(["perfetto", "chrome"]),
    help="The format of the file; default: chrome for a name that ends in .json, else perfetto.",
)
@click.option("--session", help="The session whose name begins with this; see fastrt status.")
def timeline(out: Path, seconds: float | None, chosen: Format | None, session: str | None) -> None:
    """Write the timeline of a session to OUT, in Perfetto's format or as Chrome's JSON.

    Without --seconds, it holds the last 16,384 records of each process; the session must have been started with
    FASTRT_TRACE=1 or init(trace=True). With --seconds, any session is recorded for that time.
    \f
    Raises:
        click.ClickException: no session runs here, more than one does, or it does not record.
    """
    from fastrt._core.memory import trace
    from fastrt.observe import timeline as drawn

    found = sockets(session)
    if len(found) > 1:
        names = ", ".join(path.parent.name[:8] for path in found)
        raise click.ClickException(f"several sessions run here ({names}): choose one by --session")
    with joined(found[0], "fastrt timeline") as store:
        if seconds is not None:
            recording = drawn.record(store, seconds)
        elif trace.enabled(store.client):
            recording = drawn.Recording(store)
            recording.read()
        else:
            raise click.ClickException(
                "this session does not record: start it with FASTRT_TRACE=1, or give --seconds to record from now on"
            )
        drawing = recording.drawing()
        try:
            drawn.write(drawing, out, chosen)
        except OSError as exc:
            raise click.ClickException(f"{out} cannot be written: {exc}") from exc
    lost = f"; {recording.lost:,} records were overwritten before they were read" if recording.lost else ""
    slices = sum(not one.is_point for one in drawing.slices)
    click.echo(f"{out}: {slices:,} slices{lost}; open it in https://ui.perfetto.dev")
