"""Clients for programs that are no engines: through httpx, synchronous and asynchronous, with JSON bodies.

    with HttpClient("http://127.0.0.1:7410") as client: print(client.status())
    async with AsyncHttpClient("unix:/run/user/1000/kvdock.sock") as client: print(await client.status())

The same methods, bodies, answers and errors as client.Client, whose calls cost a fraction of a call through httpx.
Needs the extra `client` (httpx). A ready httpx client (proxies, authentication, event hooks) may be passed in; it is
closed with this one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine
from contextlib import suppress
from functools import update_wrapper
from types import NoneType, TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, cast

import httpx
import msgspec

from kvdock.client.calls import SyncCalls
from kvdock.client.releases import ReleaseQueue
from kvdock.client.transport import Address
from kvdock.protocol import calls as c, schemas as s
from kvdock.protocol.calls import Call, page
from kvdock.protocol.errors import ApiError, ServerUnavailable
from kvdock.protocol.forms import JSON
from kvdock.protocol.reports import Problem
from kvdock.protocol.version import API_VERSION, VERSION_HEADER
from kvdock.protocol.wire_types import Body, Carrier, RefusedRelease

A = TypeVar("A")
P = ParamSpec("P")

FLUSH_S = 1.0
_HEADERS = {"content-type": JSON.media_type, VERSION_HEADER.lower(): str(API_VERSION)}


def _request(
    call: Call[Any], body: Body | None, ids: tuple[str, ...], query: dict[str, str] | None, timeout_s: float
) -> dict[str, Any]:
    """Arguments of httpx's `request`."""
    return {
        "method": call.method,
        "url": call.target(ids, query),
        "content": None if body is None else JSON.encode(body),
        "headers": _HEADERS,
        "timeout": timeout_s,
    }


def _answer(call: Call[A], response: httpx.Response, address: str) -> A:
    try:
        if response.status_code >= 400:
            raise ApiError.from_problem(msgspec.json.decode(response.content, type=Problem))
        if call.answer is NoneType:
            return call.answer()
        return msgspec.json.decode(response.content, type=call.answer)
    except msgspec.DecodeError as error:
        what = f"{call.method} {call.path} answered {response.status_code} with something else: {error}"
        raise ServerUnavailable(f"{address}: {what}") from error


def _base_and_socket(address: str) -> tuple[str, str | None]:
    """(base URL, Unix socket path or None). ValueError naming an address of another form."""
    at = Address.parse(address)
    return f"http://{at.authority}", at.socket_path or None


class HttpClient(SyncCalls):
    """Calls to one server. Thread-safe, as httpx.Client is."""

    def __init__(self, address: str, *, timeout_s: float = 5.0, http: httpx.Client | None = None) -> None:
        """`address`: `unix:/path` or `http://host:port`; ValueError otherwise. `http` keeps its own transport."""
        super().__init__()
        self._address, self.timeout_s = address, timeout_s
        self._base, uds = _base_and_socket(address)
        self._http = http or httpx.Client(transport=httpx.HTTPTransport(uds=uds, retries=1))

    @property
    def address(self) -> str:
        return self._address

    def _do(
        self, call: Call[A], body: Body | None, timeout_s: float | None, *ids: str,
        query: dict[str, str] | None = None,
    ) -> A:
        sent = _request(call, body, ids, query, self.timeout_s if timeout_s is None else timeout_s)
        sent["url"] = self._base + sent["url"]
        try:
            try:
                response = self._http.request(**sent)
            except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
                response = self._http.request(**sent)  # the server had closed an idle connection; calls may be repeated
        except (httpx.HTTPError, RuntimeError) as error:  # RuntimeError: the client is closed
            raise ServerUnavailable(f"{self.address}: {error or type(error).__name__}") from error
        return _answer(call, response, self.address)

    def close(self) -> None:
        for session in self._releases.sessions():
            with suppress(ApiError, ServerUnavailable):
                self.flush(session, timeout_s=FLUSH_S)
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _awaited(
    method: Callable[Concatenate[SyncCalls, P], A]
) -> Callable[Concatenate[AsyncHttpClient, P], Coroutine[Any, Any, A]]:
    """The same call, awaited. `method` ends in one `_do` or `_carrying`, so with AsyncHttpClient's it returns a
    coroutine of its answer."""

    async def call(self: AsyncHttpClient, /, *args: P.args, **kwargs: P.kwargs) -> A:
        asked: Any = method(cast(SyncCalls, self), *args, **kwargs)
        return cast(A, await asked)

    update_wrapper(call, method)
    return call


