"""Reads the log files of a session: output of its workers and actors, also after the session's end.

`fastrt logs` and other tools read by pages. A page names the place where the next one begins, so a reader that follows
a session reads each line once.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from fastrt.node.log_files import LogFolder, LogLine, Page, Wanted, find_folders, read_page, tail_page
from fastrt.node.logs import prefix_of


def sessions(runtime_dir: Path) -> list[LogFolder]:
    """List this user's sessions with log files on this machine; the one that printed last is the first.

    Args:
        runtime_dir: the runtime folder.
    Returns:
        Those that run, and the last that have ended: the folders of five stay.
    Raises:
        UnsafeFolderError: another user could have written the files.
    """
    return find_folders(runtime_dir)


def folder_of(socket_path: str) -> LogFolder | None:
    """Return the log files of the session whose daemon listens at a socket; None if it has printed nothing.

    Raises:
        UnsafeFolderError: another user could have written the files.
    """
    path = Path(socket_path).parent
    return next((one for one in find_folders(path.parent) if one.session == path.name), None)


def read(
    folder: Path, *, task: str = "", actor: str = "", worker: int = 0, after: str = "", limit: int = 1000
) -> Page:  # fmt: skip
    """Read a page of the lines of a session.

    Args:
        folder: `LogFolder.path`.
        task: only lines of tasks whose id begins with this: the `task_id` of `list_tasks` or of `runtime_context()`.
        actor: only lines of actors with this name, class, or number in `list_actors`.
        worker: only lines of the process with this pid.
        after: `Page.after` of the page before; empty: from the oldest line on.
        limit: the greatest number of lines.
    Returns:
        The page. One without lines need not be the last: each call reads a bounded number of bytes.
    Raises:
        ValueError: `after` does not come from a page.
        UnsafeFolderError, OSError: a file cannot be read.
    """
    return read_page(folder, Wanted(task.lower(), actor, worker), after, limit)


def tail(folder: Path, count: int, *, task: str = "", actor: str = "", worker: int = 0) -> Page:
    """Read the last `count` matching lines of a session; the other arguments and the result are those of `read`."""
    return tail_page(folder, Wanted(task.lower(), actor, worker), count)


def as_text(line: LogLine, with_time: bool = False, node: str = "") -> str:
    """Return a line as a driver prints it: with its prefix, its node if given, and the local time if wanted."""
    at = ""
    if with_time:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(line.time)) + f".{int(line.time * 1000) % 1000:03d} "
    of = f", node={node}" if node else ""
    return f"{at}({prefix_of(line.source.name, line.pid)}{of}) {line.text}"


def as_row(line: LogLine, node: str = "") -> dict[str, Any]:
    """Return a line for programs: time (seconds since 1970), stream, pid, name, task_id, path, actor, job, text, node.

    The node is there only if it is given.
    """
    source = line.source
    ids = [f"{id:016x}" if id else None for id in (source.task, source.path)]
    return {
        "time": line.time, "stream": "stderr" if line.is_error else "stdout", "pid": line.pid, "name": source.name,
        "task_id": ids[0], "path": ids[1],
        "actor": source.actor or None, "job": f"{source.job:016x}", "text": line.text,
        **({"node": node} if node else {}),
    }  # fmt: skip
