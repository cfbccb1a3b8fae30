"""The connectors' client of the server: the parts that a lookup has found come as arrays of the native core, because
Python objects for thousands of parts would take longer than the call (kvdock/connectors/plans.py).
"""

from __future__ import annotations

from typing import Final

from kvdock.client.client import Client
from kvdock.connectors.plans import Chunks
from kvdock.protocol.calls import LOOKUP, Call
from kvdock.protocol.errors import ServerUnavailable
from kvdock.protocol.forms import LookupReply
from kvdock.protocol.schemas import Lookup, LookupAnswer, LookupHead

_LOOKUP: Final = Call(LOOKUP.method, LOOKUP.path, LookupReply, LOOKUP.scope)


class EngineClient(Client):
    """Speaks MessagePack. Otherwise as Client."""

    def lookup(self, body: Lookup, *, timeout_s: float | None = None) -> LookupAnswer:
        """As Client.lookup(). The answer's `chunks` are Chunks."""
        reply = self._carrying(_LOOKUP, body, timeout_s, body.session)
        try:
            chunks = Chunks.of_packed(bytes(reply.chunks))
        except ValueError as error:
            raise ServerUnavailable(f"{self.address}: a lookup's answer has something else: {error}") from error
        return LookupAnswer(**{name: getattr(reply, name) for name in LookupHead.__struct_fields__}, chunks=chunks)
