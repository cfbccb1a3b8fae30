"""One client's connection: uvicorn's parser of HTTP/1.1, held to limits (kvdock/api/http/limits.py).

Invariants: a request's line and header are bounded before they are kept; a request that has begun ends within its time;
a client that does not read loses its connection; TCP never uses the descriptors that engines and the pool need.
Refusals here are problem details, too, and the connection is closed.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import math
import os
import re
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import Any, ClassVar, NamedTuple

import httptools
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from kvdock.api.access.peer import Peer, peer_of
from kvdock.api.errors import StartupError
from kvdock.api.http.crowd import Crowd
from kvdock.api.http.engine_calls import find
from kvdock.api.http.limits import ConnectionLimits
from kvdock.api.http.pace import Pace
from kvdock.api.http.wire import COMMON_HEADERS, NO_STORE, PROBLEM, PROBLEM_HEADERS, REFUSAL
from kvdock.api.record.timings import Meter
from kvdock.api.reports.degraded import CONNECTIONS_HELD, Lack, Most, tenant_with_most
from kvdock.api.turns import ENDS_OF_TURN, ENGINE_READS_OF_TURN, LONG_READ_BYTES, SHORT_READ_BYTES, ReadTurns
from kvdock.protocol.errors import ApiError, problem_of
from kvdock.protocol.forms import JSON
from kvdock.protocol.reports import Problem
from kvdock.protocol.wire_types import OWN_TENANT

SHARE = 0.5
"""The share of all connections that strangers of one address may have, or one tenant."""
log = logging.getLogger("kvdock.api.http")


class Stage(enum.Enum):
    """How far the request that is arriving now has come."""

    NONE = enum.auto()
    """Between two requests."""
    NEW = enum.auto()
    """Nothing has arrived on this connection."""
    HEAD = enum.auto()
    BODY = enum.auto()


class Arrival:
    """The request that is arriving now: how far it has come, and what of it."""

    __slots__ = ("body_bytes", "pieces", "quiet_bytes", "stage")

    def __init__(self) -> None:
        self.stage = Stage.NEW
        self.quiet_bytes = 0
        """Received since the parser last came to the end of a header, a piece of a body or a request."""
        self.pieces = self.body_bytes = 0

    def begin(self) -> None:
        self.stage = Stage.HEAD
        self.pieces = self.body_bytes = 0

    def come_to(self, stage: Stage) -> None:
        self.stage, self.quiet_bytes = stage, 0

    def add_piece(self, of_body: bytes) -> None:
        self.quiet_bytes = 0
        self.pieces += 1
        self.body_bytes += len(of_body)


class ConnectionCount:
    """The open connections of one family, and how many there may be.

    Strangers are callers that have shown no token on the connection. They may take all that is free, but from one
    address no more than a share; and where there is no room, the stranger that has waited longest gives way. So
    whoever opens connections and keeps them stops nobody else: neither probes, which have no token, nor people.
    A tenant has no more than a share either: of its own, the one that has waited longest gives way to a new one, which
    is refused if none waits.
    """

    def __init__(self, name: str, limit: int) -> None:
        self.name, self.limit, self.open = name, limit, 0
        self.strangers: dict[Connection, None] = {}
        """The one that has been quiet for longest comes first."""
        self._of_tenants: dict[str, dict[Connection, None]] = {}
        """Those that have shown a token of a tenant; likewise."""
        self._share = max(1, int(SHARE * limit))

    def make_room(self, address: str) -> bool:
        """Whether one more connection from the address fits, after one has given way if need be."""
        near = [one for one in self.strangers if one.address == address]
        if len(near) >= self._share:
            return _give_way(near)
        return self.open < self.limit or _give_way(self.strangers)

    def of_tenant(self, tenant: str) -> dict[Connection, None] | None:
        """The connections of a tenant; None: the server's own user may have all."""
        return None if tenant == OWN_TENANT else self._of_tenants.setdefault(tenant, {})

    def of_each(self) -> Counter[str]:
        """How many each tenant has. Strangers are not among them."""
        counts = Counter({tenant: len(its) for tenant, its in self._of_tenants.items()})
        counts[OWN_TENANT] = self.open - len(self.strangers) - counts.total()
        return counts

    async def tenant_with_most(self) -> Most | None:
        return tenant_with_most(f"{self.name} connections", self.of_each())

    def make_room_among(self, tenants: dict[Connection, None]) -> bool:
        """Whether one more fits within the share of a tenant, after one of its own has given way if need be."""
        return len(tenants) < self._share or _give_way(tenants)


