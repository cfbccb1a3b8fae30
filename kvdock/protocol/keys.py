"""Names of bytes: the namespace a manifest stands for, and the keys of a token sequence.

    namespace  = blake2b-256("kvdock manifest"; canonical JSON of the manifest)
    of a tenant other than the server's own user: blake2b-256("kvdock tenant"; that namespace ‖ the tenant)
    in which the chunks are filed of an engine that runs other weights than it started with:
                 blake2b-256("kvdock weights";  that namespace ‖ the name of the weights)
    root       = blake2b-256("kvdock root";     namespace)
    key[i]     = blake2b-256("kvdock chunk";    key[i-1] ‖ tokens of chunk i as little-endian u32), key[-1] = root
    or, for an engine that hashes its sequences itself, with a function and seed that the manifest names:
    key[i]     = blake2b-256("kvdock hashed";   namespace ‖ the engine's hash of all tokens up to chunk i's end)

A request whose KV depends on more than tokens has keys from tokens, whatever the manifest says:

    of what holds for all of it, such as an adapter, the namespace that its root is made of becomes
                 blake2b-256("kvdock request";  namespace ‖ tag)
    of what stands at some of its tokens, such as images, a chunk that touches any of them has
    key[i]     = blake2b-256("kvdock marked";   key[i-1] ‖ tokens ‖ for each: start, end as little-endian u64 ‖ digest)

The text in quotes is blake2b's personalisation: inputs of different kinds cannot collide.
Invariant: a key names its chunk, everything before it, and the manifest. A partial chunk has no key.
"""

from __future__ import annotations

import json
import struct
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import Final

from kvdock._core import KEY_BYTES, hashed_keys
from kvdock.protocol.errors import ManifestError

HASH_FUNCTION: Final = "blake2b-256"
"""The manifest's `hash_function` when keys are made from tokens."""
_HASHED: Final = b"kvdock hashed"
UNKNOWN_PARENT: Final = b"\xff" * KEY_BYTES
"""Stands for the key of a parent that the engine does not know: it does not know what comes before its store's first
key."""


BEGINNINGS: Final = (16, 64, 256, 1024, 4096)
"""How many of a prompt's first tokens each of its beginnings stands for."""
BEGINNING_DIGITS: Final = 16


def beginnings_of(tokens: Sequence[int]) -> str:
    """16 hex digits for the first 16 tokens, 16 for the first 64, and so on for each of BEGINNINGS that the prompt has
    as many tokens as; empty for a shorter prompt. They depend on nothing else, so they show that a prompt which begins
    like this one is stored in another namespace. They are no keys: nothing is found by them. Raises ManifestError for
    tokens outside 0..2**32-1."""
    packed, hashed, made = pack_tokens(tokens[: BEGINNINGS[-1]]), blake2b(digest_size=8, person=b"kvdock beginning"), ""
    for start, end in pairwise((0, *BEGINNINGS)):
        if len(tokens) < end:
            break
        hashed.update(packed[4 * start : 4 * end])
        made += hashed.hexdigest()
    return made


