"""Checks of calls: the caller and its scope, host name, version, query parameters; and the headers of every answer.

`Checks` is for all calls. `Guard` is the outermost layer of the FastAPI app, which answers all calls but those of
engines; kvdock/api/http/dispatch.py answers these. Each call names the scope that it needs (kvdock/protocol/calls.py).
What has no route, as the page's files, needs `health`. A HEAD is its GET, so every check is the same.

Four checks keep out web pages in a browser: they have no access token; they cannot send JSON across origins
(kvdock/api/http/wire.py requires the content type); they cannot use their own host name for this address (this module
requires a known Host); and browsers name the page that calls, which must be this server's. Browsers cannot reach Unix
sockets.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from urllib.parse import parse_qsl, urlsplit

from fastapi.routing import APIRoute
from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvdock.api.access.access_file import AccessFile
from kvdock.api.access.peer import Peer, log_refusal
from kvdock.api.http.connection import Connection
from kvdock.api.http.openapi import scope_of
from kvdock.api.http.wire import COMMON_HEADERS, REFUSAL, problem_response, refusal
from kvdock.api.record.timings import Meter
from kvdock.api.settings import Settings
from kvdock.protocol.errors import ApiError
from kvdock.protocol.reports import Problem
from kvdock.protocol.wire_types import SUPPORTED_VERSIONS, VERSION_HEADER, Scope as CallScope

_HEADERS = [(name.encode(), value.encode()) for name, value in COMMON_HEADERS.items()]
_VERSION_HEADER = VERSION_HEADER.lower().encode()
_VERSIONS = frozenset(str(version).encode() for version in SUPPORTED_VERSIONS)
"""The values of that header that are accepted: digits without leading zeros or signs."""
_PAGES = frozenset({"/", "/docs"})
"""Links of other sites may lead here."""
_OWN_SITES = (b"same-origin", b"none")


class Checks:
    """The checks of every call that come before anything of it is read: host, calling page, access token, scope,
    version."""

    def __init__(self, settings: Settings, access: AccessFile) -> None:
        self._hosts, self._access = allowed_hosts(settings), access

    def admit(self, scope: Scope, headers: Mapping[bytes, bytes], wanted: CallScope) -> Peer:
        """The caller, which is in `scope["state"]["peer"]` from now on. Raises ApiError: wrong_host, cross_site,
        unauthenticated, too_busy (Connection.has_shown), forbidden, unsupported_version."""
        peer: Peer = scope["state"]["peer"]
        if not peer.is_unix:
            self._check_host(headers)
            self._check_site(headers, scope)
        authorization = headers.get(b"authorization")
        if authorization is not None:
            peer = scope["state"]["peer"] = self._access.peer_of(authorization, peer)
            connection: Connection | None = scope["state"]["connection"]()
            if connection is not None and peer.tenant is not None:
                connection.has_shown(peer.tenant)
        peer.require(wanted)
        version = headers.get(_VERSION_HEADER)
        if version is not None and version not in _VERSIONS:
            raise ApiError(
                "unsupported_version", f"the {VERSION_HEADER} header names a version that this server does not speak",
                found=version.decode("latin-1"), wanted=list(SUPPORTED_VERSIONS),
            )
        return peer

    def is_still(self, peer: Peer, authorization: bytes | None) -> bool:
        """Whether the token still stands for the peer for which it stood when the call began."""
        try:
            return authorization is None or self._access.peer_of(authorization, peer) == peer
        except ApiError:
            return False

    def _check_host(self, headers: Mapping[bytes, bytes]) -> None:
        found = host_name(headers.get(b"host", b"").decode("latin-1"))
        if self._hosts is not None and found not in self._hosts:
            raise ApiError("wrong_host", "set allowed_hosts to serve it", found=found, wanted=sorted(self._hosts))

    def _check_site(self, headers: Mapping[bytes, bytes], scope: Scope) -> None:
        """Refuses a call that a browser made for a page of another site, by headers that browsers send and programs do
        not."""
        origin, port = headers.get(b"origin"), scope["server"][1]
        if origin is not None and not self._is_own(text := origin.decode("latin-1"), port):
            wanted = f"http, an allowed host, port {port}"
            raise ApiError("cross_site", "the page that calls is not this server's", found=text, wanted=wanted)
        site = headers.get(b"sec-fetch-site", b"none")
        if site in _OWN_SITES:
            return
        follows_link = (headers.get(b"sec-fetch-mode"), headers.get(b"sec-fetch-dest")) == (b"navigate", b"document")
        if not (follows_link and scope["method"] == "GET" and scope["path"] in _PAGES):
            raise ApiError(
                "cross_site", "the page that calls is not this server's", found=site.decode("latin-1"),
                wanted=[own.decode() for own in _OWN_SITES],
            )

    def _is_own(self, origin: str, port: int) -> bool:
        try:
            url = urlsplit(origin)
            host, found_port = url.hostname or "", url.port or 80
        except ValueError:
            return False
        return url.scheme == "http" and found_port == port and (self._hosts is None or host in self._hosts)


class Guard:
    """ASGI middleware around the app's routes; counts refusals and times each call. `routes`: all of the app.
    `methods_at`: the methods of a path that are answered elsewhere."""

    def __init__(
        self, app: ASGIApp, checks: Checks, meter: Meter, routes: Iterable[BaseRoute],
        methods_at: Callable[[str], set[str]],
    ) -> None:
        self._app, self._checks, self._meter, self._methods_at = app, checks, meter, methods_at
        self._routes = [route for route in routes if isinstance(route, APIRoute)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_ns, method = self._meter.now_ns(), scope["method"]
        if method == "HEAD":
            scope = {**scope, "method": "GET"}  # the same answer; the connection leaves out the body

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_HEADERS]
            await send(message)

        try:
            self._check(scope)
        except ApiError as error:
            log_refusal(scope["state"]["peer"], method, scope["path"], error)
            await refused(error, scope["path"])(scope, receive, send_guarded)
        else:
            try:
                await self._app(scope, receive, send_guarded)
            except Exception:  # the layer around this one answers it; here it is only counted
                self._meter.refuse("internal", "see the traceback", _route_of(scope))
                raise
        problem: Problem | None = scope["state"].get(REFUSAL)
        if problem is not None:
            self._meter.refuse(problem.code, problem.detail, _route_of(scope))
        self._meter.timings.add(method, _path_of(scope), self._meter.now_ns() - started_ns)

    def _check(self, scope: Scope) -> None:
        """Raises ApiError, as Checks does; method_not_allowed, and as _check_parameters."""
        route = next((route for route in self._routes if route.matches(scope)[0] is Match.FULL), None)
        called = route if route is not None and route.include_in_schema else None
        headers = dict(scope["headers"])
        peer = self._checks.admit(scope, headers, "health" if called is None else scope_of(called))
        scope["state"]["is_admitted"] = partial(self._checks.is_still, peer, headers.get(b"authorization"))
        if route is None:
            self._check_method(scope)
        if scope["query_string"] and called is not None:
            _check_parameters(scope["query_string"].decode("latin-1"), called)

    def _check_method(self, scope: Scope) -> None:
        """For a call that has no route, while other methods may have its path. Raises ApiError(method_not_allowed)."""
        here = [route for route in self._routes if route.matches(scope)[0] is Match.PARTIAL]
        methods = self._methods_at(scope["path"]) | {method for route in here for method in route.methods or ()}
        if methods:
            allowed = sorted(methods | {"HEAD"} if "GET" in methods else methods)
            raise ApiError("method_not_allowed", "Method Not Allowed", found=scope["method"], wanted=allowed)


def _path_of(scope: Scope) -> str:
    """The template of the route's path; "" for a call that matched none."""
    path: str = getattr(scope.get("route"), "path", "")
    return path


