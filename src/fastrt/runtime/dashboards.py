"""The file by which this user's programs find a dashboard, and the table that notebooks show of a session."""

from __future__ import annotations

import dataclasses
import html
import json
import os
from pathlib import Path

from fastrt._core.memory.segment import start_time
from fastrt.config import RUNTIME_FOLDER
from fastrt.errors import FastrtError
from fastrt.folders import has_private_folder, private_folder, read_private, replace_private
from fastrt.foreign_text import read_object


@dataclasses.dataclass(frozen=True)
class DashboardFile:
    """A running dashboard.

    Attributes:
        address: its URL, without the code.
        code: lets one browser in.
        token: lets programs in, as a bearer.
        prefix: it shows only sessions whose names begin with this.
        pid, start_time: its process.
    """

    address: str
    code: str = dataclasses.field(repr=False)
    token: str = dataclasses.field(repr=False)
    prefix: str
    pid: int
    start_time: int

    @property
    def url(self) -> str:
        """The address that lets one browser in."""
        return f"{self.address}/?code={self.code}"

    def write(self, folder: Path) -> None:
        """Write the file into the runtime folder, whole or not at all; only this user can read it.

        The files of dashboards that were killed are removed, so that they do not pile up.
        """
        private_folder(folder, RUNTIME_FOLDER)  # it is missing until a first session runs
        dashboards(folder)
        replace_private(folder, f"dashboard-{self.pid}.json", json.dumps(dataclasses.asdict(self)).encode())

    def remove(self, folder: Path) -> None:
        """Remove the file."""
        (folder / f"dashboard-{self.pid}.json").unlink(missing_ok=True)


def dashboards(folder: Path) -> list[DashboardFile]:
    """The dashboards of this user that run on this machine; files of dead ones are removed.

    Raises:
        UnsafeFolderError: another user could have written the files in the folder.
    """
    found: list[DashboardFile] = []
    if not has_private_folder(folder, RUNTIME_FOLDER):
        return found
    for path in sorted(folder.glob("dashboard-*.json")):
        try:
            one = DashboardFile(**read_object(read_private(folder, path.name), str(path), own=True))
        except (OSError, ValueError, TypeError, FastrtError):
            continue
        try:
            alive = start_time(one.pid) == one.start_time
        except OSError:
            alive = False
        if alive:
            found.append(one)
        elif path.name == f"dashboard-{one.pid}.json":
            one.remove(folder)
    return found


def this_process(address: str, code: str, token: str, prefix: str) -> DashboardFile:
    """The file of a dashboard that this process serves."""
    return DashboardFile(address, code, token, prefix, os.getpid(), start_time(os.getpid()))


def as_html(session: str, socket_path: str, num_workers: int, store_bytes: int) -> str:
    """A small table about a session for notebooks: its size, and its dashboard or the command that starts one."""
    try:
        running = [one for one in dashboards(Path(socket_path).parent.parent) if session.startswith(one.prefix)]
    except FastrtError:
        running = []
    command = f"fastrt dashboard --session {session[:8]}"
    if running:
        url, address = html.escape(running[0].url), html.escape(running[0].address)
        shown = f'<a href="{url}" target="_blank" rel="noreferrer">{address}</a>'
    else:
        shown = f"run <code>{html.escape(command)}</code>"
    rows = {
        "session": html.escape(session[:8]), "workers": f"{num_workers:,}",
        "object store": f"{store_bytes / (1 << 20):,.0f} MiB", "dashboard": shown,
    }  # fmt: skip
    cells = "".join(f"<tr><th style='text-align:left'>{name}</th><td>{value}</td></tr>" for name, value in rows.items())
    return f"<table>{cells}</table>"
