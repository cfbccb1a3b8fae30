"""What an HTTP answer says: the struct that the call is answered with, or the refusal as an ApiError."""

from __future__ import annotations

from types import NoneType
from typing import TypeVar

import msgspec

from kvdock.protocol.calls import Call
from kvdock.protocol.errors import ApiError, ServerUnavailable
from kvdock.protocol.reports import Problem

A = TypeVar("A")

_PROBLEM = msgspec.json.Decoder(Problem)


class Answers:
    """Decodes answers of the server at `address`; keeps a decoder for each type of answer. Thread-safe."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._decoders: dict[tuple[type, bool], msgspec.json.Decoder[object] | msgspec.msgpack.Decoder[object]] = {}

    def decoded(self, call: Call[A], status: int, raw: bytes, *, packed: bool) -> A:
        """Raises ApiError if it is a refusal, ServerUnavailable if it is no answer to this call. `packed`: whether
        `raw` is MessagePack; refusals are always JSON."""
        try:
            if status >= 400:
                raise ApiError.from_problem(_PROBLEM.decode(raw))
            if call.answer is NoneType:
                return call.answer()
            decoder = self._decoders.get((call.answer, packed)) or self._add_decoder(call.answer, packed)
            answer = decoder.decode(raw)
            assert isinstance(answer, call.answer)
            return answer
        except msgspec.DecodeError as error:
            what = f"{call.method} {call.path} answered {status} with something else: {error}"
            raise ServerUnavailable(f"{self._address}: {what}") from error

    def _add_decoder(
        self, answer: type[object], packed: bool
    ) -> msgspec.json.Decoder[object] | msgspec.msgpack.Decoder[object]:
        made = msgspec.msgpack.Decoder(answer) if packed else msgspec.json.Decoder(answer)
        return self._decoders.setdefault((answer, packed), made)
