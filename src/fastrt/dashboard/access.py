"""Decides which requests the dashboard answers: those of this user's browsers and programs, and no others.

A browser proves itself by two secrets. It gets both for the one-time code in the address that `fastrt dashboard`
prints: a cookie, which scripts cannot read, and a key, which the page keeps in its own storage and sends as a header.
The cookie alone is not enough, because a browser sends it to every port of the same host, also to another user's. The
key alone is not enough, because a script that got into a page could read it. A program sends the token instead.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie

from fastrt.net.address import is_loopback_host

PAGE = "/"
ASSETS = "/static/"
KEY_HEADER = "x-fastrt-key"
_BYTES = 32  # of each secret


@dataclass(frozen=True, slots=True)
class Request:
    """The parts of an HTTP request that count.

    Attributes:
        method, path: as sent.
        headers: by their names in lower case.
        code: the parameter `code` of the address; "" without one.
    """

    method: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)
    code: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a request is answered.

    Attributes:
        status: 200 to serve it, or the status of the refusal.
        why: the text of the refusal.
        admits: whether the answer carries the cookie and the key.
    """

    status: int = 200
    why: str = ""
    admits: bool = False


class Access:
    """The secrets of one dashboard, and the rules for requests.

    Args:
        names: hosts, without ports, by which browsers may reach it beside loopback: its address and the names in its
            certificate. Any other name may be one that a web page has pointed here (DNS rebinding).
        scheme: "http" or "https".
        allow_actions: whether tasks may be cancelled and actors killed.

    Attributes:
        code: lets one browser in, then it is replaced.
        key, token: secrets of pages and of programs.
        cookie: name and value.
    """

    def __init__(self, names: Iterable[str], scheme: str, allow_actions: bool = False) -> None:
        self._names = {name.lower() for name in names}
        self._scheme = scheme
        self._allow_actions = allow_actions
        self.code, self.key, self.token = (secrets.token_urlsafe(_BYTES) for _ in range(3))
        # A name of its own: cookies do not tell the ports of a host apart.
        self.cookie = (f"fastrt-{secrets.token_hex(4)}", secrets.token_urlsafe(_BYTES))

    @property
    def cookie_header(self) -> str:
        """The value of the header that sets the cookie."""
        name, value = self.cookie
        secure = "; Secure" if self._scheme == "https" else ""
        return f"{name}={value}; HttpOnly; SameSite=Strict; Path=/{secure}"

    def judge(self, request: Request) -> Verdict:
        """Decide about a request; a right code is used up and replaced by another."""
        refusal = self._wrong_place(request)
        if refusal is not None:
            return refusal
        if request.path == PAGE and request.method == "GET" and request.code and _same(request.code, self.code):
            self.code = secrets.token_urlsafe(_BYTES)
            return Verdict(admits=True)
        return self._wrong_person(request) or self._wrong_deed(request) or Verdict()

    def _wrong_place(self, request: Request) -> Verdict | None:
        """Refuse what a page of another site has sent."""
        host = request.headers.get("host", "")
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        if not (name.lower() in self._names or is_loopback_host(name.lower())):
            return Verdict(403, "the dashboard does not answer under this name; use the address that it printed")
        origin = request.headers.get("origin")
        if origin is not None and origin.lower() != f"{self._scheme}://{host}".lower():
            return Verdict(403, "a page of another site has sent this request")
        site = request.headers.get("sec-fetch-site", "none")
        opens_page = request.path == PAGE and request.headers.get("sec-fetch-mode") == "navigate"
        if site not in ("none", "same-origin") and not opens_page:
            return Verdict(403, "a page of another site has sent this request")
        return None

    def _wrong_person(self, request: Request) -> Verdict | None:
        """Refuse a request without the secrets."""
        given = request.headers.get("authorization", "")
        if given:
            scheme, _, token = given.partition(" ")
            known = scheme.lower() == "bearer" and _same(token.strip(), self.token)
            return None if known else Verdict(401, "the token is not that of this dashboard")
        name, value = self.cookie
        if not _same(_cookie(request.headers.get("cookie", ""), name), value):
            return Verdict(401, "open the address that `fastrt dashboard` printed: it holds a code that works once")
        is_open = request.path == PAGE or request.path.startswith(ASSETS)
        if not is_open and not _same(request.headers.get(KEY_HEADER, ""), self.key):
            return Verdict(
                401, "this page is of an earlier dashboard: open the address that `fastrt dashboard` printed"
            )
        return None

    def _wrong_deed(self, request: Request) -> Verdict | None:
        """Refuse changes that were not allowed when the dashboard was started, and forms."""
        if request.method in ("GET", "HEAD"):
            return None
        if request.method != "POST":
            return Verdict(405, "only GET and POST are answered")
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            return Verdict(415, "send JSON: forms are not taken")
        if request.path.startswith("/act/") and not self._allow_actions:
            return Verdict(403, "start the dashboard by `fastrt dashboard --allow-actions` to cancel and kill")
        return None


def _cookie(header: str, name: str) -> str:
    try:
        found = SimpleCookie(header).get(name)
    except CookieError:
        return ""
    return "" if found is None else found.value


def _same(given: str, secret: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), secret.encode())
