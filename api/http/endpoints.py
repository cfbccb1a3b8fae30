"""What each engine call does: read the body, decode it, one call of the service, encode the answer.

Two ways lead here: FastAPI's routes (api/http/routes_engine.py) and the short way of the Unix socket
(api/http/hot_path.py). Answers leave in the form that the caller asked for.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Generic, NamedTuple, TypeVar

from starlette.types import Receive

from kvdock.api.http.wire import read_all
from kvdock.api.service import CacheService
from kvdock.api.tokens import LONG_BODY_BYTES, check_packed_tokens, cut_tokens
from kvdock.protocol import calls, schemas as s
from kvdock.protocol.calls import Call
from kvdock.protocol.forms import Codec, Form, form_of_answer, form_of_body
from kvdock.protocol.wire_types import Answer, Body

B = TypeVar("B", bound=Body)
Run = Callable[[CacheService, B, str, Form], Answer | Awaitable[Answer]]
"""(service, body, the id in the path, form of the answer)."""


class Incoming(NamedTuple):
    """A call that has arrived: its headers, '' where there is none, and the source of its body."""

    content_type: str
    accept: str
    content_length: str
    receive: Receive


class Endpoint(Generic[B]):
    def __init__(self, call: Call[Any], body: type[B], run: Run[B]) -> None:
        self.call, self.route, self.body = call, call.path, body
        self._codec = Codec(body)
        self._run = run

    async def answer(
        self, service: CacheService, incoming: Incoming, body_limit_bytes: int, id_in_path: str
    ) -> tuple[bytes, str]:
        """(encoded answer, its media type). Raises ApiError and TableError: refusals."""
        sent = form_of_body(incoming.content_type)
        wanted = form_of_answer(incoming.accept, sent)
        raw = await read_all(incoming.receive, incoming.content_length, body_limit_bytes)
        tokens = None
        if len(raw) >= LONG_BODY_BYTES:
            if sent.packed:
                check_packed_tokens(raw)
            else:
                raw, tokens = await cut_tokens(raw)
        body = self._codec.decode(raw, sent)
        if tokens is not None and isinstance(body, s.Lookup | s.Reserve):
            body.tokens = tokens
        answer = self._run(service, body, id_in_path, wanted)
        return wanted.encode(answer if isinstance(answer, Answer) else await answer), wanted.media_type


ATTACH = Endpoint(calls.ATTACH, s.AttachSession, lambda service, body, _, form: service.attach(body))
HEARTBEAT = Endpoint(calls.HEARTBEAT, s.Heartbeat, lambda service, body, id_, form: service.heartbeat(id_, body))
LOOKUP = Endpoint(calls.LOOKUP, s.Lookup, lambda service, body, _, form: service.lookup(body, form))
RELEASE = Endpoint(calls.RELEASE, s.ReleaseLease, lambda service, body, id_, form: service.release(id_, body))
RELEASE_MANY = Endpoint(calls.RELEASE_MANY, s.ReleaseMany, lambda service, body, _, form: service.release_many(body))
MISMATCH = Endpoint(calls.MISMATCH, s.ReportMismatch, lambda service, body, _, form: service.mismatch(body))
RESERVE = Endpoint(calls.RESERVE, s.Reserve, lambda service, body, _, form: service.reserve(body, form))
COMMIT = Endpoint(calls.COMMIT, s.Commit, lambda service, body, id_, form: service.commit(id_, body))
ABORT = Endpoint(calls.ABORT, s.Abort, lambda service, body, id_, form: service.abort(id_, body))
