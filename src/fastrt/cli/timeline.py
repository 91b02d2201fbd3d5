"""`fastrt timeline`: the timeline of a session's processes, as a file that Perfetto opens."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from fastrt.cli.look import joined, sockets

if TYPE_CHECKING:
    from fastrt.observe.timeline import Format


@click.command(short_help="Write a session's timeline for https://ui.perfetto.dev.")
@click.argument("out", required=False, type=click.Path(dir_okay=False, path_type=Path))
@click.option("--seconds", type=click.FloatRange(0, 3600, min_open=True), help="Record for so long from now on.")
@click.option(
    "--format",
    "chosen",
    type=click.Choice(["perfetto", "chrome"]),
    help="The format of the file; default: chrome for a name that ends in .json, else perfetto.",
)
@click.option("--otlp", metavar="URL|FILE", help="Export spans to a receiver of OTLP over gRPC, or to a JSON file.")
@click.option("--session", help="The session whose name begins with this; see fastrt status.")
def timeline(
    out: Path | None, seconds: float | None, chosen: Format | None, otlp: str | None, session: str | None
) -> None:
    """Write the timeline of a session to OUT, in Perfetto's format or as Chrome's JSON.

    Without --seconds, it holds the last 16,384 records of each process; the session must have been started with
    FASTRT_TRACE=1 or init(trace=True). With --seconds, any session is recorded for that time. With --otlp, tasks and
    calls are exported as OpenTelemetry spans, and OUT may be left out.
    \f
    Raises:
        click.ClickException: no session runs here, more than one does, it does not record, or the result cannot be
            written.
        click.UsageError: there is neither OUT nor --otlp.
    """
    from fastrt._core.memory import trace
    from fastrt.errors import FastrtError
    from fastrt.observe import timeline as drawn

    if out is None and otlp is None:
        raise click.UsageError("give a file to write, or --otlp")
    if otlp is not None:
        from fastrt.observe import spans  # the extra is missed before the recording
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
    lost = f"; {recording.lost:,} records were overwritten before they were read" if recording.lost else ""
    if out is not None:
        try:
            drawn.write(drawing, out, chosen)
        except OSError as exc:
            raise click.ClickException(f"{out} cannot be written: {exc}") from exc
        slices = sum(not one.is_point for one in drawing.slices)
        click.echo(f"{out}: {slices:,} slices{lost}; open it in https://ui.perfetto.dev")
    if otlp is not None:
        made = spans.spans(drawing, found[0].parent.name)
        try:
            spans.export(made, otlp)
        except (FastrtError, OSError) as exc:
            raise click.ClickException(str(exc)) from exc
        click.echo(f"{otlp}: {len(made):,} spans{lost}")
