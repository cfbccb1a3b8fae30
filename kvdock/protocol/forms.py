"""The two forms of every engine body: JSON for people and scripts, MessagePack for engines.

One struct describes a body in both (kvdock/protocol/schemas.py). Answers with thousands of parts get these already
encoded from the table and embed them: no Python object is made for a part.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from mmap import mmap
from typing import Any, Final, Generic, NamedTuple, TypeVar

import msgspec

from kvdock._core import decoding_within
from kvdock.protocol.errors import ApiError
from kvdock.protocol.schemas import HoldHead, LookupHead, ReserveHead
from kvdock.protocol.wire_types import Body

B = TypeVar("B", bound=Body)
RawBody = bytes | mmap


class Form(NamedTuple):
    media_type: str
    encode: Callable[[object], bytes]
    malformed: str
    """Error code for bytes that are not in this form."""
    packed: bool


JSON = Form("application/json", msgspec.json.Encoder().encode, "malformed_json", False)
PACKED = Form("application/msgpack", msgspec.msgpack.Encoder().encode, "malformed_msgpack", True)
_BY_MEDIA_TYPE = {form.media_type: form for form in (JSON, PACKED)}


MAX_COST: Final = (1 << 16) + (1 << 10)
"""The most that decoding a body may cost (csrc/base/decoding_cost.h): 65,536 numbers, and what is beside them."""
MAX_JSON_BYTES: Final = 1 << 20
"""The most bytes of JSON that are decoded at once: each takes up to 1 ns, be it a space."""


class LookupReply(LookupHead, kw_only=True):
    """LookupAnswer as the server sends it: its chunks are already encoded."""

    chunks: msgspec.Raw


class ReserveReply(ReserveHead, kw_only=True):
    """ReserveAnswer as the server sends it: its chunks are already encoded."""

    chunks: msgspec.Raw


class HoldReply(HoldHead, kw_only=True):
    """HoldAnswer as the server sends it: its chunks are already encoded."""

    chunks: msgspec.Raw


class Codec(Generic[B]):
    """The decoders of one kind of body."""

    def __init__(self, body: type[B], *, most_cost: int = MAX_COST) -> None:
        """`most_cost`: less where values are dearer to make than lists of numbers."""
        self._most_cost = most_cost
        self._json = msgspec.json.Decoder(body).decode
        self._packed = msgspec.msgpack.Decoder(body).decode

    def decode(self, raw: RawBody, form: Form) -> B:
        """Raises ApiError: malformed_json, malformed_msgpack, invalid_body, too_large. Bodies that would take long to
        decode are refused before any of their values is made."""
        if not form.packed and len(raw) > MAX_JSON_BYTES:
            raise ApiError("too_large", "send MessagePack, or tokens", found=len(raw), wanted=MAX_JSON_BYTES)
        if not decoding_within(raw, self._most_cost, packed=form.packed):
            raise ApiError(
                "invalid_body", "too many values: send fewer in one call, and long lists of tokens as JSON", found="$",
                wanted=f"at most {self._most_cost}",
            )
        try:
            return self._packed(raw) if form.packed else self._json(raw)
        except msgspec.ValidationError as error:
            raise invalid_body(error) from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ApiError(form.malformed, str(error), wanted=f"one body of {form.media_type}") from error


def form_of_body(content_type: str) -> Form:
    """Raises ApiError(unsupported_media_type)."""
    form = _BY_MEDIA_TYPE.get(content_type)
    if form is not None:
        return form
    media_type, *parameters = content_type.lower().split(";")
    form = _BY_MEDIA_TYPE.get(media_type.strip())
    if form is None:
        wanted = list(_BY_MEDIA_TYPE)
        raise ApiError("unsupported_media_type", "send JSON or MessagePack", found=content_type, wanted=wanted)
    for name, _, value in (parameter.partition("=") for parameter in parameters):
        if name.strip() == "charset" and value.strip().strip('"') != "utf-8":
            raise ApiError("unsupported_media_type", "bodies are in UTF-8", found=content_type, wanted="charset=utf-8")
    return form


def form_of_answer(accept: str, body: Form) -> Form:
    """The form of the request's body, unless the request accepts only the other form."""
    if not accept:
        return body
    named = {item.partition(";")[0].strip().lower() for item in accept.split(",")} & _BY_MEDIA_TYPE.keys()
    return _BY_MEDIA_TYPE[named.pop()] if len(named) == 1 else body


def invalid_body(error: msgspec.ValidationError) -> ApiError:
    """`Expected `int`, got `str` - at `$.parts[0]`` → found: the path, wanted: what was expected there."""
    what, at, path = str(error).rpartition(" - at `")
    if not at:
        return ApiError("invalid_body", str(error), found="$", wanted=str(error))
    return ApiError("invalid_body", str(error), found=path.removesuffix("`"), wanted=what)


# --------------------------------------------------------------------------- decoders

# Decoders of messages, each made once in a process, by any thread.
#
# msgspec describes a type when the type's first decoder is made, and keeps the description with the type from the
# start. A thread that makes another decoder of the type meanwhile finds it half done, and the process can end with
# SIGSEGV (seen with msgspec 0.22). So one thread at a time makes decoders here.

M = TypeVar("M")

_LOCK: Final = threading.Lock()
_MADE: Final[dict[tuple[type, bool], Any]] = {}


def decoder_of(message: type[M], *, packed: bool) -> msgspec.json.Decoder[M] | msgspec.msgpack.Decoder[M]:
    """`packed`: the messages are MessagePack; else they are JSON."""
    key = (message, packed)
    made: msgspec.json.Decoder[M] | msgspec.msgpack.Decoder[M] | None = _MADE.get(key)
    if made is None:
        with _LOCK:
            made = _MADE.get(key) or (
                msgspec.msgpack.Decoder(message) if packed else msgspec.json.Decoder(message)
            )
            _MADE[key] = made
    return made
