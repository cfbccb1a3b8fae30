"""Decoders of messages, each made once in a process, by any thread.

msgspec describes a type when the type's first decoder is made, and keeps the description with the type from the start.
A thread that makes another decoder of the type meanwhile finds it half done, and the process can end with SIGSEGV
(seen with msgspec 0.22). So one thread at a time makes decoders here.
"""

from __future__ import annotations

import threading
from typing import Any, Final, TypeVar

import msgspec

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
