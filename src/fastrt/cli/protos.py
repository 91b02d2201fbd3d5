"""`fastrt protos`: write the protocol files that this version speaks, for programs in other languages."""

from __future__ import annotations

from pathlib import Path

import click

# A wheel has them in the package; a source tree that was built in place has them beside src/.
_PLACES = (Path(__file__).parents[1] / "protos", Path(__file__).parents[3] / "protos")


@click.command(short_help="Write the .proto files, for programs in other languages.")
@click.argument("folder", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
@click.option("--force", is_flag=True, help="Replace files there that differ.")
def protos(folder: Path, force: bool) -> None:
    """Write the .proto files of this version to DIR, one folder for each protocol.

    Programs in other languages generate their side from these files; docs/peers.md shows how.

    \f
    Raises:
        click.ClickException: a file there has other content, or cannot be written.
    """
    source = next((place for place in _PLACES if place.is_dir()), None)
    if source is None:
        raise click.ClickException("this installation has no .proto files: install fastrt again with pip")
    files = {path.relative_to(source): path.read_bytes() for path in sorted(source.glob("*/*.proto"))}
    try:
        there = [folder / name for name in files if (folder / name).exists()]
        differing = [path for path in there if path.read_bytes() != files[path.relative_to(folder)]]
        if differing and not force:
            names = ", ".join(map(str, differing))
            raise click.ClickException(f"{names} would change: choose another folder, or give --force")
        for name, data in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
    except OSError as exc:
        raise click.ClickException(str(exc)) from exc
    click.echo(f"{folder}: {len(files)} files in {len({name.parent for name in files})} folders")
