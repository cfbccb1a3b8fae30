"""The engine's client of the server: one method per call, with the wire structs as arguments and answers.

    client = Client("unix:/run/user/1000/kvdock.sock")
    attached = client.attach(AttachSession(instance=…, manifest=…, member=…))
    found = client.lookup(Lookup(session=attached.session, member=…, request="r1", keys=b"…"))

Thread-safe, synchronous and lean: MessagePack over a persistent connection; it needs only msgspec and the standard
library. Its methods are those of client/calls.py; client/http_client.py offers the same calls through httpx.
"""

from __future__ import annotations

from contextlib import suppress
from types import NoneType, TracebackType
from typing import Self, TypeVar

import msgspec

from kvdock.client.calls import SyncCalls
from kvdock.client.transport import Address, Transport
from kvdock.protocol import schemas as s
from kvdock.protocol.calls import Call
from kvdock.protocol.errors import ApiError, ServerUnavailable
from kvdock.protocol.forms import JSON, PACKED
from kvdock.protocol.reports import Problem
from kvdock.protocol.version import API_VERSION, VERSION_HEADER
from kvdock.protocol.wire_types import KEY_BYTES, Body

A = TypeVar("A")

FLUSH_S = 1.0
"""How long close() may take to send queued releases. The server asks about those that do not arrive."""
_JSON_TYPE = JSON.media_type.encode()
_PROBLEM = msgspec.json.Decoder(Problem)


class Client(SyncCalls):
    """Calls to one server. Each takes `timeout_s`; None means the client's default."""

    def __init__(self, address: str, *, timeout_s: float = 5.0, packed: bool = True) -> None:
        """`address`: `unix:/path` or `http://host:port`; ValueError otherwise. Connects on the first call.

        `packed`: MessagePack bodies; otherwise JSON, which people can read.
        """
        super().__init__()
        self._transport = Transport(Address.parse(address), f"{VERSION_HEADER}: {API_VERSION}\r\n".encode())
        self.timeout_s = timeout_s
        self._form = PACKED if packed else JSON
        self._media_type = self._form.media_type.encode()
        self._decoders: dict[tuple[type, bool], msgspec.json.Decoder[object] | msgspec.msgpack.Decoder[object]] = {}

    @property
    def address(self) -> str:
        return self._transport.address.text

    def close(self) -> None:
        """Sends what release_later queued, if the server answers."""
        for session in self._releases.sessions():
            with suppress(ApiError, ServerUnavailable):
                self.flush(session, timeout_s=FLUSH_S)
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _do(
        self, call: Call[A], body: Body | None, timeout_s: float | None, *ids: str,
        query: dict[str, str] | None = None,
    ) -> A:
        form = self._form if body is not None and call.packed else JSON
        sent = None if body is None else form.encode(_with_key_bytes(body) if form.packed else body)
        status, raw = self._transport.call(
            call.method, call.target(ids, query), sent, self.timeout_s if timeout_s is None else timeout_s,
            self._media_type if form is self._form else _JSON_TYPE,
        )
        try:
            if status >= 400:
                raise ApiError.from_problem(_PROBLEM.decode(raw))
            if call.answer is NoneType:
                return call.answer()
            decoder = self._decoders.get((call.answer, form.packed)) or self._add_decoder(call.answer, form.packed)
            answer = decoder.decode(raw)
            assert isinstance(answer, call.answer)
            return answer
        except msgspec.DecodeError as error:
            what = f"{call.method} {call.path} answered {status} with something else: {error}"
            raise ServerUnavailable(f"{self.address}: {what}") from error

    def _add_decoder(
        self, answer: type[object], packed: bool
    ) -> msgspec.json.Decoder[object] | msgspec.msgpack.Decoder[object]:
        made = msgspec.msgpack.Decoder(answer) if packed else msgspec.json.Decoder(answer)
        return self._decoders.setdefault((answer, packed), made)


def _with_key_bytes(body: Body) -> Body:
    """Hex keys as one bin. Strings that are no keys stay, for the server to refuse."""
    if not isinstance(body, s.Lookup | s.Reserve) or not isinstance(body.keys, list):
        return body
    if set(map(len, body.keys)) - {2 * KEY_BYTES}:
        return body
    try:
        keys = bytes.fromhex("".join(body.keys))
    except ValueError:
        return body
    return msgspec.structs.replace(body, keys=keys) if len(keys) == KEY_BYTES * len(body.keys) else body
