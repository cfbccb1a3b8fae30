"""What each engine call does: read the body, decode it, one call of the service, encode the answer.

Two ways lead here: FastAPI's routes (kvdock/api/http/routes_engine.py) and the short way of the Unix socket
(kvdock/api/http/hot_path.py). Answers leave in the form that the caller asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Generic, NamedTuple, TypeVar

from starlette.types import Receive

from kvdock.api.access.peer import Peer
from kvdock.api.http.limits import BodyRoom, BodyShare
from kvdock.api.http.wire import read_all
from kvdock.api.service import CacheService
from kvdock.api.tokens import LONG_BODY_BYTES, check_packed_tokens, cut_tokens
from kvdock.protocol import calls, schemas as s, tier_schemas as t
from kvdock.protocol.calls import Call
from kvdock.protocol.forms import Codec, Form, form_of_answer, form_of_body
from kvdock.protocol.hints import Hint
from kvdock.protocol.wire_types import Answer, Body

B = TypeVar("B", bound=Body)
Run = Callable[[CacheService, Peer, B, str, Form], Answer | Awaitable[Answer]]
"""(service, caller, body, the id in the path, form of the answer)."""


DECODED_ALONE_BYTES = 20 << 10
"""Between decoding a body of this length and working on it, other calls have a turn."""


class Incoming(NamedTuple):
    """A call that has arrived: who makes it, its headers, '' where there is none, and the source of its body."""

    peer: Peer
    content_type: str
    accept: str
    content_length: str
    receive: Receive


class Endpoint(Generic[B]):
    def __init__(self, call: Call[Any], body: type[B], run: Run[B], *, longest_bytes: int | None = None) -> None:
        """`longest_bytes`: of a body; None: as long as the server takes any."""
        self.call, self.route, self.body = call, call.path, body
        self._longest_bytes = longest_bytes
        self._codec = Codec(body)
        self._run = run

    async def answer(
        self, service: CacheService, incoming: Incoming, body_limit_bytes: int, room: BodyRoom, id_in_path: str
    ) -> tuple[bytes, str]:
        """(encoded answer, its media type). Raises ApiError and TableError: refusals."""
        sent = form_of_body(incoming.content_type)
        wanted = form_of_answer(incoming.accept, sent)
        limit = body_limit_bytes if self._longest_bytes is None else min(self._longest_bytes, body_limit_bytes)
        share = BodyShare(room)
        try:
            raw = await read_all(incoming.receive, incoming.content_length, limit, share)
            tokens = None
            if len(raw) >= LONG_BODY_BYTES:
                await share.next_turn()
                if sent.packed:
                    check_packed_tokens(raw)
                else:
                    raw, tokens = await cut_tokens(raw)
            body = self._codec.decode(raw, sent)
            if tokens is not None and isinstance(body, s.Lookup | s.Reserve):
                body.tokens = tokens  # type: ignore[assignment]  # an array of them reads like a list
            if len(raw) >= DECODED_ALONE_BYTES:
                await asyncio.sleep(0)
            answer = self._run(service, incoming.peer, body, id_in_path, wanted)
            return wanted.encode(answer if isinstance(answer, Answer) else await answer), wanted.media_type
        finally:
            share.give_back()


SHORT_BYTES = 256 << 10
"""Bodies of calls that carry neither tokens nor checksums, with all that they may list."""


ATTACH = Endpoint(
    calls.ATTACH, s.AttachSession, lambda service, peer, body, _, form: service.attach(peer, body),
    longest_bytes=SHORT_BYTES,
)
WEIGHTS = Endpoint(
    calls.WEIGHTS, s.RunWeights, lambda service, peer, body, _, form: service.weights(peer, body),
    longest_bytes=SHORT_BYTES,
)
HEARTBEAT = Endpoint(
    calls.HEARTBEAT, s.Heartbeat, lambda service, peer, body, id_, form: service.heartbeat(peer, id_, body),
    longest_bytes=SHORT_BYTES,
)
LOOKUP = Endpoint(calls.LOOKUP, s.Lookup, lambda service, peer, body, _, form: service.lookup(peer, body, form))
RELEASE = Endpoint(
    calls.RELEASE, s.ReleaseLease, lambda service, peer, body, id_, form: service.release(peer, id_, body),
    longest_bytes=SHORT_BYTES,
)
RELEASE_MANY = Endpoint(
    calls.RELEASE_MANY, s.ReleaseMany, lambda service, peer, body, _, form: service.release_many(peer, body),
    longest_bytes=SHORT_BYTES,
)
MISMATCH = Endpoint(
    calls.MISMATCH, s.ReportMismatch, lambda service, peer, body, _, form: service.mismatch(peer, body),
    longest_bytes=SHORT_BYTES,
)
HINT = Endpoint(calls.HINT, Hint, lambda service, peer, body, _, form: service.hint(peer, body))
HOLD = Endpoint(calls.HOLD, t.Hold, lambda service, peer, body, _, form: service.hold(peer, body, form))
PREFETCH = Endpoint(calls.PREFETCH, t.Prefetch, lambda service, peer, body, _, form: service.prefetch(peer, body))
RESERVE = Endpoint(calls.RESERVE, s.Reserve, lambda service, peer, body, _, form: service.reserve(peer, body, form))
COMMIT = Endpoint(calls.COMMIT, s.Commit, lambda service, peer, body, id_, form: service.commit(peer, id_, body))
ABORT = Endpoint(
    calls.ABORT, s.Abort, lambda service, peer, body, id_, form: service.abort(peer, id_, body),
    longest_bytes=SHORT_BYTES,
)