def tokens_of(beginnings: str) -> int:
    """How many first tokens of the prompt these beginnings stand for."""
    return (0, *BEGINNINGS)[len(beginnings) // BEGINNING_DIGITS]


def canonical_manifest(manifest: Mapping[str, object]) -> bytes:
    """JSON with sorted keys, no spaces, UTF-8. Strings, integers, booleans, None, and lists and mappings
    of them; ManifestError for anything else (a float has no one spelling)."""
    return json.dumps(_plain(manifest, "manifest"), sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def namespace_digest(manifest: Mapping[str, object], tenant: str = "") -> bytes:
    """The namespace of a manifest and a tenant, 32 bytes: equal exactly when the canonical manifests and the tenants
    are."""
    digest = _digest(b"kvdock manifest", canonical_manifest(manifest))
    return _digest(b"kvdock tenant", digest + tenant.encode()) if tenant else digest


def filed_in(namespace: bytes, weights: str) -> bytes:
    """The namespace in which chunks of these weights are filed, 32 bytes; "", those that the engine started with, is
    the namespace itself. Keys are made of `namespace`, whatever the weights."""
    return _digest(b"kvdock weights", namespace + weights.encode()) if weights else namespace


def tagged(namespace: bytes, tag: bytes) -> bytes:
    """The 32 bytes that take the namespace's place in the keys of a request with this tag. Without a tag: the
    namespace."""
    return _digest(b"kvdock request", namespace + tag) if tag else namespace


@dataclass(frozen=True)
class Mark:
    """Tokens [start, end) of a sequence are placeholders, for example of an image, whose content `digest` (32 bytes)
    names."""

    start: int
    end: int
    digest: bytes


def chunk_keys(namespace: bytes, tokens: Sequence[int], chunk_tokens: int) -> list[bytes]:
    """Keys of the whole chunks of `tokens`, 32 bytes each; a tail shorter than a chunk has none.

    Raises ManifestError for tokens outside 0..2**32-1, a namespace that is not 32 bytes, chunk_tokens < 1.
    """
    return KeyChain(namespace, chunk_tokens).extend(tokens)


class KeyChain:
    """The keys of a sequence that grows: extend() hashes each token once, however often it is called. `marks`: in the
    order of their starts."""

    def __init__(self, namespace: bytes, chunk_tokens: int, marks: Sequence[Mark] = ()) -> None:
        if len(namespace) != KEY_BYTES:
            raise ManifestError("namespace (bytes)", found=len(namespace), wanted=KEY_BYTES)
        if chunk_tokens < 1:
            raise ManifestError("chunk_tokens", found=chunk_tokens, wanted=">= 1")
        self.chunk_tokens, self._marks = chunk_tokens, marks
        self.keys: list[bytes] = []
        """One key for each whole chunk so far."""
        self.parent: bytes | None = None
        """The key before the first: none."""
        self._parent = _digest(b"kvdock root", namespace)
        self._tail = b""

    @property
    def tokens(self) -> int:
        """How many tokens were given so far."""
        return len(self.keys) * self.chunk_tokens + len(self._tail) // 4

    def follow(self, tokens: Sequence[int]) -> None:
        """Appends those tokens of the whole sequence that were not appended before."""
        if len(tokens) > self.tokens:
            self.extend(tokens[self.tokens :])

    def extend(self, tokens: Sequence[int]) -> list[bytes]:
        """Appends tokens; returns the keys of the chunks they completed. Nothing is appended on an error."""
        packed = self._tail + pack_tokens(tokens)
        step = 4 * self.chunk_tokens
        whole = len(packed) - len(packed) % step
        fresh: list[bytes] = []
        parent = self._parent
        for start in range(0, whole, step):
            marks = self._marks_of(len(self.keys) + len(fresh)) if self._marks else b""
            kind = b"kvdock marked" if marks else b"kvdock chunk"
            parent = _digest(kind, parent + packed[start : start + step] + marks)
            fresh.append(parent)
        self._parent = parent
        self._tail = packed[whole:]
        self.keys += fresh
        return fresh

    def _marks_of(self, chunk: int) -> bytes:
        """The marks that touch the chunk, encoded."""
        first, end = chunk * self.chunk_tokens, (chunk + 1) * self.chunk_tokens
        touching = (mark for mark in self._marks if mark.start < end and first < mark.end)
        return b"".join(struct.pack("<QQ", mark.start, mark.end) + mark.digest for mark in touching)


class HashedChain:
    """The keys of a sequence that its engine hashes as it grows. Each item of `hashes` (bytes, or their hex digits)
    covers `hash_tokens` more tokens and all tokens before them; they may lag behind the tokens. Raises ManifestError
    unless whole hashes make a chunk.
    """

    def __init__(
        self, namespace: bytes, chunk_tokens: int, hashes: Sequence[bytes] | Sequence[str], hash_tokens: int
    ) -> None:
        if chunk_tokens % hash_tokens:
            raise ManifestError("chunk_tokens", found=chunk_tokens, wanted=f"a multiple of {hash_tokens}")
        self.keys: list[bytes] = []
        """One key for each whole chunk so far."""
        self.parent: bytes | None = None
        """The key before the first; None: there is none; UNKNOWN_PARENT: the engine does not know it."""
        self._namespace, self._hashes, self._per_chunk = namespace, hashes, chunk_tokens // hash_tokens

    def key_of(self, hashed: bytes | str) -> bytes:
        """The key made from an engine's hash."""
        return hashed_keys(_HASHED, self._namespace, (hashed,))[0]

    def follow(self, tokens: Sequence[int] = ()) -> None:
        """Makes keys of the hashes that were added since the last call. The engine computed the hashes from
        `tokens`."""
        first = (len(self.keys) + 1) * self._per_chunk - 1  # the chunk's last hash covers all of it
        if first < len(self._hashes):
            self.keys += hashed_keys(_HASHED, self._namespace, self._hashes[first :: self._per_chunk])


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Little-endian u32 each. Raises ManifestError for what is not an integer in 0..2**32-1."""
    try:
        packed = array("I", tokens)
    except (OverflowError, TypeError) as error:
        bad = next((token for token in tokens if not isinstance(token, int) or not 0 <= token < 1 << 32), tokens)
        raise ManifestError("token", found=repr(bad), wanted="an integer in 0..2**32-1") from error
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _digest(kind: bytes, data: bytes) -> bytes:
    return blake2b(data, digest_size=KEY_BYTES, person=kind).digest()


def _plain(value: object, where: str) -> object:
    """`value` as dicts and lists. Raises ManifestError for what JSON could write in two ways or would change."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ManifestError(f"key in {where}", found=repr(key), wanted="a string")
        return {key: _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    raise ManifestError(where, found=type(value).__name__, wanted="str, int, bool, None, list or mapping")
