"""What each engine call does once its body has arrived: decode, one call of the service, encode.

An Endpoint knows nothing of HTTP, so that two ways lead to it: FastAPI's routes (routes_engine.py) and the short
way of the Unix socket (hot_path.py). Answers leave in the form the caller asked for.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

from kvdock.api.service import CacheService
from kvdock.api.tokens import LONG_BODY_BYTES, check_packed_tokens, cut_tokens
from kvdock.api.views import views
from kvdock.protocol import calls, schemas as s
from kvdock.protocol.calls import Call
from kvdock.protocol.errors import ApiError
from kvdock.protocol.forms import Codec, Form

B = TypeVar("B", bound=s.Body)
Run = Callable[[CacheService, B, str, Form], Awaitable[s.Answer]]
"""(service, body, the id in the path, form of the answer)."""


class Endpoint(Generic[B]):
    def __init__(self, call: Call[Any], body: type[B], run: Run[B]) -> None:
        self.route = call.path
        self._codec = Codec(body)
        self._run = run

    async def answer(
        self, service: CacheService, raw: bytes | bytearray, sent: Form, wanted: Form, id_in_path: str
    ) -> bytes:
        """The encoded answer. Raises ApiError and TableError: refusals."""
        tokens = None
        if len(raw) >= LONG_BODY_BYTES:
            if sent.packed:
                check_packed_tokens(raw)
            else:
                raw, tokens = await cut_tokens(raw)
        body = self._codec.decode(raw, sent)
        if tokens is not None and isinstance(body, s.Lookup | s.Reserve):
            body.tokens = tokens
        return wanted.encode(await self._run(service, body, id_in_path, wanted))


async def _attach(service: CacheService, body: s.AttachSession, _: str, form: Form) -> s.Answer:
    if not service.pool.ready:
        raise ApiError("not_ready", "the first segment is being allocated: attach again in a moment")
    return service.attach(body)


async def _heartbeat(service: CacheService, body: s.Heartbeat, session: str, form: Form) -> s.Answer:
    return service.heartbeat(session, body)


async def _lookup(service: CacheService, body: s.Lookup, _: str, form: Form) -> s.Answer:
    return await service.lookup(body, form)


async def _release(service: CacheService, body: s.ReleaseLease, lease: str, form: Form) -> s.Answer:
    return service.release(lease, body)


async def _release_many(service: CacheService, body: s.ReleaseMany, _: str, form: Form) -> s.Answer:
    return service.release_many(body)


async def _renew(service: CacheService, body: s.RenewLease, lease: str, form: Form) -> s.Answer:
    return views.lease(service, lease, body.session)


async def _mismatch(service: CacheService, body: s.ReportMismatch, _: str, form: Form) -> s.Answer:
    return service.mismatch(body)


async def _reserve(service: CacheService, body: s.Reserve, _: str, form: Form) -> s.Answer:
    return await service.reserve(body, form)


async def _commit(service: CacheService, body: s.Commit, reservation: str, form: Form) -> s.Answer:
    return service.commit(reservation, body)


async def _abort(service: CacheService, body: s.Abort, reservation: str, form: Form) -> s.Answer:
    return service.abort(reservation, body)


ATTACH = Endpoint(calls.ATTACH, s.AttachSession, _attach)
HEARTBEAT = Endpoint(calls.HEARTBEAT, s.Heartbeat, _heartbeat)
LOOKUP = Endpoint(calls.LOOKUP, s.Lookup, _lookup)
RELEASE = Endpoint(calls.RELEASE, s.ReleaseLease, _release)
RELEASE_MANY = Endpoint(calls.RELEASE_MANY, s.ReleaseMany, _release_many)
RENEW = Endpoint(calls.RENEW, s.RenewLease, _renew)
MISMATCH = Endpoint(calls.MISMATCH, s.ReportMismatch, _mismatch)
RESERVE = Endpoint(calls.RESERVE, s.Reserve, _reserve)
COMMIT = Endpoint(calls.COMMIT, s.Commit, _commit)
ABORT = Endpoint(calls.ABORT, s.Abort, _abort)
