"""The sessions of this user on this machine, and the answers to what browsers ask about them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fastrt.config import RUNTIME_FOLDER
from fastrt.dashboard import sections, views, watched
from fastrt.dashboard.log_readers import LogReaders
from fastrt.dashboard.pages import logs, services
from fastrt.dashboard.sections import Section
from fastrt.dashboard.services import Addresses, Services
from fastrt.dashboard.watched import Watched
from fastrt.errors import FastrtError
from fastrt.folders import has_private_folder

_SESSIONS_MAX = 8  # that are watched at once; and as many that have ended are remembered
_FREE = (views.LOGS, views.SERVICES)  # pages that need no session
_KEPT = ("overview", "tasks")  # pages that an ended session still has


class RefusedError(FastrtError):
    """There is no such page, or it cannot be shown; the text says why."""


class Desk:
    """Watches the sessions and makes the pages. A single thread calls its methods.

    Args:
        folder: the runtime folder.
        prefix: only sessions whose names begin with this.
        allow_actions: whether pages have the buttons that change the program.
        beside: the services to show; None: none.
    """

    def __init__(
        self, folder: Path, prefix: str = "", allow_actions: bool = False, beside: Addresses | None = None
    ) -> None:
        self._folder, self._prefix, self._allow_actions = folder, prefix, allow_actions
        self._sessions: dict[str, Watched] = {}  # oldest first
        self._last: dict[str, dict[str, list[Section]]] = {}  # of ended sessions: pages by view
        self._readers = LogReaders(folder)
        self._services = Services(beside or Addresses())

    def look(self) -> None:
        """Find new sessions, take a sample of each, and take leave of those that have ended."""
        if has_private_folder(self._folder, RUNTIME_FOLDER):
            for path in watched.find(self._folder, self._prefix)[:_SESSIONS_MAX]:
                if path.parent.name not in self._sessions:
                    self._sessions[path.parent.name] = Watched(path)
        for session in self._sessions.values():
            session.look()
            if session.state == watched.ENDED and session.name not in self._last:
                self._last[session.name] = self._final_pages(session)
                session.end()
        ended = [name for name, one in self._sessions.items() if one.state == watched.ENDED]
        for name in ended[:-_SESSIONS_MAX]:
            del self._sessions[name]
            del self._last[name]

    def view(self, args: Mapping[str, str]) -> list[Section]:
        """Make a page.

        Args:
            args: view, session (the beginning of its name; the newest without it), and what the view takes.
        Raises:
            RefusedError: there is no such page.
        """
        name = args.get("view", "overview")
        if name not in views.VIEWS and name not in views.LASTING and name not in _FREE:
            raise RefusedError("there is no such page")
        session = self._chosen(args.get("session", ""))
        head = self._head(session)
        if session is None and name not in _FREE:
            return [head, sections.text("none", views.NO_SESSION, "big")]
        if session is not None and session.state == watched.ENDED and name in views.VIEWS:
            kept = self._last.get(session.name, {})
            words = f"The session has ended. Still here: {', '.join([*kept, *views.LASTING, *_FREE])}."
            return [head, *kept.get(name, [sections.text("ended", words)])]
        if session is not None and session.state == watched.OUTSIDE and name not in _FREE:
            return [head, sections.text("outside", f"The session cannot be read: {session.why}", "bad")]
        try:
            found = self._made(name, session, args)
        except (FastrtError, ValueError, LookupError) as exc:
            return [head, sections.text("failed", f"This page cannot be made: {exc}", "warn")]
        return [head, *(one for one in found if self._allow_actions or not sections.is_action(one))]

    def _made(self, name: str, session: Watched | None, args: Mapping[str, str]) -> list[Section]:
        if name == views.LOGS:
            return logs.logs(self._readers, session, args)
        if name == views.SERVICES:
            return services.services(self._services)
        assert session is not None
        if name in views.LASTING:
            return views.LASTING[name](session, args)
        assert session.store is not None
        return views.VIEWS[name](session, session.store, args)

    def file(self, name: str, args: Mapping[str, str]) -> tuple[bytes, str]:
        """Make a file to download.

        Returns:
            Its bytes and media type.
        Raises:
            RefusedError: there is no such file.
        """
        session = self._chosen(args.get("session", ""))
        if name not in views.FILES or session is None or session.store is None:
            raise RefusedError("there is no such file")
        return views.FILES[name](session, session.store, args)

    def metrics(self, args: Mapping[str, str]) -> tuple[bytes, str]:
        """The figures of a session for Prometheus.

        Returns:
            The text and its media type.
        Raises:
            RefusedError: no session runs here, or a package is missing.
        """
        session = self._chosen(args.get("session", ""))
        if session is None or session.store is None:
            raise RefusedError("no session runs here")
        try:
            from fastrt.observe.metrics import CONTENT_TYPE, exposition
        except ModuleNotFoundError as exc:
            raise RefusedError(f"{exc.name} is not installed; run: pip install 'fastrt[metrics]'") from None
        return exposition(session.store), CONTENT_TYPE

    def do(self, path: str, body: Mapping[str, Any]) -> str:
        """Carry out the request of a button.

        Args:
            path: "do/..." of requests about the dashboard itself, "act/..." of those that change the program.
            body: what the button sends; session, and what the request takes.
        Returns:
            The words that the page shows.
        Raises:
            RefusedError: there is no such request.
        """
        chosen = body.get("session", "")
        session = self._chosen(chosen if isinstance(chosen, str) else "")
        if path not in views.DEEDS or session is None or session.store is None:
            raise RefusedError("there is no such request, or its session has ended")
        return views.DEEDS[path](session, session.store, body)

    def close(self) -> None:
        """Leave all sessions, and read no logs any more."""
        self._readers.close()
        for session in self._sessions.values():
            session.close()

    def _chosen(self, prefix: str) -> Watched | None:
        fitting = [one for name, one in self._sessions.items() if name.startswith(prefix)]
        alive = [one for one in fitting if one.state != watched.ENDED]
        return next(iter([*reversed(alive), *reversed(fitting)]), None)

    def _head(self, session: Watched | None) -> Section:
        """The top of every page: the session, its state, and the other sessions."""
        names = [[one.name, one.name[:8], one.state] for one in reversed(self._sessions.values())]
        about: Section = {"id": "head", "kind": "head", "sessions": names, "session": "", "state": "none", "why": ""}
        if session is not None:
            about.update(session=session.name, state=session.state, why=session.why)
            if session.state != watched.LIVE:
                about["seen"] = session.last_seen
        return about

    def _final_pages(self, session: Watched) -> dict[str, list[Section]]:
        found: dict[str, list[Section]] = {}
        for name in _KEPT:
            make: Callable[..., list[Section]] | None = views.VIEWS.get(name)
            if make is not None and session.store is not None:
                with contextlib.suppress(FastrtError, ValueError, LookupError, OSError):
                    found[name] = make(session, session.store, {})
        return found