def _give_way(strangers: Iterable[Connection]) -> bool:
    """Closes the first that waits. Returns whether there was one."""
    found = next((one for one in strangers if one.waits), None)
    if found is not None:
        found.give_way()
    return found is not None


class Counts(NamedTuple):
    """The connections of a server, by the kind of their socket."""

    unix: ConnectionCount
    tcp: ConnectionCount

    def full(self) -> list[Lack]:
        """Where there is no room, and no stranger that would give way."""
        return [
            Lack(CONNECTIONS_HELD.format(count.name), find_most=count.tenant_with_most)
            for count in self if count.open >= count.limit and not count.strangers
        ]


class Turns(NamedTuple):
    """How much all connections of a server do in one turn of the event loop."""

    reads: ReadTurns
    engine_reads: ReadTurns
    long_engine_reads: ReadTurns
    starts: ReadTurns
    """For calls of people that come over the Unix socket, where reads do not wait for the calls before them."""
    ends: ReadTurns


class Connection(HttpToolsProtocol):
    """Made by connection_class, which gives all connections of a server what they share. Each call of a connection has
    its Peer in `scope["state"]["peer"]`, and a weak reference to the connection in `["connection"]`."""

    limits: ClassVar[ConnectionLimits]
    meter: ClassVar[Meter]
    counts: ClassVar[Counts]
    turns: ClassVar[Turns]
    pace: ClassVar[Pace]
    crowd: ClassVar[Crowd]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._counted: ConnectionCount | None = None
        self._among: dict[Connection, None] | None = None
        """The connections with which it has a share in common; None: it may stay."""
        self.address = ""
        self._arriving = Arrival()
        self._refusal: ApiError | None = None
        self._running: RequestResponseCycle | None = None
        """The call that is being answered; `cycle` is the newest of those that have arrived."""
        self._timer: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._waiting = b""
        """What was read and waits for its turn."""
        self._descriptor: int | None = None
        """Its socket's, if it belongs to the crowd."""

    # ---------------------------------------------------------------- the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        try:
            peer = peer_of(transport.get_extra_info("socket"))
        except OSError as error:
            log.warning("closed a connection: the kernel does not say who it is: %s", error)
            self.transport = transport
            transport.abort()
            return
        # a plain reference would keep it alive after its end
        self.app_state = {**self.app_state, "peer": peer, "connection": weakref.ref(self)}
        super().connection_made(transport)
        count = self.counts.unix if peer.is_unix else self.counts.tcp
        self.address = peer.name if peer.is_unix else (self.client or ("", 0))[0]
        if not count.make_room(self.address):
            self.meter.counters.refused_connections += 1
            self._refuse(ApiError(
                "too_busy", f"no more {count.name} connections: try again", found=count.open, wanted=f"< {count.limit}"
            ))
            return
        count.open += 1
        self._counted = count
        if self.crowd.begin(self.address, peer.process):
            self._descriptor = transport.get_extra_info("socket").fileno()
            self.loop.call_soon(self._wait_in_crowd)  # uvloop begins to read after this
        if peer.tenant is None:
            self._among = count.strangers
            self._among[self] = None
            self.timeout_keep_alive = self.limits.stranger_idle_s
        self._wait(self.limits.header_s)

    def _uncount(self) -> None:
        if self._counted is not None:
            self._counted.open -= 1
            self._counted = None
            self.crowd.end(self.address, self.app_state["peer"].process)
        if self._among is not None:
            self._among.pop(self, None)
            self._among = None

    @property
    def who(self) -> Hashable:
        """Whose turns it takes: those of the process at its other end; over TCP those of the token that its latest call
        has shown, or of its address."""
        peer: Peer = self.app_state["peer"]
        if peer.is_unix:
            return peer.process
        shown: Peer = peer if self._running is None else self._running.scope["state"]["peer"]
        return self.address if shown.tenant is None else shown.name

    @property
    def _payer(self) -> Hashable:
        """Who pays for refused calls: of processes that are not seen here, each connection for itself."""
        return (id(self),) if self.app_state["peer"].is_unix and not self.who else self.who

    @property
    def waits(self) -> bool:
        """Whether it waits for its client: for a request, or until answers are read."""
        return self._is_idle() or self._arriving.stage in (Stage.HEAD, Stage.BODY) or self.flow.write_paused

    def give_way(self) -> None:
        """Ends, because another connection needs the room."""
        self.meter.counters.refused_connections += 1
        self._uncount()
        self._refusal = ApiError("too_busy", "another connection needed the room")
        self.transport.abort()

    def _is_heard(self) -> None:
        """Whoever is heard comes last among those that it shares with."""
        if self._among is not None:
            self._among[self] = self._among.pop(self)

    def has_shown(self, tenant: str) -> None:
        """Called before a call whose token is the tenant's is answered: the connection is no stranger's from then on,
        even if the answer never ends. Raises ApiError: too_busy, if the tenant has its share already and none of its
        connections waits."""
        count, among = self._counted, self._among
        if count is None or among is None:
            return
        tenants = count.of_tenant(tenant)
        if tenants is among:
            return
        if tenants is not None:
            if not count.make_room_among(tenants):
                raise ApiError(
                    "too_busy", f"the tenant has as many {count.name} connections as it may have, and all are in use",
                    found=len(tenants), wanted=f"< {len(tenants)}",
                )
            tenants[self] = None
        del among[self]
        self._among, self.timeout_keep_alive = tenants, self.limits.idle_s

    def connection_lost(self, exc: Exception | None) -> None:
        """After a reset, ends now what a call would still use, and the rest when it is its turn: the process that ends
        may have hundreds of connections. Until then a second descriptor keeps the socket, whose end takes the kernel
        most of the time."""
        self._uncount()
        if self._descriptor is not None:
            self.crowd.forget(self._descriptor, self._read_on)
        for cycle in (self._running, self.cycle):  # uvicorn knows only the newest of several calls
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
        if exc is None or self.turns.ends.take(0):
            self._end(exc)
            return
        try:
            kept = os.dup(self.transport.get_extra_info("socket").fileno())
        except OSError:
            self._end(exc)
        else:
            self.turns.ends.wait(self.who, partial(self._end, exc, kept), 0)

    def _end(self, exc: Exception | None, kept: int | None = None) -> None:
        """`kept`: the descriptor that keeps the socket."""
        if kept is not None:
            os.close(kept)
        self._stop_waiting()
        self._waiting = b""
        if self._unread is not None:
            self._unread.cancel()
        self._unset_keepalive_if_required()  # else uvicorn's timer would keep this object after a broken connection
        self.pipeline.clear()
        if self._running is not None:
            self._running.message_event.set()
        super().connection_lost(exc)
        for cycle in (self._running, self.cycle):
            if cycle is not None:  # a call that never starts would keep this object, and this object the call
                cycle.on_response = _nothing

    def _wait_in_crowd(self) -> None:
        """If it belongs to the crowd, it reads no more until it is its turn there."""
        if self._descriptor is not None and not (self._waiting or self.flow.read_paused or self.transport.is_closing()):
            self.transport.pause_reading()
            self.crowd.wait(self._descriptor, self._read_on)

    def _read_on(self) -> None:
        if not self.transport.is_closing():
            self.transport.resume_reading()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """A call of people waits here while many wait for their turn. It never starts if its client leaves first."""
        self._running = cycle
        is_engine_call = find(cycle.scope["method"], cycle.scope["path"]) is not None
        if is_engine_call or self._counted is self.counts.tcp or self.turns.starts.take(0):
            super()._start_asgi_task(cycle, app)
        else:
            self.turns.starts.wait(self.who, partial(self._start_waiting, cycle, app), 0)

    def _start_waiting(self, cycle: RequestResponseCycle, app: Any) -> None:
        if not cycle.disconnected:
            super()._start_asgi_task(cycle, app)

    def data_received(self, data: bytes) -> None:
        """Handles what was read when it is its turn. Until then no more is read of the connection: it could send
        megabytes in one turn of the event loop, even if all of it is dropped."""
        reads, is_next = self._turns_of(len(data)), not self._waiting
        wait_s = 0.0
        if is_next and self._was_refused():
            wait_s = self.pace.wait_s(self._payer, len(data), self.loop.time())
        if is_next and not wait_s and reads.take(len(data)):
            self._handle(data)
            self._wait_in_crowd()
            return
        self._unset_keepalive_if_required()
        self.transport.pause_reading()  # each time: uvicorn reads on when the call has taken what was there
        self._waiting += data
        if is_next:
            wait = partial(reads.wait, self.who, self._go_on, len(data))
            if wait_s:
                self._pause(wait_s, wait)
            else:
                wait()

    def _pause(self, wait_s: float, go_on: Callable[[], None]) -> None:
        """The client's time stands still meanwhile: it does not answer for what the server does not read."""
        left_s = None if self._timer is None else max(0.0, self._timer.when() - self.loop.time())
        self._stop_waiting()
        self._timer = self.loop.call_later(wait_s, self._end_pause, left_s, go_on)

    def _end_pause(self, left_s: float | None, go_on: Callable[[], None]) -> None:
        self._timer = None
        if left_s is not None:
            self._wait(left_s)
        go_on()

    def _was_refused(self) -> bool:
        """Whether the call that is being answered, or the last one that was, is refused because of what the client did,
        and not because of what the server lacks (429, 5xx)."""
        problem: Problem | None = None if self._running is None else self._running.scope["state"].get(REFUSAL)
        return problem is not None and problem.status < 500 and problem.status != 429

    def _turns_of(self, read_bytes: int) -> ReadTurns:
        """Engines do not wait for people, but for the bodies of which a turn has one, whoever sends them."""
        if read_bytes >= LONG_READ_BYTES or self._counted is self.counts.tcp:
            return self.turns.reads
        return self.turns.engine_reads if read_bytes < SHORT_READ_BYTES else self.turns.long_engine_reads

    def eof_received(self) -> bool:  # type: ignore[override]  # uvicorn's leaves the transport to close itself
        """Closes the connection when it is its turn: a thousand may end at once, with the process that had them. What
        is still sent is sent before that."""
        if self.turns.ends.take(0):
            return False
        self.turns.ends.wait(self.who, self.transport.close, 0)
        return True

    def _go_on(self) -> None:
        data, self._waiting = self._waiting, b""
        if self.transport.is_closing():
            return
        self._handle(data)
        if self._descriptor is not None:
            self._wait_in_crowd()
        elif not self.flow.read_paused and not self.transport.is_closing():
            self.transport.resume_reading()

    def _handle(self, data: bytes) -> None:
        if self._refusal is not None:
            return
        self._is_heard()
        self._unset_keepalive_if_required()
        arriving = self._arriving
        arriving.quiet_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # The upgrade is ignored. What follows may be in the protocol that the client asked for: no more is read.
            self._refusal = ApiError("malformed_request", "the connection speaks HTTP/1.1 only")
            self.cycle.keep_alive = False
            self._stop_waiting()
            return
        except httptools.HttpParserError as error:
            ours = isinstance(error, httptools.HttpParserCallbackError)  # then the parser gives no reason
            what = "its URL" if ours else str(error)
            self._refuse(self._refusal or ApiError(
                "malformed_request", f"the request cannot be parsed: {what}", wanted="HTTP/1.1"
            ))
            return
        if (arriving.quiet_bytes or arriving.stage is Stage.HEAD) and (refusal := self._unended()):
            self._refuse(refusal)
        elif self._timer is None and (arriving.stage is not Stage.NONE or self._is_idle()):
            self._wait(self.limits.body_s if arriving.stage is Stage.BODY else self.limits.header_s)

    # ---------------------------------------------------------------- what the parser finds

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._arriving.begin()
        self._stop_waiting()

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) >= self.limits.headers:
            self._stop(self._too_large_header("lines", len(self.headers) + 1, self.limits.headers))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= self.limits.pipelined:
            self._stop(ApiError(
                "too_busy", "too many requests wait for answers", found=len(self.pipeline) + 1,
                wanted=self.limits.pipelined,
            ))
        if len(self.url) > self.limits.url_bytes:
            self._stop(self._too_long_url())
        if (size := self._header_bytes()) > self.limits.header_bytes:
            self._stop(self._too_large_header("bytes", size, self.limits.header_bytes))
        if [name for name, _ in self.headers].count(b"authorization") > 1:
            self._stop(ApiError("malformed_request", "a request has one Authorization", found="several", wanted=1))
        if self._counted is self.counts.tcp:  # browsers reach only TCP
            self._settle_host()
        super().on_headers_complete()
        self.headers = [*self.headers]  # a copy: trailers are added to it and counted, but the call does not see them
        self._arriving.come_to(Stage.BODY)
        self._stop_waiting()

    def _settle_host(self) -> None:
        """Leaves one Host header, with the host that the request is for: that of its URL, if the URL has one (RFC
        9112)."""
        hosts = [header for header in self.headers if header[0] == b"host"]
        if len(hosts) != 1:
            self._stop(ApiError(
                "malformed_request", "a request names its host once, in the header Host", found=len(hosts), wanted=1
            ))
        if not self.url.startswith(b"/") and (host := httptools.parse_url(self.url).host):
            self.headers[self.headers.index(hosts[0])] = (b"host", b"[%b]" % host if b":" in host else host)

    def on_body(self, body: bytes) -> None:
        arriving = self._arriving
        arriving.add_piece(body)
        at_most = self.limits.body_pieces + arriving.body_bytes // 1024
        if arriving.pieces > at_most:
            self._stop(ApiError(
                "malformed_request", "the body arrives in too many pieces", found=arriving.pieces, wanted=at_most
            ))
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._arriving.come_to(Stage.NONE)
        self._stop_waiting()

    # ---------------------------------------------------------------- answers

    def answer(self, scope: Scope, whole: bytes) -> bool:
        """Sends header and body of a call's answer in one system call, where ASGI's two messages take two; `whole` has
        all headers, since uvicorn adds none. Returns False and sends nothing if the answer would have to wait or the
        connection ends after it: then send it by ASGI's messages."""
        cycle = self.cycle
        if cycle.scope is not scope or cycle.disconnected or not cycle.keep_alive or self.flow.write_paused:
            return False
        cycle.response_started = cycle.response_complete = True
        self.transport.write(whole)
        cycle.message_event.set()
        cycle.on_response()
        return True

    # ---------------------------------------------------------------- refusals

    def _unended(self) -> ApiError | None:
        """The refusal of a request that has arrived only in part; None: there is no reason for a refusal yet."""
        limits, arriving = self.limits, self._arriving
        if arriving.stage is Stage.HEAD and len(self.url) > limits.url_bytes:
            return self._too_long_url()
        in_headers = self._header_bytes() if arriving.stage is Stage.HEAD else 0
        if in_headers > limits.header_bytes or arriving.quiet_bytes > limits.url_bytes + limits.header_bytes:
            return self._too_large_header("bytes", max(in_headers, arriving.quiet_bytes), limits.header_bytes)
        return None

    def _header_bytes(self) -> int:
        return sum([len(name) + len(value) for name, value in self.headers])

    def _too_long_url(self) -> ApiError:
        return ApiError("url_too_long", "the URL is too long", found=len(self.url), wanted=self.limits.url_bytes)

    def _too_large_header(self, of: str, found: int, wanted: int) -> ApiError:
        return ApiError("header_too_large", f"the header has too many {of}", found=found, wanted=wanted)

    def _stop(self, refusal: ApiError) -> None:
        """Refuses, from a callback of the parser. The parser reports that a callback raised an exception, but not which
        one."""
        self._refusal = refusal
        raise ValueError(refusal.code)

    def _refuse(self, refusal: ApiError) -> None:
        """Answers with the problem, or ends the answer that is under way, and closes the connection."""
        self._refusal = refusal
        self._stop_waiting()
        self.meter.refuse(refusal.code, f"its connection was closed: {refusal.detail}")
        if self.transport.is_closing():
            return
        cycle = self.cycle
        is_answering = cycle is not None and not cycle.response_complete
        if is_answering and self._arriving.stage is not Stage.BODY:
            cycle.keep_alive = False  # its request and those before it are whole: they are answered first
            return
        if self.pipeline or (is_answering and cycle.response_started):
            self.transport.abort()  # the client would take an answer now for that of an earlier request
            return
        if is_answering:
            cycle.disconnected = True  # this answer takes the place of the call's
            cycle.message_event.set()
        self.transport.write(_answer(refusal))
        self.transport.close()
        self._close_unread()

    # ---------------------------------------------------------------- time

    def _wait(self, patience_s: float) -> None:
        self._timer = self.loop.call_later(patience_s, self._too_late)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_late(self) -> None:
        self._timer = None
        if self._arriving.stage in (Stage.NEW, Stage.NONE):
            self.transport.close()
            return
        in_body = self._arriving.stage is Stage.BODY
        self._refuse(ApiError(
            "too_slow", f"the {'body' if in_body else 'header'} did not arrive in time",
            wanted=f"{self.limits.body_s if in_body else self.limits.header_s:g} s",
        ))

    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def pause_writing(self) -> None:
        super().pause_writing()
        self._close_unread()

    def resume_writing(self) -> None:
        if self._unread is not None and not self.transport.is_closing():
            self._unread.cancel()
            self._unread = None
        super().resume_writing()

    def _close_unread(self) -> None:
        """A transport that is being closed waits until its client has read; this one waits for `unread_s` at most."""
        if self._unread is None:
            self._unread = self.loop.call_later(self.limits.unread_s, self.transport.abort)

    def on_response_complete(self) -> None:
        if self._was_refused():
            self.pace.refused(self._payer, self.loop.time())
        self._is_heard()
        super().on_response_complete()
        if self.transport.is_closing():
            self._close_unread()

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()