def _route_of(scope: Scope) -> str:
    path = _path_of(scope)
    return f"{scope['method']} {path}" if path else ""


def refused(error: ApiError, path: str) -> Response:
    headers = {"allow": ", ".join(error.wanted)} if error.code == "method_not_allowed" else None
    return problem_response(refusal(error, path), headers)


def _check_parameters(query: str, route: APIRoute) -> None:
    """A parameter that no code reads is refused, not ignored. Raises ApiError: unknown_parameter; bad_argument for one
    that comes twice."""
    wanted, seen = sorted(parameter.alias for parameter in route.dependant.query_params), set[str]()
    for name, _ in parse_qsl(query, keep_blank_values=True):
        if name not in wanted:
            raise ApiError("unknown_parameter", "the call has no such parameter", found=name, wanted=wanted)
        if name in seen:
            raise ApiError("bad_argument", f"query.{name}: it comes twice", found=f"query.{name}", wanted="once")
        seen.add(name)


def allowed_hosts(settings: Settings) -> frozenset[str] | None:
    """Host names to serve; None: all."""
    if settings.allowed_hosts:
        names = frozenset(name.strip().lower() for name in settings.allowed_hosts.split(",") if name.strip())
        return None if "*" in names else names
    return frozenset({"localhost", "127.0.0.1", "::1", settings.host.lower()})


_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^\[\]:]*))(?::[0-9]{0,5})?", re.IGNORECASE)


def host_name(header: str) -> str:
    """`[::1]:7410` → `::1`, `LOCALHOST:80` → `localhost`; what is no name with a port is its own name, and nobody's."""
    match = _HOST.fullmatch(header)
    return (match[1] or match[2]).lower() if match else header
