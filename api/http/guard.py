"""The outermost layer: checks host name, version and query parameters, and adds headers to every answer.

The server has no passwords. It is protected from web pages in a browser because a page cannot send JSON across
origins (api/http/wire.py requires the content type) and cannot use its own host name for this address (this module
requires a known Host). Browsers cannot reach Unix sockets.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from urllib.parse import parse_qsl

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvdock.api.http.wire import SECURITY_HEADERS, problem_response, refusal
from kvdock.api.settings import Settings
from kvdock.api.views.timing import Meter
from kvdock.protocol.errors import ApiError
from kvdock.protocol.version import API_VERSION, SUPPORTED_VERSIONS, VERSION_HEADER, supported

_HEADERS = [
    (name.lower().encode(), value.encode())
    for name, value in {**SECURITY_HEADERS, VERSION_HEADER: str(API_VERSION)}.items()
]
_VERSION_HEADER = VERSION_HEADER.lower().encode()


class Guard:
    """ASGI middleware; counts refusals and times each call. `routes`: the routes of the API."""

    def __init__(self, app: ASGIApp, settings: Settings, meter: Meter, routes: Iterable[BaseRoute]) -> None:
        self._app = app
        self._hosts = allowed_hosts(settings)
        self._meter = meter
        self._routes = [route for route in routes if isinstance(route, APIRoute) and route.include_in_schema]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_ns = self._meter.now_ns()

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._meter.counters.refusals += message["status"] >= 400
                message["headers"] = [*message["headers"], *_HEADERS]
            await send(message)

        try:
            self._check(scope)
        except ApiError as error:
            problem = refusal(error, Request(scope).url.path)
            await problem_response(problem)(scope, receive, send_guarded)
        else:
            await self._app(scope, receive, send_guarded)
        route = scope.get("route")
        self._meter.timings.add(scope["method"], getattr(route, "path", ""), self._meter.now_ns() - started_ns)

    def _check(self, scope: Scope) -> None:
        """Raises ApiError: wrong_host, unsupported_version, unknown_parameter."""
        host = version = None
        for name, value in scope["headers"]:
            if name == b"host":
                host = value
            elif name == _VERSION_HEADER:
                version = value
        if self._hosts is not None and scope.get("client"):
            found = host_name((host or b"").decode("latin-1"))
            if found not in self._hosts:
                raise ApiError(
                    "wrong_host", "set allowed_hosts to serve it", found=found, wanted=sorted(self._hosts)
                )
        if version is not None and not supported(text := version.decode("latin-1")):
            raise ApiError(
                "unsupported_version", f"the {VERSION_HEADER} header names a version that this server does not speak",
                found=text, wanted=list(SUPPORTED_VERSIONS),
            )
        if scope["query_string"]:
            self._check_parameters(scope)

    def _check_parameters(self, scope: Scope) -> None:
        """A parameter that no code reads is refused, not ignored."""
        route = next((route for route in self._routes if route.matches(scope)[0] is Match.FULL), None)
        if route is None:
            return  # not a call of the API: the page, its files, or an unknown path
        wanted = sorted(parameter.alias for parameter in route.dependant.query_params)
        for name, _ in parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True):
            if name not in wanted:
                raise ApiError("unknown_parameter", "the call has no such parameter", found=name, wanted=wanted)


def allowed_hosts(settings: Settings) -> frozenset[str] | None:
    """Host names to serve; None: all."""
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