def _nothing() -> None: ...


TRIED = (0, 48), (0, 54)
"""The first and the last minor version of uvicorn with which kvdock was tried."""
INSIDE = (
    "_start_asgi_task", "_unset_keepalive_if_required", "on_message_begin", "on_response_complete", "pause_writing",
    "resume_writing", "timeout_keep_alive_handler",
)


def check_uvicorn(version: str, protocol: type = HttpToolsProtocol) -> None:
    """Raises StartupError if uvicorn lacks inside what Connection builds on; warns of a version that was not tried. So
    kvdock can be installed beside an engine, whatever uvicorn that has."""
    first, last = (".".join(map(str, one)) for one in TRIED)
    if lacking := [name for name in INSIDE if not hasattr(protocol, name)]:
        raise StartupError(
            "not_installed",
            f"found uvicorn {version}, which has no {lacking[0]} inside, wanted one of {first} to {last}",
        )
    found = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if not TRIED[0] <= found <= TRIED[1]:
        log.warning("found uvicorn %s, and kvdock was tried with %s to %s: watch for errors", version, first, last)


def connection_class(limits: ConnectionLimits, meter: Meter, pace: Pace | None = None) -> type[Connection]:
    """For uvicorn.Config(http=…): the connections of one server."""
    shared = {
        "limits": limits, "meter": meter, "pace": pace or Pace(), "crowd": Crowd(),
        "turns": Turns(
            ReadTurns(),
            engine_reads=ReadTurns(ENGINE_READS_OF_TURN, calls_waiting=math.inf),
            long_engine_reads=ReadTurns(1, calls_waiting=math.inf),
            starts=ReadTurns(),
            ends=ReadTurns(ENDS_OF_TURN, calls_waiting=math.inf),
        ),
        "counts": Counts(
            ConnectionCount("Unix", limits.unix_connections), ConnectionCount("TCP", limits.tcp_connections)
        ),
    }
    return type("ServerConnection", (Connection,), shared)


def _answer(refusal: ApiError) -> bytes:
    problem = problem_of(refusal.code, refusal.detail, found=refusal.found, wanted=refusal.wanted)
    content = JSON.encode(problem)
    headers = {
        "content-type": PROBLEM, "content-length": str(len(content)), "connection": "close", **NO_STORE,
        **COMMON_HEADERS, **PROBLEM_HEADERS.get(problem.status, {}),
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return STATUS_LINE[problem.status] + lines.encode("ascii") + b"\r\n" + content