class AsyncHttpClient:
    """SyncCalls' methods, awaited. For one event loop."""

    def __init__(self, address: str, *, timeout_s: float = 5.0, http: httpx.AsyncClient | None = None) -> None:
        """`address`: `unix:/path` or `http://host:port`; ValueError otherwise. `http` keeps its own transport."""
        self.address, self.timeout_s = address, timeout_s
        self._base, uds = _base_and_socket(address)
        self._http = http or httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=uds, retries=1))
        self._releases = ReleaseQueue()

    async def _do(
        self, call: Call[A], body: Body | None, timeout_s: float | None, *ids: str,
        query: dict[str, str] | None = None,
    ) -> A:
        sent = _request(call, body, ids, query, self.timeout_s if timeout_s is None else timeout_s)
        sent["url"] = self._base + sent["url"]
        try:
            try:
                response = await self._http.request(**sent)
            except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
                response = await self._http.request(**sent)  # as in HttpClient
        except (httpx.HTTPError, RuntimeError) as error:
            raise ServerUnavailable(f"{self.address}: {error or type(error).__name__}") from error
        return _answer(call, response, self.address)

    async def _carrying(
        self, call: Call[A], body: Carrier, timeout_s: float | None, session: str | None, *ids: str
    ) -> A:
        with self._releases.carried(session, body) as loaded:
            return await self._do(call, loaded, timeout_s, *ids)

    async def flush(self, session: str, *, timeout_s: float | None = None) -> list[RefusedRelease]:
        refused: list[RefusedRelease] = []
        while self._releases.waits(session):
            answer = await self._carrying(c.RELEASE_MANY, s.ReleaseMany(session=session), timeout_s, session)
            refused += answer.refused_releases
        return refused

    async def segments(self, *, timeout_s: float | None = None) -> s.Segments:
        found = await self._do(c.SEGMENTS, None, timeout_s)
        while found.next is not None:
            more = await self._do(c.SEGMENTS, None, timeout_s, query=page(None, found.next))
            found = msgspec.structs.replace(more, segments=[*found.segments, *more.segments])
        return found

    async def close(self) -> None:
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
        """Queued, so not awaited; see SyncCalls."""
        self._releases.add(session, lease, ranks)

    attach = _awaited(SyncCalls.attach)
    heartbeat = _awaited(SyncCalls.heartbeat)
    leave = _awaited(SyncCalls.leave)
    sessions = _awaited(SyncCalls.sessions)
    session = _awaited(SyncCalls.session)
    lookup = _awaited(SyncCalls.lookup)
    release = _awaited(SyncCalls.release)
    cancel = _awaited(SyncCalls.cancel)
    mismatch = _awaited(SyncCalls.mismatch)
    lease = _awaited(SyncCalls.lease)
    leases = _awaited(SyncCalls.leases)
    reserve = _awaited(SyncCalls.reserve)
    commit = _awaited(SyncCalls.commit)
    abort = _awaited(SyncCalls.abort)
    status = _awaited(SyncCalls.status)
    stats = _awaited(SyncCalls.stats)
    requests = _awaited(SyncCalls.requests)
    clear = _awaited(SyncCalls.clear)
    delete = _awaited(SyncCalls.delete)
    pin = _awaited(SyncCalls.pin)
    config = _awaited(SyncCalls.config)
    configure = _awaited(SyncCalls.configure)
    namespaces = _awaited(SyncCalls.namespaces)
