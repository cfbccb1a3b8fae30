"""The keys that a call asks for, given as keys or as tokens. Long token lists are decoded and hashed in slices, so
that no call keeps the event loop for more than a few ms.

Decoding a JSON body of a million tokens at once takes about 50 ms, and a thread would not help, because it would hold
the interpreter for as long. So the array is cut out of the body by searching for its ends, which is fast, and decoded
piece by piece, with other calls answered in between. The decoded array takes 4 bytes a token; a list takes 36.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence

import msgspec

from kvdock.api.convert import key_bytes
from kvdock.api.pool.registry import NamespaceRecord
from kvdock.api.turns import next_slice
from kvdock.protocol.errors import ApiError
from kvdock.protocol.forms import MAX_JSON_BYTES, RawBody
from kvdock.protocol.keys import HASH_FUNCTION, KeyChain
from kvdock.protocol.wire_types import KEY_BYTES, MAX_KEYS, MAX_TOKENS, Token

LONG_BODY_BYTES = 64 << 10
"""Shorter bodies are decoded at once."""
SLICE_BYTES = 32 << 10
SLICE_TOKENS = 8192
TURN_KEY_BYTES = 2048 * KEY_BYTES
"""More keys than these are decoded in one turn of the event loop and looked up in the next one. A turn with both would
take 4 to 5 ms for MAX_KEYS keys."""

_TOKENS = re.compile(rb"(?:\xa6|\xd9\x06|\xda\0\x06|\xdb\0\0\0\x06)tokens\xdd(.{4})", re.DOTALL)
"""The name `tokens` in any encoding of a MessagePack string, then the head of an array with a 4-byte count."""
_TOKENS = re.compile(rb'"tokens"\s{0,64}:\s{0,64}\[')
SEARCHED_BYTES = 64 << 10
OVERLAP_BYTES = 144
"""Longer than any match of _TOKENS, so that each lies within one slice."""
_PIECE: msgspec.json.Decoder[list[int]] = msgspec.json.Decoder(list[Token])


async def cut_tokens(raw: RawBody) -> tuple[RawBody, array[int] | None]:
    """(the body with an empty `tokens`, the tokens) of a long JSON body; (the body, None) of any other.

    Raises ApiError(invalid_body) for an array that does not hold token ids only, or too many.
    """
    if len(raw) < LONG_BODY_BYTES:
        return raw, None
    # Quotes inside a JSON string are escaped, so what the pattern matches is a field's name.
    field = await _named_tokens(raw, 0)
    end = -1 if field is None else raw.find(b"]", field.end())
    if field is None or end < 0 or await _named_tokens(raw, end):
        return raw, None  # if anything is wrong with it, the decoder reports it
    if len(raw) - (end - field.end()) > MAX_JSON_BYTES:
        return raw, None  # the decoder refuses it by its length: so long a rest is not copied
    await next_slice()
    tokens = array("I")
    start = field.end()
    while start <= end:
        cut = raw.find(b",", min(start + SLICE_BYTES, end), end)
        stop = end if cut < 0 else cut
        tokens.extend(_decode_piece(raw[start:stop], len(tokens), more=cut >= 0))
        start = stop + 1
        await next_slice()
    return raw[: field.end()] + raw[end:], tokens


async def _named_tokens(raw: RawBody, start: int) -> re.Match[bytes] | None:
    """The first field `tokens` that is an array, from `start` on."""
    for at in range(start, len(raw), SEARCHED_BYTES):
        if found := _TOKENS.search(raw, at, at + SEARCHED_BYTES + OVERLAP_BYTES):
            return found
        await next_slice()
    return None


def _decode_piece(piece: bytes, before: int, *, more: bool) -> list[int]:
    try:
        tokens = _PIECE.decode(b"[" + piece + b"]")
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(
            "invalid_body", f"{error}, in the piece of the array that begins with token {before}",
            found="$.tokens", wanted="token ids, 0..2**32-1",
        ) from error
    if not tokens and (before or more):  # nothing between two commas, or after the last
        raise ApiError("invalid_body", "a token is missing", found="$.tokens", wanted="token ids, 0..2**32-1")
    if before + len(tokens) > MAX_TOKENS:
        raise ApiError("invalid_body", "too many tokens", found="$.tokens", wanted=f"at most {MAX_TOKENS}")
    return tokens


async def keys_of(
    namespace: NamespaceRecord, keys: list[str] | bytes | None, tokens: Sequence[int] | None, at_most: int = MAX_KEYS
) -> bytes:
    """The keys in a row: those given, or those of the whole chunks of `tokens`. Raises ApiError: invalid_body,
    bad_argument."""
    if keys is not None and tokens is None:
        joined = key_bytes(keys)
        if len(joined) > TURN_KEY_BYTES:
            await next_slice()
        return joined
    if tokens is None or keys is not None:
        found = "neither" if keys is None else "both"
        raise ApiError("invalid_body", "give keys or tokens", found=found, wanted="one of $.keys, $.tokens")
    if (function := namespace.manifest.hash_function) != HASH_FUNCTION:
        raise ApiError(
            "bad_argument", "engines of this namespace hash tokens in their own way: give keys",
            found=function, wanted=HASH_FUNCTION,
        )
    count = len(tokens) // namespace.manifest.chunk_tokens
    if count > at_most:
        raise ApiError("bad_argument", "too many chunks of tokens in one call", found=count, wanted=at_most)
    return await hash_tokens(namespace.base, tokens, namespace.manifest.chunk_tokens)


async def hash_tokens(namespace: bytes, tokens: Sequence[int], chunk_tokens: int) -> bytes:
    """The keys of the whole chunks, in a row."""
    chain = KeyChain(namespace, chunk_tokens)
    chain.extend(tokens[:SLICE_TOKENS])
    for start in range(SLICE_TOKENS, len(tokens), SLICE_TOKENS):
        await next_slice()
        chain.extend(tokens[start : start + SLICE_TOKENS])
    return b"".join(chain.keys)
