"""The control plane as an engine sees it: one method per call, the wire structs in and out.

    client = Client("unix:/run/user/1000/kvdock.sock")
    attached = client.attach(AttachSession(instance=…, manifest=…, member=…))
    found = client.lookup(Lookup(session=attached.session, member=…, request="r1", keys=[…]))

Thread-safe and synchronous. Raises ServerUnavailable when there is no answer and ApiError when the
answer is a refusal; nothing else. Imports neither FastAPI nor torch.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from kvdock.api import schemas as s
from kvdock.api.errors import ApiError, ServerUnavailable
from kvdock.api.transport import Address, Transport

T = TypeVar("T", bound=s.Answer)

_ENCODER = msgspec.json.Encoder()
_DECODERS: dict[type[s.Answer], msgspec.json.Decoder[s.Answer]] = {}


def _decode(kind: type[T], raw: bytes) -> T:
    decoder = _DECODERS.get(kind)
    if decoder is None:
        decoder = _DECODERS.setdefault(kind, msgspec.json.Decoder(kind))
    answer = decoder.decode(raw)
    assert isinstance(answer, kind)
    return answer


class Client:
    """Calls to one server. Each takes `timeout_s`; None means the client's own."""

    def __init__(self, address: str, *, timeout_s: float = 5.0) -> None:
        """`address`: `unix:/path` or `http://host:port`; ValueError otherwise. Connects on the first call."""
        self._transport = Transport(Address.parse(address))
        self.timeout_s = timeout_s

    @property
    def address(self) -> str:
        return self._transport.address.text

    def close(self) -> None:
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # ---------------------------------------------------------------- sessions

    def attach(self, body: s.AttachSession, *, timeout_s: float | None = None) -> s.SessionAttached:
        return self._call("POST", "/v1/sessions", body, s.SessionAttached, timeout_s)

    def heartbeat(self, session: str, body: s.Heartbeat, *, timeout_s: float | None = None) -> s.HeartbeatAnswer:
        return self._call("POST", f"/v1/sessions/{_q(session)}/heartbeat", body, s.HeartbeatAnswer, timeout_s)

    def leave(self, session: str, member: str, *, timeout_s: float | None = None) -> None:
        """The member's word on everything it holds."""
        self._send("DELETE", f"/v1/sessions/{_q(session)}?{urlencode({'member': member})}", None, timeout_s)

    def sessions(self, *, timeout_s: float | None = None) -> s.Sessions:
        return self._call("GET", "/v1/sessions", None, s.Sessions, timeout_s)

    def session(self, session: str, *, timeout_s: float | None = None) -> s.SessionView:
        return self._call("GET", f"/v1/sessions/{_q(session)}", None, s.SessionView, timeout_s)

    # ---------------------------------------------------------------- reading

    def lookup(self, body: s.Lookup, *, timeout_s: float | None = None) -> s.LookupAnswer:
        return self._call("POST", "/v1/lookups", body, s.LookupAnswer, timeout_s)

    def release(self, lease: str, body: s.ReleaseLease, *, timeout_s: float | None = None) -> s.ReleaseAnswer:
        return self._call("POST", f"/v1/leases/{_q(lease)}/release", body, s.ReleaseAnswer, timeout_s)

    def renew(self, lease: str, body: s.RenewLease, *, timeout_s: float | None = None) -> s.LeaseView:
        return self._call("POST", f"/v1/leases/{_q(lease)}/renew", body, s.LeaseView, timeout_s)

    def cancel(self, lease: str, body: s.CancelLease, *, timeout_s: float | None = None) -> None:
        """By the member that asked, when no rank was or will be handed the plan."""
        self._send("DELETE", f"/v1/leases/{_q(lease)}", body, timeout_s)

    def mismatch(self, body: s.ReportMismatch, *, timeout_s: float | None = None) -> s.MismatchAnswer:
        return self._call("POST", "/v1/mismatches", body, s.MismatchAnswer, timeout_s)

    def leases(self, *, timeout_s: float | None = None) -> s.Leases:
        return self._call("GET", "/v1/leases", None, s.Leases, timeout_s)

    # ---------------------------------------------------------------- writing

    def reserve(self, body: s.Reserve, *, timeout_s: float | None = None) -> s.ReserveAnswer:
        return self._call("POST", "/v1/reservations", body, s.ReserveAnswer, timeout_s)

    def commit(self, reservation: str, body: s.Commit, *, timeout_s: float | None = None) -> s.CommitAnswer:
        return self._call("POST", f"/v1/reservations/{_q(reservation)}/commit", body, s.CommitAnswer, timeout_s)

    def abort(self, reservation: str, body: s.Abort, *, timeout_s: float | None = None) -> s.ReleaseAnswer:
        return self._call("POST", f"/v1/reservations/{_q(reservation)}/abort", body, s.ReleaseAnswer, timeout_s)

    # ---------------------------------------------------------------- the pool, and what people read

    def segments(self, *, timeout_s: float | None = None) -> s.Segments:
        return self._call("GET", "/v1/segments", None, s.Segments, timeout_s)

    def status(self, *, timeout_s: float | None = None) -> s.Status:
        return self._call("GET", "/v1/status", None, s.Status, timeout_s)

    def stats(self, *, timeout_s: float | None = None) -> s.Stats:
        return self._call("GET", "/v1/stats", None, s.Stats, timeout_s)

    def requests(self, *, timeout_s: float | None = None) -> s.Requests:
        return self._call("GET", "/v1/requests", None, s.Requests, timeout_s)

    # ---------------------------------------------------------------- one call

    def _call(self, method: str, path: str, body: s.Body | None, kind: type[T], timeout_s: float | None) -> T:
        raw = self._send(method, path, body, timeout_s)
        try:
            return _decode(kind, raw)
        except msgspec.DecodeError as error:
            raise ServerUnavailable(f"{self.address}: {method} {path} answered something else: {error}") from error

    def _send(self, method: str, path: str, body: s.Body | None, timeout_s: float | None) -> bytes:
        sent = None if body is None else _ENCODER.encode(body)
        status, raw = self._transport.call(method, path, sent, self.timeout_s if timeout_s is None else timeout_s)
        if status < 400:
            return raw
        try:
            problem = _decode(s.Problem, raw)
        except msgspec.DecodeError:
            raise ServerUnavailable(f"{self.address}: {method} {path} answered {status} without a problem") from None
        raise ApiError.from_problem(problem)


def _q(part: str) -> str:
    return quote(part, safe="")
