"""The outermost layer: which host names are answered, and the headers that every answer carries.

The pool has no passwords; what protects it from a web page in somebody's browser is that the page
cannot send JSON across origins (wire.read_body wants the content type) and cannot make its own host
name point here (this module wants a known Host). Unix sockets are out of a browser's reach.
"""

from __future__ import annotations

import ipaddress

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvdock.api.errors import problem_of
from kvdock.api.history import Counters
from kvdock.api.settings import Settings
from kvdock.api.wire import SECURITY_HEADERS, problem_response


class Guard:
    """ASGI middleware; counts refusals on the way out."""

    def __init__(self, app: ASGIApp, settings: Settings, counters: Counters) -> None:
        self._app = app
        self._hosts = allowed_hosts(settings)
        self._counters = counters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._counters.refusals += message["status"] >= 400
                MutableHeaders(scope=message).update(SECURITY_HEADERS)
            await send(message)

        host = host_name(Headers(scope=scope).get("host", ""))
        if self._hosts is not None and scope.get("client") and host not in self._hosts:
            path = Request(scope).url.path
            wanted = sorted(self._hosts)
            problem = problem_of("wrong_host", "set allowed_hosts to serve it", found=host, wanted=wanted, path=path)
            await problem_response(problem)(scope, receive, send_guarded)
            return
        await self._app(scope, receive, send_guarded)


def allowed_hosts(settings: Settings) -> frozenset[str] | None:
    """Names to answer for; None: all."""
    if settings.allowed_hosts:
        names = frozenset(name.strip().lower() for name in settings.allowed_hosts.split(",") if name.strip())
        return None if "*" in names else names
    return frozenset({"localhost", "127.0.0.1", "::1", settings.host.lower()}) if is_loopback(settings.host) else None


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def host_name(header: str) -> str:
    """`[::1]:7410` → `::1`, `LOCALHOST:80` → `localhost`."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0].lower()
