"""Uses bytes as tokens: token i < 256 is byte i, and there are two special tokens. It needs no download and no
training.

Invariant: decode(encode(text)) == text for every str that UTF-8 can encode (surrogates cannot be encoded).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class Tokenizer(Protocol):
    """This module is one; that of a trained model is in trained.py."""

    EOS: int
    """The token that ends an answer."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Iterable[int]) -> str: ...


BOS = 256
EOS = 257
VOCAB_SIZE = 258


def encode(text: str, *, bos: bool = True) -> list[int]:
    """The UTF-8 bytes of `text`, after a BOS token if `bos`."""
    tokens = list(text.encode())
    return [BOS, *tokens] if bos else tokens


def decode(tokens: Iterable[int]) -> str:
    """The text of `tokens`, without special tokens; bytes that are not UTF-8 become U+FFFD."""
    return bytes(t for t in tokens if t < 256).decode(errors="replace")
