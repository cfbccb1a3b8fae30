"""Clients for programs that are no engines: through httpx, synchronous and asynchronous, with JSON bodies.

    with HttpClient("http://127.0.0.1:7410") as client: print(client.status())
    async with AsyncHttpClient("unix:/run/user/1000/kvdock.sock") as client: print(await client.status())

The methods, bodies, answers and errors are those of client.Client, whose calls cost a fraction of a call through httpx.
Needs the extra `client` (httpx). A ready httpx client (proxies, authentication, event hooks) may be passed in; it is
closed with this one. At a Unix socket, only a server of this user, or of root, is sent anything.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Collection, Coroutine
from contextlib import suppress
from functools import update_wrapper
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, cast

import httpx
import msgspec

from kvdock.client.client import FLUSH_S, Client, ReleaseQueue
from kvdock.client.transport import Address, Answers, Transport
from kvdock.protocol import calls as c, schemas as s
from kvdock.protocol.access import authorization, require_trusted_server
from kvdock.protocol.calls import Call, page
from kvdock.protocol.errors import ApiError, ServerUnavailable, without_session_secrets
from kvdock.protocol.forms import JSON
from kvdock.protocol.wire_types import API_VERSION, VERSION_HEADER, Body, Carrier, RefusedRelease

A = TypeVar("A")
P = ParamSpec("P")

_CLOSED = (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError)
"""The server had closed an idle connection: the call is repeated once, as every call may be."""
_FAILED = (httpx.HTTPError, PermissionError, RuntimeError)
"""PermissionError: the server is another user's. RuntimeError: the client is closed."""
_HEADERS = {"content-type": JSON.media_type, VERSION_HEADER.lower(): str(API_VERSION)}


def _without_session_secrets(record: logging.LogRecord) -> bool:
    """httpx logs the URL of every request. That of a session has its id, with which anybody with the token calls."""
    if isinstance(record.args, tuple):
        record.args = tuple(
            without_session_secrets(str(value)) if isinstance(value, httpx.URL) else value for value in record.args
        )
    return True


logging.getLogger("httpx").addFilter(_without_session_secrets)


def _asked(
    address: Address, headers: dict[str, str], method: str, path: str, body: bytes | None, timeout_s: float,
    trace: Callable[..., Any],
) -> dict[str, Any]:
    """The arguments of httpx's `request`. httpx calls `trace` at each step of the request, with the step's name."""
    url = f"http://{address.authority}{path}"
    return {
        "method": method, "url": url, "content": body, "headers": headers, "timeout": timeout_s,
        "extensions": {"trace": trace},
    }


def _is_strangers(address: Address, step: str, about: dict[str, Any]) -> PermissionError | None:
    """The reason why the connection that this step has made must not be used; None if it may be used."""
    if step != "connection.connect_unix_socket.complete":
        return None
    fd = about["return_value"].get_extra_info("socket").fileno()
    with socket.fromfd(fd, socket.AF_UNIX, socket.SOCK_STREAM) as connected:
        try:
            require_trusted_server(connected, address.socket_path)
        except PermissionError as error:
            return error
    return None


class _HttpxTransport(Transport):
    def __init__(self, address: Address, access_token: str, http: httpx.Client | None) -> None:
        super().__init__(address)
        self._headers = {**_HEADERS, **authorization(access_token)}
        self._http = http or httpx.Client(transport=httpx.HTTPTransport(uds=address.socket_path or None, retries=1))

    def call(
        self, method: str, path: str, body: bytes | None, timeout_s: float, media_type: bytes = b"application/json"
    ) -> tuple[int, bytes]:
        asked = _asked(self.address, self._headers, method, path, body, timeout_s, self._watch)
        try:
            try:
                response = self._http.request(**asked)
            except _CLOSED:
                response = self._http.request(**asked)
        except _FAILED as error:
            raise ServerUnavailable(f"{self.address.text}: {error or type(error).__name__}") from error
        return response.status_code, response.content

    def _watch(self, step: str, about: dict[str, Any]) -> None:
        if stranger := _is_strangers(self.address, step, about):
            about["return_value"].close()
            raise stranger

    def close(self) -> None:
        self._http.close()


class HttpClient(Client):
    """Calls to one server. Thread-safe, as httpx.Client is."""

    def __init__(
        self, address: str, *, timeout_s: float = 5.0, access_token: str = "", http: httpx.Client | None = None
    ) -> None:
        """As client.Client's. `http`: an httpx client, which keeps its own transport."""
        super().__init__(address, timeout_s=timeout_s, packed=False)
        self._transport = _HttpxTransport(self._transport.address, access_token, http)


def _awaited(
    method: Callable[Concatenate[Client, P], A]
) -> Callable[Concatenate[AsyncHttpClient, P], Coroutine[Any, Any, A]]:
    """The same call, awaited. `method` ends in one call of `_do` or `_carrying`, which AsyncHttpClient defines as
    coroutines, so here `method` returns a coroutine of its answer."""

    async def call(self: AsyncHttpClient, /, *args: P.args, **kwargs: P.kwargs) -> A:
        asked: Any = method(cast(Client, self), *args, **kwargs)
        return cast(A, await asked)

    update_wrapper(call, method)
    return call


