"""Bytes as tokens: token i < 256 is byte i, then a few specials. Nothing to download, nothing to train.

Invariant: decode(encode(text)) == text for every str.
"""

from __future__ import annotations

from collections.abc import Iterable

BOS = 256
EOS = 257
VOCAB_SIZE = 258


def encode(text: str, *, bos: bool = True) -> list[int]:
    """UTF-8 bytes of `text`, after a BOS token unless told otherwise."""
    tokens = list(text.encode())
    return [BOS, *tokens] if bos else tokens


def decode(tokens: Iterable[int]) -> str:
    """The text of `tokens`; specials vanish, bytes that are not UTF-8 show as U+FFFD."""
    return bytes(t for t in tokens if t < 256).decode(errors="replace")
