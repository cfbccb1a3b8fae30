"""The control plane for everyone else: httpx clients, synchronous and asynchronous, JSON on the wire.

    with HttpClient("http://127.0.0.1:7410") as client: print(client.status())
    async with AsyncHttpClient("unix:/run/user/1000/kvdock.sock") as client: print(await client.status())

The same methods, bodies, answers and errors as client.Client, which is what engines use: it costs a fraction of a
call through httpx. Needs the extra `client` (httpx). An httpx client made elsewhere (proxies, authentication, event
hooks) may be passed in; it is closed with this one.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from types import NoneType, TracebackType
from typing import Any, Self, TypeVar

import httpx
import msgspec

from kvdock.client.calls import SyncCalls
from kvdock.client.releases import ReleaseQueue
from kvdock.client.transport import Address
from kvdock.protocol import admin_schemas as a, calls as c, schemas as s
from kvdock.protocol.calls import Call, page
from kvdock.protocol.errors import ApiError, ServerUnavailable
from kvdock.protocol.forms import JSON
from kvdock.protocol.version import API_VERSION, VERSION_HEADER

A = TypeVar("A")

FLUSH_S = 1.0
_HEADERS = {"content-type": JSON.media_type, VERSION_HEADER.lower(): str(API_VERSION)}


def _request(
    call: Call[Any], body: s.Body | None, ids: tuple[str, ...], query: dict[str, str] | None, timeout_s: float
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
            raise ApiError.from_problem(msgspec.json.decode(response.content, type=s.Problem))
        if call.answer is NoneType:
            return call.answer()
        return msgspec.json.decode(response.content, type=call.answer)
    except msgspec.DecodeError as error:
        what = f"{call.method} {call.path} answered {response.status_code} with something else: {error}"
        raise ServerUnavailable(f"{address}: {what}") from error


def _place(address: str) -> tuple[str, str | None]:
    """(base URL, Unix socket path or None). ValueError naming an address of another form."""
    at = Address.parse(address)
    return f"http://{at.authority}", at.socket_path or None


class HttpClient(SyncCalls):
    """Calls to one server. Thread-safe, as httpx.Client is."""

    def __init__(self, address: str, *, timeout_s: float = 5.0, http: httpx.Client | None = None) -> None:
        """`address`: `unix:/path` or `http://host:port`; ValueError otherwise. `http` keeps its own transport."""
        super().__init__()
        self._address, self.timeout_s = address, timeout_s
        self._base, uds = _place(address)
        self._http = http or httpx.Client(transport=httpx.HTTPTransport(uds=uds, retries=1))

    @property
    def address(self) -> str:
        return self._address

    def _do(
        self, call: Call[A], body: s.Body | None, timeout_s: float | None, *ids: str,
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


class AsyncHttpClient:
    """SyncCalls' methods, awaited. For one event loop."""

    def __init__(self, address: str, *, timeout_s: float = 5.0, http: httpx.AsyncClient | None = None) -> None:
        """`address`: `unix:/path` or `http://host:port`; ValueError otherwise. `http` keeps its own transport."""
        self.address, self.timeout_s = address, timeout_s
        self._base, uds = _place(address)
        self._http = http or httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=uds, retries=1))
        self._releases = ReleaseQueue()

    async def _do(
        self, call: Call[A], body: s.Body | None, timeout_s: float | None, *ids: str,
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
        self, call: Call[A], body: s.Carrier, timeout_s: float | None, session: str | None, *ids: str
    ) -> A:
        loaded, taken = self._releases.load(session, body)
        try:
            return await self._do(call, loaded, timeout_s, *ids)
        except BaseException as error:
            if taken and session is not None:
                self._releases.put_back(session, taken, error)
            raise

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

    # ---------------------------------------------------------------- the calls

    async def attach(self, body: s.AttachSession, *, timeout_s: float | None = None) -> s.SessionAttached:
        return await self._do(c.ATTACH, body, timeout_s)

    async def heartbeat(
        self, session: str, body: s.Heartbeat, *, timeout_s: float | None = None
    ) -> s.HeartbeatAnswer:
        return await self._carrying(c.HEARTBEAT, body, timeout_s, session, session)

    async def leave(self, session: str, member: str, *, timeout_s: float | None = None) -> None:
        await self._do(c.LEAVE, None, timeout_s, session, query={"member": member})

    async def sessions(
        self, *, limit: int | None = None, cursor: str | None = None, timeout_s: float | None = None
    ) -> s.Sessions:
        return await self._do(c.SESSIONS, None, timeout_s, query=page(limit, cursor))

    async def session(
        self, session: str, *, limit: int | None = None, cursor: str | None = None, timeout_s: float | None = None
    ) -> a.SessionDetail:
        return await self._do(c.SESSION, None, timeout_s, session, query=page(limit, cursor))

    async def lookup(self, body: s.Lookup, *, timeout_s: float | None = None) -> s.LookupAnswer:
        return await self._carrying(c.LOOKUP, body, timeout_s, body.session)

    async def release(self, lease: str, body: s.ReleaseLease, *, timeout_s: float | None = None) -> s.ReleaseAnswer:
        return await self._do(c.RELEASE, body, timeout_s, lease)

    def release_later(self, lease: str, session: str, ranks: Collection[int]) -> None:
        """Queued, so not awaited; see SyncCalls."""
        self._releases.add(session, lease, ranks)

    async def flush(self, session: str, *, timeout_s: float | None = None) -> list[s.ReleaseRefused]:
        refused: list[s.ReleaseRefused] = []
        while taken := self._releases.take(session):
            try:
                answer = await self._do(c.RELEASE_MANY, s.ReleaseMany(session=session, releases=taken), timeout_s)
            except BaseException as error:
                self._releases.put_back(session, taken, error)
                raise
            refused += answer.refused_releases
        return refused

    async def renew(self, lease: str, body: s.RenewLease, *, timeout_s: float | None = None) -> s.LeaseView:
        return await self._do(c.RENEW, body, timeout_s, lease)

    async def cancel(self, lease: str, body: s.CancelLease, *, timeout_s: float | None = None) -> None:
        await self._do(c.CANCEL, body, timeout_s, lease)

    async def mismatch(self, body: s.ReportMismatch, *, timeout_s: float | None = None) -> s.MismatchAnswer:
        return await self._do(c.MISMATCH, body, timeout_s)

    async def leases(
        self, *, limit: int | None = None, cursor: str | None = None, timeout_s: float | None = None
    ) -> s.Leases:
        return await self._do(c.LEASES, None, timeout_s, query=page(limit, cursor))

    async def reserve(self, body: s.Reserve, *, timeout_s: float | None = None) -> s.ReserveAnswer:
        return await self._carrying(c.RESERVE, body, timeout_s, body.session)

    async def commit(self, reservation: str, body: s.Commit, *, timeout_s: float | None = None) -> s.CommitAnswer:
        return await self._carrying(c.COMMIT, body, timeout_s, body.session, reservation)

    async def abort(self, reservation: str, body: s.Abort, *, timeout_s: float | None = None) -> s.ReleaseAnswer:
        return await self._do(c.ABORT, body, timeout_s, reservation)

    async def segments(self, *, timeout_s: float | None = None) -> s.Segments:
        found = await self._do(c.SEGMENTS, None, timeout_s)
        while found.next is not None:
            more = await self._do(c.SEGMENTS, None, timeout_s, query=page(None, found.next))
            found = msgspec.structs.replace(more, segments=[*found.segments, *more.segments])
        return found

    async def status(self, *, timeout_s: float | None = None) -> s.Status:
        return await self._do(c.STATUS, None, timeout_s)

    async def stats(self, *, timeout_s: float | None = None) -> s.Stats:
        return await self._do(c.STATS, None, timeout_s)

    async def requests(
        self, *, limit: int | None = None, cursor: str | None = None, timeout_s: float | None = None
    ) -> s.Requests:
        return await self._do(c.REQUESTS, None, timeout_s, query=page(limit, cursor))

    # ---------------------------------------------------------------- administration

    async def clear(self, body: a.ClearCache, *, timeout_s: float | None = None) -> a.Cleared:
        return await self._do(c.CLEAR, body, timeout_s)

    async def delete(self, body: a.DeleteChunks, *, timeout_s: float | None = None) -> a.Deleted:
        return await self._do(c.DELETE, body, timeout_s)

    async def pin(self, body: a.PinChunks, *, timeout_s: float | None = None) -> a.Pinned:
        return await self._do(c.PIN, body, timeout_s)

    async def config(self, *, timeout_s: float | None = None) -> a.Config:
        return await self._do(c.CONFIG, None, timeout_s)

    async def configure(self, body: a.PatchConfig, *, timeout_s: float | None = None) -> a.Config:
        return await self._do(c.CONFIGURE, body, timeout_s)

    async def namespaces(
        self, *, limit: int | None = None, cursor: str | None = None, timeout_s: float | None = None
    ) -> a.Namespaces:
        return await self._do(c.NAMESPACES, None, timeout_s, query=page(limit, cursor))