class AsyncHttpClient:
    """Client's methods, awaited. For one event loop."""

    def __init__(
        self, address: str, *, timeout_s: float = 5.0, access_token: str = "", http: httpx.AsyncClient | None = None
    ) -> None:
        """As client.Client's. `http`: an httpx client, which keeps its own transport."""
        self._headers = {**_HEADERS, **authorization(access_token)}
        self._parsed = Address.parse(address)
        self.address, self.timeout_s = self._parsed.text, timeout_s
        self._answers = Answers(self.address)
        uds = self._parsed.socket_path or None
        self._http = http or httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=uds, retries=1))
        self._releases = ReleaseQueue()

    async def _do(
        self, call: Call[A], body: Body | None, timeout_s: float | None, *ids: str,
        query: dict[str, str] | None = None,
    ) -> A:
        content = None if body is None else JSON.encode(body)
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        asked = _asked(
            self._parsed, self._headers, call.method, call.target(ids, query), content, timeout_s, self._watch
        )
        try:
            try:
                response = await self._http.request(**asked)
            except _CLOSED:
                response = await self._http.request(**asked)
        except _FAILED as error:
            raise ServerUnavailable(f"{self.address}: {error or type(error).__name__}") from error
        return self._answers.decoded(call, response.status_code, response.content, packed=False)

    async def _watch(self, step: str, about: dict[str, Any]) -> None:
        if stranger := _is_strangers(self._parsed, step, about):
            await about["return_value"].aclose()
            raise stranger

    async def _carrying(
        self, call: Call[A], body: Carrier, timeout_s: float | None, session: str | None, *ids: str
    ) -> A:
        loaded, taken = self._releases.load(session, body)
        try:
            return await self._do(call, loaded, timeout_s, *ids)
        except BaseException as error:
            if session is not None:
                self._releases.put_back(session, taken, error)
            raise

    async def flush(self, session: str, *, timeout_s: float | None = None) -> list[RefusedRelease]:
        """As Client.flush."""
        refused: list[RefusedRelease] = []
        while self._releases.waits(session):
            answer = await self._carrying(c.RELEASE_MANY, s.ReleaseMany(session=session), timeout_s, session)
            refused += answer.refused_releases
        return refused

    async def segments(self, *, timeout_s: float | None = None) -> s.Segments:
        """As Client.segments."""
        found = await self._do(c.SEGMENTS, None, timeout_s)
        while found.next is not None:
            more = await self._do(c.SEGMENTS, None, timeout_s, query=page(None, found.next))
            found = msgspec.structs.replace(more, segments=[*found.segments, *more.segments])
        return found

    async def close(self) -> None:
        """As Client.close."""
        for session in self._releases.sessions():
            with suppress(ApiError, ServerUnavailable):
                await self.flush(session, timeout_s=FLUSH_S)
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    def release_later(self, lease: str, session: str, ranks: Collection[int]) -> None:
        """As Client.release_later. It only queues the release, so it is not awaited."""
        self._releases.add(session, lease, ranks)

    attach = _awaited(Client.attach)
    heartbeat = _awaited(Client.heartbeat)
    leave = _awaited(Client.leave)
    sessions = _awaited(Client.sessions)
    session = _awaited(Client.session)
    lookup = _awaited(Client.lookup)
    release = _awaited(Client.release)
    withdraw = _awaited(Client.withdraw)
    cancel = _awaited(Client.cancel)
    weights = _awaited(Client.weights)
    mismatch = _awaited(Client.mismatch)
    hint = _awaited(Client.hint)
    hold = _awaited(Client.hold)
    prefetch = _awaited(Client.prefetch)
    peer_notes = _awaited(Client.peer_notes)
    peer_read = _awaited(Client.peer_read)
    lease = _awaited(Client.lease)
    leases = _awaited(Client.leases)
    reserve = _awaited(Client.reserve)
    commit = _awaited(Client.commit)
    make_raw = _awaited(Client.make_raw)
    abort = _awaited(Client.abort)
    status = _awaited(Client.status)
    whoami = _awaited(Client.whoami)
    stats = _awaited(Client.stats)
    verdict = _awaited(Client.verdict)
    hits = _awaited(Client.hits)
    prefixes = _awaited(Client.prefixes)
    curve = _awaited(Client.curve)
    requests = _awaited(Client.requests)
    explain = _awaited(Client.explain)
    acknowledge = _awaited(Client.acknowledge)
    drain = _awaited(Client.drain)
    clear = _awaited(Client.clear)
    delete = _awaited(Client.delete)
    evict = _awaited(Client.evict)
    tiers = _awaited(Client.tiers)
    empty_tier = _awaited(Client.empty_tier)
    pin = _awaited(Client.pin)
    config = _awaited(Client.config)
    configure = _awaited(Client.configure)
    namespaces = _awaited(Client.namespaces)
