"""Requests that the server answers: those addressed to it by name (a page elsewhere could make a
browser ask it), and on an address that others reach, with its token."""

from __future__ import annotations

import hmac
import re
import socket
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fourfold.errors import UserError
from fourfold.spec import check

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_TOKEN = re.compile("[A-Za-z0-9_-]{8,200}")
# What a link on a page elsewhere may lead to: pages, which ask nothing of a planner by themselves.
_PAGES = ("/", "/runs", "/train")


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """`runs`: a store to show; `train`: a training's folder; `token` '': none is needed."""

    host: str = "127.0.0.1"
    port: int = 8300
    runs: str | None = None
    train: str | None = None
    token: str = ""
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.host not in LOOPBACK and not self.token:
            rule = "needs a token, since others can reach it"
            hint = "add --token TEXT, or use 127.0.0.1"
            raise UserError(rule, field="host", value=self.host, hint=hint)

        good = not self.token or _TOKEN.fullmatch(self.token)
        rule = "must be 8 or more letters, digits, '-' or '_'"
        check.that(good, "token", "(hidden)", rule)

    @property
    def address(self) -> str:
        return f"[{self.host}]" if ":" in self.host else self.host

    @property
    def hosts(self) -> list[str]:
        """Host names that a request may be addressed to, on any port."""
        return sorted({"127.0.0.1", "localhost", "[::1]", self.address, *self.names})


def listening(settings: Served) -> tuple[Served, socket.socket]:
    """(the settings with the port that was got, its socket)."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((settings.host, settings.port))
    except (OSError, OverflowError) as error:
        found.close()
        rule, hint = f"cannot be listened on ({error})", "pass another --port, or 0 for any"
        asked = f"{settings.host}:{settings.port}"
        raise UserError(rule, field="port", value=asked, hint=hint) from None
    found.listen(128)
    return replace(settings, port=found.getsockname()[1]), found


class Guard:
    """Middleware that refuses requests of other sites' pages and those without the token."""

    def __init__(self, inner: ASGIApp, settings: Served) -> None:
        self.inner, self.settings = inner, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.inner(scope, receive, send)
            return
        from starlette.requests import Request
        from starlette.responses import PlainTextResponse

        request = Request(scope)
        why = self.why_not(request)
        if why:
            await PlainTextResponse(why, status_code=403)(scope, receive, send)
            return

        async def with_headers(event: Message) -> None:
            if event["type"] == "http.response.start":
                event["headers"] += [
                    (b"x-content-type-options", b"nosniff"),
                    (b"x-frame-options", b"DENY"),
                    (b"referrer-policy", b"no-referrer"),
                    (b"cache-control", b"no-store"),
                ]
                if self.settings.token and request.query_params.get("token"):
                    cookie = f"token={self.settings.token}; HttpOnly; SameSite=Strict; Path=/"
                    event["headers"].append((b"set-cookie", cookie.encode()))
            await send(event)

        await self.inner(scope, receive, with_headers)

    def why_not(self, request: Request) -> str:
        host, origin = request.headers["host"], request.headers.get("origin")
        if origin is not None and origin != f"http://{host}":
            return f"a page of {origin!r} may not ask this server"
        if not _own_page_asks(request):
            return "a page of another site may not ask this server"
        if request.method not in ("GET", "HEAD"):
            return "this server only answers GET"
        if self.settings.token:
            given = request.query_params.get("token") or request.cookies.get("token") or ""
            if not hmac.compare_digest(given.encode(), self.settings.token.encode()):
                return "the token is missing or wrong: open the address that the server printed"
        return ""


def _own_page_asks(request: Request) -> bool:
    """By what browsers say of a request; other programs say nothing."""
    site, mode, target = (
        request.headers.get(f"sec-fetch-{name}") for name in ("site", "mode", "dest")
    )
    if site in (None, "none", "same-origin"):
        return True
    return (mode, target) == ("navigate", "document") and request.url.path in _PAGES
