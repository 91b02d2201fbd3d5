"""Looks at a session while its processes are killed: a dashboard with an open page that records, and lists in a loop.

    python tests/crash/looker.py RUNTIME_FOLDER     (with the failpoint build on the path)

Ends at the end of its standard input, and prints one JSON object: the number of looks, the longest, and problems.
"""

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

from fastrt.errors import FastrtError
from fastrt.observe import listing, reading
from fastrt.observe.joining import Joined
from fastrt.runtime.dashboards import dashboards

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.dashboard import Dashboard

PATIENCE_S = 30.0  # of one look: a stopped process may hold a lock for as long as it is stopped
VIEWS = ("overview", "tasks", "rows", "actors", "workers", "memory", "timeline", "nodes")


class Looker:
    """A process that looks at the session of a runtime folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.looks = self.recordings = 0
        self.longest_s = 0.0
        self.problems: list[str] = []
        self.is_over = threading.Event()

    def took(self, begun: float, what: str) -> None:
        """Count a look, and complain if it took too long."""
        seconds = time.monotonic() - begun
        self.looks += 1
        self.longest_s = max(self.longest_s, seconds)
        if seconds > PATIENCE_S:
            self.problems.append(f"hung: {what} took {seconds:.0f} s")

    def pages(self) -> None:
        """Open page after page of a dashboard; now and then kill it while it records, and start another."""
        while not self.is_over.is_set():
            with Dashboard(self.folder) as dash:
                for view in VIEWS * 2:
                    begun = time.monotonic()
                    found = dash.view(view)  # fails on any answer but 200
                    self.took(begun, f"the page {view}")
                    if view == "timeline":
                        self.recordings += dash.post("/do/record")[0] == 200
                    if "failed" in found and "session" not in found["failed"]["text"]:
                        self.problems.append(f"lost: the page {view}: {found['failed']['text']}")
                if not self.is_over.is_set():
                    dash.process.kill()
        dashboards(self.folder)  # removes the file of the last one, if it was killed just before the end

    def lists(self) -> None:
        """List tasks, objects and workers in a loop; the tool joins the session again after the daemon was killed."""
        joined: Any = None
        while not self.is_over.is_set():
            begun = time.monotonic()
            try:
                if joined is None:
                    (path,) = self.folder.glob("*/node.sock")
                    joined = Joined(path, "looker", PATIENCE_S)
                reading.page(joined.store, "tasks", {}, limit=100)
                reading.page(joined.store, "objects", {}, limit=100)
                listing.workers(joined.store)
                if not joined.is_connected():
                    joined.close()
                    joined = None
            except (FastrtError, ValueError):  # the daemon is dead and the next one is on its way
                joined = None
                self.is_over.wait(0.1)
            self.took(begun, "a list")
        if joined is not None:
            joined.close()

    def run(self, work: Any) -> None:
        """Do one kind of work to the end; an error is a problem."""
        try:
            work()
        except Exception as exc:
            self.problems.append(f"lost: {work.__name__} ended: {exc!r}")


def main(folder: Path) -> None:
    """Look until the standard input ends, then print what was seen."""
    looker = Looker(folder)
    threads = [threading.Thread(target=looker.run, args=(work,)) for work in (looker.pages, looker.lists)]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    looker.is_over.set()
    for thread in threads:
        thread.join()
    found = {
        "looks": looker.looks,
        "recordings": looker.recordings,
        "longest_look_s": looker.longest_s,
        "problems": looker.problems,
    }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
