"""The dashboard's HTTP side: every request passes `Access`, pages are static files, data is streamed as JSON."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from typing import Any
from urllib.parse import parse_qsl

from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fastrt.dashboard import access, sections
from fastrt.dashboard.access import Access
from fastrt.dashboard.desk import Desk, RefusedError
from fastrt.errors import FastrtError

_log = logging.getLogger(__name__)
_BODY_MAX = 4096
_BODY_S = 5.0
_STREAMS_MAX = 32
_EVERY_S = 1.0
_TYPES = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml", "html": "text/html"}
HEADERS = {
    # No inline script or style, nothing from elsewhere, no frames.
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class Guard:
    """Judges each request before a byte of its body is read, and puts the security headers on each answer.

    Args:
        app: answers the admitted requests.
        rules: who is admitted.
        admitted: called when a browser has used the code.
    """

    def __init__(self, app: ASGIApp, rules: Access, admitted: Callable[[], None]) -> None:
        self._app, self._rules, self._admitted = app, rules, admitted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, as ASGI defines it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        if scope["type"] != "http":
            return
        headers: dict[str, str] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.decode("latin-1"), value.decode("latin-1"))
        query = (
            dict(parse_qsl(scope["query_string"].decode("latin-1"), max_num_fields=32)) if scope["path"] == "/" else {}
        )
        request = access.Request(scope["method"], scope["path"], headers, query.get("code", ""))
        verdict = self._rules.judge(request)
        extra = dict(HEADERS)
        if verdict.status != 200:
            extra["connection"] = "close"
        if verdict.admits:
            extra["set-cookie"] = self._rules.cookie_header
            scope["admits"] = True
            self._admitted()

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message.get("headers", ()), *((name.encode(), value.encode()) for name, value in extra.items())
                ]  # fmt: skip
            await send(message)

        app = self._app if verdict.status == 200 else PlainTextResponse(verdict.why + "\n", verdict.status)
        await app(scope, receive, guarded)


def make(desk: Desk, rules: Access, admitted: Callable[[], None], closing: asyncio.Event) -> ASGIApp:
    """Make the application.

    Args:
        desk: knows the sessions; its methods are called on one thread.
        rules: who is admitted.
        admitted: called when a browser has used the code.
        closing: ends the streams of all pages when it is set.
    """
    files = _static_files()
    pool = ThreadPoolExecutor(1, "fastrt-dashboard")
    served = _Served(desk, rules, pool, files, closing)
    routes = [
        Route("/", served.page, methods=["GET"]),
        Route("/static/{name}", served.static, methods=["GET"]),
        Route("/view", served.view, methods=["GET"]),
        Route("/stream", served.stream, methods=["GET"]),
        Route("/metrics", served.metrics, methods=["GET"]),
        Route("/file/{name}", served.file, methods=["GET"]),
        Route("/do/{name}", served.do, methods=["POST"]),
        Route("/act/{name}", served.do, methods=["POST"]),
    ]
    return Guard(Starlette(routes=routes, lifespan=served.lifespan), rules, admitted)


class _Served:
    """The handlers of the routes."""

    def __init__(
        self, desk: Desk, rules: Access, pool: ThreadPoolExecutor, files: Mapping[str, bytes], closing: asyncio.Event
    ) -> None:
        self._desk, self._rules, self._pool, self._files, self._closing = desk, rules, pool, files, closing
        self._streams = 0
        self._cached: dict[tuple[Any, ...], tuple[float, list[sections.Section]]] = {}

    def lifespan(self, app: Starlette) -> Any:
        """Take samples while the server runs, and leave the sessions at its end."""

        @contextlib.asynccontextmanager
        async def running() -> AsyncIterator[None]:
            sampler = asyncio.create_task(self._sample())
            try:
                yield
            finally:
                sampler.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await sampler
                await self._call(self._desk.close)
                self._pool.shutdown()

        return running()

    async def page(self, request: HttpRequest) -> Response:
        """The one HTML page; for a browser that brought the code it holds the key."""
        html = self._files["index.html"]
        if request.scope.get("admits"):
            html = html.replace(b'content="" data-key', b'content="%s" data-key' % self._rules.key.encode())
        return Response(html, media_type="text/html")

    async def static(self, request: HttpRequest) -> Response:
        """A file of the page."""
        name = request.path_params["name"]
        if name not in self._files:
            return PlainTextResponse("there is no such file\n", 404)
        return Response(self._files[name], media_type=_TYPES.get(name.rpartition(".")[2], "text/plain"))

    async def view(self, request: HttpRequest) -> Response:
        """The sections of a page once, for programs."""
        try:
            found = await self._sections(dict(request.query_params))
        except RefusedError as exc:
            return PlainTextResponse(f"{exc}\n", 404)
        return JSONResponse(found)

    async def stream(self, request: HttpRequest) -> Response:
        """The sections of a page, then their changes each second (server-sent events)."""
        args = dict(request.query_params)
        if self._streams >= _STREAMS_MAX:
            return PlainTextResponse(f"{_STREAMS_MAX} pages are open already: close one\n", 503)
        return StreamingResponse(self._events(args), media_type="text/event-stream")

    async def _events(self, args: dict[str, str]) -> AsyncIterator[str]:
        self._streams += 1
        shown: dict[str, sections.Section] = {}
        order: list[str] = []
        try:
            while not self._closing.is_set():
                began = time.monotonic()
                try:
                    found = await self._sections(args)
                except RefusedError as exc:
                    found = [sections.text("refused", str(exc), "warn")]
                news = sections.changes(shown, found)
                if news["set"] or news["order"] != order:
                    yield f"data: {json.dumps(news, separators=(',', ':'))}\n\n"
                else:
                    yield ": nothing new\n\n"  # and the browser sees that the dashboard lives
                shown, order = {section["id"]: section for section in found}, news["order"]
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._closing.wait(), max(0.05, _EVERY_S - (time.monotonic() - began)))
        finally:
            self._streams -= 1

    async def file(self, request: HttpRequest) -> Response:
        """A file to download, such as the timeline."""
        name = request.path_params["name"]
        try:
            data, kind = await self._call(self._desk.file, name, dict(request.query_params))
        except (RefusedError, FastrtError) as exc:
            return PlainTextResponse(f"{exc}\n", 404)
        return Response(data, media_type=kind)

    async def metrics(self, request: HttpRequest) -> Response:
        """The figures of a session for Prometheus, read now."""
        try:
            data, kind = await self._call(self._desk.metrics, dict(request.query_params))
        except FastrtError as exc:
            return PlainTextResponse(f"{exc}\n", 503)
        return Response(data, headers={"content-type": kind})

    async def do(self, request: HttpRequest) -> Response:
        """Carry out a request of a button."""
        try:
            body = await asyncio.wait_for(_small_body(request), _BODY_S)
            words = await self._call(self._desk.do, request.url.path.lstrip("/"), body)
        except (RefusedError, FastrtError, ValueError) as exc:
            return JSONResponse({"said": str(exc), "done": False}, 400)
        except asyncio.TimeoutError:
            return JSONResponse({"said": "the request did not come in time", "done": False}, 408)
        self._cached.clear()  # so that the next page shows the change
        return JSONResponse({"said": words, "done": True})

    async def _sections(self, args: dict[str, str]) -> list[sections.Section]:
        """The sections of a page; pages that several browsers show are made once a second."""
        key = tuple(sorted(args.items()))
        known = self._cached.get(key)
        if known is not None and time.monotonic() - known[0] < _EVERY_S / 2:
            return known[1]
        found: list[sections.Section] = await self._call(self._desk.view, args)
        if len(self._cached) >= _STREAMS_MAX:
            self._cached.clear()
        self._cached[key] = time.monotonic(), found
        return found

    async def _sample(self) -> None:
        while True:
            began = time.monotonic()
            try:
                await self._call(self._desk.look)
            except Exception:  # of one session in an unforeseen state; the page says what it can
                _log.exception("a sample could not be taken")
            await asyncio.sleep(max(0.05, _EVERY_S - (time.monotonic() - began)))

    def _call(self, function: Callable[..., Any], *args: Any) -> Awaitable[Any]:
        return asyncio.get_running_loop().run_in_executor(self._pool, function, *args)


async def _small_body(request: HttpRequest) -> dict[str, Any]:
    data = b""
    async for piece in request.stream():
        data += piece
        if len(data) > _BODY_MAX:
            raise ValueError(f"a request has at most {_BODY_MAX} bytes")
    from fastrt.foreign_text import read_object

    return read_object(data, "the request")


def _static_files() -> dict[str, bytes]:
    folder = resources.files("fastrt.dashboard") / "static"
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name.rpartition(".")[2] in _TYPES}
