"""The connectors' client of the server: the parts that a lookup has found come as arrays of the native core, because
Python objects for thousands of parts would take longer than the call (kvdock/connectors/plans.py).
"""

from __future__ import annotations

from typing import Final

from kvdock.client.client import UNAUTHENTICATED, Client
from kvdock.client.transport import Begun
from kvdock.connectors.plans import Chunks
from kvdock.protocol.calls import LOOKUP, Call
from kvdock.protocol.errors import ServerUnavailable
from kvdock.protocol.forms import LookupReply
from kvdock.protocol.schemas import Lookup, LookupAnswer, LookupHead

_LOOKUP: Final = Call(LOOKUP.method, LOOKUP.path, LookupReply, LOOKUP.scope)


class EngineClient(Client):
    """Speaks MessagePack. Otherwise as Client."""

    def begin_lookup(self, body: Lookup) -> BegunLookup | None:
        """Sends the request of a lookup, without waiting for anything. None: nothing was sent; use lookup()."""
        try:
            content = self._form.encode(body)
        except UnicodeEncodeError:  # a client may have chosen the request's id: the engine's thread must not end
            return None
        begun = self._transport.begin(_LOOKUP.method, _LOOKUP.target(()), content, self._media_type)
        return BegunLookup(self, body, begun) if begun is not None else None

    def lookup(self, body: Lookup, *, timeout_s: float | None = None) -> LookupAnswer:
        """As Client.lookup(). The answer's `chunks` are Chunks."""
        return self._answer_of(self._carrying(_LOOKUP, body, timeout_s, body.session))

    def end_lookup(self, body: Lookup, begun: Begun) -> LookupAnswer:
        """See BegunLookup.answer."""
        status, raw = self._transport.finish(begun, self.timeout_s)
        if status == UNAUTHENTICATED:  # there may be another access token by now
            return self.lookup(body)
        return self._answer_of(self._answers.decoded(_LOOKUP, status, raw, packed=True))

    def _answer_of(self, reply: LookupReply) -> LookupAnswer:
        try:
            chunks = Chunks.of_packed(bytes(reply.chunks))
        except ValueError as error:
            raise ServerUnavailable(f"{self.address}: a lookup's answer has something else: {error}") from error
        return LookupAnswer(**{name: getattr(reply, name) for name in LookupHead.__struct_fields__}, chunks=chunks)


class BegunLookup:
    """A lookup whose request is on its way. Either answer() or drop() must be called."""

    def __init__(self, client: EngineClient, body: Lookup, begun: Begun) -> None:
        self._client, self._body, self._begun = client, body, begun

    def answer(self) -> LookupAnswer:
        """Waits for the answer. Otherwise as EngineClient.lookup()."""
        return self._client.end_lookup(self._body, self._begun)

    def drop(self) -> None:
        """Nobody waits for the answer."""
        self._begun.connection.close()
